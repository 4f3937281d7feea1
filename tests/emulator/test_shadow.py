"""The compiled happens-before checks (lines, records, spilled cells) against a plain model of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import layout as L
from msa_cudacore.ptx.emulator import pool
from msa_cudacore.ptx.emulator.clocks import Clocks
from msa_cudacore.ptx.emulator.memory import Memory, SharedMemory, record_global, record_shared

pytest.importorskip("numba")

SLOTS, LINES = 4, 3
BASE = L.SHARED_RESERVED


@dataclass
class Model:
    """The last write of each 4-byte granule, and its last read by each slot: (slot, clock, program row,
    strong, bytes)."""

    clocks: Clocks
    writes: dict = field(default_factory=dict)
    reads: dict = field(default_factory=dict)

    def unordered(self, access, slot, strong, touched):
        other, clock, _, was_strong, its_bytes = access
        ordered = other == slot or clock <= self.clocks.VC[slot, other] or strong and was_strong
        return bool(touched & its_bytes) and not ordered

    def touch(self, slot, pc, at, size, writes, strong):
        """The earlier accesses that this one races with: (address, slot, program row, it was a write)."""
        found, now = set(), (slot, int(self.clocks.VC[slot, slot]))
        pieces = [
            (granule, {b for b in range(4) if at <= 4 * granule + b < at + size})
            for granule in range(at // 4, (at + size - 1) // 4 + 1)
        ]
        for granule, touched in pieces:
            earlier = [(self.writes[granule], True)] if granule in self.writes else []
            if writes:
                earlier += [(read, False) for read in self.reads.get(granule, {}).values()]
            for access, was_write in earlier:
                if self.unordered(access, slot, strong, touched):
                    found.add((4 * granule + min(touched), access[0], access[2], was_write))
        if found:
            return found
        for granule, touched in pieces:
            if writes:
                last = self.writes.get(granule)
                if last is not None and last[:3] == (*now, pc):
                    touched = touched | last[4]
                self.writes[granule] = (*now, pc, strong, touched)
            else:
                seen = self.reads.setdefault(granule, {})
                last = seen.get(slot)
                if last is not None and last[:2] == now:
                    touched = touched | last[4]
                seen[slot] = (*now, pc, strong, touched)
        return found


def fresh_clocks() -> Clocks:
    """As a launch makes them: later than whatever is left in reused cells."""
    epoch, _ = pool.begin_epoch()
    clocks = Clocks(SLOTS, 1, epoch)
    for slot in range(SLOTS):
        clocks.start(slot)
    return clocks


def accesses(rng, readers):
    """Endless (slot, program row, offset, bytes, writes, strong), of every width, mostly whole granules."""
    while True:
        slot, pc, strong = int(rng.integers(SLOTS)), int(rng.integers(4)), bool(rng.random() < 0.1)
        size = int(rng.choice([1, 2, 4, 4, 8, 16, 32, 128, 256]))
        at = int(rng.integers(0, (128 * LINES - size) // min(size, 16) + 1)) * min(size, 16)
        yield slot, pc, at, size, slot not in readers or bool(rng.random() < 0.3), strong


def step(rng, clocks):
    """Some order between two slots, as a barrier would make it."""
    one, other = rng.choice(SLOTS, 2, replace=False)
    if rng.random() < 0.5:
        clocks.join(int(one), int(other))
    if rng.random() < 0.2:
        for slot in range(1, SLOTS):
            clocks.join(0, slot)
        for slot in range(1, SLOTS):
            clocks.join(slot, 0)


def agree(code, out, found, place):
    """The compiled code reports a race exactly where the model finds some, and names one of them."""
    assert bool(code) == bool(found), (code, found)
    if code:
        cell = int(out[L.OUT_AUX]) & 0xFFFFFFFFFFFFFFFF
        who = cell >> 24 & 0xFFF, cell >> 5 & 0x7FFFF
        assert (int(out[L.OUT_ADDRESS]) - place, *who, code == L.F_RACE_WRITE) in found


def follow(rng, clocks, readers, record, out, begin):
    """Random accesses, by the model and by `record`, until a race: they agree on each."""
    model, stream = Model(clocks), accesses(rng, readers)
    for _ in range(int(rng.integers(5, 120))):
        access = next(stream)
        found = model.touch(*access)
        code = record(*access)
        agree(code, out, found, begin)
        if code:
            break
        step(rng, clocks)


@pytest.mark.parametrize("part", range(8))
def test_shared_memory(part, rng):
    for _ in range(40):
        clocks = fresh_clocks()
        memory, out = SharedMemory(BASE + 128 * LINES, SLOTS), np.zeros(L.OUT_COLUMNS, np.int64)
        row = np.zeros((1, L.C_COLUMNS), np.int64)
        memory.fill_row(row[0])
        row[0, L.C_GROUP_SLOTS] = SLOTS

        def record(slot, pc, at, size, writes, strong):
            return record_shared(
                row, clocks.VC, clocks.K, out, 0, BASE + at, size, slot, pc, not writes, writes, strong
            )

        follow(rng, clocks, range(SLOTS), record, out, BASE)
        memory.give_back()
        pool.end_epoch(int(clocks.VC.max()))


@pytest.mark.parametrize("part", range(8))
def test_global_memory_with_one_reader(part, rng):
    """Of several readers global memory keeps one; with a single one it forgets nothing."""
    for _ in range(40):
        clocks = fresh_clocks()
        array, memory, out = np.zeros(128 * LINES, np.uint8), Memory(), np.zeros(L.OUT_COLUMNS, np.int64)
        begin = memory.map(array)
        table = memory.table(True, memory.generation)

        def record(slot, pc, at, size, writes, strong):
            return record_global(
                table, clocks.VC, clocks.K, out, 0, at, size, slot, pc, not writes, writes, strong
            )

        follow(rng, clocks, [2], record, out, begin)
        memory.close()
        pool.end_epoch(int(clocks.VC.max()))


@pytest.mark.parametrize("first", [0, 16])
def test_global_memory_remembers_a_second_reader_of_other_words(first):
    clocks = fresh_clocks()
    array, memory, out = np.zeros(128, np.uint8), Memory(), np.zeros(L.OUT_COLUMNS, np.int64)
    memory.map(array)
    table = memory.table(True, memory.generation)

    def touch(slot, at, size, writes):
        return record_global(
            table, clocks.VC, clocks.K, out, 0, at, size, slot, 0, not writes, writes, False
        )

    assert touch(0, first, 16, False) == touch(1, 64, 32, False) == 0
    assert touch(2, 68, 4, True) == L.F_RACE_READ and int(out[L.OUT_AUX]) >> 24 & 0xFFF == 1
    assert touch(2, first + 4, 4, True) == L.F_RACE_READ and int(out[L.OUT_AUX]) >> 24 & 0xFFF == 0
    memory.close()
    pool.end_epoch(int(clocks.VC.max()))
