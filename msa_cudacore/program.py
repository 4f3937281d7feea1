"""What a program is: one implementation of the whole operator, as the registry and the runner see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .arguments import Tensor
from .contract import Call, Problem
from .launch.device import DeviceFacts

__all__ = ["Bound", "Plan", "Program"]


@dataclass(frozen=True)
class Plan:
    """How a program would run a problem: plain values, no device objects, so that it is testable without a GPU."""

    splits: int
    workspace_bytes: int
    description: str
    """Program name and specialisation, for `runner.program`, logs and bug reports."""
    configuration: Any = None
    """What the program itself needs to bind the plan; opaque to everybody else."""


@dataclass(frozen=True)
class Bound:
    """A call bound to a device: steps to run in order, each taking a stream. Host programs ignore the stream."""

    steps: tuple[Callable[[Any], None], ...]
    plan: Plan
    device: DeviceFacts | None
    memory: Any = None
    """Memory of the program's own that the steps use, to be kept as long as they are."""


class Program(Protocol):
    """One implementation of the whole operator."""

    backend: str
    """The `backend` argument that asks for it by name."""
    summary: str
    """One line for `msa-cudacore doctor`."""
    place: str
    """`cpu` or `cuda`: where the tensors it serves lie."""

    def refusal(self, device: DeviceFacts | None) -> str | None:
        """Why this device cannot run the program, or None where it can."""

    def plan(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> Plan:
        """Choose splits and configuration. Raises ValueError naming `splits` where the factor is not served."""

    def most_workspace_bytes(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> int:
        """The largest `workspace_bytes` of the problem and of every smaller batch of it, with tables of any width.
        Raises as :meth:`plan`.
        """

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        """Compile, load and bind; afterwards nothing is resolved, allocated or looked up."""
