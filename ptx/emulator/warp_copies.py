"""cp.async without leaving the compiled loop: issue, groups, waits, and the two stages of every copy.

The copies of one warp instruction are one agent with a clock slot of its own. It reads its source and writes
its destination at times the schedule draws; until then the destination holds poison and is claimed. Groups
belong to threads: every lane counts its commits, and an operation remembers the count at its issue.
"""

from __future__ import annotations

import numpy as np

from .bitcast import load8, load64, store8, store64
from .jit import inlined, unit
from .lane_races import check_lane, record_lane
from .lanes_memory import find_allocation, set_initialised
from .layout import (
    A_BEGIN, A_END, A_HOST, A_WRITE, C_ALIVE, C_BARRIERS, C_INIT, C_RANK, C_SHARED, C_SHARED_END, F_ALIGN,
    F_BOUNDS, F_CLUSTER_EXIT, F_OPERAND, F_OVERLAP, F_SPACE, FR_KEY, FR_PC, FR_STATE, FRAG_COPY, FRAG_READY,
    FRAGMENTS, G_CHECK_SHARED_RACES, G_CLOCK, G_COPIES, G_COPY_BYTES, G_COPY_SLOT, G_EVENTS, G_LANES,
    G_SCHEDULE, G_SERIAL, G_TRACE, NONE, OFFSET_MASK, OUT_AGENT, OUT_SIZE, P_A, P_B, P_C, P_W, P_X, P_Y, P_Z,
    RANK_SHIFT, SCHEDULE_EAGER, SHARED_RESERVED, SPACE_GLOBAL, SPACE_SHARED_CTA, W_CTA, W_STATUS, WARP_READY,
)
from .opcodes import CP_ASYNC, CP_COMMIT
from .shadow import fault, touch_global, touch_shared

#: Clock slots of copies in flight, in a program that has any.
COPY_AGENTS = 24
#: Copies of one warp that ended and were not waited for yet; beyond that the oldest count as waited for.
FINISHED = 512

# ---- copies in flight: Q[agent, column]; from Q_GROUP on one value a lane, from Q_DATA on two words a lane
(Q_STATE, Q_WARP, Q_PC, Q_MASK, Q_SIZE, Q_CTA, Q_START, Q_SERIAL, Q_CLOCK, Q_GROUP) = range(10)
Q_TO, Q_FROM, Q_COUNT, Q_DATA = (Q_GROUP + 32 * k for k in (1, 2, 3, 4))
Q_COLUMNS = Q_DATA + 64
FREE, ISSUED, READ = range(3)

# ---- groups: GC[warp slot, lane] commits so far; column 32: how many rows of DN the warp has
GC_FINISHED = 32
GC_COLUMNS = 33

# ---- copies that ended: DN[warp slot, n] = (clock slot, clock, lanes, group)
DN_SLOT, DN_CLOCK, DN_MASK, DN_GROUP = range(4)

#: What `copy_unit` is asked for beside the instructions: one stage of a random copy, all of one copy.
STEP, FINISH = -1, -2
#: Slot numbers of events that are no slices: waits and copies (see timeline).
EVENT_WAIT, EVENT_COPY = 1 << 20, 2 << 20


@inlined
def event(G, EV, start, kind, slot, pc, cta):
    if G[G_TRACE] and G[G_EVENTS] < EV.shape[0]:
        at = G[G_EVENTS]
        EV[at, 0] = start
        EV[at, 1] = G[G_CLOCK] - start
        EV[at, 2] = kind + slot
        EV[at, 3] = pc
        EV[at, 4] = pc
        EV[at, 5] = cta
        G[G_EVENTS] = at + 1


@inlined
def agent_fault(OUT, code, q):
    """A fault that a copy in flight runs into, not the instruction that executes."""
    OUT[OUT_AGENT] = q + 1
    return code


