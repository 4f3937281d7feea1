"""tcgen05 through PTX: products of every kind against recorded words and the arithmetic model, copies,
allocation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx import emulator
from msa_cudacore.ptx.emulator import tensor_core as tc
from msa_cudacore.ptx.emulator import tensor_memory as tm

sys.path.insert(0, str(Path(__file__).parent))
from product_kernel import run, shared_descriptor  # noqa: E402
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

WORDS = json.loads((Path(__file__).parent / "data" / "b200_mma_words.json").read_text())["words"]
FORMATS = {
    "f16": 0,
    "bf16": 1,
    "tf32": 2,
    "e4m3": 0,
    "e5m2": 1,
    "e2m3": 3,
    "e3m2": 4,
    "e2m1": 5,
    "u8": 0,
    "s8": 1,
}


def pack_row(values, fmt, padded):
    """32 bytes of K of one row, as shared memory holds them."""
    values = np.array(values, np.uint32)
    if fmt == "tf32":
        return values.view(np.uint8)
    if fmt in ("f16", "bf16"):
        return (values >> (16 if fmt == "bf16" else 0)).astype(np.uint16).view(np.uint8)
    codes = values.astype(np.uint8)
    if fmt == "e2m1" and not padded:
        return codes[::2] & 15 | codes[1::2] << 4
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(fmt, 8)
    if bits == 8:
        return codes
    row = np.full((2, 16), 0xA5, np.uint8)
    for unit in range(2):
        stream = sum(
            int(c & (1 << bits) - 1) << (bits * i) for i, c in enumerate(codes[16 * unit : 16 * unit + 16])
        )
        row[unit, : 2 * bits] = np.frombuffer(stream.to_bytes(2 * bits, "little"), np.uint8)
    return row.ravel()


def descriptor(word):
    kind = word["kind"]
    a, b = FORMATS[word["a_format"]], FORMATS[word["b_format"]]
    if kind in ("mxf4", "mxf4nvf4"):
        return 1 << 7 | 1 << 10 | 1 << 17 | (word["scale_type"] == "ue8m0") << 23 | 1 << 27
    if kind == "mxf8f6f4":
        return a << 7 | b << 10 | 1 << 17 | 1 << 23 | 1 << 27
    d = {"f16": 0, "f32": 1, "s32": 2}[word["d"]]
    return bool(word["saturate"]) << 3 | d << 4 | a << 7 | b << 10 | 1 << 17 | 8 << 24


@pytest.mark.parametrize("word", WORDS, ids=[w["name"] for w in WORDS])
def test_recorded_word_comes_out_of_the_instruction(word):
    """Row 77 of A and column 5 of B hold the recorded operands, everything else is zero."""
    padded = word["kind"] in ("f8f6f4", "mxf8f6f4")
    a, b = np.zeros((128, 32), np.uint8), np.zeros((8, 32), np.uint8)
    a[77] = pack_row(word["a"], word["a_format"], padded)
    b[5] = pack_row(word["b"], word["b_format"], padded)
    c = np.zeros((128, 8), np.uint32)
    c[77, 5] = word["c"]
    kind, scales = f"kind::{word['kind']}", None
    if word["scale_a"] is not None:
        count = len(word["scale_a"])
        kind += f".block_scale.scale_vec::{count}X"
        one = 0x7F if word["scale_type"] == "ue8m0" else 0x38
        rows = np.full((128, 4), one, np.uint8), np.full((8, 4), one, np.uint8)
        rows[0][77, :count], rows[1][5, :count] = word["scale_a"], word["scale_b"]
        # Row m of A: lane m % 32 of every quarter, column m / 32.
        sa = np.tile(rows[0].view(np.uint32).reshape(4, 32).T, (4, 1))
        sb = np.zeros((128, 1), np.uint32)
        for quarter in range(4):
            sb[32 * quarter : 32 * quarter + 8, 0] = rows[1].view(np.uint32)[:, 0]
        scales = sa, sb
    d = run(kind, descriptor(word), a, b, c, scales=scales)
    expected = np.zeros_like(d)
    if word["scale_a"] is not None:
        # A NaN scale spoils its whole row or column, zeros included.
        spoiled_row = any(
            x & 0x7F == 0x7F if word["scale_type"] == "ue4m3" else x == 0xFF for x in word["scale_a"]
        )
        spoiled_column = any(
            x & 0x7F == 0x7F if word["scale_type"] == "ue4m3" else x == 0xFF for x in word["scale_b"]
        )
        expected[77] = 0x7FFFFFFF if spoiled_row else 0
        expected[:, 5] = np.where(spoiled_column, 0x7FFFFFFF, expected[:, 5])
    finite = {"f32": 0x7F800000, "f16": 0x7C00}.get(word["d"])
    mask = np.ones(d.shape, bool)
    if finite is not None and word["scale_a"] is None:
        # Special operands meet the zeros of the other rows and columns; only the recorded element is
        # compared.
        mask[77], mask[:, 5] = False, False
    expected[77, 5], mask[77, 5] = word["result"], True
    np.testing.assert_array_equal(d[mask], expected[mask])


def random_codes(rng, fmt, shape):
    bits = tc.FORMAT_BITS[fmt]
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint32)
    if fmt == tc.E4M3:
        codes = np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
    if fmt == tc.E5M2:
        codes = np.where(codes & 0x7C == 0x7C, codes ^ 0x40, codes)
    if fmt == tc.F16:
        codes = np.where(codes & 0x7C00 == 0x7C00, codes ^ 0x4000, codes)
    return codes


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
@pytest.mark.parametrize(
    "a_format, b_format, idesc",
    [(tc.F16, tc.F16, 1 << 4), (tc.E4M3, tc.E5M2, 1 << 4 | 1 << 10), (tc.E2M1, tc.E4M3, 1 << 4 | 5 << 7)],
)
def test_whole_tiles_agree_with_the_arithmetic_model(schedule, a_format, b_format, idesc):
    rng = np.random.default_rng()
    n, k = 24, 16 if a_format == tc.F16 else 32
    a, b = random_codes(rng, a_format, (128, k)), random_codes(rng, b_format, (n, k))
    c = rng.standard_normal((128, n)).astype(np.float32).view(np.uint32)
    images = [
        np.stack([pack_row(row, tc.FORMAT_NAMES[f], True) for row in rows])
        for rows, f in ((a, a_format), (b, b_format))
    ]
    kind = "kind::f16" if a_format == tc.F16 else "kind::f8f6f4"
    d = run(kind, idesc | n // 8 << 17 | 8 << 24, *images, c, schedule=schedule)
    np.testing.assert_array_equal(d, tc.mma_float(a, b, c, a_format, b_format))
    fresh = run(
        kind, idesc | n // 8 << 17 | 8 << 24, *images, c, accumulate=False, schedule=schedule, checks=False
    )
    np.testing.assert_array_equal(fresh, tc.mma_float(a, b, np.zeros_like(c), a_format, b_format))


@pytest.mark.parametrize(
    "fmt, code, shift", [(tc.E4M3, 0, 0), (tc.E2M1, 5, 2), (tc.E3M2, 4, 1), (tc.E2M3, 3, 1)]
)
def test_narrow_operands_sit_in_the_middle_of_their_byte_in_tensor_memory(fmt, code, shift):
    rng = np.random.default_rng()
    a, b = random_codes(rng, fmt, (128, 32)), random_codes(rng, tc.E4M3, (8, 32))
    c = rng.standard_normal((128, 8)).astype(np.float32).view(np.uint32)
    words = np.ascontiguousarray((a << shift).astype(np.uint8)).view(np.uint32)
    d = run(
        "kind::f8f6f4", 1 << 4 | code << 7 | 1 << 17 | 8 << 24, None, b.astype(np.uint8), c, a_words=words
    )
    np.testing.assert_array_equal(d, tc.mma_float(a, b, c, fmt, tc.E4M3))


def test_half_of_an_nvfp4_tile_can_come_from_tensor_memory():
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 16, (r, 64)).astype(np.uint8) for r in (128, 40))
    sa, sb = (rng.integers(0x28, 0x48, (r, 4)).astype(np.uint8) for r in (128, 40))
    c = rng.standard_normal((128, 40)).astype(np.float32).view(np.uint32)
    cells_a = np.tile(sa.view(np.uint32).reshape(4, 32).T, (4, 1))
    padded = np.zeros((64, 4), np.uint8)
    padded[:40] = sb
    cells_b = np.tile(padded.view(np.uint32).reshape(2, 32).T, (4, 1))
    packed = [np.stack([pack_row(row, "e2m1", False) for row in x]) for x in (a, b)]
    idesc = 1 << 7 | 1 << 10 | 5 << 17 | 1 << 27
    expected = tc.mma_fp4(a, b, c, sa, sb, tc.UE4M3)
    kind = "kind::mxf4nvf4.block_scale.scale_vec::4X"
    np.testing.assert_array_equal(run(kind, idesc, *packed, c, scales=(cells_a, cells_b)), expected)
    words = np.ascontiguousarray(packed[0]).view(np.uint32)
    np.testing.assert_array_equal(
        run(kind, idesc, None, packed[1], c, scales=(cells_a, cells_b), a_words=words), expected
    )


def test_masked_lanes_keep_their_accumulator():
    rng = np.random.default_rng()
    a, b = random_codes(rng, tc.F16, (128, 16)), random_codes(rng, tc.F16, (8, 16))
    c = rng.standard_normal((128, 8)).astype(np.float32).view(np.uint32)
    masks = [int(x) for x in rng.integers(0, 1 << 32, 4)]
    images = [np.stack([pack_row(row, "f16", False) for row in x]) for x in (a, b)]
    d = run(
        "kind::f16", 1 << 4 | 1 << 17 | 8 << 24, *images, c, extra=", {" + ", ".join(map(str, masks)) + "}"
    )
    off = np.array([masks[i // 32] >> (i % 32) & 1 for i in range(128)], bool)
    expected = tc.mma_float(a, b, c, tc.F16, tc.F16)
    expected[off] = c[off]
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
@pytest.mark.parametrize("m", [128, 256])
def test_a_pair_of_ctas_shares_a_product(schedule, m):
    rng = np.random.default_rng()
    n = 48
    a, b = random_codes(rng, tc.F16, (m, 16)), random_codes(rng, tc.F16, (n, 16))
    c = rng.standard_normal((m, n)).astype(np.float32).view(np.uint32)
    images = [
        np.stack([pack_row(row, "f16", False) for row in x]).reshape(2, len(x) // 2, 32) for x in (a, b)
    ]
    if m == 256:
        parts = c.reshape(2, 128, n)
    else:
        # Upper lanes hold the second half of the columns.
        parts = c.reshape(2, 64, 2, n // 2).transpose(0, 2, 1, 3).reshape(2, 128, n // 2)
    d = run("kind::f16", 1 << 4 | n // 8 << 17 | m // 16 << 24, *images, parts, pair=True, schedule=schedule)
    if m == 128:
        d = d.reshape(2, 2, 64, n // 2).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(d.reshape(m, n), tc.mma_float(a, b, c, tc.F16, tc.F16))


@pytest.mark.parametrize("m", [128, 256])
def test_a_pair_scales_its_blocks(m):
    rng = np.random.default_rng()
    n = 64
    a, b = (rng.integers(0, 16, (r, 64)).astype(np.uint8) for r in (m, n))
    sa, sb = (rng.integers(0x28, 0x48, (r, 4)).astype(np.uint8) for r in (m, n))
    c = np.zeros((m, n), np.uint32)
    images = [
        np.stack([pack_row(row, "e2m1", False) for row in x]).reshape(2, len(x) // 2, 32) for x in (a, b)
    ]
    # [CTA, column, lane % 32] -> [CTA, lane, column], four times over.
    cells_a = np.tile(sa.view(np.uint32).reshape(2, m // 64, 32).transpose(0, 2, 1), (1, 4, 1))
    if m == 256:
        cells_b = np.tile(sb.view(np.uint32).reshape(2, 32).T, (4, 1))
        parts = c.reshape(2, 128, n)
    else:
        halves = sb.view(np.uint32).reshape(2, 1, 32).transpose(0, 2, 1)
        cells_b = np.concatenate([halves[0], halves[0], halves[1], halves[1]])
        parts = c.reshape(2, 128, n // 2)
    d = run(
        "kind::mxf4nvf4.block_scale.scale_vec::4X",
        1 << 7 | 1 << 10 | n // 8 << 17 | m // 128 << 27,
        *images,
        parts,
        pair=True,
        scales=(cells_a, np.stack([cells_b, cells_b])),
    )
    if m == 128:
        d = d.reshape(2, 2, 64, n // 2).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(d.reshape(m, n), tc.mma_fp4(a, b, c, sa, sb, tc.UE4M3))


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
def test_scales_can_be_copied_from_shared_memory(schedule):
    """128 x 4 scale bytes in 512 bytes, byte (m, s) at (m % 32) * 16 + (m / 32) * 4 + s, behind B in its
    image.
    """
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 16, (r, 64)).astype(np.uint8) for r in (128, 128))
    sa, sb = (rng.integers(0x28, 0x48, (128, 4)).astype(np.uint8) for _ in range(2))
    c = rng.standard_normal((128, 128)).astype(np.float32).view(np.uint32)
    packed = [np.stack([pack_row(row, "e2m1", False) for row in x]) for x in (a, b)]
    tiles = [s.reshape(4, 32, 4).transpose(1, 0, 2).reshape(16, 32) for s in (sa, sb)]
    # core_matrix_image is undone, so that the tiles lie flat behind B: 8 rows by two 16-byte halves.
    flat = [t.reshape(2, 2, 8, 16).transpose(0, 2, 1, 3).reshape(16, 32) for t in tiles]
    b_and_scales = np.concatenate([packed[1], *flat])
    copies = "".join(
        f"""
        mov.b64 %rd12, {shared_descriptor(17408 + 4096 + 512 * i, 16, 128)};
        tcgen05.cp.cta_group::1.32x128b.warpx4 [%r{9 + i}], %rd12;"""
        for i in range(2)
    )
    dummy = np.zeros((128, 1), np.uint32)
    d = run(
        "kind::mxf4nvf4.block_scale.scale_vec::4X",
        1 << 7 | 1 << 10 | 16 << 17 | 1 << 27,
        packed[0],
        b_and_scales,
        c,
        scales=(dummy, dummy),
        prepare_scales=copies,
        schedule=schedule,
    )
    np.testing.assert_array_equal(d, tc.mma_fp4(a, b, c, sa, sb, tc.UE4M3))


def test_half_height_products_use_sixteen_lanes_of_each_quarter():
    rng = np.random.default_rng()
    a, b = random_codes(rng, tc.F16, (64, 16)), random_codes(rng, tc.F16, (16, 16))
    c = rng.standard_normal((128, 16)).astype(np.float32).view(np.uint32)
    images = [np.stack([pack_row(row, "f16", False) for row in x]) for x in (a, b)]
    d = run("kind::f16", 1 << 4 | 2 << 17 | 4 << 24, *images, c)
    lanes = np.array([32 * (m // 16) + m % 16 for m in range(64)])
    expected = c.copy()
    expected[lanes] = tc.mma_float(a, b, c[lanes], tc.F16, tc.F16)
    np.testing.assert_array_equal(d, expected)


def xor_image(linear, code):
    """Move the bytes of an image (1024-aligned) to where a swizzle puts them: 16-byte chunks by line."""
    address = np.arange(linear.size)
    moved = {
        2: address ^ (address >> 3 & 0x70),
        4: address ^ (address >> 3 & 0x30),
        6: address ^ (address >> 3 & 0x10),
        1: address ^ (address >> 2 & 0x60),
    }[code]
    image = np.zeros_like(linear)
    image[moved] = linear
    return image


@pytest.mark.parametrize("code, width, step", [(2, 128, 0), (2, 128, 3), (4, 64, 0), (4, 64, 1), (6, 32, 0)])
def test_k_major_tiles_may_be_swizzled_and_stepped_along_k(code, width, step):
    rng = np.random.default_rng()
    a, b = (random_codes(rng, tc.F16, (r, width // 2)).astype(np.uint16) for r in (128, 16))
    c = rng.standard_normal((128, 16)).astype(np.float32).view(np.uint32)
    words = []
    for x, offset in ((a, 1024), (b, 17408)):
        words += [
            xor_image(x.view(np.uint8).ravel(), code),
            shared_descriptor(offset + 32 * step, 16, 8 * width, code),
        ]
    d = run("kind::f16", 1 << 4 | 2 << 17 | 8 << 24, None, None, c, images=words)
    k = slice(16 * step, 16 * step + 16)
    np.testing.assert_array_equal(d, tc.mma_float(a[:, k], b[:, k], c, tc.F16, tc.F16))


def test_mn_major_tiles_are_read_across():
    """128-byte swizzle: blocks of 64 elements of M (N), eight k to a 1024-byte group."""
    rng = np.random.default_rng()
    a, b = (random_codes(rng, tc.F16, (r, 16)).astype(np.uint16) for r in (128, 64))
    c = rng.standard_normal((128, 64)).astype(np.float32).view(np.uint32)
    words = []
    for x, offset in ((a, 1024), (b, 17408)):
        # [block of M][group of K][k][m]: LBO 2048 between blocks, SBO 1024 between groups of eight k.
        linear = np.ascontiguousarray(x.reshape(-1, 64, 2, 8).transpose(0, 2, 3, 1)).view(np.uint8).ravel()
        words += [xor_image(linear, 2), shared_descriptor(offset, 2048, 1024, 2)]
    d = run("kind::f16", 1 << 4 | 1 << 15 | 1 << 16 | 8 << 17 | 8 << 24, None, None, c, images=words)
    np.testing.assert_array_equal(d, tc.mma_float(a, b, c, tc.F16, tc.F16))


def test_mn_major_tf32_uses_atoms_of_32_bytes():
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((r, 8)).astype(np.float32).view(np.uint32) for r in (128, 32))
    c = rng.standard_normal((128, 32)).astype(np.float32).view(np.uint32)
    words = []
    for x, offset in ((a, 1024), (b, 17408)):
        # [block of 32 M][group of 4 k][k][m]
        linear = np.ascontiguousarray(x.reshape(-1, 32, 2, 4).transpose(0, 2, 3, 1)).view(np.uint8).ravel()
        words += [xor_image(linear, 1), shared_descriptor(offset, 1024, 512, 1)]
    d = run(
        "kind::tf32",
        1 << 4 | 2 << 7 | 2 << 10 | 1 << 15 | 1 << 16 | 4 << 17 | 8 << 24,
        None,
        None,
        c,
        images=words,
    )
    np.testing.assert_array_equal(d, tc.mma_float(a, b, c, tc.TF32, tc.TF32))


def warp_program(body):
    """One warp with 64 columns of tensor memory; their address is in %r3."""
    return f"""
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 64;
        bar.warp.sync -1;
        ld.shared.b32 %r3, [%base];
        {body}
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;
    """


def names(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


FILL = "".join(f"mad.lo.u32 %r{10 + i}, %lane, 64, {i};" for i in range(32))
FILL += f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r3], {names(10, 32)}; tcgen05.wait::st.sync.aligned;"


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
@pytest.mark.parametrize(
    "shape, num, lane0, column0, imm",
    [
        ("32x32b", 4, 0, 3, None),
        ("16x64b", 4, 16, 1, None),
        ("16x128b", 2, 0, 4, None),
        ("16x256b", 1, 16, 8, None),
        ("16x32bx2", 4, 0, 2, 8),
        ("16x32bx2", 4, 0, 2, 16 << 16),
    ],
)
def test_loads_find_the_cells_of_their_shape(schedule, seed, shape, num, lane0, column0, imm):
    """Every cell of lane l, column c holds 64 * l + c."""
    lanes, columns = tm.register_cells(shape, num, second_half=imm or 0)
    count = lanes.shape[1]
    out = filled(32, count)
    immediate = f", {imm}" if imm is not None else ""
    launch(
        warp_program(
            FILL
            + f"""
        add.u32 %r4, %r3, {lane0 << 16 | column0};
        tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {names(50, count)}, [%r4]{immediate};
        tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %rd1, %tid, {4 * count}; add.u64 %rd1, %rd1, %a0;
    """
            + "".join(f"st.global.b32 [%rd1 + {4 * i}], %r{50 + i};" for i in range(count))
        ),
        out,
        schedule=schedule,
        seed=seed,
    )
    np.testing.assert_array_equal(out, (64 * (lanes[0] + lane0) + columns[0] + column0).T)


def test_half_words_are_packed_and_unpacked():
    out = filled(32, 2)
    launch(
        warp_program("""
        mad.lo.u32 %r10, %lane, 65536, 7; mad.lo.u32 %r11, %lane, 131072, 9;
        tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r3], {%r10, %r11};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r12, %r13}, [%r3];
        tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r14, %r15, %r16, %r17}, [%r3];
        tcgen05.wait::ld.sync.aligned;
        add.u32 %r12, %r12, %r14; add.u32 %r13, %r13, %r17;
        mul.wide.u32 %rd1, %tid, 8; add.u64 %rd1, %rd1, %a0; st.global.v2.b32 [%rd1], {%r12, %r13};
    """),
        out,
    )
    lane = np.arange(32)
    np.testing.assert_array_equal(out, np.stack([lane * 65536 + 7 + 7, lane * 131072 + 9 + 2 * lane], 1))


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
def test_an_allocation_waits_until_columns_are_free(schedule, seed):
    """Two warps take all 512 columns in turn."""
    launch(
        """
        mad.lo.u32 %r1, %warp, 16, %base;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
        bar.warp.sync -1;
        ld.shared.b32 %r3, [%r1];
        shl.b32 %r4, %warp, 21; add.u32 %r4, %r4, %r3;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%tid};
        tcgen05.wait::st.sync.aligned;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;
    """,
        threads=64,
        schedule=schedule,
        seed=seed,
    )


@pytest.mark.parametrize(
    "body, kind, message",
    [
        (
            "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%base], 32;",
            "tensor-memory",
            "cluster of one",
        ),
        (
            warp_program("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 128;"),
            "tensor-memory",
            "must not grow",
        ),
        (
            warp_program("add.u32 %r4, %r3, 2097152; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];"),
            "tensor-memory",
            "reaches lanes",
        ),
        (
            warp_program("add.u32 %r4, %r3, 524288; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r5}, [%r4];"),
            "tensor-memory",
            "multiple of 16",
        ),
        (
            warp_program("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];"),
            "uninitialised",
            "never written",
        ),
        (
            warp_program(
                "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r5}; "
                "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];"
            ),
            "tensor-memory",
            "wait::st",
        ),
        (warp_program("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r5}; "), "tensor-memory", "wait::st"),
        (warp_program("add.u32 %r3, %r3, 32;"), "tensor-memory", "no allocation"),
        (warp_program("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%r5};"), "operand", "2 registers"),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 256;"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 256;"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 32;",
            "deadlock",
            "32 free columns",
        ),
    ],
)
def test_misuse_of_tensor_memory_is_reported(body, kind, message):
    for schedule, seed in SCHEDULES[2:]:
        with pytest.raises(emulator.Fault, match=message) as caught:
            launch(body, schedule=schedule, seed=seed)
        assert caught.value.kind == kind


def test_wrong_lane_bits_can_be_forgiven():
    out = filled(32)
    launch(
        warp_program("""
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%tid}; tcgen05.wait::st.sync.aligned;
        add.u32 %r4, %r3, 2097152; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];
        tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %rd1, %tid, 4; add.u64 %rd1, %rd1, %a0; st.global.b32 [%rd1], %r5;
    """),
        out,
        checks=emulator.Checks(forgiving_lanes=True),
    )
    np.testing.assert_array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    "text, message",
    [
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "sparse"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "shift"),
        ("tcgen05.mma.cta_group::1.kind::f64 [%r1], %rd1, %rd2, %r3, %p1;", "unknown modifiers"),
    ],
)
def test_what_is_not_modelled_is_refused_with_its_line(text, message):
    ptx = f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry k() {{
.reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<2>;
{text}
ret; }}"""
    with pytest.raises(emulator.PtxSyntaxError, match=message) as caught:
        emulator.load(ptx)
    assert "6" in str(caught.value)


