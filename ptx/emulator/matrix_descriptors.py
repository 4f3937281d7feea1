"""Decoding and checking the descriptors that tensor-core instructions read from registers.

Three words are decoded here: the tcgen05 instruction descriptor (32 bits), the tcgen05 shared-memory matrix
descriptor and the wgmma one (64 bits each).  The encoders live in ``ptx/descriptors.py``; a test holds the
two to each other.  Bit positions: PTX ISA "Instruction descriptor" and "Shared memory descriptor" of tcgen05
and of wgmma, checked against CUTLASS ``cute/arch/mma_sm100_desc.hpp`` and ``mma_sm90_desc.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import tensor_core as tc


class DescriptorError(ValueError):
    """A descriptor that the instruction cannot execute; the message names the field, its value and the rule.
    """


# Swizzle patterns of shared memory: (XOR this many bits, from this bit, of the address shifted right by).
# 128B: bits 6:4 ^= bits 9:7, and so on.
NO_SWIZZLE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM_32B, SWIZZLE_128B_ATOM_64B = range(6)
SWIZZLE_NAMES = ("none", "32B", "64B", "128B", "128B with 32-byte atoms", "128B with 64-byte atoms")
SWIZZLE_BYTES = (16, 32, 64, 128, 128, 128)
_SWIZZLE_MASK = (0, 0x10, 0x30, 0x70, 0x60, 0x40)
_SWIZZLE_SHIFT = (0, 3, 3, 3, 2, 1)


def swizzle(address, mode):
    """The byte addresses (array or int) after the XOR of a swizzle mode; the pattern counts absolute
    addresses.
    """
    return address ^ ((address >> _SWIZZLE_SHIFT[mode]) & _SWIZZLE_MASK[mode])


def bits(word, high, low):
    return (word >> low) & ((1 << (high - low + 1)) - 1)


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded tcgen05 instruction descriptor.

    ``a_format``/``b_format``/``d_format`` are the numbers of ``tensor_core``; ``scale_a_id`` and
    ``scale_b_id`` are byte positions inside a 32-bit scale word.
    """

    kind: str
    m: int
    n: int
    k: int
    a_format: int
    b_format: int
    d_format: int
    sparse: bool
    saturate: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    scale_format: int
    scale_a_id: int
    scale_b_id: int
    max_shift: int

    @property
    def packed_fp4(self) -> bool:
        """Operands are two E2M1 codes a byte without padding."""
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def element_bits(self) -> int:
        """Bits of one element as the address formulas of shared memory count them."""
        if self.packed_fp4:
            return 4
        return {"tf32": 32, "f16": 16}.get(self.kind, 8)


_D_F32, _D_F16, _D_S32 = tc.D_F32, tc.D_F16, 2
_PLAIN_FORMATS = {
    "f16": {0: tc.F16, 1: tc.BF16},
    "tf32": {2: tc.TF32},
    "f8f6f4": {0: tc.E4M3, 1: tc.E5M2, 3: tc.E2M3, 4: tc.E3M2, 5: tc.E2M1},
    "i8": {0: tc.U8, 1: tc.S8},
}
_PLAIN_FORMATS["mxf8f6f4"] = _PLAIN_FORMATS["f8f6f4"]
KINDS = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")


def _expect(condition, field, value, rule):
    if not condition:
        raise DescriptorError(f"instruction descriptor: {field} is {value}; {rule}")


