"""Tensor memory of one CTA: cells, column allocation, and where each instruction finds its data.

128 lanes by 512 columns of 32-bit cells.  An address holds the lane in bits 31:16 and the column in bits
15:0. Layouts: PTX ISA "Tensor Memory", "tcgen05.ld", "tcgen05.cp" and "Data movement shape"; the register,
accumulator and scale layouts, which the ISA gives as figures, were taken from CUTLASS
``cute/atom/copy_traits_sm100.hpp`` and ``mma_traits_sm100_frag.hpp``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LANES = 128
COLUMNS = 512

#: What a cell reads as before anything was stored in it: a quiet NaN pattern that shows up in dumps.
POISON = np.uint32(0x7FC0DEAD)


class TensorMemoryError(Exception):
    """A rule of tensor memory was broken; the message says which."""


def split_address(address):
    """(lane, column) of a tensor-memory address."""
    address = int(address) & 0xFFFFFFFF
    return address >> 16, address & 0xFFFF


class TensorMemory:
    """Cells and column ownership of one CTA's tensor memory.

    ``cells`` is uint32 [128, 512]; ``initialised`` bool, same shape; ``owner`` int32 [512] holds the base
    column of the allocation that a column belongs to, -1 where it is free.
    """

    def __init__(self):
        self.cells = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.initialised = np.zeros((LANES, COLUMNS), np.bool_)
        self.owner = np.full(COLUMNS, -1, np.int32)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
        self._last_columns = COLUMNS

    @staticmethod
    def check_columns(columns):
        """TensorMemoryError unless a column count can be allocated."""
        if columns not in (32, 64, 128, 256, 512):
            raise TensorMemoryError(f"{columns} columns: the count must be a power of two from 32 to 512")

    def free_bases(self, columns):
        """Base columns at which an allocation fits now; bases are multiples of the allocation's size."""
        return [base for base in range(0, COLUMNS, columns) if (self.owner[base:base + columns] < 0).all()]

    def allocate(self, columns, base):
        """Take ``columns`` from ``base``, one of ``free_bases``; TensorMemoryError where the rules forbid it.
        """
        self.check_request(columns)
        self._last_columns = columns
        self.owner[base:base + columns] = base
        self.allocations[base] = columns
        self.cells[:, base:base + columns] = POISON
        self.initialised[:, base:base + columns] = False
        return base

    def check_request(self, columns):
        """TensorMemoryError where an allocation of this size would be wrong whatever is free."""
        self.check_columns(columns)
        if self.relinquished:
            raise TensorMemoryError("allocation after relinquish_alloc_permit by this CTA")
        if columns > self._last_columns:
            raise TensorMemoryError(f"allocation of {columns} columns after one of {self._last_columns}: "
                                    "sizes must not grow inside a CTA")

    def release(self, address, columns):
        """Give back an allocation; TensorMemoryError unless address and size are those of one."""
        self.check_columns(columns)
        lane, base = split_address(address)
        held = ", ".join(f"{c} columns at {b}" for b, c in sorted(self.allocations.items())) or "none"
        if lane or self.allocations.get(base) != columns:
            raise TensorMemoryError(f"deallocation of {columns} columns at lane {lane}, column {base}, which "
                                    f"is no "
                                    f"allocation of this CTA (live: {held})")
        del self.allocations[base]
        self.owner[base:base + columns] = -1

    def check_cells(self, lanes, columns):
        """TensorMemoryError unless all lanes and columns exist, are allocated, and belong to one allocation.
        """
        low, high = int(columns.min()), int(columns.max())
        if low < 0 or high >= COLUMNS:
            raise TensorMemoryError(f"columns {low}..{high} reach outside 0..{COLUMNS - 1}")
        if int(lanes.min()) < 0 or int(lanes.max()) >= LANES:
            raise TensorMemoryError(f"lanes {int(lanes.min())}..{int(lanes.max())} reach outside "
                                    f"0..{LANES - 1}")
        owners = self.owner[low:high + 1]
        if owners[0] == owners[-1] >= 0 and (owners == owners[0]).all():
            return
        touched = np.unique(columns)
        owners = np.unique(self.owner[touched])
        if owners[0] < 0:
            free = touched[self.owner[touched] < 0]
            raise TensorMemoryError(f"column {int(free[0])} is not allocated")
        if len(owners) > 1:
            raise TensorMemoryError(f"columns {low}..{high} cross from the allocation at {owners[0]} into "
                                    f"the one "
                                    f"at {owners[1]}")


