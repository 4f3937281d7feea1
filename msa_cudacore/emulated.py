"""The Blackwell program in the PTX emulator: host arrays in, the sm_100a kernel instruction by instruction,
arrays out."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import Tensor
from .blackwell import (
    ENTRY,
    Configuration,
    choose_configuration,
    kernel_arguments,
    pointed_at,
    source,
    tensor_maps,
)
from .contract import Call, Problem
from .launch.device import DeviceFacts
from .program import Bound, Plan

if TYPE_CHECKING:
    from .ptx.emulator import Checks, Memory, Report

__all__ = ["EmulatedProgram", "launch", "memory_of", "pointer_argument"]

ARCHITECTURE = "sm_100a"
MULTIPROCESSORS = 148
"""The part whose choices are emulated: CTAs run one after the other, so this costs nothing."""


@functools.cache
def _module(constants: str) -> Any:
    from .ptx import emulator
    from .ptx.nvrtc import compile_ptx

    return emulator.load(compile_ptx(source(constants), ARCHITECTURE, name="blackwell.cu", lineinfo=True))


def launch(
    call: Call,
    configuration: Configuration,
    *,
    schedule: str = "random",
    seed: int = 0,
    checks: Checks | bool = True,
    trace: bool = False,
) -> Report:
    """Run one launch of a configuration over a call on host arrays; `out` and `lse` of the call are written.

    Parameters
    ----------
    schedule, seed, checks, trace
        As in `msa_cudacore.ptx.emulator.Module.launch`: the order of events, and what is watched.

    Raises
    ------
    msa_cudacore.ptx.emulator.Fault
        The kernel broke a rule of the machine.
    """
    maps = [tiles.for_emulator(_bytes(tiles.pointer, tiles.pointer + 1)) for tiles in tensor_maps(call)]
    tensors = pointed_at(call)
    arrays = [pointer_argument(tensor) for tensor in tensors]
    memory = memory_of(call)
    try:
        return _module(configuration.constants).launch(
            ENTRY,
            (configuration.ctas,),
            (configuration.block,),
            [*maps, *arrays, *kernel_arguments(call, configuration)[len(tensors) :]],
            cluster=(configuration.splits,) if configuration.splits > 1 else None,
            shared_bytes=configuration.shared_bytes,
            schedule=schedule,
            seed=seed,
            checks=checks,
            trace=trace,
            memory=memory,
        )
    finally:
        memory.close()


def memory_of(call: Call) -> Memory:
    """Global memory of the emulator that holds the tensors of a call on host arrays, in place."""
    from .ptx.emulator import Memory

    memory = Memory()
    for low, high in _regions((*call.inputs, call.out, call.lse)):
        memory.map(_bytes(low, high))
    return memory


def pointer_argument(tensor: Tensor) -> np.ndarray | None:
    """A tensor as the emulator takes a pointer; an empty one has no bytes to point at, nothing is read
    through it."""
    return _bytes(tensor.pointer, tensor.pointer + 1) if tensor.elements else None


def _regions(tensors: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """The address ranges of the tensors; those of views that interleave in one allocation are one range."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(tensor.extent for tensor in tensors if tensor.elements):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _bytes(low: int, high: int) -> np.ndarray:
    """Host memory as bytes; the call keeps its owners alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))


class EmulatedProgram:
    """The Blackwell program on host arrays, in the emulator with its checks on: exact, and slow."""

    backend = "emulated"
    summary = (
        "the Blackwell program (sm_100a) in the PTX emulator, for host arrays; for tests and demonstrations"
    )
    place = "cpu"

    def refusal(self, device: DeviceFacts | None) -> str | None:
        if importlib.util.find_spec("numba") is None:
            return "needs numba (pip install 'msa-cudacore[emulator]')"
        return None

    def plan(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> Plan:
        try:
            configuration = choose_configuration(problem, MULTIPROCESSORS, splits)
        except ValueError as error:
            raise ValueError(str(error).replace("'blackwell'", "'emulated'")) from None
        return Plan(
            splits=1 if configuration.unsplit_rounds else configuration.splits,
            workspace_bytes=0,
            description=f"emulated blackwell({ARCHITECTURE}, {configuration.description})",
            configuration=configuration,
        )

    def most_workspace_bytes(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> int:
        return self.plan(problem, device, splits).workspace_bytes  # none, for all sizes

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        configuration: Configuration = plan.configuration
        if call.problem.items == 0:
            return Bound(steps=(), plan=plan, device=None)
        _module(configuration.constants)

        def step(stream: Any) -> None:
            launch(call, configuration)

        return Bound(steps=(step,), plan=plan, device=None)