@inlined
def read_source(A, G, VC, K, Q, OUT, q):
    """First stage: the bytes from global memory."""
    slot, pc = G[G_COPY_SLOT] + q, Q[q, Q_PC]
    allocation = -1
    for i in range(32):
        if (Q[q, Q_MASK] >> i) & 1 == 0:
            continue
        count = Q[q, Q_COUNT + i]
        Q[q, Q_DATA + 2 * i] = 0
        Q[q, Q_DATA + 2 * i + 1] = 0
        if count == 0:
            continue
        address = np.uint64(Q[q, Q_FROM + i])
        end = address + np.uint64(count)
        if allocation < 0 or address < np.uint64(A[allocation, A_BEGIN]) or end > np.uint64(
                A[allocation, A_END]):
            allocation = find_allocation(A, address)
            if allocation < 0 or end > np.uint64(A[allocation, A_END]):
                OUT[OUT_SIZE] = count
                return agent_fault(OUT, fault(OUT, F_BOUNDS, i, address, SPACE_GLOBAL, allocation), q)
        at = np.int64(address) - A[allocation, A_BEGIN]
        if A[allocation, A_WRITE] != 0:
            code = touch_global(A, VC, K, OUT, allocation, at, count, slot, pc, True, False, False, i)
            if code:
                return agent_fault(OUT, code, q)
        host = np.uint64(A[allocation, A_HOST] + at)
        if count == 16:
            Q[q, Q_DATA + 2 * i] = np.int64(load64(host))
            Q[q, Q_DATA + 2 * i + 1] = np.int64(load64(host + np.uint64(8)))
        else:
            for k in range(count):
                word = Q_DATA + 2 * i + (k >> 3)
                Q[q, word] |= np.int64(load8(host + np.uint64(k)) << np.uint64(8 * (k & 7)))
    Q[q, Q_STATE] = READ
    return 0


@inlined
def touch_destination(C, G, VC, K, Q, OUT, q, slot):
    """Record the write of every lane's piece, neighbouring pieces together."""
    if G[G_CHECK_SHARED_RACES] == 0:
        return 0
    size, cta = Q[q, Q_SIZE], Q[q, Q_CTA]
    i = 0
    while i < 32:
        if (Q[q, Q_MASK] >> i) & 1 == 0:
            i += 1
            continue
        first = i
        low = high = Q[q, Q_TO + i]
        while i < 32 and (Q[q, Q_MASK] >> i) & 1 and Q[q, Q_TO + i] == high:
            high += size
            i += 1
        code = touch_shared(C, VC, K, OUT, cta, low, high - low, slot, Q[q, Q_PC], False, True, False, first)
        if code:
            return agent_fault(OUT, code, q)
    return 0


@inlined
def write_destination(C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q):
    """Second stage: the bytes into shared memory; whoever waits for the copy may go on."""
    cta, size, slot = Q[q, Q_CTA], Q[q, Q_SIZE], G[G_COPY_SLOT] + q
    if C[cta, C_ALIVE] == 0:
        place = (C[cta, C_RANK] << RANK_SHIFT) + Q[q, Q_TO]
        return agent_fault(OUT, fault(OUT, F_CLUSTER_EXIT, 0, place, SPACE_SHARED_CTA, C[cta, C_RANK]), q)
    code = touch_destination(C, G, VC, K, Q, OUT, q, slot)
    if code:
        return code
    for i in range(32):
        if (Q[q, Q_MASK] >> i) & 1:
            at = Q[q, Q_TO + i]
            host = np.uint64(C[cta, C_SHARED] + at)
            low, high = np.uint64(Q[q, Q_DATA + 2 * i]), np.uint64(Q[q, Q_DATA + 2 * i + 1])
            if size == 16:
                store64(host, low)
                store64(host + np.uint64(8), high)
            else:
                for k in range(size):
                    store8(host + np.uint64(k), low >> np.uint64(8 * k))
            set_initialised(np.uint64(C[cta, C_INIT] + at), size)
            if G[G_LANES]:
                # As if the lane had stored it now; the others need more than its wait_group.
                record_lane(C, G, cta, Q[q, Q_WARP], Q[q, Q_PC], i, at, size, True)
    end_copy(W, FR, G, VC, Q, GC, DN, EV, q, slot)
    return 0


