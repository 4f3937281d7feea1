"""Which matrix element each register of each lane holds, for mma.sync, wgmma, ldmatrix, stmatrix and
movmatrix.

Every function returns index arrays ``[registers, 32 lanes, elements of a register]``, lowest bits first.
Sources: PTX ISA "Matrix fragments for mma.sync" and "ldmatrix"; CUTLASS ``cute/atom/mma_traits_sm80.hpp`` and
``mma_traits_sm90_gmma.hpp``. The mma.sync and wgmma layouts were also compared with an H200
(tests/emulator/data/h200_mma.npz).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE >> 2, _LANE & 3


def _grid(registers, elements):
    r, lane, e = np.meshgrid(np.arange(registers), _LANE, np.arange(elements), indexing="ij")
    return r, lane >> 2, lane & 3, e


@lru_cache(maxsize=None)
def operand_a(m, k, bits):
    """Row and k of the A operand of mma.sync: M is 8 or 16, elements have ``bits`` bits."""
    per = max(32 // bits, 1)
    count = m * k * bits // (32 * 32) if bits < 64 else m * k // 32
    r, group, member, e = _grid(count, per)
    halves = m // 8
    return group + 8 * (r % halves), (r // halves) * 4 * per + member * per + e


@lru_cache(maxsize=None)
def operand_b(n, k, bits):
    """Column n and k of the B operand of mma.sync (N is 8)."""
    per = max(32 // bits, 1)
    count = n * k * bits // (32 * 32) if bits < 64 else n * k // 32
    r, group, member, e = _grid(count, per)
    return group + 0 * r, r * 4 * per + member * per + e


@lru_cache(maxsize=None)
def accumulator(m, n, bits):
    """Row and column of C and D: mma.sync (M 8 or 16, N 8) and one warp's 16 rows of wgmma (N up to 256).

    16-bit results sit in pairs of neighbouring columns.
    """
    per = 2 if bits == 16 else 1
    halves = m // 8
    r, group, member, e = _grid(m * n // 32 // per, per)
    if per == 2:
        return group + 8 * (r % halves), 8 * (r // halves) + 2 * member + e
    return group + 8 * ((r >> 1) % halves), 8 * ((r >> 1) // halves) + 2 * member + (r & 1)


@lru_cache(maxsize=None)
def matrix_16x16_b8():
    """Memory row and column of byte ``b`` of register ``r`` (0, 1): ldmatrix.m16n16.trans; int64 [2, 32, 4].
    """
    r, lane, b = np.meshgrid(np.arange(2), _LANE, np.arange(4), indexing="ij")
    return 4 * (lane % 4) + b, lane // 4 + 8 * r


@lru_cache(maxsize=None)
def matrix_8x16_b8():
    """Memory row and column of byte ``b``: ldmatrix.m8n16; int64 [32, 4]."""
    lane, b = np.meshgrid(_LANE, np.arange(4), indexing="ij")
    return lane // 4, 4 * (lane % 4) + b


@lru_cache(maxsize=None)
def matrix_16x8_b8_transposed():
    """Memory row and column of byte ``b``: stmatrix.m16n8.trans.b8, whose memory rows are the 8 columns' 16
    bytes.
    """
    lane, b = np.meshgrid(_LANE, np.arange(4), indexing="ij")
    return 4 * (lane % 4) + b, lane // 4
