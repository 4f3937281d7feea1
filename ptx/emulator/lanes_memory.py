"""Loads, stores and atomics of a warp, with bounds, alignment, initialisation and happens-before checks.

An access goes through three steps: addresses of all lanes are resolved to host pointers (T[0]), offsets
(T[1]) and owners (T[2]); the shadow cells are checked and updated; the bytes move. Nothing is written before
every lane passed.
"""

from __future__ import annotations

import numpy as np

from .atomics import atomic_result
from .bitcast import (
    U0, U1, load8, load16, load32, load64, load_bytes, signed, store8, store32, store64, store_bytes,
)
from .clocks import knows_start, observe, publish
from .jit import inlined, unit
from .lane_races import check_lane_races, lanes_learn
from .layout import (
    A_BEGIN, A_END, A_FLAGS, A_HOST, A_READ_ONLY, A_WRITE, C_ALIVE, C_CLUSTER_SIZE, C_FIRST_CTA, C_FIRST_SLOT,
    C_INIT, C_RANK, C_SHARED, C_SHARED_END, C_WARPS, F_ALIGN, F_BOUNDS, F_CLUSTER_EXIT, F_CLUSTER_START,
    F_RACE_READ, F_RACE_WRITE, F_READ_ONLY, F_SPACE, F_UNINITIALISED, G_BANKS, G_CHECK_MEMORY, G_CHECK_RACES,
    G_CHECK_SHARED_RACES, G_CHECK_UNINITIALISED, G_LANES, G_LOCAL_HOST, G_LOCAL_INIT, G_LOCAL_SIZE,
    LOCAL_WINDOW, OFFSET_MASK, OUT_ADDRESS, OUT_LANE, OUT_MASK, OUT_SIZE, P_A, P_B, P_C, P_D, P_E, P_OP, P_S,
    P_W, P_X, P_Y, P_Z, RANK_SHIFT, SHARED_RESERVED, SHARED_WINDOW, SPACE_FRAME, SPACE_GENERIC, SPACE_GLOBAL,
    SPACE_LOCAL, SPACE_SHARED_CTA, W_CTA,
)
from .opcodes import ATOM, LD, LDMATRIX, ST
from .shadow import fault, touch_global, touch_shared

_SHARED = np.uint64(SHARED_WINDOW)
_LOCAL = np.uint64(LOCAL_WINDOW)
_WINDOW = np.uint64(1 << 40)
_M32 = np.uint64(0xFFFFFFFF)
_FOUR = np.uint64(0x01010101)
_EIGHT = np.uint64(0x0101010101010101)

# Owner codes in T[2]: a CTA index for shared, _LOCAL_OWNER for local, _GLOBAL_OWNER + allocation for the
# rest.
_LOCAL_OWNER = np.uint64(1 << 40)
_GLOBAL_OWNER = np.uint64(1 << 41)


@inlined
def find_allocation(A, address):
    """Index of the allocation that begins at or below `address`, -1 when there is none."""
    low, high = 0, A.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if np.uint64(A[middle, A_BEGIN]) <= address:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inlined