# --- tcgen05.ld and tcgen05.st ------------------------------------------------------------------------------

_REGISTERS_PER_NUM = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def register_count(shape, num):
    """32-bit registers a thread gives or takes; ValueError where the shape has no such ``.num``."""
    if shape not in _REGISTERS_PER_NUM:
        raise ValueError(f"shape {shape}: known are {', '.join(_REGISTERS_PER_NUM)}")
    count = _REGISTERS_PER_NUM[shape] * num
    if num not in (1, 2, 4, 8, 16, 32, 64, 128) or count > 128:
        raise ValueError(f".{shape}.x{num} does not exist: at most 128 registers")
    return count


@lru_cache(maxsize=None)
def register_cells(shape, num, packed=False, second_half=0):
    """Lane and column offsets of every register of a tcgen05.ld or .st.

    Args:
        shape: "32x32b", "16x64b", "16x128b", "16x256b" or "16x32bx2".
        num: the repetition ``.xN``.
        packed: ``.pack::16b`` / ``.unpack::16b``: a register holds the low halves of two neighbouring
            columns.
        second_half: for 16x32bx2, the immediate (lane << 16 | column) added for threads 16..31.

    Returns:
        lanes, columns: int64 [cells per register (1 or 2), registers, 32 threads], relative to the address.
    """
    r, t = np.meshgrid(np.arange(register_count(shape, num)), np.arange(32), indexing="ij")
    if shape == "32x32b":
        lane, column = t, r
    elif shape == "16x64b":
        lane, column = (t >> 2) + 8 * (t & 1), 2 * r + ((t >> 1) & 1)
    elif shape == "16x128b":
        lane, column = (t >> 2) + 8 * (r & 1), 4 * (r >> 1) + (t & 3)
    elif shape == "16x256b":
        lane, column = (t >> 2) + 8 * ((r >> 1) & 1), 8 * (r >> 2) + 2 * (t & 3) + (r & 1)
    else:
        lane, column = t & 15, r
    if packed:
        lanes, columns = np.stack([lane, lane]), np.stack([2 * column, 2 * column + 1])
    else:
        lanes, columns = lane[None], column[None]
    if shape == "16x32bx2":
        upper = t[None] >= 16
        lanes = lanes + np.where(upper, second_half >> 16, 0)
        columns = columns + np.where(upper, second_half & 0xFFFF, 0)
    lanes, columns = lanes.astype(np.int64), columns.astype(np.int64)
    lanes.setflags(write=False)
    columns.setflags(write=False)
    return lanes, columns


# --- tcgen05.cp ---------------------------------------------------------------------------------------------

