"""Who touched which word last: the happens-before checks of shared and global memory.

An access leaves a stamp (clock, slot, program row; see layout). A *record* of two words holds the last stamp
on a 128-byte line and the mask of the 4-byte granules that it covers; bit 32 of the mask says that other
granules of the line have a cell of their own. Most accesses cover whole lines, so that one comparison and one
store serve 32 words. What a record can no longer hold is spilled into the cells: nothing is forgotten.

Shared memory keeps one write record a line and a read record for every line and slot; global memory one of
each.
"""

from __future__ import annotations

import numpy as np

from .bitcast import M32, U0, U1, U63, load64, store64
from .clocks import K_EPOCH, K_OWN, K_START
from .jit import inlined
from .layout import (
    A_BEGIN, A_READ, A_READ_LINES, A_WRITE, A_WRITE_LINES, C_GRANULES, C_RANK, C_READ, C_READ_LINES,
    C_READERS, C_WRITE, C_WRITE_LINES, CELL_STRONG, F_PROXY, F_RACE_READ, F_RACE_WRITE, OUT_ADDRESS, OUT_AUX,
    OUT_AUX2, OUT_LANE, RANK_SHIFT,
)

#: Bit of a record's mask: cells of this line are in use.
_CELLS = np.uint64(1 << 32)
_ALL_BYTES = np.uint64(15)
_STRONG = np.uint64(CELL_STRONG)
_EIGHT = np.uint64(8)


@inlined
def fault(OUT, code, lane, address, aux, aux2):
    OUT[OUT_LANE] = lane
    OUT[OUT_ADDRESS] = np.int64(address)
    OUT[OUT_AUX] = np.int64(aux)
    OUT[OUT_AUX2] = np.int64(aux2)
    return code


@inlined
def make_stamp(VC, slot, pc, strong):
    """The stamp of an access that covers whole granules."""
    stamp = (np.uint64(VC[slot, slot]) << np.uint64(36)) | (np.uint64(slot) << np.uint64(24)) | (
        np.uint64(pc) << np.uint64(5)) | _ALL_BYTES
    return stamp | _STRONG if strong else stamp


@inlined
def unordered(cell, bits, strong, slot, VC, K, shared):
    """True when the access recorded in `cell` is not ordered before the present one and touches the same
    bytes."""
    if cell & bits == U0 or (strong and cell & _STRONG != U0):
        return False
    other = np.int64((cell >> np.uint64(24)) & np.uint64(0xFFF))
    clock = np.int64(cell >> np.uint64(36))
    if clock < K[slot, K_EPOCH] or other >= K.shape[0]:
        # Left over from an earlier launch.
        return False
    if other == slot:
        # An earlier CTA used this slot: its accesses are not in program order with ours.
        return not shared and clock < K[slot, K_START] and clock > K[slot, K_OWN]
    if clock <= VC[slot, other]:
        return False
    return not (shared and clock < K[other, K_START])


@inlined
def lowest(mask):
    """Number of the lowest bit that is set."""
    k = 0
    while (mask >> np.uint64(k)) & U1 == U0:
        k += 1
    return k


@inlined
def spill(stamp, mask, cells):
    """Move a record's granules into their cells; `cells` is the address of the line's first."""
    for k in range(32):
        if (mask >> np.uint64(k)) & U1:
            store64(cells + np.uint64(8 * k), stamp)


@inlined
def unordered_cell(cells, mask, bits, strong, slot, VC, K, shared):
    """The first granule of `mask` whose cell is not ordered before the present access, -1 if none."""
    for k in range(32):
        if (mask >> np.uint64(k)) & U1:
            cell = load64(cells + np.uint64(8 * k))
            if cell != U0 and unordered(cell, bits, strong, slot, VC, K, shared):
                return k
    return -1


@inlined
def replace_record(record, last, covered, stamp, mask, cells):
    """The present access becomes the record's; what it does not cover moves into the cells."""
    left = covered & M32 & ~mask
    if left:
        spill(last, left, cells)
        covered = _CELLS
    store64(record, stamp)
    store64(record + _EIGHT, (covered & _CELLS) | mask)


