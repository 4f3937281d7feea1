"""Divergence inside a warp: fragments (lanes that share a program counter) and where they meet again.

A divergent branch opens a record for the immediate post-dominator; each side runs as a fragment, and the
first to get there waits for the others. Waiting there is only opportunistic, as on Volta and later: when
nothing else in the warp can run, or the others run very long (they may spin on what the waiting lanes do
next), a waiting fragment goes on alone. `.sync` instructions with a member mask meet through `join_members`.
"""

from __future__ import annotations

import numpy as np

from .bitcast import popcount as count_lanes
from .jit import compiled, inlined
from .layout import (
    B_ARRIVED, B_LANES, B_WARPS, C_ALIVE, FR_BASE, FR_MASK, FR_PC, FR_RECORD, FR_STATE, FRAG_FREE,
    FRAG_MEMBERS, FRAG_READY, FRAG_RECONVERGE, FRAGMENTS, RC_BASE, RC_MASK, RC_PARENT, RC_PC, RC_USED,
    RC_WAITING, RECORDS, W_ALIVE, W_CTA, W_CURRENT, W_FRAGMENTS, W_INDEX, W_STATUS, WARP_BLOCKED, WARP_DONE,
    WARP_READY,
)


@inlined
def new_fragment(W, FR, slot, like, pc, mask):
    """A further fragment of the warp, otherwise equal to fragment `like`."""
    for f in range(FRAGMENTS):
        if FR[slot, f, FR_STATE] == FRAG_FREE:
            for column in range(FR.shape[2]):
                FR[slot, f, column] = FR[slot, like, column]
            FR[slot, f, FR_STATE] = FRAG_READY
            FR[slot, f, FR_PC] = pc
            FR[slot, f, FR_MASK] = mask
            W[slot, W_FRAGMENTS] += 1
            return f
    return -1


@inlined
def new_record(RC, slot, pc, mask, parent, base):
    """A meeting point: row `pc` in the frame that begins at `base` (recursion passes the same row in other
    frames)."""
    for r in range(RECORDS):
        if RC[slot, r, RC_USED] == 0:
            RC[slot, r, RC_USED] = 1
            RC[slot, r, RC_PC] = pc
            RC[slot, r, RC_MASK] = mask
            RC[slot, r, RC_PARENT] = parent
            RC[slot, r, RC_WAITING] = -1
            RC[slot, r, RC_BASE] = base
            return r
    return -1


@inlined
def settle_record(W, FR, RC, slot, r):
    """Let the waiting fragment of record r go on if every live lane of the record has come."""
    while r >= 0 and RC[slot, r, RC_USED]:
        expected = RC[slot, r, RC_MASK] & W[slot, W_ALIVE]
        parent = RC[slot, r, RC_PARENT]
        waiting = RC[slot, r, RC_WAITING]
        if expected == 0:
            RC[slot, r, RC_USED] = 0
        elif waiting >= 0 and FR[slot, waiting, FR_MASK] == expected:
            RC[slot, r, RC_USED] = 0
            FR[slot, waiting, FR_RECORD] = parent
            FR[slot, waiting, FR_STATE] = FRAG_READY
            return
        else:
            return
        r = parent


@inlined
def reach_record(W, FR, RC, slot, f):
    """Fragment f stands at the meeting point of its record. Returns True when it may go on as it is."""
    r = FR[slot, f, FR_RECORD]
    waiting = RC[slot, r, RC_WAITING]
    if waiting < 0:
        RC[slot, r, RC_WAITING] = f
        waiting = f
        FR[slot, f, FR_STATE] = FRAG_RECONVERGE
    else:
        FR[slot, waiting, FR_MASK] |= FR[slot, f, FR_MASK]
        FR[slot, f, FR_STATE] = FRAG_FREE
        W[slot, W_FRAGMENTS] -= 1
    if FR[slot, waiting, FR_MASK] == RC[slot, r, RC_MASK] & W[slot, W_ALIVE]:
        RC[slot, r, RC_USED] = 0
        FR[slot, waiting, FR_RECORD] = RC[slot, r, RC_PARENT]
        FR[slot, waiting, FR_STATE] = FRAG_READY
        W[slot, W_CURRENT] = waiting
        return True
    return False


@inlined
def leave_records(FR, RC, W, slot, mask, r, stop):
    """Lanes of `mask` no longer come to record r and its parents below `stop`."""
    while r >= 0 and r != stop:
        parent = RC[slot, r, RC_PARENT]
        RC[slot, r, RC_MASK] &= ~mask
        settle_record(W, FR, RC, slot, r)
        r = parent


