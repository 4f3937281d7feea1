"""Tensor memory of the CTAs of a launch, with the checks that every tcgen05 instruction shares.

An access is made by a warp (ld, st) or by the agent of an asynchronous instruction (mma, cp).  Agents of one
issuing warp run in the order of issue: PTX promises that for mma after mma on one accumulator, mma after cp,
and commit after all of them; CUTLASS main loops rely on it for cp after mma too, so it is modelled for the
whole sequence of one warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .clocks import K_OWN, K_START
from .machine import on_launch
from .tensor_memory import COLUMNS, TensorMemory, TensorMemoryError
from .tensor_shadow import TensorShadow, WarpFences, granules

LD, ST, MMA, CP = range(4)
_KIND_NAMES = ("tcgen05.ld", "tcgen05.st", "tcgen05.mma", "tcgen05.cp")


@dataclass(frozen=True)
class Access:
    """What an ``info`` number of the shadow stands for."""

    kind: int
    slot: int
    warp_key: tuple
    text: str
    line: int


class TensorState:
    """Everything the launch knows about tensor memory."""

    def __init__(self, machine):
        self.machine = machine
        self.memories: dict[int, TensorMemory] = {}
        self.shadows: dict[int, TensorShadow] = {}
        self.fences: dict[tuple, WarpFences] = {}
        self.accesses: list[Access] = []
        self.access_numbers: dict[tuple, int] = {}
        self.cta_group: int | None = None
        self.pipelines: dict[tuple, list] = {}
        #: (CTA, base column) -> (warp, instruction) of the allocation
        self.allocators: dict[tuple, tuple] = {}

    def memory(self, cta):
        if cta.index not in self.memories:
            self.memories[cta.index] = TensorMemory()
            self.shadows[cta.index] = TensorShadow()
        return self.memories[cta.index]

    def fences_of(self, warp):
        key = (warp.cta.index, warp.index)
        if key not in self.fences:
            self.fences[key] = WarpFences(self.machine.clocks.slots)
        return self.fences[key]

    def info(self, kind, slot, warp_key, ins):
        key = (kind, slot, warp_key, ins.line)
        number = self.access_numbers.get(key)
        if number is None:
            number = self.access_numbers[key] = len(self.accesses)
            self.accesses.append(Access(kind, slot, warp_key, ins.text, ins.line))
        return number

    def cta_exit(self, cta):
        """All tensor memory must be given back before a CTA ends."""
        memory = self.memories.pop(cta.index, None)
        self.shadows.pop(cta.index, None)
        if memory is not None and memory.allocations and self.machine.checks.async_rules:
            held = ", ".join(f"{columns} columns at {base}" for base,
                             columns in sorted(memory.allocations.items()))
            warp, ins = self.allocators.get((cta.index, min(memory.allocations)), (None, None))
            raise self.machine.fault_at("tensor-memory", f"CTA {cta.index} exits without tcgen05.dealloc of "
                                                         f"{held}",
                                        ins, cta, warp)

    def check_group(self, warp, group):
        """All tcgen05 instructions of a kernel use one .cta_group."""
        if self.cta_group is None:
            self.cta_group = group
        elif self.cta_group != group:
            warp.fault("tensor-memory", f"cta_group::{group} in a kernel that used "
                                        f"cta_group::{self.cta_group} before: "
                       "one kernel uses one of them for all tcgen05 instructions")
        if group == 2 and len(warp.cta.cluster) < 2:
            warp.fault("tensor-memory", "cta_group::2 in a cluster of one CTA")


def state_of(machine):
    """The TensorState of a launch."""
    return machine.tensor_state


@on_launch
def _begin(machine):
    machine.tensor_state = TensorState(machine)
    machine.on_cta_exit(machine.tensor_state.cta_exit)


class Toucher:
    """One warp or agent that accesses tensor memory, with the knowledge it may rely on.

    ``known`` (int64 per slot) is what it has synchronised with; ``fenced`` what fence::after_thread_sync
    covered. ``queued``: an asynchronous instruction, which follows the earlier ones of its warp by itself.
    """

    def __init__(self, who, slot, warp_key, known, fenced, state, *, queued=False):
        self.who, self.slot, self.warp_key = who, slot, warp_key
        self.known, self.fenced, self.state, self.queued = known, fenced, state, queued

    def _known(self, slot):
        """How much of another slot this one knows; of its own, what earlier occupants of the slot did."""
        return self.state.machine.clocks.K[slot, K_OWN] if slot == self.slot else self.known[slot]

    def _unordered(self, clash, what, fences):
        slot, clock, number = clash
        access = self.state.accesses[number]
        if slot == self.slot and clock >= self.state.machine.clocks.K[slot, K_START]:
            waits = self.state.fences.get(access.warp_key)
            if access.kind in (LD, ST) and waits is not None:
                clocks = waits.waited_ld if access.kind == LD else waits.waited_st
                if WarpFences.first_at(clocks, clock) is None:
                    return self._report("tensor-memory", access, what,
                                        f"without tcgen05.wait::{'ld' if access.kind == LD else 'st'} in "
                                        f"between")
            return None
        if self.queued and access.kind in (MMA, CP) and access.warp_key == self.warp_key:
            return None
        if clock > self._known(slot):
            if access.kind in (MMA, CP):
                need = "which has not been waited for (tcgen05.commit and an mbarrier wait)"
            else:
                need = "which is not ordered before it"
            return self._report("tensor-memory", access, what, need)
        fences = fences and self.state.machine.checks.tcgen05_fences
        if access.kind in (LD, ST):
            waits = self.state.fences.get(access.warp_key)
            name = "ld" if access.kind == LD else "st"
            waited = WarpFences.first_at(waits.waited_ld if access.kind == LD else waits.waited_st, clock)
            if waited is None or waited >= self._known(slot):
                return self._report("tensor-memory", access, what,
                                    f"whose warp did not execute tcgen05.wait::{name} before it synchronised")
            # Shipped kernels that are right on a B200 leave out the fence behind a load that was waited for:
            # its values are in registers, and only the columns are handed on.
            if fences and access.kind == ST and access.warp_key != self.warp_key:
                fence = WarpFences.first_at(waits.before, waited)
                if fence is None or fence >= self._known(slot):
                    return self._report("tensor-memory", access, what,
                                        "whose warp did not execute tcgen05.fence::before_thread_sync before "
                                        "it "
                                        "synchronised")
        if fences and access.warp_key != self.warp_key and clock > self.fenced[slot]:
            return self._report("tensor-memory", access, what,
                                "without tcgen05.fence::after_thread_sync behind the synchronisation")
        return None

    def _report(self, kind, access, what, need):
        return (kind, f"{what} conflicts with {_KIND_NAMES[access.kind]} at PTX line {access.line} "
                f"({access.text.strip()}), {need}")

    def _check(self, clashes, what, cta, fences=True):
        for clash in clashes:
            problem = self._unordered(clash, what, fences)
            if problem is not None:
                self.who.fault(problem[0], f"{problem[1]} (CTA {cta.index})")

    def read(self, cta, lanes, columns, kind, ins):
        """Check and record a read of cells; the values come from the caller's own indexing."""
        memory = self.state.memory(cta)
        checks = self.state.machine.checks
        self._inside(memory, lanes, columns)
        if checks.uninitialised and not memory.initialised[lanes, columns].all():
            bad = np.argwhere(~memory.initialised[lanes, columns])[0]
            lane, column = int(lanes[tuple(bad)]), int(columns[tuple(bad)])
            self.who.fault("uninitialised", f"{_KIND_NAMES[kind]} reads lane {lane}, column {column} of "
                                            f"tensor memory, "
                           "which was never written", address=lane << 16 | column)
        if checks.async_rules:
            shadow = self.state.shadows[cta.index]
            cells = granules(lanes, columns)
            self._check(shadow.conflicts_of_read(cells), f"{_KIND_NAMES[kind]} (read)", cta)
            info = self.state.info(kind, self.slot, self.warp_key, ins)
            shadow.record_read(cells, self.slot, self.clock(), info)

    def write(self, cta, lanes, columns, kind, ins, *, claim=False):
        """Check and record a write of cells, and mark them initialised (not where it is a claim for later).
        """
        memory = self.state.memory(cta)
        self._inside(memory, lanes, columns)
        if self.state.machine.checks.async_rules:
            shadow = self.state.shadows[cta.index]
            cells = granules(lanes, columns)
            writes, reads = shadow.conflicts_of_write(cells)
            self._check(writes, f"{_KIND_NAMES[kind]} (write)", cta)
            self._check(reads, f"{_KIND_NAMES[kind]} (write)", cta)
            info = self.state.info(kind, self.slot, self.warp_key, ins)
            shadow.record_write(cells, self.slot, self.clock(), info)
        if not claim:
            memory.initialised[lanes, columns] = True

    def check_free(self, cta, lanes, columns):
        """A deallocation must be ordered behind every access to its columns."""
        if self.state.machine.checks.async_rules:
            writes, reads = self.state.shadows[cta.index].conflicts_of_write(granules(lanes, columns))
            self._check(writes, "tcgen05.dealloc", cta, fences=False)
            self._check(reads, "tcgen05.dealloc", cta, fences=False)

    def clock(self):
        return int(self.state.machine.clocks.VC[self.slot, self.slot])

    def _inside(self, memory, lanes, columns):
        if self.state.machine.checks.forgiving_lanes:
            if int(columns.max()) >= COLUMNS or int(lanes.max()) >= 128:
                self.who.fault("tensor-memory", "an access reaches outside 128 lanes and 512 columns")
            return
        try:
            memory.check_cells(lanes, columns)
        except TensorMemoryError as error:
            self.who.fault("tensor-memory", str(error))


def warp_toucher(warp):
    state = state_of(warp.machine)
    clocks = warp.machine.clocks
    return Toucher(warp, warp.slot, (warp.cta.index, warp.index), clocks.VC[warp.slot, :clocks.slots],
                   state.fences_of(warp).after, state)


