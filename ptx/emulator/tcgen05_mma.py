"""tcgen05.mma: operands from shared and tensor memory, the product, and the accumulator.

PTX ISA, "tcgen05.mma".  Collectors are permission to reuse and nothing else, so they are accepted without
effect. Sparse products, zero-column masks, ``.ashift`` and scale-input-d are refused: no source says what
they compute bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import tensor_core as tc
from .forms import operation, row
from .matrix_descriptors import (DescriptorError, check_operand_layout, decode_instruction_descriptor,
                                 decode_tcgen05_matrix_descriptor, padded_fp_elements)
from .model import Address, Immediate, Vector
from .tcgen05 import group_of, pair_of, start, warp_access
from .tcgen05_state import MMA, state_of
from .tensor_memory import (accumulator_cells, operand_lanes, scale_cells_a, scale_cells_b, split_address)

_GROUP = "cta_group::1|cta_group::2"
_COLLECTOR = ("collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard?")
_COLLECTORS_B = "|".join(f"collector::b{i}::{use}" for i in range(4)
                         for use in ("fill", "use", "lastuse", "discard"))
_PLAIN = "kind::f16|kind::tf32|kind::f8f6f4|kind::i8"
_SCALED = "kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4"


@lru_cache(maxsize=1024)
def _instruction(word, kind, cta_group, weight_stationary, scale_vector):
    return decode_instruction_descriptor(word, kind, cta_group=cta_group, weight_stationary=weight_stationary,
                                         scale_vector=scale_vector)


@lru_cache(maxsize=1024)
def _matrix(word):
    return decode_tcgen05_matrix_descriptor(word)


@lru_cache(maxsize=512)
def unit_grid(descriptor, rows, k_bytes, k, element_bits, mn_major):
    """Shared offsets of the 16-byte units that hold an operand.

    Returns:
        int64 [rows, K bytes / 16] (K-major), or [K, rows * element bytes / 16] (MN-major).
    """
    if mn_major:
        element_bytes = element_bits // 8
        per = 16 // element_bytes
        k_index, mn = np.meshgrid(np.arange(k), np.arange(0, rows, per), indexing="ij")
        return descriptor.address_mn_major(mn, k_index, element_bytes)
    row_index, kb = np.meshgrid(np.arange(rows), np.arange(0, k_bytes, 16), indexing="ij")
    return descriptor.address(row_index, kb)


def elements(units, fmt, kind_bits, mn_major, rows, k):
    """Operand words uint32 [rows, K] from the 16-byte units of ``unit_grid``."""
    if mn_major:
        word = {8: np.uint8, 16: np.uint16, 32: np.uint32}[kind_bits]
        return np.ascontiguousarray(units.view(word).reshape(k, rows).T).astype(np.uint32)
    if kind_bits == 8 and tc.FORMAT_BITS[fmt] < 8:
        return padded_fp_elements(units.reshape(rows, -1, 16), fmt).reshape(rows, k).astype(np.uint32)
    flat = np.ascontiguousarray(units.reshape(rows, -1))
    if kind_bits == 4:
        return np.stack([flat & 15, flat >> 4], axis=-1).reshape(rows, k)
    return flat.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[kind_bits]).astype(np.uint32)


def _from_tensor_memory(words, fmt, bits, k):
    """Operand words [rows, K] from tensor-memory cells uint32 [rows, columns]."""
    flat = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        return np.stack([flat & 15, flat >> 4], axis=-1).reshape(len(words), k)
    if bits == 8:
        # Narrow formats sit in the middle of their byte: FP4 in bits 5:2, FP6 in bits 6:1.
        shift = {4: 2, 6: 1}.get(tc.FORMAT_BITS[fmt], 0)
        return (flat >> shift).astype(np.uint32)
    return flat.view(np.uint16 if bits == 16 else np.uint32).astype(np.uint32)


class Product:
    """One tcgen05.mma with its operands decoded, ready to run."""

    def __init__(self, warp, ins, lane, idesc, d, a, b, a_in_tensor_memory, accumulate, scales, disabled,
                 group, weight_stationary):
        self.ins, self.idesc, self.d, self.group = ins, idesc, d, group
        self.accumulate, self.scales, self.disabled = accumulate, scales, disabled
        self.weight_stationary, self.a_in_tensor_memory = weight_stationary, a_in_tensor_memory
        self.ctas = pair_of(warp.cta) if group == 2 else [warp.cta]
        self.state = state_of(warp.machine)
        self.a = a
        parts = len(self.ctas)
        self.a_rows, self.b_rows = idesc.m // parts, idesc.n // parts
        self.k_bytes = idesc.k * idesc.element_bits // 8
        bits = idesc.element_bits
        self.a_grid = self.b_grid = None
        what = "B"
        try:
            descriptor = _matrix(b)
            check_operand_layout(descriptor, element_bits=bits, mn_major=idesc.b_mn_major)
            self.b_grid = unit_grid(descriptor, self.b_rows, self.k_bytes, idesc.k, bits, idesc.b_mn_major)
            what = "A"
            if not a_in_tensor_memory:
                descriptor = _matrix(a)
                check_operand_layout(descriptor, element_bits=bits, mn_major=idesc.a_mn_major)
                self.a_grid = unit_grid(descriptor, self.a_rows, self.k_bytes, idesc.k, bits,
                                        idesc.a_mn_major)
            elif idesc.a_mn_major:
                raise DescriptorError("instruction descriptor: A major (bit 15) is 1; A in tensor memory is "
                                      "K-major")
            for fmt, mn_major in ((idesc.a_format, idesc.a_mn_major), (idesc.b_format, idesc.b_mn_major)):
                if mn_major and tc.FORMAT_BITS[fmt] < 8:
                    raise DescriptorError("instruction descriptor: operands of less than 8 bits are K-major "
                                          "only")
        except DescriptorError as error:
            warp.fault("descriptor", f"operand {what}: {error}", lane=lane)

        self._check_overlap(warp, lane)

    def _check_overlap(self, warp, lane):
        """The accumulator must not lie over A or the scale factors that the same instruction reads."""
        base, width = split_address(self.d)[1], int(self._accumulator()[2].max()) + 1
        others = []
        if self.a_in_tensor_memory:
            others.append(("A", split_address(self.a)[1], self.k_bytes // 4))
        if self.scales is not None:
            for name, address, rows in zip(("A's scales", "B's scales"), self.scales[1],
                                           (self.idesc.m // len(self.ctas), self.idesc.n)):
                others.append((name, split_address(address)[1], -(-rows // 32)))
        for name, start_column, count in others:
            if start_column < base + width and base < start_column + count:
                warp.fault("tensor-memory", f"columns {base}..{base + width - 1} of D overlap columns "
                                            f"{start_column}.."
                           f"{start_column + count - 1} of {name}", lane=lane, address=self.d)

    def _accumulator(self):
        return accumulator_cells(self.idesc.m, self.idesc.n, self.group, self.weight_stationary)

    def _results(self):
        """(CTA, which elements, lanes, columns) of the accumulator in each CTA, lanes that are left alone
        taken out.
        """
        cta_of, lane, column = self._accumulator()
        d_lane, d_column = split_address(self.d)
        lane, column = lane + d_lane, column + d_column
        for part, cta in enumerate(self.ctas):
            mine = cta_of == part
            if self.disabled is not None:
                mine = mine & ~self.disabled[part][lane]
            if mine.any():
                yield cta, mine, lane[mine], column[mine]

    def claim(self, toucher):
        for cta, _, lane, column in self._results():
            toucher.write(cta, lane, column, MMA, self.ins, claim=True)

    def run(self, toucher):
        idesc = self.idesc
        a = np.concatenate([self._read_a(toucher, cta, part) for part, cta in enumerate(self.ctas)])
        b = np.concatenate([self._read_shared(toucher, cta, self.b_grid, idesc.b_format, idesc.b_mn_major,
                                              self.b_rows) for cta in self.ctas])
        c = np.zeros((idesc.m, idesc.n), np.uint32)
        results = list(self._results())
        if self.accumulate:
            for cta, mine, lane, column in results:
                toucher.read(cta, lane, column, MMA, self.ins)
                c[mine] = self.state.memory(cta).cells[lane, column]
        out = self._multiply(toucher, a, b, c)
        for cta, mine, lane, column in results:
            toucher.write(cta, lane, column, MMA, self.ins)
            self.state.memory(cta).cells[lane, column] = out[mine]

    def _read_shared(self, toucher, cta, grid, fmt, mn_major, rows):
        # Padded FP4 and FP6 units: nobody need have written the padding.
        padded = self.idesc.element_bits == 8 and not mn_major and tc.FORMAT_BITS[fmt] < 8
        units = warp_access(toucher, cta, grid.ravel(), 2 * tc.FORMAT_BITS[fmt] if padded else 16)
        return elements(units, fmt, self.idesc.element_bits, mn_major, rows, self.idesc.k)

    def _read_a(self, toucher, cta, part):
        idesc = self.idesc
        if not self.a_in_tensor_memory:
            return self._read_shared(toucher, cta, self.a_grid, idesc.a_format, idesc.a_mn_major, self.a_rows)
        cta_of, lanes = operand_lanes(idesc.m, self.group, self.weight_stationary)
        base_lane, base = split_address(self.a)
        mine = cta_of[0] == part
        lanes = lanes[:, mine] + base_lane
        columns = base + np.arange(self.k_bytes // 4)
        memory = self.state.memory(cta)
        copies = []
        for copy in lanes:
            lane_grid, column_grid = np.meshgrid(copy, columns, indexing="ij")
            toucher.read(cta, lane_grid, column_grid, MMA, self.ins)
            copies.append(memory.cells[lane_grid, column_grid])
        for other in copies[1:]:
            if not np.array_equal(other, copies[0]):
                toucher.who.fault("tensor-memory", f"the copies of A at lanes {lanes[0][0]} and "
                                                   f"{lanes[1][0]} differ: this "
                                  "shape reads A once for each part of the datapath")
        return _from_tensor_memory(copies[0], idesc.a_format, idesc.element_bits, idesc.k)

    def _scales(self, toucher, cta, address, lanes, columns, byte, count):
        """Scale bytes [rows, count] of one CTA; every copy must agree (with forgiving_lanes the first one
        counts).
        """
        base_lane, base = split_address(address)
        lanes, columns = lanes + base_lane, columns + base
        memory = self.state.memory(cta)
        toucher.read(cta, lanes, columns, MMA, self.ins)
        words = memory.cells[lanes, columns]
        picked = words >> np.uint32(8 * byte) & np.uint32(0xFFFFFFFF >> (32 - 8 * count))
        if (picked != picked[0]).any() and not toucher.who.machine.checks.forgiving_lanes:
            at = np.argwhere(picked != picked[0])[0]
            lane, column = int(lanes[tuple(at)]), int(columns[tuple(at)])
            toucher.who.fault("tensor-memory", f"scale factors at lane {lane}, column {column} differ from "
                                               f"their copy in "
                              f"lane {int(lanes[0, at[1]])}: every 32-lane quarter holds them")
        return np.ascontiguousarray(picked[0][:, None].astype("<u4")).view(np.uint8).reshape(-1, 4)[:, :count]

    def _multiply(self, toucher, a, b, c):
        idesc = self.idesc
        negate = dict(negate_a=idesc.negate_a, negate_b=idesc.negate_b)
        if idesc.kind == "i8":
            widen = {tc.U8: np.uint8, tc.S8: np.int8}
            wide_a, wide_b = (x.astype(np.uint8).view(widen[f]).astype(np.int32)
                              for x, f in ((a, idesc.a_format), (b, idesc.b_format)))
            return tc.mma_integer(wide_a, wide_b, c, saturate=idesc.saturate)
        if self.scales is None:
            return tc.mma_float(a, b, c, idesc.a_format, idesc.b_format, d_format=idesc.d_format, **negate)
        count, (address_a, address_b) = self.scales
        cta_of, lanes, columns = scale_cells_a(idesc.m, self.group)
        scale_a = np.concatenate([
            self._scales(toucher, cta, address_a, lanes[:, cta_of[0] == part], columns[:, cta_of[0] == part],
                         idesc.scale_a_id, count) for part, cta in enumerate(self.ctas)])
        lanes, columns = scale_cells_b(idesc.m, idesc.n, self.group)
        each = [self._scales(toucher, cta, address_b, lanes, columns, idesc.scale_b_id, count)
                for cta in self.ctas]
        results = []
        for scale_b in each:
            if idesc.kind == "mxf8f6f4":
                results.append(tc.mma_float(a, b, c, idesc.a_format, idesc.b_format, scale_a=scale_a[:, 0],
                                            scale_b=scale_b[:, 0], **negate))
            else:
                results.append(tc.mma_fp4(a, b, c, scale_a, scale_b, idesc.scale_format, **negate))
            if len(each) == 1 or np.array_equal(each[0], each[1]):
                return results[0]
        # Each CTA computes its own rows with its own copy of B's scales.
        half = idesc.m // 2
        return np.concatenate([results[0][:half], results[1][half:]])


def _issue(warp, ins, *, kind, scale_vector, scaled, weight_stationary):
    """Decode the operands of the one issuing lane, check them, and queue the product."""
    group = group_of(warp, ins)
    if ins.has("ashift"):
        warp.fault("unsupported", "tcgen05.mma with .ashift is not modelled")
    for lane in warp.lanes:
        first = ins.operands[1]
        in_tensor_memory = isinstance(first, Address)
        d = int(warp.address(0)[lane]) & 0xFFFFFFFF
        a = int((warp.address(1) if in_tensor_memory else warp.values(1))[lane])
        b, word = int(warp.values(2)[lane]), int(warp.values(3)[lane]) & 0xFFFFFFFF
        rest = list(range(4, len(ins.operands)))
        scales = disabled = None
        if scaled:
            scales = (scale_vector, tuple(int(warp.address(i)[lane]) & 0xFFFFFFFF for i in rest[:2]))
            rest = rest[2:]
        elif rest and isinstance(ins.operands[rest[0]], Vector):
            masks = [int(x) & 0xFFFFFFFF for x in warp.vector(rest[0])[:, lane]]
            if len(masks) != 4 * group:
                warp.fault("operand", f"{len(masks)} disable-output-lane masks; cta_group::{group} takes "
                                      f"{4 * group}",
                           lane=lane)
            bits = np.array([masks[i // 32] >> (i % 32) & 1 for i in range(128 * group)], np.bool_)
            disabled = bits.reshape(group, 128)
            rest = rest[1:]
        if not rest:
            warp.fault("operand", "the enable-input-d predicate is missing", lane=lane)
        accumulate = bool(warp.predicate(rest[0]) >> int(lane) & 1)
        for extra in rest[1:]:
            operand = ins.operands[extra]
            value = operand.value if isinstance(operand, Immediate) else int(warp.values(extra)[lane])
            if value:
                warp.fault("unsupported", "a zero-column mask is not modelled" if weight_stationary else
                           f"scale-input-d {value} is not modelled", lane=lane)
        try:
            idesc = _instruction(word, kind, group, weight_stationary, scale_vector)
        except DescriptorError as error:
            warp.fault("descriptor", f"{error} (descriptor {word:#010x})", lane=lane)
        base_lane = split_address(d)[0]
        if base_lane not in ((0, 16) if idesc.m == 64 and not weight_stationary else (0,)):
            warp.fault("tensor-memory", f"D at lane {base_lane}: M={idesc.m} starts at lane 0"
                       + (" or 16" if idesc.m == 64 else ""), lane=lane)
        if in_tensor_memory and split_address(a)[0] != base_lane:
            warp.fault("tensor-memory", f"A at lane {split_address(a)[0]}, D at lane {base_lane}: they start "
                                        f"at the same "
                       "lane", lane=lane)
        product = Product(warp, ins, lane, idesc, d, a, b, in_tensor_memory, accumulate, scales, disabled,
                          group, weight_stationary)
        start(warp, ins, ins.text, product.run, product.claim)
        warp.machine.report.count_mma(f"tcgen05 {kind}", idesc.m, idesc.n, idesc.k)


@operation("tcgen05.mma", f"{_GROUP} {_PLAIN} {_COLLECTOR} ashift?", None)
def tcgen05_mma(warp, ins):
    kind = ins.one_of(*_PLAIN.split("|"))[6:]
    _issue(warp, ins, kind=kind, scale_vector=None, scaled=False, weight_stationary=False)


@operation("tcgen05.mma.ws", f"cta_group::1 {_PLAIN} {_COLLECTORS_B}?", None)
def tcgen05_mma_ws(warp, ins):
    kind = ins.one_of(*_PLAIN.split("|"))[6:]
    _issue(warp, ins, kind=kind, scale_vector=None, scaled=False, weight_stationary=True)


_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}


@operation("tcgen05.mma", f"{_GROUP} {_SCALED} block_scale "
                          f"scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32? "
                          f"{_COLLECTOR}", None)
def tcgen05_mma_scaled(warp, ins):
    kind = ins.one_of(*_SCALED.split("|"))[6:]
    size = ins.one_of(*_VECTORS, "block16", "block32")
    if size in _VECTORS:
        vector = _VECTORS[size]
    elif size is None and kind == "mxf4nvf4":
        warp.fault("operand", "kind::mxf4nvf4 needs a scale vector size")
    else:
        vector = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4 if size == "block16" else 2}[kind]
    allowed = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}[kind]
    if vector not in allowed or (size == "block16" and kind != "mxf4nvf4"):
        warp.fault("operand", f"kind::{kind} with .{size} does not exist")
    _issue(warp, ins, kind=kind, scale_vector=vector, scaled=True, weight_stationary=False)


@row("tcgen05.mma.sp", f"{_GROUP}? {_PLAIN}|{_SCALED} block_scale? {_COLLECTOR}", None)
@row("tcgen05.mma.ws.sp", f"{_GROUP}? {_PLAIN}", None)
def tcgen05_mma_sparse(builder, ins):
    raise builder.error("sparse products (tcgen05.mma.sp) are not modelled")