COPY_SHAPES = {
    # shape: source rows, bytes a row, lane groups each row goes to
    "128x256b": (128, 32, lambda row: [row]),
    "4x256b": (4, 32, lambda row: [32 * row]),
    "128x128b": (128, 16, lambda row: [row]),
    "64x128b.warpx2::02_13": (64, 16, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda row: [row + 32 * (row // 32), row + 32 * (row // 32) + 32]),
    "32x128b.warpx4": (32, 16, lambda row: [row, row + 32, row + 64, row + 96]),
}


@lru_cache(maxsize=None)
def copy_lanes(shape):
    """Source row and destination lane of each row written by a tcgen05.cp: two int64 [pieces]."""
    rows, _, lanes_of = COPY_SHAPES[shape]
    pairs = [(row, lane) for row in range(rows) for lane in lanes_of(row)]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


# --- MMA operands -------------------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def accumulator_cells(m, n, cta_group=1, weight_stationary=False):
    """Where D[m, n] lies, relative to the D address (layouts A, B, D, E, F, G of the PTX ISA).

    Returns:
        cta, lane, column: int64 [M, N]; cta is 0 for the even-ranked CTA of a pair and 1 for the odd one.
    """
    row, col = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    cta = np.zeros_like(row)
    half = n // 2
    if cta_group == 2 and m == 256:
        cta, lane, column = row // 128, row % 128, col
    elif cta_group == 2 and m == 128:
        cta, lane, column = row // 64, row % 64 + 64 * (col >= half), col % half
    elif m == 128:
        lane, column = row, col
    elif m == 64 and weight_stationary:
        lane, column = row + 64 * (col >= half), col % half
    elif m == 64:
        lane, column = 32 * (row // 16) + row % 16, col
    elif m == 32 and weight_stationary:
        lane, column = row + 32 * (col // (n // 4)), col % (n // 4)
    else:
        raise ValueError(f"M={m} with cta_group::{cta_group}: no accumulator layout")
    result = tuple(x.astype(np.int64) for x in (cta, lane, column))
    for x in result:
        x.setflags(write=False)
    return result


@lru_cache(maxsize=None)
def operand_lanes(m, cta_group=1, weight_stationary=False):
    """Lane (and CTA) of each row of an A operand in tensor memory: two int64 [copies, M].

    Where the datapath works on two halves (M=128 over a pair) or on four quarters, the rows are held once for
    each; all copies are read by the hardware and must agree.
    """
    row = np.arange(m)
    if cta_group == 2 and m == 256:
        cta, lane = (row // 128)[None], (row % 128)[None]
    elif cta_group == 2:
        cta, lane = np.stack([row // 64] * 2), np.stack([row % 64, row % 64 + 64])
    elif m == 128:
        cta, lane = (row * 0)[None], row[None]
    elif m == 64 and weight_stationary:
        cta, lane = np.zeros((2, m), int), np.stack([row, row + 64])
    elif m == 64:
        cta, lane = (row * 0)[None], (32 * (row // 16) + row % 16)[None]
    else:
        cta, lane = np.zeros((4, m), int), np.stack([row + 32 * i for i in range(4)])
    return cta.astype(np.int64), lane.astype(np.int64)


@lru_cache(maxsize=None)
def scale_cells_a(m, cta_group=1):
    """Where the scale word of each row of A lies: cta, lane, column, int64 [4 copies, M].

    Rows are dealt to 32 lanes and then to columns, and the 32 lanes are repeated in the other three quarters.
    """
    row = np.arange(m)
    per_cta = m if cta_group == 1 else m // 2
    cta, local = row // per_cta, row % per_cta
    copies = np.arange(4)[:, None]
    return (np.broadcast_to(cta, (4, m)).astype(np.int64), (local % 32 + 32 * copies).astype(np.int64),
            np.broadcast_to(local // 32, (4, m)).astype(np.int64))


@lru_cache(maxsize=None)
def scale_cells_b(m, n, cta_group=1):
    """Where the scale word of each column of B lies, in *each* CTA of the MMA: lane, column, int64 [copies,
    N].

    Every CTA holds the scales of all N columns, four times over; an M=128 MMA of a pair, whose upper 64 lanes
    work on the upper half of N, has the lower half of N in lanes 0..63 and the upper half in lanes 64..127,
    twice each.
    """
    col = np.arange(n)
    if cta_group == 2 and m == 128:
        local = col % (n // 2)
        copies = np.arange(2)[:, None]
        lane = local % 32 + 64 * (col >= n // 2) + 32 * copies
        return lane.astype(np.int64), np.broadcast_to(local // 32, (2, n)).astype(np.int64)
    copies = np.arange(4)[:, None]
    return (col % 32 + 32 * copies).astype(np.int64), np.broadcast_to(col // 32, (4, n)).astype(np.int64)