@inlined
def end_copy(W, FR, G, VC, Q, GC, DN, EV, q, slot):
    warp = Q[q, Q_WARP]
    left = Q[q, Q_MASK]
    while left:
        # Lanes that committed alike share an entry.
        first = 0
        while (left >> first) & 1 == 0:
            first += 1
        group, lanes = Q[q, Q_GROUP + first], 0
        for i in range(first, 32):
            if (left >> i) & 1 and Q[q, Q_GROUP + i] == group:
                lanes |= 1 << i
        left &= ~lanes
        if GC[warp, GC_FINISHED] == DN.shape[1]:
            drop_finished(VC, GC, DN, warp, 0)
        at = GC[warp, GC_FINISHED]
        DN[warp, at, DN_SLOT], DN[warp, at, DN_CLOCK] = slot, Q[q, Q_CLOCK]
        DN[warp, at, DN_MASK], DN[warp, at, DN_GROUP] = lanes, group
        GC[warp, GC_FINISHED] = at + 1
    Q[q, Q_STATE] = FREE
    G[G_COPIES] -= 1
    event(G, EV, Q[q, Q_START], EVENT_COPY, warp, Q[q, Q_PC], Q[q, Q_CTA])
    for f in range(FRAGMENTS):
        if FR[warp, f, FR_STATE] == FRAG_COPY:
            FR[warp, f, FR_STATE] = FRAG_READY
            W[warp, W_STATUS] = WARP_READY
            event(G, EV, FR[warp, f, FR_KEY], EVENT_WAIT, warp, FR[warp, f, FR_PC], W[warp, W_CTA])


@inlined
def drop_finished(VC, GC, DN, warp, at):
    """The warp learns of a finished copy and forgets it."""
    other = DN[warp, at, DN_SLOT]
    if DN[warp, at, DN_CLOCK] > VC[warp, other]:
        VC[warp, other] = DN[warp, at, DN_CLOCK]
    last = GC[warp, GC_FINISHED] - 1
    for n in range(at, last):
        for column in range(4):
            DN[warp, n, column] = DN[warp, n + 1, column]
    GC[warp, GC_FINISHED] = last


@inlined
def advance(A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q, everything):
    """One stage of copy q, or all that is left."""
    if Q[q, Q_STATE] == ISSUED:
        code = read_source(A, G, VC, K, Q, OUT, q)
        if code or not everything:
            return code
    return write_destination(C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q)


@inlined
def resolve_destination(C, OUT, cta, i, address, size):
    """Check one lane's destination. Returns a fault code or 0."""
    address &= np.uint64(0xFFFFFFFF)
    rank, at = np.int64(address >> np.uint64(RANK_SHIFT)), np.int64(address & np.uint64(OFFSET_MASK))
    OUT[OUT_SIZE] = size
    if rank != C[cta, C_RANK]:
        return fault(OUT, F_SPACE, i, address, SPACE_SHARED_CTA, rank)
    if at % size:
        return fault(OUT, F_ALIGN, i, address, SPACE_SHARED_CTA, 0)
    if at < SHARED_RESERVED or at + size > C[cta, C_SHARED_END]:
        return fault(OUT, F_BOUNDS, i, address, SPACE_SHARED_CTA, rank)
    for k in range(at >> 3, ((at + size - 1) >> 3) + 1):
        if load8(np.uint64(C[cta, C_BARRIERS] + k)):
            return fault(OUT, F_OVERLAP, i, address, size, (rank << RANK_SHIFT) + 8 * k)
    return 0


@inlined
def free_agent(Q):
    """A free row of Q, used longest ago; -1 when there is none."""
    found = -1
    for q in range(Q.shape[0]):
        if Q[q, Q_STATE] == FREE and (found < 0 or Q[q, Q_SERIAL] < Q[found, Q_SERIAL]):
            found = q
    return found


@inlined
def oldest_agent(Q):
    found = 0
    for q in range(Q.shape[0]):
        if Q[q, Q_SERIAL] < Q[found, Q_SERIAL]:
            found = q
    return found