def test_random_descriptors_end_in_a_result_or_a_fault():
    """Whatever bits a program hands over, the emulator answers with a Fault and nothing else."""
    rng = np.random.default_rng()
    a, b = np.zeros((128, 32), np.uint8), np.zeros((16, 32), np.uint8)
    c = np.zeros((128, 16), np.uint32)
    kinds = [
        "f16",
        "tf32",
        "f8f6f4",
        "i8",
        "mxf8f6f4.block_scale.scale_vec::1X",
        "mxf4nvf4.block_scale.scale_vec::4X",
    ]
    seen = set()
    for _ in range(40):
        kind = kinds[int(rng.integers(len(kinds)))]
        # Half of them legal but for a few bits, so that the deeper checks are reached too.
        idesc = 1 << 4 | 2 << 17 | 8 << 24 if rng.random() < 0.5 else int(rng.integers(0, 1 << 32))
        words = [
            shared_descriptor(
                int(rng.integers(0, 1 << 14)) * 16,
                int(rng.integers(0, 64)) * 16,
                int(rng.integers(0, 256)) * 16,
                int(rng.choice([0, 1, 2, 4, 6])),
            )
            & (1 << 64) - 1
            for _ in range(2)
        ]
        scales = (np.zeros((128, 4), np.uint32), np.zeros((128, 1), np.uint32)) if "block" in kind else None
        try:
            run(
                f"kind::{kind}",
                idesc,
                a,
                b,
                c,
                scales=scales,
                images=(a.ravel(), words[0], b.ravel(), words[1]),
            )
        except emulator.Fault as fault:
            seen.add(fault.kind)
    assert seen <= {"descriptor", "out-of-bounds", "uninitialised", "tensor-memory"} and "descriptor" in seen
