"""wgmma: the asynchronous products of a warpgroup on sm_90a.

Each warp of the four computes its 16 of the 64 rows.  Results are in the registers at once, but the shared
memory that a product reads counts as in use until its group has been waited for.  PTX ISA, "wgmma.mma_async".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import tensor_core as tc
from .forms import operation, row
from .matrix_descriptors import DescriptorError, SWIZZLE_128B_ATOM_32B, decode_wgmma_matrix_descriptor
from .model import Immediate, Vector
from .register_layouts import accumulator, operand_a
from .tcgen05_mma import elements, unit_grid

#: element format, bits, K of one instruction
_INPUTS = {"f16": (tc.F16, 16, 16), "bf16": (tc.BF16, 16, 16), "tf32": (tc.TF32, 32, 8),
           "e4m3": (tc.E4M3, 8, 32), "e5m2": (tc.E5M2, 8, 32), "s8": (tc.S8, 8, 32), "u8": (tc.U8, 8, 32)}
_NUMBERS = "|".join(f"m64n{n}k{k}" for k in (8, 16, 32) for n in range(8, 257, 8))


class Groups:
    """The open and the committed wgmma groups of one warp; each is an agent that holds what the products
    read.
    """

    def __init__(self):
        self.open = None
        self.committed = []


def _groups(warp):
    return warp.cta.state.setdefault(("wgmma", warp.index), Groups())


@lru_cache(maxsize=512)
def _descriptor(word):
    return decode_wgmma_matrix_descriptor(word)


def _shared_operand(warp, agent, word, rows, first, fmt, bits, k, mn_major, what):
    """Words [rows, K] of an operand in shared memory, from row ``first``."""
    try:
        descriptor = _descriptor(word)
        if mn_major and bits != 16:
            raise DescriptorError(f"{bits}-bit operands are K-major only")
        if descriptor.swizzle == SWIZZLE_128B_ATOM_32B:
            raise DescriptorError("no such swizzle")
    except DescriptorError as error:
        warp.fault("descriptor", f"operand {what}: {error}")
    if mn_major:
        # All rows of the tile are laid out together; this warp takes its own from them.
        total = 64 if what == "A" else rows
        grid = unit_grid(descriptor, total, k * bits // 8, k, bits, True)
        per = 128 // bits
        grid = grid[:, first // per:(first + rows) // per]
    else:
        total = first + rows
        grid = unit_grid(descriptor, total, k * bits // 8, k, bits, False)[first:]
    units = warp.machine.access.gather_shared(agent, warp.cta.rank, grid.ravel(), 16)
    return elements(units, fmt, bits, mn_major, rows, k)


def _flag(warp, ins, index):
    operand = ins.operands[index]
    if isinstance(operand, Immediate):
        return operand.value
    return 1 if warp.predicate(index) else 0


@operation("wgmma.mma_async", f"sync aligned {_NUMBERS} f32|f16|s32 f16|bf16|tf32|e4m3|e5m2|s8|u8 "
                              "f16|bf16|tf32|e4m3|e5m2|s8|u8 satfinite?", None)
def wgmma(warp, ins):
    shape = next(m for m in ins.modifiers if m.startswith("m64n"))
    n, k = (int(x) for x in shape[4:].split("k"))
    types = [m for m in ins.modifiers if m in _INPUTS or m in ("f32", "s32")]
    d_type, a_type, b_type = types
    a_format, bits, wanted = _INPUTS[a_type]
    b_format = _INPUTS[b_type][0]
    integer = a_type in ("s8", "u8")
    if k != wanted or _INPUTS[b_type][1] != bits or integer != (d_type == "s32"):
        warp.fault("operand", f"wgmma {shape} with types {'.'.join(types)} does not exist")
    groups = _groups(warp)
    machine = warp.machine
    if groups.open is None:
        groups.open = warp.spawn("wgmma.mma_async", proxy="async")
    else:
        machine.clocks.join(groups.open.slot, warp.slot)
    agent = groups.open
    agent.instruction, agent.pc = ins, max(ins.pc, 0)
    first = 16 * (warp.index % 4)
    in_registers = isinstance(ins.operands[1], Vector)
    flags = [_flag(warp, ins, i) for i in range(3, len(ins.operands))]
    scale_d, rest = flags[0] if flags else 1, flags[1:]
    signs, major = ([1, 1], rest) if integer else (rest[:2], rest[2:])
    a_mn = bool(major[0]) if major and not in_registers else False
    b_mn = bool(major[-1]) if major else False
    if in_registers:
        registers = warp.vector(1).astype(np.uint32)
        a_row, a_k = operand_a(16, k, bits)
        if len(registers) != len(a_row):
            warp.fault("operand", f"A has {len(registers)} registers, {len(a_row)} are needed")
        a = np.empty((16, k), np.uint32)
        per = 32 // bits
        shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
        mask = np.uint32((1 << bits) - 1)
        a[a_row, a_k] = registers[:, :, None] >> shifts & mask
    else:
        a = _shared_operand(warp, agent, warp.uniform(1), 16, first, a_format, bits, k, a_mn, "A")
    b = _shared_operand(warp, agent, warp.uniform(2), n, 0, b_format, bits, k, b_mn, "B")
    d_bits = 16 if d_type == "f16" else 32
    row_index, column = accumulator(16, n, d_bits)
    items = ins.operands[0].items
    if len(items) != len(row_index):
        warp.fault("operand", f"D has {len(items)} registers, {len(row_index)} are needed")
    c = np.zeros((16, n), np.uint32)
    shifts = np.arange(32 // d_bits, dtype=np.uint32) * np.uint32(d_bits)
    if scale_d:
        words = warp.vector(0).astype(np.uint32)
        c[row_index, column] = words[:, :, None] >> shifts & np.uint32((1 << d_bits) - 1)
    if integer:
        widen = {"u8": np.uint8, "s8": np.int8}
        wide = [x.astype(np.uint8).view(widen[t]).astype(np.int32) for x, t in ((a, a_type), (b, b_type))]
        d = tc.mma_integer(*wide, c, saturate=ins.has("satfinite"))
    else:
        narrow = dict(window=tc.WGMMA_FP8_BITS, kept_bits=tc.WGMMA_FP8_BITS) if bits == 8 else {}
        negative = [int(s) & 0xFFFFFFFF == 0xFFFFFFFF for s in signs]
        d = tc.mma_float(a, b, c, a_format, b_format, negate_a=negative[0], negate_b=negative[1],
                         d_format=tc.D_F16 if d_type == "f16" else tc.D_F32, **narrow)
    packed = (d[row_index, column] << shifts).sum(axis=-1, dtype=np.uint32)
    for item, value in zip(items, packed):
        warp.write_operand(item, value)
    machine.report.count_mma(f"wgmma {a_type}", 16, n, k)


@row("wgmma.mma_async.sp", f"sync aligned {_NUMBERS}? f32|f16|s32?", None)
def wgmma_sparse(builder, ins):
    raise builder.error("sparse products (wgmma.mma_async.sp) are not modelled")


@operation("wgmma.fence", "sync aligned", "")
def wgmma_fence(warp, ins):
    """Orders register accesses, which are in order here anyway."""


@operation("wgmma.commit_group", "sync aligned", "")
def wgmma_commit(warp, ins):
    groups = _groups(warp)
    groups.committed.append(groups.open)
    groups.open = None


@operation("wgmma.wait_group", "sync aligned", "a")
def wgmma_wait(warp, ins):
    groups = _groups(warp)
    operand = ins.operands[0]
    keep = operand.value if isinstance(operand, Immediate) else warp.uniform(0)
    clocks = warp.machine.clocks
    while len(groups.committed) > keep:
        agent = groups.committed.pop(0)
        if agent is not None:
            clocks.acquire_row(warp.slot, clocks.VC[agent.slot].copy())
            agent.done = True
            agent.retire()
