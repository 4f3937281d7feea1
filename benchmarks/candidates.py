"""What can be timed: the form every contender takes, and the two that need nothing but this package.

A candidate offers variants (launch settings) for a row; each is tried briefly on one step and the best one is
timed on all. A prepared step is already captured: calling `replay` enqueues it on the bench's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msa_cudacore import prepare_msa_nvfp4_sparse_decode

from .arrays import Arrays
from .timing import Stopwatch
from .workload import Step, Workload

__all__ = [
    "TRIAL_SAMPLES",
    "Bench",
    "Candidate",
    "EmptyKernel",
    "Ours",
    "Prepared",
    "Unavailable",
    "arguments_of",
    "replayed",
]

TRIAL_SAMPLES = 15
"""Replays of one step with which a launch setting is tried."""


class Unavailable(RuntimeError):
    """A candidate cannot run here, or not on this row; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What a candidate works with."""

    stopwatch: Stopwatch
    arrays: Arrays


@dataclass(frozen=True)
class Prepared:
    """One step, captured."""

    replay: Callable[[], None]
    out: Any = None
    """Dense bfloat16 or float16 whose elements are [tokens, num_q_heads, 128]; None for a candidate without a
    result.
    """
    lse: Any = None
    """Dense float32 [tokens, num_q_heads]; times `lse_scale` it is the natural logarithm."""
    lse_scale: float = 1.0
    description: str = ""
    keep: Any = None
    """What the captured work uses; a graph keeps none of it alive."""


def replayed(
    prepared: Sequence[Prepared], replays: Sequence[Callable[[], None]], bench: Bench
) -> list[tuple[Any, Any]]:
    """(out, natural lse or None) of every prepared step after `replays`, which are to write all of them: they
    are NaN before.
    """
    for one in prepared:
        for array in (one.out, one.lse):
            if array is not None:
                bench.arrays.poison(array)
    bench.arrays.finish()
    for replay in replays:
        replay()
    bench.stopwatch.stream.sync()
    return [(one.out, None if one.lse is None else one.lse * one.lse_scale) for one in prepared]


class Candidate(Protocol):
    name: str
    title: str
    format: str
    """What it reads: `nvfp4`, `fp8`, `bf16`, or `none`."""
    kind: str
    """`ours`, `peer`, `ceiling` or `floor`."""

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        """Ways to run the row by name, the best guess first. Raises :class:`Unavailable`."""


class EmptyKernel:
    name, title, format, kind = "floor", "empty kernel (floor of the method)", "none", "floor"

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        return {"": lambda step: Prepared(bench.stopwatch.empty_kernel())}


def arguments_of(step: Step, workload: Workload, bench: Bench) -> dict[str, Any]:
    """What the public function is given for a step."""
    return {
        "q": step.q,
        "q2k_indices": step.q2k_indices,
        **workload.views._asdict(),
        "page_table": step.page_table,
        "seqused_k": step.seqused_k,
        "k_global_scale": 1.0,
        "v_global_scale": 1.0,
        "seqlen_q": workload.row.seqlen_q,
        "bf16_as_uint16": bench.arrays.bf16_as_uint16,
    }


class Ours:
    """The public function with its automatic choices."""

    name, title, format, kind = "ours", "msa_cudacore", "nvfp4", "ours"

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        return {"": lambda step: self.prepare(step, workload, bench)}

    def prepare(
        self, step: Step, workload: Workload, bench: Bench, *, enable_pdl: bool = False
    ) -> Prepared:
        """A step captured alone; what it keeps is its runner."""
        runner = prepare_msa_nvfp4_sparse_decode(**arguments_of(step, workload, bench), enable_pdl=enable_pdl)
        return Prepared(
            bench.stopwatch.capture(runner.launch),
            runner.out,
            runner.lse,
            description=runner.program,
            keep=runner,
        )
