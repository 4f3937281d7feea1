"""Named barriers: bar.sync, bar.arrive, bar.red and their barrier{.cta} spellings."""

from __future__ import annotations

import numpy as np

from .clocks import acquire_into, clear_row, join_rows
from .fragments import count_lanes
from .jit import inlined, unit
from .layout import (
    B_ARRIVED, B_EXPECTED, B_GENERATION, B_LANES, B_REDUCE, B_REDUCE_KIND, B_WARPS, C_ALIVE, C_FIRST_SLOT,
    C_WARPS, F_BARRIER_COUNT, FR_BASE, FR_KEY, FR_MASK, FR_PC, FR_STATE, FRAG_BARRIER, FRAG_READY, FRAGMENTS,
    P_D, P_X, W_ALIVE, W_CTA, W_INDEX, W_STATUS, WARP_READY,
)

#: P_X of a barrier operation
SYNC, ARRIVE, RED_POPC, RED_AND, RED_OR = range(5)


@inlined
def barrier_complete(F, P, W, FR, C, B, VC, K, BV, cta, number):
    """Release every fragment that waits at this barrier."""
    row = cta * 16 + number
    kind = B[row, B_REDUCE_KIND]
    total = B[row, B_REDUCE]
    first = C[cta, C_FIRST_SLOT]
    for slot in range(first, first + C[cta, C_WARPS]):
        touched = False
        for f in range(FRAGMENTS):
            if FR[slot, f, FR_STATE] == FRAG_BARRIER and FR[slot, f, FR_KEY] == number:
                pc = FR[slot, f, FR_PC]
                mask = FR[slot, f, FR_MASK]
                if kind == RED_POPC:
                    d = P[pc, P_D]
                    if d >= 0:
                        for i in range(32):
                            if (mask >> i) & 1:
                                F[d + FR[slot, f, FR_BASE], i] = np.uint64(total)
                elif kind == RED_AND or kind == RED_OR:
                    d = P[pc, P_D]
                    if d >= 0:
                        d += FR[slot, f, FR_BASE]
                        old = F[d, 0] & ~np.uint64(mask)
                        F[d, 0] = old | np.uint64(mask) if total else old
                FR[slot, f, FR_STATE] = FRAG_READY
                FR[slot, f, FR_PC] = pc + 1
                W[slot, W_STATUS] = WARP_READY
                touched = True
        if touched:
            acquire_into(VC, K, slot, BV[row])
    B[row, B_ARRIVED] = 0
    B[row, B_WARPS] = 0
    B[row, B_EXPECTED] = 0
    B[row, B_GENERATION] += 1
    clear_row(BV, row)


@inlined
def barrier_check(F, P, W, FR, C, B, VC, K, BV, cta, number):
    """Complete the barrier if everybody expected has come (also asked when a warp ends)."""
    row = cta * 16 + number
    if B[row, B_WARPS] == 0:
        return
    expected = B[row, B_EXPECTED]
    if expected < 0:
        expected = 32 * C[cta, C_ALIVE]
    if B[row, B_ARRIVED] >= expected:
        barrier_complete(F, P, W, FR, C, B, VC, K, BV, cta, number)


@unit("i", "U2 I2 I2 I3 I2 I2 I2 I2 I2 i i i i i i i")
def barrier_arrive(F, P, W, FR, C, B, VC, K, BV, slot, f, pc, number, expected, mask, votes):
    """Lanes `mask` of fragment f arrive. expected < 0 means all warps of the CTA. Returns a fault code or 0.

    The fragment waits (FRAG_BARRIER, at pc) unless the operation is an arrive; completion moves it past pc.
    """
    cta = W[slot, W_CTA]
    row = cta * 16 + number
    kind = P[pc, P_X]
    bit = np.int64(1) << W[slot, W_INDEX]
    if B[row, B_WARPS] == 0:
        B[row, B_EXPECTED] = expected
        B[row, B_REDUCE] = 1 if kind == RED_AND else 0
        B[row, B_REDUCE_KIND] = kind
        B[row, B_ARRIVED] = 0
    elif B[row, B_EXPECTED] != expected:
        return F_BARRIER_COUNT
    if kind != ARRIVE and kind != SYNC:
        B[row, B_REDUCE_KIND] = kind
    if B[row, B_WARPS] & bit == 0:
        B[row, B_WARPS] |= bit
        B[row, B_ARRIVED] += 32 - count_lanes(W[slot, W_ALIVE])
        B[row, B_LANES + W[slot, W_INDEX]] = np.int64(0xFFFFFFFF) & ~W[slot, W_ALIVE]
    B[row, B_ARRIVED] += count_lanes(mask)
    B[row, B_LANES + W[slot, W_INDEX]] |= mask
    if kind == RED_POPC:
        B[row, B_REDUCE] += count_lanes(votes & mask)
    elif kind == RED_AND:
        if votes & mask != mask:
            B[row, B_REDUCE] = 0
    elif kind == RED_OR:
        if votes & mask != 0:
            B[row, B_REDUCE] = 1
    join_rows(BV[row], VC[slot])
    VC[slot, slot] += 1
    if kind == ARRIVE:
        FR[slot, f, FR_PC] = pc + 1
    else:
        FR[slot, f, FR_STATE] = FRAG_BARRIER
        FR[slot, f, FR_KEY] = number
        FR[slot, f, FR_PC] = pc
    barrier_check(F, P, W, FR, C, B, VC, K, BV, cta, number)
    return 0


@unit("void", "U2 I2 I2 I3 I2 I2 I2 I2 I2 i")
def barrier_exit(F, P, W, FR, C, B, VC, K, BV, cta):
    """After lanes of a CTA ended: barriers that waited for them may be complete."""
    for number in range(16):
        barrier_check(F, P, W, FR, C, B, VC, K, BV, cta, number)
