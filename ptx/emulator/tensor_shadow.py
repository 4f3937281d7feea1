"""Who touched tensor memory last, and whether a later access may rely on it.

A granule is one column of 16 lanes (the smallest unit an instruction addresses).  Every access is stamped
with the clock slot of its agent and the clock there; ``Clocks`` knows what happens before what.  On top of
that tcgen05 has rules of its own (PTX ISA, "tcgen05 memory consistency model"), kept here as clocks of the
warp that made the access:

* a load or store counts only once the warp has executed ``wait::ld`` or ``wait::st``,
* for another thread, only if the warp then executed ``fence::before_thread_sync`` ahead of its
  synchronisation,
* and the other thread must execute ``fence::after_thread_sync`` behind it.

The fences step the warp's clock, so "before" and "behind" are comparisons of clock values.
"""

from __future__ import annotations

import bisect

import numpy as np

from .tensor_memory import COLUMNS, LANES

GROUPS = LANES // 16
_READERS = 6


def granules(lanes, columns):
    """Distinct granule numbers of cells: (lane / 16) * 512 + column."""
    touched = np.zeros(GROUPS * COLUMNS, np.bool_)
    touched[(np.asarray(lanes) >> 4) * COLUMNS + np.asarray(columns)] = True
    return np.flatnonzero(touched)


class WarpFences:
    """Clock values at which one warp executed the waits and fences of tcgen05."""

    def __init__(self, slots):
        self.waited_ld: list[int] = []
        self.waited_st: list[int] = []
        self.before: list[int] = []
        self.after = np.zeros(slots, np.int64)

    @staticmethod
    def first_at(clocks, clock):
        """The first recorded clock >= clock, or None."""
        at = bisect.bisect_left(clocks, clock)
        return clocks[at] if at < len(clocks) else None


class TensorShadow:
    """Last write and recent reads of each granule of one CTA's tensor memory."""

    def __init__(self):
        count = GROUPS * COLUMNS
        self.write_slot = np.full(count, -1, np.int32)
        self.write_clock = np.zeros(count, np.int64)
        self.write_info = np.full(count, -1, np.int32)
        self.read_slot = np.full((count, _READERS), -1, np.int32)
        self.read_clock = np.zeros((count, _READERS), np.int64)
        self.read_info = np.full((count, _READERS), -1, np.int32)
        self.read_next = np.zeros(count, np.int8)

    def forget(self, columns):
        """A deallocation: the columns have no history any more."""
        for group in range(GROUPS):
            at = group * COLUMNS + columns
            self.write_slot[at] = -1
            self.read_slot[at] = -1

    def conflicts_of_read(self, cells):
        """Distinct (slot, clock, info) of the last writes of granules."""
        return _distinct(self.write_slot[cells], self.write_clock[cells], self.write_info[cells])

    def conflicts_of_write(self, cells):
        """Distinct writes and distinct reads that a write of granules must follow."""
        return (self.conflicts_of_read(cells),
                _distinct(self.read_slot[cells].ravel(), self.read_clock[cells].ravel(),
                          self.read_info[cells].ravel()))

    def record_write(self, cells, slot, clock, info):
        self.write_slot[cells] = slot
        self.write_clock[cells] = clock
        self.write_info[cells] = info
        self.read_slot[cells] = -1
        self.read_next[cells] = 0

    def record_read(self, cells, slot, clock, info):
        # The reader's own earlier entry is replaced, so that repeated loads do not push others out.
        same = self.read_slot[cells] == slot
        place = np.where(same.any(axis=1), same.argmax(axis=1), self.read_next[cells])
        self.read_slot[cells, place] = slot
        self.read_clock[cells, place] = clock
        self.read_info[cells, place] = info
        self.read_next[cells] = np.where(same.any(axis=1), self.read_next[cells], (place + 1) % _READERS)


def _distinct(slots, clocks, infos):
    live = np.flatnonzero(slots >= 0)
    found = []
    while len(live):
        # Mostly one access covers everything, so peeling off equal ones is quicker than sorting.
        first = live[0]
        slot, clock, info = slots[first], clocks[first], infos[first]
        found.append((int(slot), int(clock), int(info)))
        live = live[(slots[live] != slot) | (clocks[live] != clock) | (infos[live] != info)]
    return found