@inlined
def check_readers(C, VC, K, OUT, cta, slot, line, mask, bits, low, strong, lane):
    """Fault code when another slot's read of these granules is not ordered before `slot`."""
    readers = load64(np.uint64(C[cta, C_READERS] + 8 * line))
    lines = (C[cta, C_GRANULES] + 31) >> 5
    bit = 0
    while readers != U0:
        if readers & U1:
            other = bit
            while other < K.shape[0]:
                record = np.uint64(C[cta, C_READ_LINES] + 16 * (other * lines + line))
                last = load64(record)
                clock = np.int64(last >> np.uint64(36))
                # The record is the slot's newest read of this line: where it is ordered, older ones are.
                if other != slot and clock > VC[slot, other] and clock >= K[other, K_START]:
                    covered = load64(record + _EIGHT)
                    cells = np.uint64(C[cta, C_READ] + 8 * (other * C[cta, C_GRANULES] + 32 * line))
                    at = -1
                    if covered & mask and unordered(last, bits, strong, slot, VC, K, True):
                        at = lowest(covered & mask)
                    elif covered & _CELLS:
                        at = unordered_cell(cells, mask & ~covered, bits, strong, slot, VC, K, True)
                        if at >= 0:
                            last = load64(cells + np.uint64(8 * at))
                    if at >= 0:
                        place = (C[cta, C_RANK] << RANK_SHIFT) + 128 * line + 4 * at + low
                        return fault(OUT, F_RACE_READ, lane, place, last, 0)
                other += 64
        readers >>= U1
        bit += 1
    return 0


@inlined
def touch_shared(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong, lane):
    """Happens-before check and record of one contiguous access to a CTA's shared memory. Returns a fault code
    or 0."""
    if (at | size) & 3:
        return touch_shared_bytes(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong, lane)
    granule, end = at >> 2, (at + size) >> 2
    stamp = make_stamp(VC, slot, pc, strong)
    lines = (C[cta, C_GRANULES] + 31) >> 5
    safe = U0
    while granule < end:
        line = granule >> 5
        stop = min(end, 32 * line + 32)
        mask = ((U1 << np.uint64(stop - granule)) - U1) << np.uint64(granule & 31)
        own = np.uint64(C[cta, C_READ_LINES] + 16 * (slot * lines + line))
        if not writes and load64(own) == stamp and mask & ~load64(own + _EIGHT) == U0:
            # Read before by this instruction, with this clock: had anybody written since, that write would
            # have been a race.
            granule = stop
            continue
        record = np.uint64(C[cta, C_WRITE_LINES] + 16 * line)
        cells = np.uint64(C[cta, C_WRITE] + 256 * line)
        last, covered = load64(record), load64(record + _EIGHT)
        found = -1
        # Neighbouring lines mostly hold the same access, which was just found to be ordered.
        if covered & mask and last >> np.uint64(24) != safe:
            if unordered(last, _ALL_BYTES, strong, slot, VC, K, True):
                found = lowest(covered & mask)
            elif last & _STRONG == U0:
                safe = last >> np.uint64(24)
        if found < 0 and covered & _CELLS and mask & ~covered:
            found = unordered_cell(cells, mask & ~covered, _ALL_BYTES, strong, slot, VC, K, True)
            if found >= 0:
                last = load64(cells + np.uint64(8 * found))
        if found >= 0:
            place = (C[cta, C_RANK] << RANK_SHIFT) + 128 * line + 4 * found
            return fault(OUT, F_RACE_WRITE, lane, place, last, 0)
        if writes:
            if load64(np.uint64(C[cta, C_READERS] + 8 * line)):
                code = check_readers(C, VC, K, OUT, cta, slot, line, mask, _ALL_BYTES, 0, strong, lane)
                if code:
                    return code
            if last == stamp:
                store64(record + _EIGHT, covered | mask)
            else:
                replace_record(record, last, covered, stamp, mask, cells)
        elif reads:
            last, covered = load64(own), load64(own + _EIGHT)
            if last == stamp:
                store64(own + _EIGHT, covered | mask)
            else:
                if np.int64(last >> np.uint64(36)) < K[slot, K_START]:
                    covered = U0
                cells = np.uint64(C[cta, C_READ] + 8 * (slot * C[cta, C_GRANULES] + 32 * line))
                replace_record(own, last, covered, stamp, mask, cells)
                pointer = np.uint64(C[cta, C_READERS] + 8 * line)
                store64(pointer, load64(pointer) | (U1 << (np.uint64(slot) & U63)))
        granule = stop
    return 0


