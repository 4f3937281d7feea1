"""Races between lanes of one warp on shared memory (Checks(warp_races=True)).

Threads of a warp are scheduled independently: what one lane stores another may read only behind an
instruction that both execute together (bar.warp.sync, a barrier, or another .sync instruction). Every lane
has a clock and knows a clock of every other lane of its warp; every byte of shared memory remembers the lane
that wrote it and two lanes that read it. All of this lies in arrays of its own, used only where the check is
on.

PTX promises memory order for bar.warp.sync and barriers alone; shfl, vote and the like are taken for an order
here, because a warp issues its accesses in order.
"""

from __future__ import annotations

import numpy as np

from .bitcast import U0, U1, load64, store64
from .jit import inlined, unit
from .layout import C_LANES, C_RANK, F_WARP_RACE, G_LANES, RANK_SHIFT
from .shadow import fault

#: Bytes of the clocks of one warp: clock of lane j as lane i knows it, [32, 32] int64.
LANE_CLOCKS = 32 * 32 * 8


@inlined
def clock_of(G, slot, i, j):
    """Address of what lane i knows of lane j."""
    return np.uint64(G[G_LANES] + LANE_CLOCKS * slot + 8 * (32 * i + j))


@inlined
def start_lanes(G, slot):
    for i in range(32):
        for j in range(32):
            store64(clock_of(G, slot, i, j), U1 if i == j else U0)


@inlined
def lanes_meet(G, slot, mask):
    """The lanes of `mask` execute an instruction together: each learns what the others know."""
    for j in range(32):
        most = U0
        for i in range(32):
            if (mask >> i) & 1:
                most = max(most, load64(clock_of(G, slot, i, j)))
        for i in range(32):
            if (mask >> i) & 1:
                store64(clock_of(G, slot, i, j), most)
    for i in range(32):
        if (mask >> i) & 1:
            store64(clock_of(G, slot, i, i), load64(clock_of(G, slot, i, i)) + U1)


@inlined
def lanes_learn(G, slot, mask):
    """The lanes of `mask` acquired something from outside: taken to include all that their warp did."""
    for i in range(32):
        if (mask >> i) & 1:
            for j in range(32):
                if i != j:
                    store64(clock_of(G, slot, i, j), load64(clock_of(G, slot, j, j)))
    # What a lane does from here on is news to them.
    for j in range(32):
        store64(clock_of(G, slot, j, j), load64(clock_of(G, slot, j, j)) + U1)


@unit("void", "I1 i i i")
def lane_event(G, slot, mask, kind):
    """The above for callers outside: 0 start, 1 meet, 2 learn."""
    if kind == 0:
        start_lanes(G, slot)
    elif kind == 1:
        lanes_meet(G, slot, mask)
    else:
        lanes_learn(G, slot, mask)


@inlined
def concurrent(G, cell, slot, lane):
    """True when the access in a byte's cell was another lane's of this warp, and `lane` does not know it."""
    other = np.int64(cell & np.uint64(31))
    if cell == U0 or other == lane or np.int64((cell >> np.uint64(24)) & np.uint64(0xFFF)) != slot:
        return False
    return cell >> np.uint64(36) > load64(clock_of(G, slot, lane, other))


@inlined
def lane_stamp(G, slot, pc, lane):
    return (load64(clock_of(G, slot, lane, lane)) << np.uint64(36)) | (np.uint64(slot) << np.uint64(24)) | (
        np.uint64(pc) << np.uint64(5)) | np.uint64(lane)


@inlined
def record_lane(C, G, cta, slot, pc, lane, at, size, writes):
    """Leave the stamp of an access. Per byte there are three cells: writer, a reader, another reader."""
    stamp = lane_stamp(G, slot, pc, lane)
    for byte in range(at, at + size):
        cells = np.uint64(C[cta, C_LANES] + 24 * byte)
        if writes:
            store64(cells, stamp)
        else:
            first = load64(cells + np.uint64(8))
            if concurrent(G, first, slot, lane):
                store64(cells + np.uint64(16), stamp)
            else:
                if first & np.uint64(31) != np.uint64(lane):
                    store64(cells + np.uint64(16), U0)
                store64(cells + np.uint64(8), stamp)


@inlined
def check_lane(C, G, OUT, cta, slot, lane, at, size, writes):
    """Fault code when another lane's access to one of the bytes is concurrent with this lane's, else 0."""
    for byte in range(at, at + size):
        cells = np.uint64(C[cta, C_LANES] + 24 * byte)
        place = (C[cta, C_RANK] << RANK_SHIFT) + byte
        if concurrent(G, load64(cells), slot, lane):
            return fault(OUT, F_WARP_RACE, lane, place, load64(cells), 0)
        if writes:
            for reader in range(1, 3):
                cell = load64(cells + np.uint64(8 * reader))
                if concurrent(G, cell, slot, lane):
                    return fault(OUT, F_WARP_RACE, lane, place, cell, 1)
    return 0


@inlined
def check_lane_races(C, G, T, OUT, slot, pc, size, writes, m, shared_owners):
    """Check and record a weak access of a warp whose lanes resolve to T[1] (offset), T[2] (owner). Lanes of
    one instruction do not race with each other. Returns a fault code or 0."""
    for i in range(32):
        if (m >> np.uint64(i)) & U1 and T[2, i] < shared_owners:
            code = check_lane(C, G, OUT, np.int64(T[2, i]), slot, i, np.int64(T[1, i]), size, writes)
            if code:
                return code
    for i in range(32):
        if (m >> np.uint64(i)) & U1 and T[2, i] < shared_owners:
            record_lane(C, G, np.int64(T[2, i]), slot, pc, i, np.int64(T[1, i]), size, writes)
    return 0
