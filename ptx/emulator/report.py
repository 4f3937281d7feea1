"""What a launch did: instruction counts by class, warp and source line, bytes moved, matrix products,
conflicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from . import layout as L
from . import opcodes as O

_FAMILIES = {
    O.INTEGER: "integer",
    O.BITS: "integer",
    O.PREDICATE: "predicate",
    O.FLOAT: "float",
    O.HALF: "half",
    O.CONVERT: "convert",
    O.WARP: "warp",
    O.CONTROL: "control",
    O.MATRIX: "matrix",
}
_NAMED = (("tcgen05.mma", "matrix"), ("mma", "matrix"), ("wgmma", "matrix"), ("tcgen05", "tensor memory"),
          ("ldmatrix", "matrix load"), ("stmatrix", "matrix load"), ("cp.async", "async copy"),
          ("mbarrier", "barrier"), ("bar", "barrier"), ("atom", "atomic"), ("red", "atomic"), ("ld", "load"),
          ("st", "store"), ("fence", "fence"), ("membar", "fence"), ("shfl", "warp"), ("mov", "move"))


def instruction_class(instruction, op: int) -> str:
    """The class an instruction is counted under."""
    name = instruction.opcode
    for prefix, kind in _NAMED:
        if name == prefix or name.startswith(prefix + "."):
            return kind
    return _FAMILIES.get(op & 0xF00, "other")


@dataclass
class LineCount:
    """Executions of one PTX instruction."""

    line: int
    text: str
    source: object
    warps: int
    lanes: int
    wavefronts: int


@dataclass
class Counts:
    """What the counters of the compiled loop come to."""

    lines: list
    by_class: Counter
    by_warp: list
    bytes: Counter
    shared_accesses: int = 0
    shared_wavefronts: int = 0
    ideal_wavefronts: int = 0


def _counted(name: str, text: str) -> property:
    return property(lambda report: getattr(report.counts, name), doc=text)


@dataclass
class Report:
    """Result of a launch (also filled in when the launch ends in a Fault)."""

    module: object
    decoded: object
    grid: tuple
    block: tuple
    cluster: tuple
    explicit_cluster: bool
    mma: Counter = field(default_factory=Counter)
    timeline: object = None
    moved: Counter = field(default_factory=Counter)
    executed: np.ndarray | None = None

    lines = _counted("lines", "LineCount of each PTX instruction that ran, in the order of the text.")
    by_class = _counted("by_class", "Warp instructions by class.")
    by_warp = _counted("by_warp", "Warp instructions by the warp's index in its CTA.")
    bytes = _counted("bytes", "Bytes by the way they moved.")
    shared_accesses = _counted("shared_accesses", "Warp accesses to shared memory.")
    shared_wavefronts = _counted("shared_wavefronts", "Passes that they took.")
    ideal_wavefronts = _counted("ideal_wavefronts", "Passes without bank conflicts.")

    @property
    def warp_instructions(self) -> int:
        return sum(entry.warps for entry in self.lines)

    # ---- called by operations
    def count_mma(self, kind: str, m: int, n: int, k: int) -> None:
        self.mma[kind, m, n, k] += 1

    def count_bytes(self, what: str, count: int) -> None:
        self.moved[what] += int(count)

    # ---- called at the end
    def collect(self, machine) -> None:
        self.executed = machine.N
        if machine.G[L.G_COPY_BYTES]:
            self.count_bytes("cp.async", machine.G[L.G_COPY_BYTES])
        if machine.G[L.G_TRACE]:
            from .timeline import Timeline

            machine.flush_events()
            self.timeline = Timeline(machine)

    @cached_property
    def counts(self) -> Counts:
        """Made when somebody asks: for a small kernel it takes longer than the launch."""
        counts, program = self.executed, self.decoded.program
        found = Counts([], Counter(), [], Counter(self.moved))
        per_line: dict[int, LineCount] = {}
        warps = np.zeros(counts.shape[1] - 3, np.int64)
        for pc in np.flatnonzero(counts[:, 0]):
            instruction = self.decoded.instructions[pc]
            if instruction is None:
                continue
            op = int(program[pc, L.P_OP])
            times, lanes, fronts = (int(n) for n in counts[pc, :3])
            _count_memory(found, op, program[pc], lanes, times, fronts)
            # One PTX instruction may be several operations: it counts once, by the operation run most often.
            key = id(instruction)
            entry = per_line.get(key)
            if entry is None:
                per_line[key] = LineCount(
                    instruction.line, instruction.text, instruction.source, times, lanes, fronts
                )
                warps += counts[pc, 3:]
                found.by_class[instruction_class(instruction, op)] += times
            else:
                entry.wavefronts += fronts
                entry.lanes = max(entry.lanes, lanes)
        found.lines = sorted(per_line.values(), key=lambda entry: entry.line)
        found.by_warp = [int(n) for n in warps]
        return found

    @property
    def by_source(self) -> dict[str, int]:
        """Warp instructions by CUDA source line ("file:line")."""
        totals: dict[str, int] = defaultdict(int)
        for entry in self.lines:
            if entry.source is not None:
                totals[f"{entry.source.file}:{entry.source.line}"] += entry.warps
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def summary(self) -> str:
        """A page of text."""
        out = [f"{self.decoded.entry.name}: {self.warp_instructions:,} warp instructions"]
        out += [f"  {kind:<14}{count:>14,}" for kind, count in self.by_class.most_common()]
        out += (
            ["bytes"] + [f"  {what:<22}{count:>14,}" for what, count in self.bytes.most_common()]
            if self.bytes
            else []
        )
        if self.mma:
            out.append("matrix products")
            out += [f"  {kind} {m}x{n}x{k}: {count:,}" for (kind, m, n, k), count in sorted(self.mma.items())]
        if self.shared_accesses:
            out.append(
                f"shared memory: {self.shared_accesses:,} accesses, {self.shared_wavefronts:,} wavefronts "
                f"({self.ideal_wavefronts:,} without conflicts)"
            )
        return "\n".join(out)

    def save_trace(self, path) -> None:
        """Write the time line in the Chrome/Perfetto trace format. Needs launch(trace=True)."""
        self._need_timeline().save_trace(path)

    def plot(self, path=None):
        """Picture of the pipeline, one row a warp (matplotlib). Needs launch(trace=True)."""
        return self._need_timeline().plot(path)

    def _need_timeline(self):
        if self.timeline is None:
            raise ValueError("no time line was kept: launch with trace=True")
        return self.timeline


def _count_memory(counts: Counts, op: int, row, lanes: int, times: int, fronts: int) -> None:
    if op in (O.LD, O.ST, O.ATOM):
        size = (int(row[L.P_X]) & 0xFF) * (int(row[L.P_X]) >> 8)
        space = int(row[L.P_Y]) & 0xFF
        name = {L.SPACE_GLOBAL: "global", L.SPACE_LOCAL: "local", L.SPACE_FRAME: "local",
                L.SPACE_GENERIC: "generic"}.get(space, "shared")
        what = {O.LD: "load", O.ST: "store", O.ATOM: "atomic"}[op]
        counts.bytes[f"{name} {what}"] += lanes * size
        ideal = max(1, size // 4)
    elif op == O.LDMATRIX:
        ideal = int(row[L.P_X]) & 0xFF  # matrices of 128 bytes
        counts.bytes["shared load"] += times * ideal * 128
    else:
        return
    if fronts:
        counts.shared_accesses += times
        counts.shared_wavefronts += fronts
        counts.ideal_wavefronts += times * ideal