def resolve_lanes(F, A, C, W, G, T, VC, K, OUT, slot, a, offset, space, size, writes, m):
    """Fill T[0..2] for the lanes of `m`. `size` is the whole access of a lane in bytes. Returns a fault code
    or 0."""
    mine = W[slot, W_CTA]
    allocation = -1
    known = np.int64(-1)
    begin, end = U0, U0
    OUT[OUT_SIZE] = size
    usize = np.uint64(size)
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        address = F[a, i] + np.uint64(offset)
        where = space
        if space == SPACE_GENERIC:
            window = address >> np.uint64(40)
            if window == _SHARED >> np.uint64(40):
                where = SPACE_SHARED_CTA + 1
                address &= _M32
            elif window == _LOCAL >> np.uint64(40):
                where = SPACE_LOCAL
                address &= _WINDOW - U1
            else:
                where = SPACE_GLOBAL
        # Access sizes are powers of two.
        if address & (usize - U1):
            return fault(OUT, F_ALIGN, i, address, where, 0)
        if where == SPACE_GLOBAL:
            if not (begin <= address and address + usize <= end):
                allocation = find_allocation(A, address)
                if allocation < 0:
                    return fault(OUT, F_BOUNDS, i, address, where, -1)
                begin, end = np.uint64(A[allocation, A_BEGIN]), np.uint64(A[allocation, A_END])
                if address + usize > end or address + usize < address:
                    return fault(OUT, F_BOUNDS, i, address, where, allocation)
            if writes and A[allocation, A_FLAGS] & A_READ_ONLY:
                return fault(OUT, F_READ_ONLY, i, address, where, allocation)
            T[0, i] = np.uint64(A[allocation, A_HOST]) + (address - begin)
            T[1, i] = address - begin
            T[2, i] = _GLOBAL_OWNER + np.uint64(allocation)
        elif where == SPACE_LOCAL or where == SPACE_FRAME:
            if address + usize > np.uint64(G[G_LOCAL_SIZE]):
                return fault(OUT, F_BOUNDS, i, address, where, 0)
            at = np.uint64((slot * 32 + i) * G[G_LOCAL_SIZE]) + address
            T[0, i] = np.uint64(G[G_LOCAL_HOST]) + at
            T[1, i] = at
            T[2, i] = _LOCAL_OWNER
        else:
            address &= _M32
            rank = np.int64(address >> np.uint64(RANK_SHIFT))
            at = address & np.uint64(OFFSET_MASK)
            cta = mine
            if rank != C[mine, C_RANK]:
                if where == SPACE_SHARED_CTA:
                    return fault(OUT, F_SPACE, i, address, where, rank)
                if rank >= C[mine, C_CLUSTER_SIZE]:
                    return fault(OUT, F_BOUNDS, i, address, where, rank)
                cta = C[mine, C_FIRST_CTA] + rank
                if C[cta, C_ALIVE] == 0:
                    return fault(OUT, F_CLUSTER_EXIT, i, address, where, rank)
                if cta != known:
                    if G[G_CHECK_SHARED_RACES] and not knows_start(VC, K, slot, C[cta, C_FIRST_SLOT],
                                                                   C[cta, C_WARPS]):
                        return fault(OUT, F_CLUSTER_START, i, address, where, rank)
                    known = cta
            if at < np.uint64(SHARED_RESERVED) or at + usize > np.uint64(C[cta, C_SHARED_END]):
                return fault(OUT, F_BOUNDS, i, address, where, rank)
            T[0, i] = np.uint64(C[cta, C_SHARED]) + at
            T[1, i] = at
            T[2, i] = np.uint64(cta)
    return 0


@inlined
def all_initialised(pointer, size):
    """True when each of `size` bytes of the initialisation map is set."""
    if size >= 8:
        for k in range(size >> 3):
            if load64(pointer + np.uint64(8 * k)) != _EIGHT:
                return False
        return size & 4 == 0 or load32(pointer + np.uint64(size - 4)) == _FOUR
    if size == 4:
        return load32(pointer) == _FOUR
    if size == 2:
        return load16(pointer) == np.uint64(0x0101)
    return load8(pointer) == U1


@inlined
def set_initialised(pointer, size):
    if size >= 8:
        for k in range(size >> 3):
            store64(pointer + np.uint64(8 * k), _EIGHT)
        if size & 4:
            store32(pointer + np.uint64(size - 4), _FOUR)
    elif size == 4:
        store32(pointer, _FOUR)
    else:
        for k in range(size):
            store8(pointer + np.uint64(k), U1)