@inlined
def issue(F, P, A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, slot, pc, base, mask):
    size, flags, cta = P[pc, P_X], P[pc, P_Y], W[slot, W_CTA]
    if (size != 4 and size != 8 and size != 16) or (flags & 1 and size != 16):
        return fault(OUT, F_OPERAND, 0, 0, size, 0)
    q = free_agent(Q)
    if q < 0:
        # More copies in flight than slots: the oldest completes now, as it may.
        q = oldest_agent(Q)
        code = advance(A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q, True)
        if code:
            return code
    a, b, c = P[pc, P_A], P[pc, P_B], P[pc, P_C]
    a = a + base if a >= 0 else ~a
    b = b + base if b >= 0 else ~b
    if c != NONE:
        c = c + base if c >= 0 else ~c
    for i in range(32):
        if (mask >> i) & 1 == 0:
            continue
        count = size
        if c != NONE:
            if flags & 2:
                ignored = np.int64((F[c, 0] >> np.uint64(i)) & np.uint64(1)) ^ (flags >> 2)
                count = 0 if ignored else size
            else:
                count = np.int64(F[c, i] & np.uint64(0xFFFFFFFF))
        if count > size:
            return fault(OUT, F_OPERAND, i, count, size, 1)
        to, source = F[a, i] + np.uint64(P[pc, P_Z]), F[b, i] + np.uint64(P[pc, P_W])
        code = resolve_destination(C, OUT, cta, i, to, size)
        if code == 0 and G[G_LANES]:
            code = check_lane(C, G, OUT, cta, slot, i, np.int64(to & np.uint64(OFFSET_MASK)), size, True)
        if code:
            return code
        if count and np.int64(source & np.uint64(size - 1)):
            return fault(OUT, F_ALIGN, i, source, SPACE_GLOBAL, 0)
        Q[q, Q_TO + i] = np.int64(to & np.uint64(OFFSET_MASK))
        Q[q, Q_FROM + i], Q[q, Q_COUNT + i], Q[q, Q_GROUP + i] = np.int64(source), count, GC[slot, i]
        G[G_COPY_BYTES] += count
    agent = G[G_COPY_SLOT] + q
    G[G_SERIAL] += 1
    Q[q, Q_WARP], Q[q, Q_PC], Q[q, Q_MASK], Q[q, Q_SIZE], Q[q, Q_CTA] = slot, pc, mask, size, cta
    Q[q, Q_START], Q[q, Q_SERIAL] = G[G_CLOCK], G[G_SERIAL]
    # The agent begins with what the warp knows.
    clock = VC[agent, agent] + 1
    for k in range(VC.shape[1]):
        VC[agent, k] = VC[slot, k]
    VC[agent, agent] = Q[q, Q_CLOCK] = clock
    VC[slot, slot] += 1
    Q[q, Q_STATE] = ISSUED
    G[G_COPIES] += 1
    code = touch_destination(C, G, VC, K, Q, OUT, q, agent)
    if code:
        return code
    for i in range(32):
        if (mask >> i) & 1:
            host = np.uint64(C[cta, C_SHARED] + Q[q, Q_TO + i])
            for k in range(size):
                store8(host + np.uint64(k), np.uint64(0xFF))
    if G[G_SCHEDULE] == SCHEDULE_EAGER:
        return advance(A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q, True)
    return 0


@inlined
def wait(P, VC, FR, Q, GC, DN, G, slot, f, pc, mask):
    """wait_group: all but the newest groups (P_X; -1: also what was not committed). -1 while a copy is in
    flight, and the fragment sleeps."""
    keep = P[pc, P_X]
    for q in range(Q.shape[0]):
        if Q[q, Q_STATE] != FREE and Q[q, Q_WARP] == slot:
            for i in range(32):
                if ((mask & Q[q, Q_MASK]) >> i) & 1 and Q[q, Q_GROUP + i] < GC[slot, i] - keep:
                    FR[slot, f, FR_STATE] = FRAG_COPY
                    FR[slot, f, FR_PC] = pc
                    FR[slot, f, FR_KEY] = G[G_CLOCK]
                    return -1
    at = 0
    while at < GC[slot, GC_FINISHED]:
        lanes = mask & DN[slot, at, DN_MASK]
        first = 0
        while lanes and (lanes >> first) & 1 == 0:
            first += 1
        if lanes and DN[slot, at, DN_GROUP] < GC[slot, first] - keep:
            drop_finished(VC, GC, DN, slot, at)
        else:
            at += 1
    return 0


@unit("i", "U2 I2 I2 I2 I2 I3 I1 I2 I2 I2 I2 I3 I2 I1 i i i i i i")
def copy_unit(F, P, A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, what, slot, f, pc, base, mask):
    """CP_ASYNC, CP_COMMIT and CP_WAIT by a warp; STEP: one stage of copy number `slot` of those in flight;
    FINISH: all of the copy of agent `slot`. Returns a fault code, 0, or -1 when the fragment has to wait."""
    if what == STEP or what == FINISH:
        q = slot
        if what == STEP:
            left = slot
            for q in range(Q.shape[0]):
                if Q[q, Q_STATE] != FREE:
                    if left == 0:
                        break
                    left -= 1
        return advance(A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, q, what == FINISH)
    if what == CP_ASYNC:
        return issue(F, P, A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, slot, pc, base, mask)
    if what == CP_COMMIT:
        for i in range(32):
            if (mask >> i) & 1:
                GC[slot, i] += 1
        return 0
    return wait(P, VC, FR, Q, GC, DN, G, slot, f, pc, mask)
