"""The compiled interpreter loop: picks a warp, runs it for a slice, leaves for Python only when it must.

The dispatch below is long because control flow, the memory pipeline and the choice of the family function all
need the loop's local state (program counter, mask, frame); the families themselves live in the lanes_*.py
files.
"""

from __future__ import annotations

import numpy as np

from .barriers import barrier_arrive, barrier_exit
from .bitcast import M32, U0, load8, store8
from .clocks import fence, proxy_fence
from .fragments import (
    choose_fragment, count_lanes, exit_lanes, join_members, new_fragment, new_record, reach_record,
    release_waiting,
)
from .jit import inlined, unit
from .lane_races import lane_event
from .lanes_convert import convert_lanes
from .lanes_float import float_lanes
from .lanes_half import half_lanes
from .lanes_integer import integer_fast, integer_lane, lop3
from .lanes_memory import first_lane, memory_instruction
from .lanes_predicate import predicate_lanes
from .lanes_warp import warp_lanes
from .layout import (
    C_ALIVE, F_ABSENT, F_BARRIER_NUMBER, F_BREAK, F_BRX, F_DIVERGED, F_GUARD_DIVERGED, F_MEMBER, F_STACK,
    F_TRAP, FR_BASE, FR_DEPTH, FR_LOCAL, FR_MASK, FR_PC, FR_RECORD, FR_STATE, FRAG_READY, FRAGMENTS, G_BUDGET,
    G_CHECK_CONVERGENCE, G_CLOCK, G_COPIES, G_COPY_BUDGET, G_EVENTS, G_LANES, G_LIMIT, G_LOCAL_HOST,
    G_LOCAL_INIT, G_LOCAL_SIZE, G_MAX_DEPTH, G_QUANTUM, G_RANDOM, G_SCHEDULE, G_SLOTS, G_STEPS, G_SYNC_USED,
    G_TASKS, G_TRACE, LEAVE_CTA, LEAVE_EVENTS, LEAVE_FAULT, LEAVE_IDLE, LEAVE_LIMIT, LEAVE_PYTHON,
    LEAVE_SYNC_TABLE, LEAVE_TICK, NONE, OUT_CODE, OUT_MASK, OUT_PC, OUT_SLOT, P_A, P_B, P_C, P_D, P_E,
    P_GUARD, P_GUARD_NOT, P_OP, P_RECONVERGE, P_S, P_SYNC, P_TARGET, P_W, P_X, P_Y, P_Z, RC_BASE, RC_PC,
    SCHEDULE_LATE, SYNC_MASK, SYNC_NONE, SYNC_WARP, W_ALIVE, W_COUNT, W_CTA, W_CURRENT, W_DIVERGED,
    W_FRAGMENTS, W_INDEX, W_SPECIAL, W_STATUS, WARP_READY,
)
from .matrix_unit import matrix_lanes
from .shadow import fault
from .warp_copies import STEP, copy_unit
from .opcodes import (
    BARRIER, BITS, BRA, BRX, CALL, CALL_INDIRECT, CONVERT, COPY, EXIT, FENCE, FENCE_PROXY, FLOAT, HALF,
    INTEGER, LOP3, MATRIX, MEMORY, MOV_LOCAL, MOV_SPECIAL, NOP, PREDICATE, PYTHON, RET, TRAP, WARP,
)

#: The separately compiled functions, in the order of their addresses, and the families that need each.
UNITS = (integer_fast, integer_lane, lop3, float_lanes, half_lanes, convert_lanes, predicate_lanes,
         warp_lanes, memory_instruction, matrix_lanes, barrier_arrive, barrier_exit, copy_unit, lane_event)
(U_INTEGER_FAST, U_INTEGER_LANE, U_LOP3, U_FLOAT, U_HALF, U_CONVERT, U_PREDICATE, U_WARP, U_MEMORY,
 U_MATRIX, U_BARRIER, U_BARRIER_EXIT, U_COPY, U_LANES) = range(14)
_NEEDED = {INTEGER: (U_INTEGER_FAST,), BITS: (U_INTEGER_LANE,), PREDICATE: (U_PREDICATE,), FLOAT: (U_FLOAT,),
           HALF: (U_HALF,), CONVERT: (U_CONVERT,), MEMORY: (U_MEMORY,), WARP: (U_WARP,), MATRIX: (U_MATRIX,),
           COPY: (U_COPY,)}