@inlined
def granule_bytes(at, size, granule):
    """(mask, number of the first) of the bytes of a granule that an access touches."""
    low, high = max(at - granule * 4, 0), min(at + size - granule * 4, 4)
    return ((U1 << np.uint64(high)) - U1) & ~((U1 << np.uint64(low)) - U1), low


@inlined
def touch_shared_bytes(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong, lane):
    """touch_shared for an access that begins or ends inside a granule: the lines go over to cells."""
    stamp = make_stamp(VC, slot, pc, strong) & ~_ALL_BYTES
    granules = C[cta, C_GRANULES]
    lines = (granules + 31) >> 5
    for granule in range(at >> 2, ((at + size - 1) >> 2) + 1):
        bits, low = granule_bytes(at, size, granule)
        line, k = granule >> 5, granule & 31
        mask = U1 << np.uint64(k)
        record = np.uint64(C[cta, C_WRITE_LINES] + 16 * line)
        cells = np.uint64(C[cta, C_WRITE] + 256 * line)
        spill(load64(record), load64(record + _EIGHT), cells)
        store64(record + _EIGHT, _CELLS)
        pointer = cells + np.uint64(8 * k)
        cell = load64(pointer)
        if cell != U0 and unordered(cell, bits, strong, slot, VC, K, True):
            return fault(OUT, F_RACE_WRITE, lane, (C[cta, C_RANK] << RANK_SHIFT) + granule * 4 + low, cell, 0)
        if writes:
            code = check_readers(C, VC, K, OUT, cta, slot, line, mask, bits, low, strong, lane)
            if code:
                return code
            if cell >> np.uint64(5) == stamp >> np.uint64(5):
                bits |= cell & _ALL_BYTES
            store64(pointer, stamp | bits)
        elif reads:
            record = np.uint64(C[cta, C_READ_LINES] + 16 * (slot * lines + line))
            cells = np.uint64(C[cta, C_READ] + 8 * (slot * granules + 32 * line))
            last = load64(record)
            if np.int64(last >> np.uint64(36)) >= K[slot, K_START]:
                spill(last, load64(record + _EIGHT), cells)
            store64(record, stamp)
            store64(record + _EIGHT, _CELLS)
            pointer = cells + np.uint64(8 * k)
            seen = load64(pointer)
            if np.int64(seen >> np.uint64(36)) == VC[slot, slot]:
                bits |= seen & _ALL_BYTES
            store64(pointer, stamp | bits)
            pointer = np.uint64(C[cta, C_READERS] + 8 * line)
            store64(pointer, load64(pointer) | (U1 << (np.uint64(slot) & U63)))
    return 0


@inlined
def touch_global(A, VC, K, OUT, allocation, at, size, slot, pc, reads, writes, strong, lane):
    """The same for global memory. Lines whose accesses do not follow each other neatly go over to cells."""
    granule, end = at >> 2, (at + size + 3) >> 2
    neat = (at | size) & 3 == 0
    stamp = make_stamp(VC, slot, pc, strong)
    safe = U0
    while granule < end:
        line = granule >> 5
        stop = min(end, 32 * line + 32)
        mask = ((U1 << np.uint64(stop - granule)) - U1) << np.uint64(granule & 31)
        written = np.uint64(A[allocation, A_WRITE_LINES] + 16 * line)
        read = np.uint64(A[allocation, A_READ_LINES] + 16 * line)
        last, covered = load64(written), load64(written + _EIGHT)
        seen, kept = load64(read), load64(read + _EIGHT)
        if np.int64(last >> np.uint64(36)) < K[slot, K_EPOCH]:
            covered = U0
        if np.int64(seen >> np.uint64(36)) < K[slot, K_EPOCH]:
            kept = U0
        fits = neat and (covered | kept) & _CELLS == U0
        if fits:
            if covered & mask and last >> np.uint64(24) != safe:
                if unordered(last, _ALL_BYTES, strong, slot, VC, K, False):
                    place = A[allocation, A_BEGIN] + 128 * line + 4 * lowest(covered & mask)
                    return fault(OUT, F_RACE_WRITE, lane, place, last, 0)
                if last & _STRONG == U0:
                    safe = last >> np.uint64(24)
            if writes:
                if kept & mask and unordered(seen, _ALL_BYTES, strong, slot, VC, K, False):
                    place = A[allocation, A_BEGIN] + 128 * line + 4 * lowest(kept & mask)
                    return fault(OUT, F_RACE_READ, lane, place, seen, 0)
                if last == stamp:
                    store64(written + _EIGHT, covered | mask)
                elif covered & ~mask == U0:
                    store64(written, stamp)
                    store64(written + _EIGHT, mask)
                else:
                    fits = False
            elif reads:
                # Of several concurrent readers the first is kept; which one a schedule makes first varies.
                if kept and seen == stamp:
                    store64(read + _EIGHT, kept | mask)
                elif kept and unordered(seen, _ALL_BYTES, False, slot, VC, K, False):
                    fits = mask & ~kept == U0
                elif kept & ~mask == U0:
                    store64(read, stamp)
                    store64(read + _EIGHT, mask)
                else:
                    fits = False
        if not fits:
            spill(last, covered, np.uint64(A[allocation, A_WRITE] + 256 * line))
            spill(seen, kept, np.uint64(A[allocation, A_READ] + 256 * line))
            store64(written, stamp)
            store64(written + _EIGHT, _CELLS)
            store64(read, stamp)
            store64(read + _EIGHT, _CELLS)
            code = touch_global_cells(A, VC, K, OUT, allocation, at, size, granule, stop, slot, stamp, reads,
                                      writes, strong, lane)
            if code:
                return code
        granule = stop
    return 0


