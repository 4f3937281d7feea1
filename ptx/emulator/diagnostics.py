"""Faults: what went wrong, and exactly where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Fault(RuntimeError):
    """A program error found while emulating.

    `kind` is a kebab-case class (out-of-bounds, misaligned, uninitialised, race, proxy, mbarrier,
    tensor-memory, descriptor, divergence, deadlock, ...), `line`/`text` the PTX instruction, `source` the
    CUDA source position when the PTX has line information, `cta` the CTA's index in the grid, `warp` and
    `lane` who executed it, `address` the address concerned in its own state space.
    """

    kind: str
    message: str
    line: int | None = None
    text: str = ""
    source: object = None
    cta: int | None = None
    warp: int | None = None
    lane: int | None = None
    address: int | None = None

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.message}"]
        who = [
            f"CTA {self.cta}" if self.cta is not None else "",
            f"warp {self.warp}" if self.warp is not None else "",
            f"lane {self.lane}" if self.lane is not None else "",
        ]
        where = ", ".join(filter(None, who))
        if where:
            parts.append(f"  by {where}")
        if self.line is not None:
            parts.append(f"  at PTX line {self.line}: {self.text}")
        if self.source is not None:
            parts.append(f"  from {self.source}")
        return "\n".join(parts)

    def __reduce__(self):
        return (
            Fault,
            (
                self.kind,
                self.message,
                self.line,
                self.text,
                self.source,
                self.cta,
                self.warp,
                self.lane,
                self.address,
            ),
        )

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Checks:
    """Which checkers run. Those for errors are on by default; `Checks.off()` is the fastest setting.

    races: data races on global memory; shared_races: on shared memory; uninitialised: reads of shared, local
    and tensor memory that nobody wrote; convergence: divergence at `.aligned` instructions; bank_conflicts:
    count shared wavefronts; async_rules: the proxy, mbarrier, tensor-memory and lifetime rules of
    asynchronous instructions; proxy_overwrites: require fence.proxy.async also where the async proxy only
    overwrites what the generic proxy wrote; tcgen05_fences: require tcgen05.fence::after_thread_sync between
    a wait and tensor-memory accesses; forgiving_lanes: ignore wrong lane bits of tensor-memory addresses and
    skip its allocation check, as release builds on hardware do. Bounds and alignment are always checked.
    warp_races (off unless asked for): lanes of one warp that exchange data through shared memory without an
    instruction that they execute together in between.
    """

    races: bool = True
    shared_races: bool = True
    uninitialised: bool = True
    convergence: bool = True
    bank_conflicts: bool = True
    async_rules: bool = True
    proxy_overwrites: bool = True
    tcgen05_fences: bool = True
    forgiving_lanes: bool = False
    warp_races: bool = False

    @classmethod
    def off(cls) -> "Checks":
        return cls(False, False, False, False, False, False, False, False, False)