_integer_fast, _integer_lane, _lop3 = integer_fast.call, integer_lane.call, lop3.call
_float_lanes = float_lanes.call
_half_lanes, _convert_lanes, _predicate_lanes = half_lanes.call, convert_lanes.call, predicate_lanes.call
_warp_lanes, _memory_instruction, _matrix_lanes = warp_lanes.call, memory_instruction.call, matrix_lanes.call
_barrier_arrive, _barrier_exit, _copy = barrier_arrive.call, barrier_exit.call, copy_unit.call
_lane_event = lane_event.call


def addresses_for(program, warp_races: bool) -> np.ndarray:
    """Entry points of the units that a program needs (others 0): they are compiled or loaded now."""
    needed = {U_BARRIER_EXIT, U_LANES} if warp_races else {U_BARRIER_EXIT}
    for op in set(program[:, P_OP].tolist()):
        needed.update(_NEEDED.get(op & 0xF00, ()))
        if op == LOP3:
            needed.add(U_LOP3)
        if op == BARRIER:
            needed.add(U_BARRIER)
    return np.array([u.address() if k in needed else 0 for k, u in enumerate(UNITS)], np.int64)


#: A warp may run this many instructions while some of its lanes wait at a meeting point before they go on
#: alone.
_PATIENCE = 20_000
#: Warp instructions after which schedule "late" completes a copy although warps still run.
_LATE = 50_000
#: A slice adds fewer events than this.
_EVENTS_LEFT = 4_000


@inlined
def next_random(G):
    """xorshift64*: the schedule's only source of randomness inside the loop."""
    x = np.uint64(G[G_RANDOM])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    G[G_RANDOM] = np.int64(x)
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33))


@inlined
def member_mask(F, row, mask):
    """Union of the member masks that the lanes of `mask` name."""
    union = U0
    for i in range(32):
        if (mask >> i) & 1:
            union |= F[row, i]
    return np.int64(union & M32)


@inlined
def copy_parameters(V, G, slot, mask, start, count, source, target):
    """Move call parameters between two frames of local memory: V holds (source, target, bytes) triples."""
    for n in range(count):
        s, t, size = V[start + 3 * n] + source, V[start + 3 * n + 1] + target, V[start + 3 * n + 2]
        for i in range(32):
            if (mask >> i) & 1:
                at = (slot * 32 + i) * G[G_LOCAL_SIZE]
                copy_bytes(G[G_LOCAL_HOST] + at + s, G[G_LOCAL_HOST] + at + t, size)
                copy_bytes(G[G_LOCAL_INIT] + at + s, G[G_LOCAL_INIT] + at + t, size)


@inlined
def copy_bytes(source, target, size):
    for k in range(size):
        store8(np.uint64(target + k), load8(np.uint64(source + k)))


@inlined
def alu_instruction(F, P, addresses, base, pc, m):
    """INTEGER to CONVERT families: pure functions of registers."""
    op = P[pc, P_OP]
    family = op & 0xF00
    d, a, b, c = P[pc, P_D], P[pc, P_A], P[pc, P_B], P[pc, P_C]
    present = d >= 0
    d = d + base if present else 0
    a = a + base if a >= 0 else ~a
    b = b + base if b >= 0 else ~b
    c = c + base if c >= 0 else ~c
    x, y = P[pc, P_X], P[pc, P_Y]
    w, s = np.uint64(P[pc, P_W]), np.uint64(P[pc, P_S])
    if family == INTEGER:
        if op == LOP3:
            _lop3(addresses[U_LOP3], F, d, a, b, c, np.uint64(x), m)
        else:
            _integer_fast(addresses[U_INTEGER_FAST], F, op, d, a, b, c, w, s, m)
    elif family == FLOAT:
        _float_lanes(addresses[U_FLOAT], F, op, d, a, b, c, x, y, m)
    elif family == PREDICATE:
        e = P[pc, P_E]
        e = e + base if e >= 0 else -1
        _predicate_lanes(addresses[U_PREDICATE], F, op, d if present else -1, a, b, c, e, x, y, P[pc, P_Z],
                         w, s, m)
    elif family == HALF:
        _half_lanes(addresses[U_HALF], F, op, d, a, b, c, x, y, m)
    else:
        e = P[pc, P_E]
        e = e + base if e >= 0 else ~e
        if family == BITS:
            _integer_lane(addresses[U_INTEGER_LANE], F, op, d, a, b, c, e, w, s, np.uint64(x), np.uint64(y),
                          m)
        else:
            _convert_lanes(addresses[U_CONVERT], F, op, d, a, b, c, e, x, y, P[pc, P_Z], w, s, m)