@inlined
def check_lanes(A, C, G, VC, K, T, OUT, slot, pc, size, reads, writes, strong, m):
    """Initialisation and race checks of resolved lanes, and marking of what a store initialises."""
    races, shared_races = G[G_CHECK_RACES] != 0, G[G_CHECK_SHARED_RACES] != 0
    initial = G[G_CHECK_UNINITIALISED] != 0
    if T[2, 0] != _LOCAL_OWNER and consecutive(T, size, m):
        # One contiguous piece: check it at once. The lane of a fault is the one whose bytes it names.
        at = np.int64(T[1, 0])
        if T[2, 0] < _LOCAL_OWNER:
            cta = np.int64(T[2, 0])
            code = 0
            if initial:
                pointer = np.uint64(C[cta, C_INIT] + at)
                if reads and not all_initialised(pointer, 32 * size):
                    code = -1
                elif writes:
                    set_initialised(pointer, 32 * size)
            if code == 0 and shared_races:
                code = touch_shared(C, VC, K, OUT, cta, at, 32 * size, slot, pc, reads, writes, strong, 0)
                if code > 0:
                    OUT[OUT_LANE] = ((OUT[OUT_ADDRESS] & OFFSET_MASK) - at) // size
            if code >= 0:
                return code
        elif races:
            allocation = np.int64(T[2, 0] - _GLOBAL_OWNER)
            if A[allocation, A_WRITE] == 0:
                return 0
            code = touch_global(A, VC, K, OUT, allocation, at, 32 * size, slot, pc, reads, writes, strong, 0)
            if code:
                OUT[OUT_LANE] = (OUT[OUT_ADDRESS] - A[allocation, A_BEGIN] - at) // size
            return code
        else:
            return 0
    last_owner, last_at = ~U0, np.int64(-1)
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        owner = T[2, i]
        at = np.int64(T[1, i])
        if owner == last_owner and at == last_at:
            # The same place as the lane before.
            continue
        last_owner, last_at = owner, at
        if owner < _LOCAL_OWNER:
            cta = np.int64(owner)
            if initial:
                pointer = np.uint64(C[cta, C_INIT] + at)
                if reads and not all_initialised(pointer, size):
                    return fault(
                        OUT, F_UNINITIALISED, i, (C[cta, C_RANK] << RANK_SHIFT) + at, SPACE_SHARED_CTA, 0
                    )
                if writes:
                    set_initialised(pointer, size)
            if shared_races:
                code = touch_shared(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong, i)
                if code:
                    return code
        elif owner == _LOCAL_OWNER:
            if initial:
                pointer = np.uint64(G[G_LOCAL_INIT] + at)
                if reads and not all_initialised(pointer, size):
                    return fault(OUT, F_UNINITIALISED, i, at % G[G_LOCAL_SIZE], SPACE_LOCAL, 0)
                if writes:
                    set_initialised(pointer, size)
        elif races:
            allocation = np.int64(owner - _GLOBAL_OWNER)
            if A[allocation, A_WRITE] != 0:
                code = touch_global(A, VC, K, OUT, allocation, at, size, slot, pc, reads, writes, strong, i)
                if code:
                    return code
    return 0


@inlined
def load_lanes(F, V, T, base, d, count, size, shift, w, m):
    """Move `count` elements of `size` bytes from T[0] to the rows V[d...]; `shift` sign-extends when not
    zero."""
    for k in range(count):
        row = V[d + k]
        if row < 0:
            continue
        row += base
        step = np.uint64(k * size)
        if size == 4 and shift == U0:
            for i in range(32):
                if (m >> np.uint64(i)) & U1:
                    F[row, i] = load32(T[0, i] + step)
        else:
            for i in range(32):
                if (m >> np.uint64(i)) & U1:
                    value = load_bytes(T[0, i] + step, size)
                    if shift:
                        value = np.uint64(signed(value, shift)) & w
                    F[row, i] = value


@inlined
def store_lanes(F, V, T, base, a, count, size, m):
    for k in range(count):
        row = V[a + k]
        row = row + base if row >= 0 else ~row
        step = np.uint64(k * size)
        for i in range(32):
            if (m >> np.uint64(i)) & U1:
                store_bytes(T[0, i] + step, size, F[row, i])