@compiled
def release_waiting(W, FR, RC, slot, mask):
    """Let fragments that wait at a meeting point and hold a lane of `mask` go on alone. Returns how many."""
    freed = 0
    for f in range(FRAGMENTS):
        if FR[slot, f, FR_STATE] == FRAG_RECONVERGE and FR[slot, f, FR_MASK] & mask:
            r = FR[slot, f, FR_RECORD]
            parent = RC[slot, r, RC_PARENT]
            RC[slot, r, RC_WAITING] = -1
            FR[slot, f, FR_STATE] = FRAG_READY
            FR[slot, f, FR_RECORD] = parent
            RC[slot, r, RC_MASK] &= ~FR[slot, f, FR_MASK]
            if RC[slot, r, RC_MASK] & W[slot, W_ALIVE] == 0:
                RC[slot, r, RC_USED] = 0
            freed += 1
    if freed:
        W[slot, W_STATUS] = WARP_READY
    return freed


@inlined
def is_ancestor(RC, slot, r, above):
    """True when record `above` is r or encloses it; -1 encloses everything."""
    if above < 0:
        return True
    while r >= 0:
        if r == above:
            return True
        r = RC[slot, r, RC_PARENT]
    return False


@inlined
def join_members(W, FR, RC, slot, f, needed):
    """Fragment f stands at a `.sync` instruction that `needed` lanes execute together.

    Fragments already waiting at the same instruction are merged into f. Returns True when all needed lanes
    are here.
    """
    pc = FR[slot, f, FR_PC]
    for g in range(FRAGMENTS):
        if g != f and FR[slot, g, FR_STATE] == FRAG_MEMBERS and FR[slot, g, FR_PC] == pc and (
                FR[slot, g, FR_BASE] == FR[slot, f, FR_BASE]) and FR[slot, g, FR_MASK] & needed:
            mine, theirs = FR[slot, f, FR_RECORD], FR[slot, g, FR_RECORD]
            if is_ancestor(RC, slot, mine, theirs):
                common = theirs
            elif is_ancestor(RC, slot, theirs, mine):
                common = mine
            else:
                common = -1
            leave_records(FR, RC, W, slot, FR[slot, f, FR_MASK], mine, common)
            leave_records(FR, RC, W, slot, FR[slot, g, FR_MASK], theirs, common)
            FR[slot, f, FR_MASK] |= FR[slot, g, FR_MASK]
            FR[slot, f, FR_RECORD] = common
            FR[slot, g, FR_STATE] = FRAG_FREE
            W[slot, W_FRAGMENTS] -= 1
    if FR[slot, f, FR_MASK] & needed == needed:
        return True
    FR[slot, f, FR_STATE] = FRAG_MEMBERS
    release_waiting(W, FR, RC, slot, needed & ~FR[slot, f, FR_MASK])
    return False


@inlined
def wake_members(FR, slot):
    """After lanes exited: waiting `.sync` fragments look again at who is still expected."""
    for f in range(FRAGMENTS):
        if FR[slot, f, FR_STATE] == FRAG_MEMBERS:
            FR[slot, f, FR_STATE] = FRAG_READY


@inlined
def exit_lanes(W, FR, RC, C, B, slot, f, mask):
    """Lanes of fragment f end. Returns True when the whole warp is done."""
    W[slot, W_ALIVE] &= ~mask
    cta = W[slot, W_CTA]
    warp_bit = np.int64(1) << W[slot, W_INDEX]
    for k in range(16):
        # Lanes that ended without arriving count as arrived at a barrier where their warp waits.
        if B[cta * 16 + k, B_WARPS] & warp_bit:
            lanes = B_LANES + W[slot, W_INDEX]
            B[cta * 16 + k, B_ARRIVED] += count_lanes(mask & ~B[cta * 16 + k, lanes])
            B[cta * 16 + k, lanes] |= mask
    record = FR[slot, f, FR_RECORD]
    if mask == FR[slot, f, FR_MASK]:
        FR[slot, f, FR_STATE] = FRAG_FREE
        W[slot, W_FRAGMENTS] -= 1
    else:
        FR[slot, f, FR_MASK] &= ~mask
    while record >= 0:
        parent = RC[slot, record, RC_PARENT]
        settle_record(W, FR, RC, slot, record)
        record = parent
    wake_members(FR, slot)
    if W[slot, W_ALIVE] == 0:
        W[slot, W_STATUS] = WARP_DONE
        C[cta, C_ALIVE] -= 1
        return True
    return False


@inlined
def choose_fragment(W, FR, slot, start):
    """A ready fragment of the warp, searched from `start`; the warp blocks when there is none."""
    for k in range(FRAGMENTS):
        f = (start + k) % FRAGMENTS
        if FR[slot, f, FR_STATE] == FRAG_READY:
            W[slot, W_CURRENT] = f
            return f
    W[slot, W_STATUS] = WARP_BLOCKED
    return -1
