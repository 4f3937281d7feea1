"""ldmatrix, stmatrix, movmatrix (PTX ISA, "Warp-level matrix instructions")."""

from __future__ import annotations

import numpy as np

from . import layout as L
from . import opcodes as O
from .forms import operation, row
from .layout import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from .matrix_descriptors import padded_fp_elements
from .places import is_generic
from .register_layouts import matrix_8x16_b8, matrix_16x8_b8_transposed, matrix_16x16_b8
from .rows_memory import elements, space_of
from .tensor_core import E2M1, E2M3

_LANE = np.arange(32)


def _row_offsets(warp, ins, index, count):
    """Offsets of the matrix rows that lanes 0 .. count-1 point to."""
    addresses = warp.address(index)[:count]
    if is_generic(ins):
        addresses = addresses - np.uint64(SHARED_WINDOW)
    for lane in np.flatnonzero(addresses >> np.uint64(RANK_SHIFT) != warp.cta.rank):
        warp.fault("address-space", f"row address {int(warp.address(index)[lane]):#x} is not in this CTA's "
                                    f"shared memory",
                   lane=int(lane), address=int(addresses[lane]))
    for lane in np.flatnonzero(addresses & np.uint64(15)):
        warp.fault("misaligned", f"row address {int(addresses[lane]):#x} is not a multiple of 16",
                   lane=int(lane), address=int(addresses[lane]))
    return (addresses & np.uint64(OFFSET_MASK)).astype(np.int64)


def _number(ins):
    return int(ins.one_of("x1", "x2", "x4")[1:])


def _write(warp, index, values):
    items = getattr(warp.instruction.operands[index], "items", (warp.instruction.operands[index],))
    if len(items) != len(values):
        warp.fault("operand", f"{len(items)} registers where {len(values)} are needed")
    for item, value in zip(items, values):
        warp.write_operand(item, value)


@row("ldmatrix", "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16", "d, [a]")
@row("ldmatrix", "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16", "{d}, [a]")
def ldmatrix(b, ins):
    items, count = elements(ins.operands[0]), _number(ins)
    if len(items) != count:
        raise b.error(f"{len(items)} registers where {count} are needed")
    a, offset, frame = b.address(ins.operands[1])
    if frame:
        raise b.error("matrices are loaded from shared memory")
    start = b.row_list([b.dest(item) for item in items])
    b.emit(O.LDMATRIX, d=start, a=a, x=count | ins.has("trans") << 8, y=space_of(ins), z=offset,
           sync=L.SYNC_ALIGNED, defs="", uses="a", def_list=(start, count))


def _bytes_of(ins, rows):
    """Rows of 16 one-byte elements, expanded from the padded narrow formats where the instruction says so."""
    if ins.has("b4x16_p64"):
        return padded_fp_elements(rows, E2M1)
    if ins.has("b6x16_p32"):
        return padded_fp_elements(rows, E2M3)
    return rows


def _pack_bytes(values):
    return (values.astype(np.uint32) << (8 * np.arange(4, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)


@operation("ldmatrix", "sync aligned m16n16 x1|x2 trans shared|shared::cta? b8|b8x16 b4x16_p64|b6x16_p32?",
           "d, [a]")
@operation("ldmatrix", "sync aligned m16n16 x1|x2 trans shared|shared::cta? b8|b8x16 b4x16_p64|b6x16_p32?",
           "{d}, [a]")
def ldmatrix_m16n16(warp, ins):
    count = _number(ins)
    offsets = _row_offsets(warp, ins, 1, 16 * count)
    rows = _bytes_of(ins, warp.machine.access.gather_shared(warp.agent, warp.cta.rank, offsets, 16))
    row, column = matrix_16x16_b8()
    values = rows.reshape(count, 16, 16)[:, row, column]
    _write(warp, 0, _pack_bytes(values).reshape(2 * count, 32))


@operation("ldmatrix", "sync aligned m8n16 x1|x2|x4 shared|shared::cta? b8x16 b4x16_p64|b6x16_p32", "d, [a]")
@operation("ldmatrix", "sync aligned m8n16 x1|x2|x4 shared|shared::cta? b8x16 b4x16_p64|b6x16_p32",
           "{d}, [a]")
def ldmatrix_m8n16(warp, ins):
    count = _number(ins)
    offsets = _row_offsets(warp, ins, 1, 8 * count)
    rows = _bytes_of(ins, warp.machine.access.gather_shared(warp.agent, warp.cta.rank, offsets, 16))
    row, column = matrix_8x16_b8()
    _write(warp, 0, _pack_bytes(rows.reshape(count, 8, 16)[:, row, column]))


@operation("stmatrix", "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16", "[a], d")
@operation("stmatrix", "sync aligned m8n8 x1|x2|x4 trans? shared|shared::cta? b16", "[a], {d}")
def stmatrix(warp, ins):
    count = _number(ins)
    offsets = _row_offsets(warp, ins, 0, 8 * count)
    values = warp.vector(1).astype(np.uint32)
    if len(values) != count:
        warp.fault("operand", f"{len(values)} registers where {count} are needed")
    if ins.has("trans"):
        elements = np.empty((count, 8, 8), np.uint16)
        elements[:, 2 * (_LANE & 3), _LANE >> 2] = values & np.uint32(0xFFFF)
        elements[:, 2 * (_LANE & 3) + 1, _LANE >> 2] = values >> np.uint32(16)
        rows = elements.reshape(8 * count, 8)
    else:
        rows = np.empty((count, 8, 4), np.uint32)
        rows[:, _LANE >> 2, _LANE & 3] = values
        rows = rows.reshape(8 * count, 4)
    warp.machine.access.scatter_shared(warp.agent, warp.cta.rank, offsets, rows.view(np.uint8))


@operation("stmatrix", "sync aligned m16n8 x1|x2|x4 trans shared|shared::cta? b8", "[a], d")
@operation("stmatrix", "sync aligned m16n8 x1|x2|x4 trans shared|shared::cta? b8", "[a], {d}")
def stmatrix_m16n8(warp, ins):
    """8-bit elements: register j of lane l holds rows 4*(l%4) .. +3 of column l/4; memory rows are columns.
    """
    count = _number(ins)
    offsets = _row_offsets(warp, ins, 0, 8 * count)
    values = warp.vector(1).astype(np.uint32)
    if len(values) != count:
        warp.fault("operand", f"{len(values)} registers where {count} are needed")
    row, column = matrix_16x8_b8_transposed()
    rows = np.empty((count, 8, 16), np.uint8)
    parts = (values[..., None] >> (8 * np.arange(4, dtype=np.uint32))).astype(np.uint8)
    rows[:, column, row] = parts
    warp.machine.access.scatter_shared(warp.agent, warp.cta.rank, offsets, rows.reshape(8 * count, 16))


@operation("movmatrix", "sync aligned m8n8 trans b16", "d, a")
def movmatrix(warp, ins):
    elements = np.empty((8, 8), np.uint32)
    values = warp.u32(1)
    elements[_LANE >> 2, 2 * (_LANE & 3)] = values & np.uint32(0xFFFF)
    elements[_LANE >> 2, 2 * (_LANE & 3) + 1] = values >> np.uint32(16)
    turned = elements.T
    warp.write(0, turned[_LANE >> 2, 2 * (_LANE & 3)] | turned[_LANE >> 2, 2 * (_LANE & 3)
                                                               + 1] << np.uint32(16))