@inlined
def stores_nothing_new(F, V, T, base, a, count, size, m):
    """True when memory already holds every byte of the store."""
    for k in range(count):
        row = V[a + k]
        row = row + base if row >= 0 else ~row
        keep = ~U0 >> np.uint64(64 - 8 * size)
        for i in range(32):
            if (m >> np.uint64(i)) & U1 and load_bytes(T[0, i] + np.uint64(k * size), size) != F[
                row, i
            ] & keep:
                return False
    return True


@inlined
def atomic_lanes(F, V, T, base, d, b, c, count, size, op, kind, m):
    """Read-modify-write of each lane in lane order; d < 0 for `red`. b, c index V (element rows), c < 0 if
    unused."""
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        flush = T[2, i] >= _GLOBAL_OWNER
        for k in range(count):
            pointer = T[0, i] + np.uint64(k * size)
            old = load_bytes(pointer, size)
            row = V[b + k]
            x = F[row + base if row >= 0 else ~row, i]
            y = U0
            if c >= 0:
                row = V[c + k]
                y = F[row + base if row >= 0 else ~row, i]
            store_bytes(pointer, size, atomic_result(op, kind, old, x, y, flush))
            if d >= 0 and V[d + k] >= 0:
                F[V[d + k] + base, i] = old


@inlined
def consecutive(T, size, m):
    """True when a full warp touches one contiguous piece in lane order."""
    if m != np.uint64(0xFFFFFFFF):
        return False
    for i in range(31):
        if T[1, i + 1] - T[1, i] != np.uint64(size) or T[2, i + 1] != T[2, i]:
            return False
    return True


@inlined
def bank_wavefronts(T, size, m):
    """Shared-memory passes of one warp access: 32 four-byte banks; 8-byte lanes go in halves, 16-byte in
    quarters.

    Lanes that touch the same word share it. For every bank, T[3] heads a chain of the words met so far (T[4]
    the next link, T[5] the words), T[6] counts them.
    """
    group = 32 if size <= 4 else (16 if size == 8 else 8)
    words = max(size >> 2, 1)
    total = 0
    for start in range(0, 32, group):
        for bank in range(32):
            T[3, bank] = U0
            T[6, bank] = U0
        worst = U0
        links = np.uint64(0)
        for i in range(start, start + group):
            if (m >> np.uint64(i)) & U1 == U0:
                continue
            first = T[1, i] >> np.uint64(2)
            for k in range(words):
                word = first + np.uint64(k)
                bank = word & np.uint64(31)
                link = T[3, bank]
                while link != U0 and T[5, link - U1] != word:
                    link = T[4, link - U1]
                if link == U0:
                    T[5, links] = word
                    T[4, links] = T[3, bank]
                    links += U1
                    T[3, bank] = links
                    T[6, bank] += U1
                    worst = max(worst, T[6, bank])
        total += np.int64(worst)
    return total


@inlined
def first_lane(m):
    for i in range(32):
        if (m >> np.uint64(i)) & U1:
            return i
    return 0


@inlined
def load_matrices(F, P, V, A, C, W, G, T, VC, K, OUT, slot, pc, a, base, m):
    """ldmatrix.m8n8: lane 8 k + r points to row r of matrix k (P_X: matrices, and 256 for .trans)."""
    count, transposed = P[pc, P_X] & 0xFF, P[pc, P_X] >> 8 != 0
    rows = ~U0 >> np.uint64(64 - 8 * count)
    code = resolve_lanes(F, A, C, W, G, T, VC, K, OUT, slot, a, P[pc, P_Z], P[pc, P_Y], 16, False, rows)
    if code:
        return code
    for i in range(8 * count):
        if T[2, i] != np.uint64(W[slot, W_CTA]):
            rank = C[np.int64(T[2, i]), C_RANK] if T[2, i] < _LOCAL_OWNER else -1
            return fault(OUT, F_SPACE, i, F[a, i], SPACE_SHARED_CTA, rank)
    if G[G_CHECK_MEMORY]:
        code = check_lanes(A, C, G, VC, K, T, OUT, slot, pc, 16, True, False, False, rows)
        if code:
            return code
    if G[G_BANKS]:
        # Eight rows of 16 bytes a pass: one for each matrix whose rows lie in different banks.
        OUT[OUT_MASK] = bank_wavefronts(T, 16, rows)
    for k in range(count):
        row = V[P[pc, P_D] + k]
        if row < 0:
            continue
        for i in range(32):
            if (m >> np.uint64(i)) & U1:
                if transposed:
                    first, step = 8 * k + 2 * (i & 3), np.uint64(2 * (i >> 2))
                    value = load16(T[0, first] + step) | (load16(T[0, first + 1] + step) << np.uint64(16))
                else:
                    value = load32(T[0, 8 * k + (i >> 2)] + np.uint64(4 * (i & 3)))
                F[row + base, i] = value
    return 0


