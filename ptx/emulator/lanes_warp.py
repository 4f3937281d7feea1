"""Communication between the lanes of a warp: shfl, vote, match, redux, elect, activemask, special registers,
clocks."""

from __future__ import annotations

import numpy as np

from .bitcast import M32, M64, U0, U1, signed
from .jit import inlined, unit
from .lanes_float import pick_f32
from .opcodes import ACTIVEMASK, CLOCK, ELECT, MATCH, MOV_SPECIAL, REDUX, REDUX_F, SHFL, VOTE

#: Member mask of the old shuffles without .sync, which may read any lane.
ALL_UNCHECKED = np.uint64(0x1FFFFFFFF)
SHUFFLE_MODES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
VOTE_MODES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}
REDUX_MODES = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}


@inlined
def shuffle_source(lane, b, c, mode):
    """Source lane and whether it lies inside the segment (PTX "shfl" pseudo-code)."""
    value, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    low = lane & segment
    limit = low | (clamp & ~segment)
    if mode == 0:
        j = lane - value
        inside = j >= limit
    elif mode == 1:
        j = lane + value
        inside = j <= limit
    elif mode == 2:
        j = lane ^ value
        inside = j <= limit
    else:
        j = low | (value & ~segment)
        inside = j <= limit
    return (j, True) if inside else (lane, False)


@inlined
def write_mask(F, row, value, m):
    keep = np.uint64(m)
    F[row, 0] = (F[row, 0] & ~keep) | (np.uint64(value) & keep)


@inlined
def vote(F, a, e, x, negated, m, lane):
    """Result of a vote for one lane: over the lanes of its member mask that execute."""
    group = np.uint64(m) & F[e, lane]
    truth = (~F[a, 0] if negated else F[a, 0]) & group
    if x == 0:
        return U1 if truth == group else U0
    if x == 1:
        return U1 if truth != U0 else U0
    if x == 2:
        return U1 if truth == group or truth == U0 else U0
    return truth


@inlined
def reduce_lanes(F, a, e, x, y, m, lane):
    group = np.uint64(m) & F[e, lane]
    first = True
    r = U0
    for j in range(32):
        if (group >> np.uint64(j)) & U1 == U0:
            continue
        v = F[a, j] & M32
        if first:
            r = v
            first = False
        elif x == 0:
            r = (r + v) & M32
        elif x == 3:
            r &= v
        elif x == 4:
            r |= v
        elif x == 5:
            r ^= v
        else:
            if y:
                less = signed(v, np.uint64(32)) < signed(r, np.uint64(32))
            else:
                less = v < r
            if less == (x == 1):
                r = v
    return r


@inlined
def reduce_floats(F, a, e, x, y, m, lane):
    group = np.uint64(m) & F[e, lane]
    first = True
    r = U0
    for j in range(32):
        if (group >> np.uint64(j)) & U1:
            v = F[a, j] & M32
            # A lone value passes through the same rule as a pair, for `.abs` and NaN canonicalisation.
            r = pick_f32(v, v, y, x == 1) if first else pick_f32(r, v, y, x == 1)
            first = False
    return r


@unit("i", "U2 i i i i i i i i i i i i", allocates=True)
def warp_lanes(F, op, d, a, b, c, e, x, y, p, mask, clock, noise):
    """WARP family for the lanes of `mask`. p: predicate output row (-1 none); e: row of the member mask.

    Returns 0, or 1 + 32 * source + lane for a shuffle in which `lane` reads a lane that does not take part.
    """
    if op == MOV_SPECIAL:
        for i in range(32):
            if (mask >> i) & 1:
                F[d, i] = F[a, i]
    elif op == SHFL:
        values = F[a].copy()
        inside_mask = 0
        for i in range(32):
            if (mask >> i) & 1:
                j, inside = shuffle_source(i, np.int64(F[b, i] & M32), np.int64(F[c, i] & M32), x)
                # The value of a lane that takes no part is unpredictable; without a member mask it is
                # poisoned.
                present = (mask >> j) & 1 != 0
                if not present and inside and F[e, i] != ALL_UNCHECKED:
                    return 1 + 32 * j + i
                if d >= 0:
                    F[d, i] = values[j] & M32 if present else np.uint64(noise) & M32
                if inside:
                    inside_mask |= 1 << i
        if p >= 0:
            write_mask(F, p, inside_mask, mask)
    elif op == VOTE:
        if x == 3:
            results = np.empty(32, np.uint64)
            for i in range(32):
                if (mask >> i) & 1:
                    results[i] = vote(F, a, e, x, y != 0, mask, i)
            for i in range(32):
                if (mask >> i) & 1:
                    F[d, i] = results[i]
        else:
            truth = 0
            for i in range(32):
                if (mask >> i) & 1 and vote(F, a, e, x, y != 0, mask, i):
                    truth |= 1 << i
            write_mask(F, d, truth, mask)
    elif op == MATCH:
        # x: 0 any, 1 all; y: width mask selector (1 = 64-bit values)
        results = np.zeros(32, np.uint64)
        truth = 0
        keep = M64 if y else M32
        for i in range(32):
            if (mask >> i) & 1:
                group = np.uint64(mask) & F[e, i]
                same = U0
                for j in range(32):
                    if (group >> np.uint64(j)) & U1 and F[a, j] & keep == F[a, i] & keep:
                        same |= U1 << np.uint64(j)
                if x == 1:
                    if same == group:
                        results[i] = group
                        truth |= 1 << i
                else:
                    results[i] = same
        for i in range(32):
            if (mask >> i) & 1 and d >= 0:
                F[d, i] = results[i]
        if p >= 0:
            write_mask(F, p, truth, mask)
    elif op == REDUX or op == REDUX_F:
        results = np.empty(32, np.uint64)
        for i in range(32):
            if (mask >> i) & 1:
                if op == REDUX:
                    results[i] = reduce_lanes(F, a, e, x, y, mask, i)
                else:
                    results[i] = reduce_floats(F, a, e, x, y, mask, i)
        for i in range(32):
            if (mask >> i) & 1:
                F[d, i] = results[i]
    elif op == ACTIVEMASK:
        for i in range(32):
            if (mask >> i) & 1:
                F[d, i] = np.uint64(mask)
    elif op == ELECT:
        # The lowest lane of each group; PTX leaves the choice open but asks for the same one every time.
        elected = 0
        for i in range(32):
            if (mask >> i) & 1:
                group = np.uint64(mask) & F[e, i]
                leader = 0
                while (group >> np.uint64(leader)) & U1 == U0:
                    leader += 1
                elected |= 1 << leader
                if d >= 0:
                    F[d, i] = np.uint64(leader)
        if p >= 0:
            write_mask(F, p, elected, mask)
    elif op == CLOCK:
        # x: 0 low 32 bits, 1 all 64 bits, 2 high 32 bits. One executed warp instruction is one tick.
        value = np.uint64(clock)
        if x == 0:
            value &= M32
        elif x == 2:
            value >>= np.uint64(32)
        for i in range(32):
            if (mask >> i) & 1:
                F[d, i] = value
    return 0