@inlined
def branch(F, P, W, FR, RC, G, slot, f, pc, mask, taken):
    """Conditional or unconditional bra with taken lanes `taken`; updates the fragment. Returns the next
    pc."""
    target = P[pc, P_TARGET]
    if taken == mask:
        return target
    if taken == 0:
        return pc + 1
    meet = P[pc, P_RECONVERGE]
    record = FR[slot, f, FR_RECORD]
    base = FR[slot, f, FR_BASE]
    if meet >= 0 and (record < 0 or RC[slot, record, RC_PC] != meet or RC[slot, record, RC_BASE] != base):
        record = new_record(RC, slot, meet, mask, record, base)
        FR[slot, f, FR_RECORD] = record
    # Which side runs first is part of the schedule.
    if next_random(G) & 1:
        new_fragment(W, FR, slot, f, pc + 1, mask & ~taken)
        FR[slot, f, FR_MASK] = taken
        return target
    new_fragment(W, FR, slot, f, target, taken)
    FR[slot, f, FR_MASK] = mask & ~taken
    return pc + 1


@inlined
def indexed_branch(F, P, V, W, FR, RC, G, OUT, slot, f, pc, base, mask):
    """brx.idx: groups of lanes with the same target become fragments. Returns the next pc of this one, -1 on
    fault."""
    row = P[pc, P_A]
    row = row + base if row >= 0 else ~row
    start, count = P[pc, P_B], P[pc, P_C]
    for i in range(32):
        if (mask >> i) & 1 and F[row, i] >= np.uint64(count):
            fault(OUT, F_BRX, i, F[row, i], count, 0)
            return -1
    left = mask
    first = first_lane(np.uint64(mask))
    same = 0
    for i in range(32):
        if (mask >> i) & 1 and F[row, i] == F[row, first]:
            same |= 1 << i
    if same != mask:
        meet = P[pc, P_RECONVERGE]
        record = FR[slot, f, FR_RECORD]
        if meet >= 0 and (record < 0 or RC[slot, record, RC_PC] != meet or RC[slot, record, RC_BASE] != base):
            FR[slot, f, FR_RECORD] = new_record(RC, slot, meet, mask, record, base)
        left = mask & ~same
        while left:
            lead = first_lane(np.uint64(left))
            group = 0
            for i in range(32):
                if (left >> i) & 1 and F[row, i] == F[row, lead]:
                    group |= 1 << i
            new_fragment(W, FR, slot, f, V[start + np.int64(F[row, lead])], group)
            left &= ~group
        FR[slot, f, FR_MASK] = same
    return V[start + np.int64(F[row, first])]


@inlined
def run_return(P, V, W, FR, G, RS, slot, f, mask):
    """ret from a function: lanes go back to their call sites. Returns the next pc."""
    depth = FR[slot, f, FR_DEPTH] - 1
    first = first_lane(np.uint64(mask))
    call = RS[slot, depth, first]
    same = 0
    for i in range(32):
        if (mask >> i) & 1 and RS[slot, depth, i] == call:
            same |= 1 << i
    if same != mask:
        # Lanes from other call sites stay at the ret as a fragment of their own.
        new_fragment(W, FR, slot, f, FR[slot, f, FR_PC], mask & ~same)
        FR[slot, f, FR_MASK] = same
    caller_local = FR[slot, f, FR_LOCAL] - P[call, P_Y]
    copy_parameters(V, G, slot, same, P[call, P_C], P[call, P_E], FR[slot, f, FR_LOCAL], caller_local)
    FR[slot, f, FR_BASE] -= P[call, P_X]
    FR[slot, f, FR_LOCAL] = caller_local
    FR[slot, f, FR_DEPTH] = depth
    return call + 1