@inlined
def touch_global_cells(A, VC, K, OUT, allocation, at, size, granule, stop, slot, stamp, reads, writes, strong,
                       lane):
    """One line of touch_global by its cells."""
    stamp &= ~_ALL_BYTES
    while granule < stop:
        bits, low = granule_bytes(at, size, granule)
        pointer = np.uint64(A[allocation, A_WRITE] + 8 * granule)
        cell = load64(pointer)
        if cell != U0 and unordered(cell, bits, strong, slot, VC, K, False):
            return fault(OUT, F_RACE_WRITE, lane, A[allocation, A_BEGIN] + granule * 4 + low, cell, 0)
        read_pointer = np.uint64(A[allocation, A_READ] + 8 * granule)
        seen = load64(read_pointer)
        if writes:
            if seen != U0 and unordered(seen, bits, strong, slot, VC, K, False):
                return fault(OUT, F_RACE_READ, lane, A[allocation, A_BEGIN] + granule * 4 + low, seen, 0)
            if cell >> np.uint64(5) == stamp >> np.uint64(5):
                bits |= cell & _ALL_BYTES
            store64(pointer, stamp | bits)
        elif reads and (seen == U0 or not unordered(seen, _ALL_BYTES, False, slot, VC, K, False)):
            store64(read_pointer, stamp | bits)
        granule += 1
    return 0


@inlined
def hidden(cell, VC, slot, generic_slots, start):
    """True for a generic write, not before clock `start`, that the async proxy of `slot` may not see."""
    other = np.int64((cell >> np.uint64(24)) & np.uint64(0xFFF))
    clock = np.int64(cell >> np.uint64(36))
    return other < generic_slots and clock > VC[slot, VC.shape[1] // 2 + other] and clock >= start


@inlined
def hidden_write(lines, cells, begin, VC, K, OUT, at, size, slot, generic_slots, shared):
    """Fault code if the last generic write of a granule is not visible to the async proxy for `slot`.

    Slots from `generic_slots` on belong to agents of the async proxy, whose writes need no fence.
    """
    for granule in range(at >> 2, ((at + size - 1) >> 2) + 1):
        line, k = granule >> 5, np.uint64(granule & 31)
        record = np.uint64(lines + 16 * line)
        cell, covered = load64(record), load64(record + _EIGHT)
        if not shared and np.int64(cell >> np.uint64(36)) < K[slot, K_EPOCH]:
            covered = U0
        if (covered >> k) & U1 == U0:
            cell = load64(np.uint64(cells + 8 * granule)) if covered & _CELLS else U0
        if cell != U0:
            other = np.int64((cell >> np.uint64(24)) & np.uint64(0xFFF))
            start = K[slot, K_EPOCH] if not shared or other >= K.shape[0] else K[other, K_START]
            if hidden(cell, VC, slot, generic_slots, start):
                return fault(OUT, F_PROXY, 0, begin + granule * 4, cell, 0)
    return 0
