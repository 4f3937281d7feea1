"""The registry: which programs exist, in order of preference, and which one serves a call.

Adding a program means adding it to `PROGRAMS`; nothing else asks which programs exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import Tensor
from .blackwell import BlackwellProgram
from .checks import shown
from .contract import Call, Problem
from .emulated import EmulatedProgram
from .launch import device as device_module
from .launch.device import DeviceFacts
from .portable import PortableProgram
from .program import Bound, Plan, Program

__all__ = ["PROGRAMS", "ReferenceProgram", "backends", "select"]


class ReferenceProgram:
    """The float64 oracle on host arrays, rounded once to bfloat16 and float32."""

    backend = "reference"
    summary = "float64 NumPy oracle on host arrays; any machine"
    place = "cpu"

    def refusal(self, device: DeviceFacts | None) -> str | None:
        return None

    def plan(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> Plan:
        if splits not in (None, 1):
            raise ValueError(f"splits is {splits}; backend 'reference' accepts 1")
        return Plan(splits=1, workspace_bytes=0, description="reference(float64)")

    def most_workspace_bytes(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> int:
        return self.plan(problem, device, splits).workspace_bytes  # none, for all sizes

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        from .reference import decode, round_to_bf16

        arrays = {tensor.name: tensor.to_numpy() for tensor in call.inputs}
        out, lse = call.out.to_numpy(), call.lse.to_numpy()

        def step(stream: Any) -> None:
            # NaN and infinite queries, and results beyond float32, pass through in silence, as on a device.
            with np.errstate(all="ignore"):
                exact_out, exact_lse = decode(
                    **arrays,
                    k_global_scale=call.k_global_scale,
                    v_global_scale=call.v_global_scale,
                    seqlen_q=call.problem.seqlen_q,
                    softmax_scale=call.softmax_scale,
                )
                out[...] = round_to_bf16(exact_out)
                lse[...] = exact_lse

        return Bound(steps=(step,), plan=plan, device=None)


PROGRAMS: tuple[Program, ...] = (
    BlackwellProgram(), PortableProgram(), ReferenceProgram(), EmulatedProgram(),
)
"""Every program, the one that `auto` prefers first."""

_SYNONYMS = {"cake": "auto"}


def backends() -> tuple[str, ...]:
    """Every value that the `backend` argument accepts."""
    names = dict.fromkeys(program.backend for program in PROGRAMS)
    return ("auto", *_SYNONYMS, *names)


def select(backend: str, place: str, ordinal: int) -> tuple[Program, DeviceFacts | None]:
    """Find the program for a backend name and the device on which the tensors lie.

    Raises
    ------
    TypeError, ValueError
        The backend is unknown, or does not serve tensors that lie there.
    DriverUnavailable
        The tensors lie on a CUDA device that cannot be used.
    RuntimeError
        No program, or not the one asked for, runs on this device; the message says why.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend is a {type(backend).__name__}; accepted are {', '.join(backends())}")
    name = _SYNONYMS.get(backend, backend)
    named = [program for program in PROGRAMS if name in ("auto", program.backend)]
    if not named:
        raise ValueError(f"backend is {shown(backend)}; accepted are {', '.join(backends())}")
    fitting = [program for program in named if program.place == place]
    if not fitting:
        wanted = "CUDA device" if named[0].place == "cuda" else "host"
        given = "the host" if place == "cpu" else f"cuda:{ordinal}"
        raise ValueError(
            f"backend {backend!r} serves {wanted} arrays and q lies on {given}; "
            f"accepted are arrays where the backend runs, or backend='auto'"
        )
    device = None if place == "cpu" else device_module.facts(ordinal)
    refusals = []
    for program in fitting:
        refusal = program.refusal(device)
        if refusal is None:
            return program, device
        refusals.append(f"{program.backend}: {refusal}")
    raise RuntimeError(f"backend {backend!r} cannot run on {device or 'the host'}: {'; '.join(refusals)}")