@unit("i", "U2 I2 I1 I2 I3 I3 I3 I2 I2 I2 I1 U2 I2 I2 I2 I2 I2 U1 I2 I2 I1 I2 I1 I2 I2 I3")
def run(F, P, V, W, FR, RC, RS, C, B, A, G, T, VC, VF, VP, K, BV, SK, SV, N, OUT, EV, addresses, Q, GC, DN):
    """Run warps until something needs Python. Returns a LEAVE_* reason; details are in OUT.

    N counts executed instructions: N[pc, 0] warps, N[pc, 1] lanes, N[pc, 2] shared-memory wavefronts, and
    N[pc, 3 + warp index in the CTA] per warp.
    """
    slots = G[G_SLOTS]
    while True:
        if G[G_BUDGET] <= 0:
            return LEAVE_TICK
        if 2 * G[G_SYNC_USED] > SK.shape[0]:
            return LEAVE_SYNC_TABLE
        if G[G_STEPS] > G[G_LIMIT]:
            return LEAVE_LIMIT
        if G[G_COPIES] and G[G_COPY_BUDGET] <= 0:
            code = _copy(addresses[U_COPY], F, P, A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, STEP,
                         next_random(G) % G[G_COPIES], 0, 0, 0, 0)
            G[G_COPY_BUDGET] = _LATE if G[G_SCHEDULE] == SCHEDULE_LATE else 1 + next_random(G) % 160
            if code:
                OUT[OUT_CODE] = code
                return LEAVE_FAULT
        # ---- choose a warp
        slot = -1
        start = next_random(G) % slots
        for k in range(slots):
            s = start + k
            if s >= slots:
                s -= slots
            if W[s, W_STATUS] == WARP_READY:
                slot = s
                break
        if slot < 0:
            if G[G_COPIES] and G[G_TASKS] == 0:
                G[G_COPY_BUDGET] = 0
                continue
            return LEAVE_IDLE
        f = W[slot, W_CURRENT]
        if W[slot, W_FRAGMENTS] > 1 or FR[slot, f, FR_STATE] != FRAG_READY:
            f = choose_fragment(W, FR, slot, next_random(G) % FRAGMENTS)
            if f < 0:
                continue
            if W[slot, W_FRAGMENTS] > 1 and W[slot, W_DIVERGED] > _PATIENCE:
                W[slot, W_DIVERGED] = 0
                release_waiting(W, FR, RC, slot, np.int64(0xFFFFFFFF))
        pc, mask, base = FR[slot, f, FR_PC], FR[slot, f, FR_MASK], FR[slot, f, FR_BASE]
        record = FR[slot, f, FR_RECORD]
        meet = RC[slot, record, RC_PC] if record >= 0 else -1
        # Mostly long slices, which keep a warp's registers in cache; every fourth is short, for fine
        # interleavings.
        quantum = next_random(G)
        quantum = 1 + (quantum >> 2) % (16 if quantum & 3 == 0 else G[G_QUANTUM])
        begin_pc = pc
        executed = 0
        reason = -1
        moved = False
        counter = 3 + W[slot, W_INDEX]
        while executed < quantum:
            if pc == meet and RC[slot, record, RC_BASE] == base:
                FR[slot, f, FR_PC] = pc
                if not reach_record(W, FR, RC, slot, f):
                    moved = True
                    break
                f = W[slot, W_CURRENT]
                mask, base = FR[slot, f, FR_MASK], FR[slot, f, FR_BASE]
                record = FR[slot, f, FR_RECORD]
                meet = RC[slot, record, RC_PC] if record >= 0 else -1
                continue
            op = P[pc, P_OP]
            m = mask
            guard = P[pc, P_GUARD]
            if guard >= 0:
                p = np.int64(F[guard + base, 0])
                m = mask & ~p if P[pc, P_GUARD_NOT] else mask & p
            sync = P[pc, P_SYNC]
            if sync != SYNC_NONE and m != 0:
                if sync == SYNC_MASK or sync == SYNC_WARP:
                    if sync == SYNC_MASK:
                        row = P[pc, P_E]
                        needed = member_mask(F, row + base if row >= 0 else ~row, m) & W[slot, W_ALIVE]
                    else:
                        needed = W[slot, W_ALIVE]
                    if needed & m != m:
                        OUT[OUT_CODE] = fault(OUT, F_MEMBER, first_lane(np.uint64(m & ~needed)), needed, m, 0)
                        reason = LEAVE_FAULT
                        break
                    if needed != m:
                        FR[slot, f, FR_PC] = pc
                        joined = join_members(W, FR, RC, slot, f, needed)
                        record = FR[slot, f, FR_RECORD]
                        meet = RC[slot, record, RC_PC] if record >= 0 else -1
                        if not joined:
                            moved = True
                            break
                        mask = FR[slot, f, FR_MASK]
                        m = mask
                        if guard >= 0:
                            p = np.int64(F[guard + base, 0])
                            m = mask & ~p if P[pc, P_GUARD_NOT] else mask & p
                        if m & needed != needed:
                            # Lanes that are named but predicated off can never arrive.
                            lost = first_lane(np.uint64(needed & ~m))
                            OUT[OUT_CODE] = fault(OUT, F_MEMBER, lost, needed, m, 1)
                            reason = LEAVE_FAULT
                            break
                elif m != W[slot, W_ALIVE] and G[G_CHECK_CONVERGENCE]:
                    lost = first_lane(np.uint64(W[slot, W_ALIVE] & ~m))
                    code = F_DIVERGED if m == mask else F_GUARD_DIVERGED
                    OUT[OUT_CODE] = fault(OUT, code, lost, W[slot, W_ALIVE], m, 0)
                    reason = LEAVE_FAULT
                    break
                if G[G_LANES]:
                    _lane_event(addresses[U_LANES], G, slot, m, 1)
            executed += 1
            N[pc, 0] += 1
            N[pc, counter] += 1
            family = op & 0xF00
            if family <= CONVERT:
                if m:
                    alu_instruction(F, P, addresses, base, pc, np.uint64(m))
                    N[pc, 1] += count_lanes(m)
                pc += 1
            elif family == MEMORY:
                if m and op != NOP:
                    OUT[OUT_MASK] = 0
                    code = _memory_instruction(addresses[U_MEMORY], F, P, V, A, C, W, G, T, VC, VF, VP, K, SK,
                                               SV, OUT, slot, pc, base, FR[slot, f, FR_LOCAL], m)
                    if code:
                        OUT[OUT_CODE] = code
                        reason = LEAVE_FAULT
                        break
                    N[pc, 1] += count_lanes(m)
                    N[pc, 2] += OUT[OUT_MASK]
                pc += 1
            elif op == BRA:
                taken = m
                if taken == mask:
                    pc = P[pc, P_TARGET]
                elif taken == 0:
                    pc += 1
                else:
                    pc = branch(F, P, W, FR, RC, G, slot, f, pc, mask, taken)
                    mask = FR[slot, f, FR_MASK]
                    record = FR[slot, f, FR_RECORD]
                    meet = RC[slot, record, RC_PC] if record >= 0 else -1
            elif family == WARP:
                if m:
                    N[pc, 1] += count_lanes(m)
                    d, a, b, c, e = P[pc, P_D], P[pc, P_A], P[pc, P_B], P[pc, P_C], P[pc, P_E]
                    if op == MOV_SPECIAL:
                        a = a + W[slot, W_SPECIAL]
                    else:
                        a = a + base if a >= 0 else ~a
                    b = b + base if b >= 0 else ~b
                    c = c + base if c >= 0 else ~c
                    e = e + base if e >= 0 else ~e
                    z = P[pc, P_Z]
                    d = d + base if d >= 0 else -1
                    absent = _warp_lanes(addresses[U_WARP], F, op, d, a, b, c, e, P[pc, P_X], P[pc, P_Y],
                                         z + base if z >= 0 else -1, m, G[G_CLOCK] + executed, next_random(G))
                    if absent and G[G_CHECK_CONVERGENCE]:
                        OUT[OUT_CODE] = fault(OUT, F_ABSENT, (absent - 1) % 32, (absent - 1) // 32, m, 0)
                        reason = LEAVE_FAULT
                        break
                pc += 1
            elif family == PYTHON:
                if m:
                    FR[slot, f, FR_PC] = pc
                    N[pc, 1] += count_lanes(m)
                    reason = LEAVE_PYTHON
                    OUT[OUT_MASK] = m
                    break
                pc += 1
            elif family == MATRIX:
                if m:
                    N[pc, 1] += count_lanes(m)
                    _matrix_lanes(addresses[U_MATRIX], F, V, base, P[pc, P_A], P[pc, P_B], P[pc, P_C],
                                  P[pc, P_E])
                pc += 1
            elif family == COPY:
                if m:
                    N[pc, 1] += count_lanes(m)
                    if G[G_COPIES] == 0:
                        late = G[G_SCHEDULE] == SCHEDULE_LATE
                        G[G_COPY_BUDGET] = _LATE if late else 1 + next_random(G) % 160
                    code = _copy(addresses[U_COPY], F, P, A, C, W, FR, G, VC, K, Q, GC, DN, EV, OUT, op, slot,
                                 f, pc, base, m)
                    if code > 0:
                        OUT[OUT_CODE] = code
                        reason = LEAVE_FAULT
                        break
                    if code < 0:
                        moved = True
                        break
                pc += 1
            elif op == EXIT or (op == RET and FR[slot, f, FR_DEPTH] == 0):
                if m:
                    FR[slot, f, FR_PC] = pc + 1
                    cta = W[slot, W_CTA]
                    whole = m == mask
                    ended = exit_lanes(W, FR, RC, C, B, slot, f, m)
                    _barrier_exit(addresses[U_BARRIER_EXIT], F, P, W, FR, C, B, VC, K, BV, cta)
                    if ended:
                        if C[cta, C_ALIVE] == 0:
                            OUT[OUT_MASK] = cta
                            reason = LEAVE_CTA
                        moved = True
                        break
                    if whole:
                        moved = True
                        break
                    mask = FR[slot, f, FR_MASK]
                pc += 1
            elif op == BARRIER:
                if m:
                    row = P[pc, P_A]
                    first = first_lane(np.uint64(m))
                    number = np.int64(F[row + base if row >= 0 else ~row, first])
                    expected = np.int64(-1)
                    row = P[pc, P_B]
                    if row != NONE:
                        expected = np.int64(F[row + base if row >= 0 else ~row, first])
                    if number > 15 or (expected != -1 and (expected <= 0 or expected % 32 != 0)):
                        OUT[OUT_CODE] = fault(OUT, F_BARRIER_NUMBER, first, number, expected, 0)
                        reason = LEAVE_FAULT
                        break
                    votes = m
                    row = P[pc, P_C]
                    if row >= 0:
                        votes = np.int64(F[row + base, 0])
                        if P[pc, P_Y]:
                            votes = ~votes
                    if m != mask:
                        new_fragment(W, FR, slot, f, pc + 1, mask & ~m)
                        FR[slot, f, FR_MASK] = m
                        mask = m
                    code = _barrier_arrive(addresses[U_BARRIER], F, P, W, FR, C, B, VC, K, BV, slot, f, pc,
                                           number, expected, m, votes)
                    if code:
                        earlier = B[W[slot, W_CTA] * 16 + number, 0]
                        OUT[OUT_CODE] = fault(OUT, code, first, number, expected, earlier)
                        reason = LEAVE_FAULT
                        break
                    if FR[slot, f, FR_STATE] != FRAG_READY:
                        moved = True
                        break
                    pc = FR[slot, f, FR_PC]
                else:
                    pc += 1
            elif op == FENCE:
                if m:
                    fence(VC, VF, VP, K, slot)
                    if G[G_LANES]:
                        _lane_event(addresses[U_LANES], G, slot, m, 2)
                pc += 1
            elif op == FENCE_PROXY:
                if m:
                    proxy_fence(VC, slot)
                pc += 1
            elif op == MOV_LOCAL:
                d = P[pc, P_D] + base
                for i in range(32):
                    if (m >> i) & 1:
                        F[d, i] = np.uint64(P[pc, P_X] + FR[slot, f, FR_LOCAL])
                pc += 1
            elif op == BRX:
                next_pc = indexed_branch(F, P, V, W, FR, RC, G, OUT, slot, f, pc, base, m)
                if next_pc < 0:
                    OUT[OUT_CODE] = F_BRX
                    reason = LEAVE_FAULT
                    break
                pc = next_pc
                mask = FR[slot, f, FR_MASK]
                record = FR[slot, f, FR_RECORD]
                meet = RC[slot, record, RC_PC] if record >= 0 else -1
            elif op == CALL or op == CALL_INDIRECT:
                if m == 0:
                    pc += 1
                    continue
                target = P[pc, P_TARGET]
                called = m
                if op == CALL_INDIRECT:
                    row = P[pc, P_D]
                    row = row + base if row >= 0 else ~row
                    value = F[row, first_lane(np.uint64(m))]
                    called = 0
                    for i in range(32):
                        if (m >> i) & 1 and F[row, i] == value:
                            called |= 1 << i
                    target = -1
                    for n in range(V[P[pc, P_Z]]):
                        if np.uint64(V[P[pc, P_Z] + 1 + 2 * n]) == value:
                            target = V[P[pc, P_Z] + 2 + 2 * n]
                    if target < 0:
                        OUT[OUT_CODE] = fault(OUT, F_STACK, first_lane(np.uint64(m)), value, 1, 0)
                        reason = LEAVE_FAULT
                        break
                depth = FR[slot, f, FR_DEPTH]
                if depth >= G[G_MAX_DEPTH]:
                    OUT[OUT_CODE] = fault(OUT, F_STACK, first_lane(np.uint64(m)), depth, 0, 0)
                    reason = LEAVE_FAULT
                    break
                if called != mask:
                    # Lanes predicated off go on; lanes that call something else try again here. All meet
                    # after.
                    meet = pc + 1
                    record = FR[slot, f, FR_RECORD]
                    if record < 0 or RC[slot, record, RC_PC] != meet or RC[slot, record, RC_BASE] != base:
                        FR[slot, f, FR_RECORD] = new_record(RC, slot, meet, mask, record, base)
                    if mask & ~m:
                        new_fragment(W, FR, slot, f, pc + 1, mask & ~m)
                    if m & ~called:
                        new_fragment(W, FR, slot, f, pc, m & ~called)
                    FR[slot, f, FR_MASK] = called
                    mask = called
                for i in range(32):
                    if (called >> i) & 1:
                        RS[slot, depth, i] = pc
                local = FR[slot, f, FR_LOCAL]
                copy_parameters(V, G, slot, called, P[pc, P_A], P[pc, P_B], local, local + P[pc, P_Y])
                FR[slot, f, FR_BASE] += P[pc, P_X]
                FR[slot, f, FR_LOCAL] += P[pc, P_Y]
                FR[slot, f, FR_DEPTH] = depth + 1
                base = FR[slot, f, FR_BASE]
                pc = target
                record = FR[slot, f, FR_RECORD]
                meet = RC[slot, record, RC_PC] if record >= 0 else -1
            elif op == RET:
                FR[slot, f, FR_PC] = pc
                pc = run_return(P, V, W, FR, G, RS, slot, f, mask)
                mask, base = FR[slot, f, FR_MASK], FR[slot, f, FR_BASE]
            else:
                if m:
                    code = F_TRAP if op == TRAP else F_BREAK
                    OUT[OUT_CODE] = fault(OUT, code, first_lane(np.uint64(m)), 0, 0, 0)
                    reason = LEAVE_FAULT
                    break
                pc += 1
        # ---- end of the slice
        G[G_CLOCK] += executed
        G[G_STEPS] += executed
        G[G_BUDGET] -= executed
        G[G_COPY_BUDGET] -= executed
        W[slot, W_COUNT] += executed
        if W[slot, W_FRAGMENTS] > 1:
            W[slot, W_DIVERGED] += executed
        if not moved:
            FR[slot, f, FR_PC] = pc
        elif W[slot, W_STATUS] == WARP_READY:
            choose_fragment(W, FR, slot, next_random(G) % FRAGMENTS)
        if G[G_TRACE]:
            at = G[G_EVENTS]
            EV[at, 0] = G[G_CLOCK] - executed
            EV[at, 1] = executed
            EV[at, 2] = slot
            EV[at, 3] = begin_pc
            EV[at, 4] = pc
            EV[at, 5] = W[slot, W_CTA]
            G[G_EVENTS] = at + 1
        if reason >= 0:
            OUT[OUT_SLOT] = slot
            OUT[OUT_PC] = pc
            return reason
        if G[G_TRACE] and G[G_EVENTS] + _EVENTS_LEFT >= EV.shape[0]:
            return LEAVE_EVENTS