def decode_instruction_descriptor(word, kind, *, cta_group=1, weight_stationary=False, scale_vector=None):
    """Decode and check a tcgen05 instruction descriptor.

    Args:
        word: the 32-bit descriptor.
        kind: one of ``KINDS``.
        cta_group: 1 or 2.
        weight_stationary: the ``.ws`` form.
        scale_vector: scales per row in one MMA, from the instruction text (1, 2, 4); None for unscaled kinds.

    Raises:
        DescriptorError: a reserved bit is set, a code is not defined, or M, N, K are illegal for the kind.
    """
    word = int(word) & 0xFFFFFFFF
    scaled = kind.startswith("mx")
    sparse = bool(bits(word, 2, 2))
    _expect(not sparse, "sparsity (bit 2)", 1, "the dense instruction needs 0")
    _expect(bits(word, 1, 0) == 0, "sparsity selector (bits 1:0)", bits(word, 1, 0),
            "a dense instruction needs 0")
    _expect(bits(word, 6, 6) == 0, "bit 6", 1, "it is reserved and must be 0")
    a_code, b_code = bits(word, 9, 7), bits(word, 12, 10)
    d_format, saturate, scale_format, ids, max_shift = _D_F32, False, tc.UE8M0, (0, 0), 0
    if scaled:
        _expect(bits(word, 3, 3) == 0, "bit 3", 1, f"kind::{kind} reserves it")
        _expect(bits(word, 26, 24) == 0, "bits 26:24", bits(word, 26, 24), f"kind::{kind} reserves them")
        m = bits(word, 28, 27) * 128
        ids = (bits(word, 30, 29), bits(word, 5, 4))
        scale_format = tc.UE8M0 if bits(word, 23, 23) else tc.UE4M3
    else:
        _expect(bits(word, 23, 23) == 0, "bit 23", 1, f"kind::{kind} reserves it")
        _expect(bits(word, 29, 29) == 0, "bit 29", 1, f"kind::{kind} reserves it")
        m = bits(word, 28, 24) * 16
        d_format, saturate, max_shift = bits(word, 5, 4), bool(bits(word, 3, 3)), bits(word, 31, 30)
        d_format = {0: _D_F16, 1: _D_F32, 2: _D_S32}.get(d_format, d_format)
    n = bits(word, 22, 17) * 8
    if kind in ("mxf4", "mxf4nvf4"):
        _expect(a_code == 1, "A format (bits 9:7)", a_code, f"kind::{kind} takes only 1 (E2M1)")
        _expect(b_code == 1, "B format (bits 12:10)", b_code,
                f"kind::{kind} takes only 1 (E2M1), bit 12 is 0")
        _expect(not bits(word, 16, 15), "major (bits 16:15)", bits(word, 16, 15),
                f"kind::{kind} is K-major only")
        _expect(kind == "mxf4nvf4" or scale_format == tc.UE8M0, "scale type (bit 23)", 0,
                "kind::mxf4 takes UE8M0 (1)")
        _expect(not bits(word, 31, 31), "K size (bit 31)", 1, "K = 96 exists on sm_103a only")
        a_format = b_format = tc.E2M1
    else:
        table = _PLAIN_FORMATS[kind]
        _expect(a_code in table, "A format (bits 9:7)", a_code, f"kind::{kind} defines {sorted(table)}")
        _expect(b_code in table, "B format (bits 12:10)", b_code, f"kind::{kind} defines {sorted(table)}")
        a_format, b_format = table[a_code], table[b_code]
        if kind == "f16":
            _expect(a_format == b_format, "B format (bits 12:10)", b_code,
                    f"kind::f16 needs A's format, {a_code}")
    if kind == "mxf8f6f4":
        _expect(scale_format == tc.UE8M0, "scale type (bit 23)", 0, "kind::mxf8f6f4 takes UE8M0 (1)")
        _expect(not bits(word, 31, 31), "bit 31", 1, "kind::mxf8f6f4 reserves it")
    if not scaled:
        _check_d_format(kind, d_format, a_format)
        _expect(kind == "i8" or not saturate, "saturate (bit 3)", 1, f"kind::{kind} reserves it")
        _expect(weight_stationary or not max_shift, "maximum shift (bits 31:30)", max_shift,
                "only .ws uses it")
        _expect(kind != "i8" or not bits(word, 14, 13), "negate (bits 14:13)", bits(word, 14, 13),
                "kind::i8 has none")
    k = {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(kind, 32)
    check_shape(kind, m, n, cta_group=cta_group, weight_stationary=weight_stationary,
                b_mn_major=bool(bits(word, 16, 16)))
    if scaled:
        _check_scale_ids(kind, ids, scale_vector, scale_format)
    return InstructionDescriptor(
        kind=kind, m=m, n=n, k=k, a_format=a_format, b_format=b_format, d_format=d_format, sparse=sparse,
        saturate=saturate, negate_a=bool(bits(word, 13, 13)), negate_b=bool(bits(word, 14, 14)),
        a_mn_major=bool(bits(word, 15, 15)), b_mn_major=bool(bits(word, 16, 16)), scale_format=scale_format,
        scale_a_id=ids[0], scale_b_id=ids[1], max_shift=max_shift,
    )


def _check_d_format(kind, d_format, a_format):
    if kind == "i8":
        allowed = (_D_S32,)
    elif kind == "f8f6f4" or (kind == "f16" and a_format == tc.F16):
        allowed = (_D_F16, _D_F32)
    else:
        allowed = (_D_F32,)
    _expect(d_format in allowed, "D format (bits 5:4)", {1: 0, 0: 1, 2: 2}.get(d_format, d_format),
            f"kind::{kind} defines " + ", ".join({0: "1 (F32)", 1: "0 (F16)", 2: "2 (S32)"}[d]
                                                 for d in allowed))


def _check_scale_ids(kind, ids, scale_vector, scale_format):
    if scale_format == tc.UE4M3:
        _expect(scale_vector == 4, "scale type (bit 23)", "0 (UE4M3)", "it needs scale_vec::4X (block 16)")
    allowed = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[scale_vector]
    for name, value in zip(("A scale id (bits 30:29)", "B scale id (bits 5:4)"), ids):
        _expect(value in allowed, name, value, f"kind::{kind} with {scale_vector} scales a row takes "
                                               f"{allowed}")


def check_shape(kind, m, n, *, cta_group, weight_stationary=False, b_mn_major=False):
    """Raise DescriptorError unless M x N is legal (PTX ISA, tcgen05 matrix shapes)."""
    where = f"kind::{kind}, cta_group::{cta_group}" + (", .ws" if weight_stationary else "")
    if weight_stationary:
        _expect(cta_group == 1 and not kind.startswith("mx"), ".ws", where,
                "it is for cta_group::1 and unscaled kinds")
        _expect(m in (32, 64, 128), "M", m, f"{where} takes 32, 64, 128")
        _expect(n in (64, 128, 256), "N", n, f"{where} takes 64, 128, 256")
        return
    if cta_group == 1:
        rows = (128,) if kind.startswith("mx") else (64, 128)
    else:
        rows = (128, 256)
    _expect(m in rows, "M", m, f"{where} takes {rows}")
    step = 8 * cta_group
    if kind == "i8":
        legal = n in (8, 16, 24, 32) or (48 <= n <= 256 and n % 16 == 0) if cta_group == 1 else n % 32 == 0
        _expect(legal and 8 <= n <= 256, "N", n, f"{where} takes 8, 16, 24, 32, 48..256 by 16 (pairs: "
                                                 f"32..256 by 32)")
        return
    if b_mn_major and kind in ("f8f6f4", "mxf8f6f4"):
        step *= 2
    _expect(step <= n <= 256 and n % step == 0, "N", n, f"{where} takes {step}..256 in steps of {step}")


@dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded shared-memory matrix descriptor; all quantities in bytes."""

    start: int
    leading_offset: int
    stride_offset: int
    swizzle: int
    base_offset: int

    def address(self, row, k_byte):
        """Shared-memory byte addresses of a K-major operand.

        Args:
            row: row of A, or column of B (array).
            k_byte: byte offset along K (array), counted in the units that are packed without gaps.
        """
        if self.swizzle == NO_SWIZZLE:
            linear = ((row % 8) * 16 + (row // 8) * self.stride_offset + k_byte % 16
                      + (k_byte // 16) * self.leading_offset)
            return self.start + linear
        width = SWIZZLE_BYTES[self.swizzle]
        return self._swizzled((row % 8) * width + (row // 8) * self.stride_offset + k_byte)

    def address_mn_major(self, mn, k, element_bytes):
        """Shared-memory byte addresses of an MN-major operand: index along M or N, and along K, in elements.
        """
        if self.swizzle == NO_SWIZZLE:
            unit = 16 // element_bytes
            linear = ((mn % unit) * element_bytes + (mn // unit) * self.stride_offset + (k % 8) * 16
                      + (k // 8) * self.leading_offset)
            return self.start + linear
        width = SWIZZLE_BYTES[self.swizzle]
        span = width // element_bytes
        lines = 4 if self.swizzle == SWIZZLE_128B_ATOM_32B else 8
        return self._swizzled((mn % span) * element_bytes + (mn // span) * self.leading_offset
                              + (k % lines) * width + (k // lines) * self.stride_offset)

    def _swizzled(self, linear):
        address = self.start + linear
        if self.base_offset == 0:
            return swizzle(address, self.swizzle)
        # The pattern starts at the line named by the base offset instead of at a multiple of its period.
        shifted = address - 128 * self.base_offset
        return address ^ ((shifted >> _SWIZZLE_SHIFT[self.swizzle]) & _SWIZZLE_MASK[self.swizzle])


_TCGEN05_SWIZZLE = {0: NO_SWIZZLE, 1: SWIZZLE_128B_ATOM_32B, 2: SWIZZLE_128B, 4: SWIZZLE_64B, 6: SWIZZLE_32B}
_WGMMA_SWIZZLE = {0: NO_SWIZZLE, 1: SWIZZLE_128B, 2: SWIZZLE_64B, 3: SWIZZLE_32B}


def decode_tcgen05_matrix_descriptor(word):
    """Decode a tcgen05 shared-memory descriptor; DescriptorError where a fixed or reserved bit is wrong."""
    word = int(word) & 0xFFFFFFFFFFFFFFFF

    def expect(condition, field, value, rule):
        if not condition:
            raise DescriptorError(f"shared-memory descriptor {word:#018x}: {field} is {value}; {rule}")

    expect(bits(word, 48, 46) == 1, "version (bits 48:46)", bits(word, 48, 46),
           "tcgen05 needs 0b001 (a wgmma descriptor has 0 there)")
    expect(bits(word, 15, 14) == 0, "bits 15:14", bits(word, 15, 14), "they are reserved and must be 0")
    expect(bits(word, 31, 30) == 0, "bits 31:30", bits(word, 31, 30), "they are reserved and must be 0")
    expect(bits(word, 52, 52) == 0, "leading-offset mode (bit 52)", 1, "absolute mode exists on sm_103a only")
    expect(bits(word, 60, 53) == 0, "bits 60:53", bits(word, 60, 53), "they are reserved and must be 0")
    code = bits(word, 63, 61)
    expect(code in _TCGEN05_SWIZZLE, "swizzle (bits 63:61)", code, "defined are 0, 1, 2, 4, 6")
    mode, base = _TCGEN05_SWIZZLE[code], bits(word, 51, 49)
    expect(mode != NO_SWIZZLE or base == 0, "base offset (bits 51:49)", base,
           "without a swizzle it must be 0")
    return MatrixDescriptor(bits(word, 13, 0) << 4, bits(word, 29, 16) << 4, bits(word, 45, 32) << 4, mode,
                            base)


def decode_wgmma_matrix_descriptor(word):
    """Decode a wgmma shared-memory descriptor; DescriptorError where a reserved bit is set."""
    word = int(word) & 0xFFFFFFFFFFFFFFFF
    for high, low in ((15, 14), (31, 30), (48, 46), (61, 52)):
        if bits(word, high, low):
            raise DescriptorError(f"wgmma descriptor {word:#018x}: bits {high}:{low} are "
                                  f"{bits(word, high, low)}; "
                                  "they are reserved and must be 0 (a tcgen05 descriptor sets bit 46)")
    mode = _WGMMA_SWIZZLE[bits(word, 63, 62)]
    return MatrixDescriptor(bits(word, 13, 0) << 4, bits(word, 29, 16) << 4, bits(word, 45, 32) << 4, mode,
                            bits(word, 51, 49))


def check_operand_layout(descriptor, *, element_bits, mn_major):
    """DescriptorError where the swizzle cannot be combined with the operand's major and element size."""
    name = SWIZZLE_NAMES[descriptor.swizzle]
    atom32 = descriptor.swizzle == SWIZZLE_128B_ATOM_32B
    if not mn_major:
        if atom32:
            raise DescriptorError(f"shared-memory descriptor: swizzle {name} has no K-major layout")
        return
    if element_bits < 8:
        raise DescriptorError(f"shared-memory descriptor: {element_bits}-bit operands are K-major only")
    if element_bits == 32 and not atom32:
        raise DescriptorError(f"shared-memory descriptor: MN-major 32-bit operands need the 128B swizzle "
                              f"with "
                              f"32-byte atoms, not {name}")
    if element_bits != 32 and atom32:
        raise DescriptorError(f"shared-memory descriptor: swizzle {name} is for MN-major 32-bit operands, "
                              f"these have {element_bits} bits")


def padded_fp_elements(units, fmt):
    """The codes of FP4 or FP6 elements in padded 16-byte units (16 elements a unit).

    Args:
        units: uint8 [..., 16].
        fmt: ``tensor_core.E2M1``, ``E2M3`` or ``E3M2``.

    Returns:
        uint8 [..., 16]; the pad bytes (the last 8 or 4 of a unit) are not looked at.
    """
    width = tc.FORMAT_BITS[fmt]
    used = units[..., :2 * width].astype(np.uint8)
    flat = np.unpackbits(used, axis=-1, bitorder="little").reshape(*units.shape[:-1], 16, width)
    return (flat << np.arange(width, dtype=np.uint8)).sum(axis=-1).astype(np.uint8)