@unit("i", "U2 I2 I1 I2 I2 I2 I1 U2 I2 I2 I2 I2 U1 I2 I1 i i i i i")
def memory_instruction(F, P, V, A, C, W, G, T, VC, VF, VP, K, SK, SV, OUT, slot, pc, base, local, mask):
    """LD, ST, ATOM and LDMATRIX. Returns a fault code or 0."""
    op = P[pc, P_OP]
    space = P[pc, P_Y] & 0xFF
    strong = (P[pc, P_Y] >> 8) & 1 != 0
    acquire = (P[pc, P_Y] >> 9) & 1 != 0
    release = (P[pc, P_Y] >> 10) & 1 != 0
    count, size = P[pc, P_X] & 0xFF, P[pc, P_X] >> 8
    a = P[pc, P_A]
    a = a + base if a >= 0 else ~a
    offset = P[pc, P_Z]
    if space == SPACE_FRAME:
        offset += local
    m = np.uint64(mask)
    if op == LDMATRIX:
        return load_matrices(F, P, V, A, C, W, G, T, VC, K, OUT, slot, pc, a, base, m)
    total = count * size
    code = resolve_lanes(F, A, C, W, G, T, VC, K, OUT, slot, a, offset, space, total, op != LD, m)
    if code:
        return code
    if G[G_CHECK_MEMORY]:
        code = check_lanes(A, C, G, VC, K, T, OUT, slot, pc, total, op != ST, op != LD, strong, m)
        # Unordered stores of the value that is already there change nothing, and compilers rely on it.
        if code and not (op == ST and (code == F_RACE_WRITE or code == F_RACE_READ)
                         and stores_nothing_new(F, V, T, base, P[pc, P_B], count, size, m)):
            return code
    if G[G_LANES] and not strong and op != ATOM:
        code = check_lane_races(C, G, T, OUT, slot, pc, total, op != LD, m, _LOCAL_OWNER)
        if code and not (op == ST and stores_nothing_new(F, V, T, base, P[pc, P_B], count, size, m)):
            return code
    if G[G_BANKS] and T[2, first_lane(m)] < _LOCAL_OWNER:
        OUT[OUT_MASK] = max(total >> 2, 1) if consecutive(T, total, m) else bank_wavefronts(T, total, m)
    if op == LD:
        load_lanes(F, V, T, base, P[pc, P_D], count, size, np.uint64(P[pc, P_S]), np.uint64(P[pc, P_W]), m)
    elif op == ST:
        store_lanes(F, V, T, base, P[pc, P_B], count, size, m)
    else:
        atomic_lanes(F, V, T, base, P[pc, P_D], P[pc, P_B], P[pc, P_C], count, size, P[pc, P_E] & 0xFF,
                     P[pc, P_E] >> 8, m)
    if acquire and G[G_LANES]:
        lanes_learn(G, slot, mask)
    if strong and G[G_CHECK_RACES]:
        previous = U0
        for i in range(32):
            if (m >> np.uint64(i)) & U1 and T[0, i] != previous:
                previous = T[0, i]
                if op != ST:
                    observe(VC, VP, K, SK, SV, slot, previous, acquire)
                if op != LD:
                    publish(VC, VF, K, SK, SV, G, slot, previous, release, op == ATOM)
    return 0
