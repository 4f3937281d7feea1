"""ldmatrix, stmatrix, movmatrix and wgmma through PTX."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Fault
from msa_cudacore.ptx.emulator import tensor_core as tc

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

LANE = np.arange(32)
#: copies 2048 bytes of argument 0 to shared memory
FILL = """
    mov.u32 %r20, %tid;
    F: mul.wide.u32 %rd20, %r20, 16; add.u64 %rd20, %rd20, %a0;
    ld.global.v4.b32 {%r21, %r22, %r23, %r24}, [%rd20];
    mad.lo.u32 %r25, %r20, 16, %base; st.shared.v4.b32 [%r25], {%r21, %r22, %r23, %r24};
    add.u32 %r20, %r20, %ntid.x; setp.lt.u32 %p5, %r20, 128; @%p5 bra F;
    bar.sync 0;
    mad.lo.u32 %r1, %tid, 16, %base;
"""


def keep(count, argument=1):
    lines = [f"mul.wide.u32 %rd9, %tid, {4 * count}; add.u64 %rd9, %rd9, %a{argument};"]
    return "".join(lines + [f"st.global.b32 [%rd9 + {4 * i}], %r{40 + i};" for i in range(count)])


def registers(count):
    return "{" + ", ".join(f"%r{40 + i}" for i in range(count)) + "}"


def image():
    return np.random.default_rng().integers(0, 256, (128, 16)).astype(np.uint8)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_gives_each_lane_its_pair(count, trans):
    rows, out = image(), filled(32, count)
    launch(
        FILL
        + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(count)}, [%r1];"
        + keep(count),
        rows,
        out,
    )
    matrices = rows.view(np.uint16)[: 8 * count].reshape(count, 8, 8)
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    expected = np.stack(
        [matrices[:, LANE // 4, 2 * (LANE % 4)], matrices[:, LANE // 4, 2 * (LANE % 4) + 1]], axis=-1
    )
    np.testing.assert_array_equal(out.view(np.uint16).reshape(32, count, 2), expected.transpose(1, 0, 2))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stride, passes", [(16, 1), (32, 2), (64, 4), (80, 1), (112, 1), (128, 8), (0, 1)])
def test_ldmatrix_passes_are_counted(count, stride, passes):
    report = launch(
        FILL
        + f"""
        mad.lo.u32 %r1, %tid, {stride}, %base;
        ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {registers(count)}, [%r1];
    """,
        image(),
    )
    (line,) = [line for line in report.lines if line.text.startswith("ldmatrix")]
    assert line.wavefronts == count * passes
    # The fill: four stores of a warp, 16 bytes a lane.
    assert (report.shared_accesses, report.shared_wavefronts) == (4 + 1, 16 + count * passes)
    assert report.ideal_wavefronts == 16 + count
    assert report.bytes["shared load"] == 128 * count


@pytest.mark.parametrize(
    "form, data_bytes, bits", [("b8", 16, 8), ("b8x16.b4x16_p64", 8, 4), ("b8x16.b6x16_p32", 12, 6)]
)
def test_sixteen_by_sixteen_bytes_are_transposed(form, data_bytes, bits):
    rows, out = image(), filled(32, 4)
    launch(
        FILL + f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.{form} {registers(4)}, [%r1];" + keep(4),
        rows,
        out,
    )
    stream = np.unpackbits(rows[:32, :data_bytes], axis=1, bitorder="little").reshape(32, 16, bits)
    values = (stream << np.arange(bits)).sum(-1).astype(np.uint8).reshape(2, 16, 16)
    got = out.view(np.uint8).reshape(32, 2, 2, 4)
    for matrix in range(2):
        for r in range(2):
            for b in range(4):
                np.testing.assert_array_equal(
                    got[:, matrix, r, b], values[matrix, 4 * (LANE % 4) + b, LANE // 4 + 8 * r]
                )


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(trans):
    rows, out = image(), filled(128)
    launch(
        FILL
        + f"""
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {registers(4)}, [%r1];
        add.u32 %r2, %r1, 4096;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {registers(4)};
        bar.warp.sync -1;
        ld.shared.v4.b32 {registers(4)}, [%r2];
    """
        + keep(4),
        rows,
        out,
    )
    np.testing.assert_array_equal(out.view(np.uint8).reshape(32, 16), rows[:32])


def test_bytes_are_stored_column_by_column():
    rows, out = image(), filled(32, 4)
    launch(
        FILL
        + f"""
        ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {registers(4)}, [%r1];
        add.u32 %r2, %r1, 4096;
        stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r2], {registers(4)};
        bar.warp.sync -1;
        ld.shared.v4.b32 {registers(4)}, [%r2];
    """
        + keep(4),
        rows,
        out,
    )
    # Two 16 x 16 tiles turned once; each memory row that stmatrix writes is one of their columns.
    np.testing.assert_array_equal(
        out.view(np.uint8).reshape(2, 16, 16), rows[:32].reshape(2, 16, 16).transpose(0, 2, 1)
    )


def test_movmatrix_turns_a_fragment():
    rows, out = image(), filled(32)
    launch(
        FILL
        + """
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r41}, [%r1];
        movmatrix.sync.aligned.m8n8.trans.b16 %r40, %r41;
    """
        + keep(1),
        rows,
        out,
    )
    matrix = rows.view(np.uint16)[:8].reshape(8, 8).T
    np.testing.assert_array_equal(
        out.view(np.uint16).reshape(32, 2),
        np.stack([matrix[LANE // 4, 2 * (LANE % 4)], matrix[LANE // 4, 2 * (LANE % 4) + 1]], 1),
    )


@pytest.mark.parametrize(
    "body, kind",
    [
        (
            "add.u32 %r1, %r1, 8; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r40, %r41, %r42, %r43}, [%r1];",
            "misaligned",
        ),
        (
            "add.u32 %r1, %r1, 16384; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r40, %r41, %r42, %r43}, "
            "[%r1];",
            "out-of-bounds",
        ),
        (
            "add.u32 %r1, %r1, 4096; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r40, %r41, %r42, %r43}, "
            "[%r1];",
            "uninitialised",
        ),
    ],
)
def test_wrong_rows_are_reported(body, kind):
    with pytest.raises(Fault) as caught:
        launch(FILL + body, image())
    assert caught.value.kind == kind


def wgmma_descriptor(offset, leading, stride):
    return f"""
        add.u32 %r30, %base, {offset}; cvt.u64.u32 %rd10, %r30; shr.u64 %rd10, %rd10, 4;
        and.b64 %rd10, %rd10, 16383;
        or.b64 %rd10, %rd10, {(leading >> 4) << 16 | (stride >> 4) << 32};
    """


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
@pytest.mark.parametrize(
    "types, fmt", [("f32.f16.f16", tc.F16), ("f32.bf16.bf16", tc.BF16), ("f16.f16.f16", tc.F16)]
)
def test_wgmma_multiplies_tiles_in_shared_memory(schedule, seed, types, fmt):
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 1 << 16, (r, 16)).astype(np.uint16) for r in (64, 8))
    for x in (a, b):
        x &= np.uint16(0xBBFF if fmt == tc.F16 else 0xBFFF)
    half = types.startswith("f16")
    # K-major without swizzle: 8-row groups every 128 bytes, the two K halves 1024 (A) or 128 (B) bytes apart.
    tile = np.concatenate(
        [x.view(np.uint8).reshape(len(x), 2, 16).transpose(1, 0, 2).reshape(-1) for x in (a, b)]
    )
    source = np.zeros((160, 16), np.uint8)
    source.reshape(-1)[: len(tile)] = tile
    c = rng.standard_normal((128, 4)).astype(np.float32)
    count = 2 if half else 4
    start = (
        c.view(np.uint32) if not half else rng.integers(0, 0x7000, (128, 4)).astype(np.uint16).view(np.uint32)
    )
    out = filled(128, count)
    launch(
        FILL.replace("128; @%p5", "160; @%p5")
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + f"mul.wide.u32 %rd8, %tid, {4 * count}; add.u64 %rd8, %rd8, %a1;"
        + "".join(f"ld.global.b32 %r{40 + i}, [%rd8 + {4 * i}];" for i in range(count))
        + wgmma_descriptor(0, 1024, 128)
        + "mov.b64 %rd11, %rd10;"
        + wgmma_descriptor(2048, 128, 128)
        + f"""
        wgmma.fence.sync.aligned;
        setp.eq.u32 %p3, %tid, %tid;
        wgmma.mma_async.sync.aligned.m64n8k16.{types} {registers(count)}, %rd11, %rd10, %p3, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
    """
        + keep(count, 2),
        source,
        start[:, :count].copy(),
        out,
        threads=128,
        arch="sm_90a",
        schedule=schedule,
        seed=seed,
    )
    row = (
        16 * (np.arange(128) // 32)[:, None]
        + (np.arange(128) % 32 // 4)[:, None]
        + 8 * (np.arange(4)[None] // 2)
    )
    column = 2 * (np.arange(128) % 4)[:, None] + np.arange(4)[None] % 2
    words = np.zeros((64, 8), np.uint32)
    values = start[:, :count]
    values = values if not half else values.copy().view(np.uint16).astype(np.uint32)
    words[row, column] = values
    d = tc.mma_float(a, b, words, fmt, fmt, d_format=tc.D_F16 if half else tc.D_F32)
    got = out if not half else out.view(np.uint16)
    np.testing.assert_array_equal(got, d[row, column])


def test_operands_of_a_running_wgmma_must_not_change():
    body = (
        FILL.replace("128; @%p5", "160; @%p5")
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + wgmma_descriptor(0, 1024, 128)
        + "mov.b64 %rd11, %rd10;"
        + wgmma_descriptor(2048, 128, 128)
        + f"""
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {registers(4)}, %rd11, %rd10, 0, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        {{wait}}
        st.shared.b32 [%r1], 0;
    """
    )
    source = np.full((160, 16), 0x11, np.uint8)
    launch(
        body.replace("{wait}", "wgmma.wait_group.sync.aligned 0; bar.sync 0;"),
        source,
        threads=128,
        arch="sm_90a",
    )
    with pytest.raises(Fault) as caught:
        launch(body.replace("{wait}", "bar.sync 0;"), source, threads=128, arch="sm_90a")
    assert caught.value.kind == "race"
