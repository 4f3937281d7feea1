"""Column numbers of the flat state arrays and the address map: the one place that compiled code and Python
share."""

from __future__ import annotations

# ---- program rows: P[pc, column], int64
(P_OP, P_GUARD, P_GUARD_NOT, P_D, P_A, P_B, P_C, P_E, P_X, P_Y, P_Z, P_W, P_S, P_TARGET, P_RECONVERGE,
 P_SYNC) = range(16)
P_COLUMNS = 16
#: Row number that means "no register" (an absent guard, a sink).
NONE = -(1 << 40)

#: P_SYNC values: no convergence rule; `.aligned` (every live lane must be here); member mask in operand P_E
SYNC_NONE, SYNC_ALIGNED, SYNC_MASK, SYNC_WARP = range(4)

# ---- warp state: W[slot, column], int64
(W_STATUS, W_CTA, W_INDEX, W_SPECIAL, W_CURRENT, W_ALIVE, W_COUNT, W_DIVERGED, W_FRAGMENTS) = range(9)
W_COLUMNS = 9
#: W_STATUS values
WARP_FREE, WARP_READY, WARP_BLOCKED, WARP_DONE = range(4)

# ---- fragments: lanes of a warp that share a program counter. FR[slot, fragment, column]
(FR_STATE, FR_PC, FR_MASK, FR_BASE, FR_LOCAL, FR_RECORD, FR_DEPTH, FR_KEY) = range(8)
FR_COLUMNS = 8
FRAGMENTS = 32
#: FR_STATE values; the last five are reasons to wait
FRAG_FREE, FRAG_READY, FRAG_RECONVERGE, FRAG_MEMBERS, FRAG_BARRIER, FRAG_KEY, FRAG_COPY = range(7)

# ---- reconvergence records: RC[slot, record, column]
(RC_USED, RC_PC, RC_MASK, RC_PARENT, RC_WAITING, RC_BASE) = range(6)
RC_COLUMNS = 6
RECORDS = 96

# ---- CTA state: C[cta, column], int64
(C_USED, C_RANK, C_FIRST_CTA, C_CLUSTER_SIZE, C_FIRST_SLOT, C_WARPS, C_ALIVE, C_SHARED, C_SHARED_END,
 C_INIT, C_WRITE, C_READ, C_READ_LINES, C_READERS, C_GROUP_SLOT, C_GROUP_SLOTS, C_GRANULES, C_LINEAR,
 C_BARRIERS, C_WRITE_LINES, C_LANES) = range(21)
C_COLUMNS = 21

# ---- named barriers: B[cta * 16 + id, column]; from B_LANES on the mask of arrived lanes of each warp
(B_EXPECTED, B_ARRIVED, B_WARPS, B_GENERATION, B_REDUCE, B_REDUCE_KIND, B_LANES) = range(7)
B_COLUMNS = B_LANES + 32

# ---- allocations: A[index, column], sorted by address; the host pointer of the bytes and of the shadow cells
(A_BEGIN, A_END, A_HOST, A_WRITE, A_READ, A_FLAGS, A_WRITE_LINES, A_READ_LINES) = range(8)
A_COLUMNS = 8
A_READ_ONLY = 1

# ---- configuration and counters: G[column], int64
(G_SLOTS, G_QUANTUM, G_BUDGET, G_CLOCK, G_LIMIT, G_CHECK_MEMORY, G_CHECK_RACES, G_CHECK_SHARED_RACES,
 G_LOCAL_HOST, G_LOCAL_SIZE, G_LOCAL_INIT, G_TRACE, G_EVENTS, G_BANKS, G_RANDOM, G_SYNC_USED,
 G_CHECK_UNINITIALISED, G_CHECK_CONVERGENCE, G_STEPS, G_MAX_DEPTH, G_SCHEDULE, G_TASKS, G_COPIES, G_COPY_SLOT,
 G_COPY_BUDGET, G_COPY_BYTES, G_SERIAL, G_LANES) = range(28)
G_COLUMNS = 28
#: G_SCHEDULE values
SCHEDULE_RANDOM, SCHEDULE_EAGER, SCHEDULE_LATE = range(3)

# ---- what the interpreter hands back: OUT[column]
(OUT_SLOT, OUT_PC, OUT_MASK, OUT_CODE, OUT_LANE, OUT_ADDRESS, OUT_AUX, OUT_AUX2, OUT_SIZE,
 OUT_AGENT) = range(10)
OUT_COLUMNS = 10
#: Reasons to leave the compiled loop
(LEAVE_PYTHON, LEAVE_FAULT, LEAVE_IDLE, LEAVE_TICK, LEAVE_CTA, LEAVE_LIMIT, LEAVE_EVENTS,
 LEAVE_SYNC_TABLE) = range(8)

#: Fault codes and the kinds they are reported as
FAULTS = {
    1: "out-of-bounds", 2: "misaligned", 3: "uninitialised", 4: "race", 5: "race", 6: "read-only",
    7: "divergence", 8: "divergence", 9: "trap", 10: "barrier", 11: "barrier", 12: "address-space",
    13: "call-stack", 14: "cluster-exit",
    15: "brx", 16: "divergence", 17: "divergence", 18: "operand", 19: "breakpoint", 20: "proxy",
    21: "mbarrier", 22: "cluster-start", 23: "warp-race",
}
(F_BOUNDS, F_ALIGN, F_UNINITIALISED, F_RACE_WRITE, F_RACE_READ, F_READ_ONLY, F_DIVERGED, F_GUARD_DIVERGED,
 F_TRAP, F_BARRIER_COUNT, F_BARRIER_NUMBER, F_SPACE, F_STACK, F_CLUSTER_EXIT, F_BRX, F_MEMBER, F_ABSENT,
 F_OPERAND, F_BREAK, F_PROXY, F_OVERLAP,
 F_CLUSTER_START, F_WARP_RACE) = range(1, 24)

# ---- address map (bytes). A shared address is rank << 24 | offset, so one 32-bit window holds a whole
# cluster.
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
PARAMETER_WINDOW = 0x7C00_0000_0000
CONST_WINDOW = 0x7B00_0000_0000
GLOBAL_WINDOW = 0x5000_0000_0000
CODE_WINDOW = 0x7A00_0000_0000
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
#: The first KB of shared memory belongs to the system on sm_90 and later.
SHARED_RESERVED = 0x400

# ---- state spaces of LD/ST/ATOM (P_Y low byte)
(SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED_CTA, SPACE_SHARED_CLUSTER, SPACE_LOCAL, SPACE_FRAME) = range(6)

# ---- shadow cells, uint64: clock << 36 | slot << 24 | pc << 5 | strong << 4 | byte mask of the 4-byte
# granule
CELL_CLOCK_SHIFT, CELL_SLOT_SHIFT = 36, 24
CELL_STRONG = 1 << 4
