"""Kernels that CUTLASS's Python DSL compiles for sm_100a give NumPy's answers in the emulator."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

# The DSL reads its environment once, when it is imported; the PTX it keeps goes to a folder that ends with the process.
_KEPT = tempfile.TemporaryDirectory()
os.environ.update(CUTE_DSL_ARCH="sm_100a", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=_KEPT.name)
cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
sys.path.insert(0, str(Path(__file__).parent))

import cutlass.cute as cute  # noqa: E402
import cutlass.cute.runtime as cute_runtime  # noqa: E402

import cute_kernels as kernels  # noqa: E402
from msa_cudacore.ptx import emulator  # noqa: E402

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ROOMY_SHARED_BYTES = 200_000
# CUTLASS reads accumulators behind a commit and a wait alone, without tcgen05.fence::after_thread_sync.
CHECKS = emulator.Checks(tcgen05_fences=False)


def _row_major(dtype, *shape):
    return cute_runtime.make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def _run(function, fakes, arguments, grid, threads, cluster=1):
    """Compile on fake tensors, then launch the one kernel of the PTX on real arrays."""
    text = cute.compile(function, *fakes).__ptx__
    if os.path.exists(text):
        text = Path(text).read_text()
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(", text)
    emulator.load(text).launch(
        entry, grid=grid, block=(threads,), cluster=(cluster,), shared_bytes=ROOMY_SHARED_BYTES, args=arguments, schedule="random",
        seed=int.from_bytes(os.urandom(2)), checks=CHECKS,
    )


def test_elementwise_scaled_sum():
    rng = np.random.default_rng()
    x, y = rng.normal(size=(2, kernels.ELEMENTS)).astype(np.float32)
    out = np.full(kernels.ELEMENTS, np.nan, np.float32)
    fakes = [_row_major(cutlass.Float32, kernels.ELEMENTS)] * 3 + [cutlass.Float32(0)]
    _run(kernels.scaled_sum, fakes, [x, y, out, np.float32(1.25)], (2,), 128)
    np.testing.assert_allclose(out, 1.25 * x.astype(np.float64) + y, 1e-6, 1e-6)


def test_row_sum_and_largest():
    x = np.random.default_rng().normal(size=(kernels.ROWS, kernels.COLUMNS)).astype(BF16)
    total, largest = np.full((2, kernels.ROWS), np.nan, np.float32)
    fakes = [_row_major(cutlass.BFloat16, kernels.ROWS, kernels.COLUMNS), *[_row_major(cutlass.Float32, kernels.ROWS)] * 2]
    _run(kernels.row_sum, fakes, [x, total, largest], (kernels.ROWS,), 128)
    np.testing.assert_allclose(total, x.astype(np.float64).sum(1), 1e-4, 1e-4)
    np.testing.assert_array_equal(largest, x.astype(np.float32).max(1))


def test_warp_level_matrix_product():
    rng = np.random.default_rng()
    a = rng.normal(size=(kernels.WARP_M, kernels.WARP_K)).astype(np.float16)
    b = rng.normal(size=(kernels.WARP_N, kernels.WARP_K)).astype(np.float16)
    c = np.full((kernels.WARP_M, kernels.WARP_N), np.nan, np.float32)
    fakes = [_row_major(cutlass.Float16, *a.shape), _row_major(cutlass.Float16, *b.shape), _row_major(cutlass.Float32, *c.shape)]
    _run(kernels.warp_matmul, fakes, [a, b, c], (1,), 128)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, 1e-4, 1e-4)


def test_warp_specialised_tcgen05_pipeline():
    rng = np.random.default_rng()
    m, n, k = 128, 128, 320
    a, b = rng.normal(size=(m, k)).astype(np.float16), rng.normal(size=(n, k)).astype(np.float16)
    c = np.full((m, n), np.nan, np.float32)
    fakes = [_row_major(cutlass.Float16, m, k), _row_major(cutlass.Float16, n, k), _row_major(cutlass.Float32, m, n)]
    maps = [
        emulator.TensorMap.from_array(x, (rows, kernels.TILE[2]), swizzle="128B")
        for x, rows in ((a, kernels.TILE[0]), (b, kernels.TILE[1]))
    ]
    # The first parameter is the state of the MMA atom: do not accumulate, negate nothing, mask no lane.
    state = emulator.Bytes(bytes(32))
    _run(kernels.pipelined_matmul, fakes, [state, *maps, c], (1, n // kernels.TILE[1]), 192)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, 1e-4, 1e-3)


def test_two_ctas_share_one_tcgen05_product():
    rng = np.random.default_rng()
    (m, n, tile_k), k = kernels.PAIR_TILE, 192
    a, b = rng.normal(size=(m, k)).astype(np.float16), rng.normal(size=(n, k)).astype(np.float16)
    c = np.full((m, n), np.nan, np.float32)
    fakes = [_row_major(cutlass.Float16, m, k), _row_major(cutlass.Float16, n, k), _row_major(cutlass.Float32, m, n)]
    # Each CTA loads its half of the rows of A and of B.
    maps = [emulator.TensorMap.from_array(x, (len(x) // 2, tile_k), swizzle="128B") for x in (a, b)]
    _run(kernels.paired_matmul, fakes, [emulator.Bytes(bytes(64)), *maps, c], (2,), 192, cluster=2)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, 1e-4, 1e-3)


def test_block_scaled_nvfp4_product():
    rng = np.random.default_rng()
    m, n, k = 128, 128, 512
    groups = k // kernels.SCALE_BLOCK
    codes = [rng.integers(0, 256, (rows, k // 2)).astype(np.uint8) for rows in (m, n)]
    scales = [rng.uniform(0.1, 4, (rows, groups)).astype(E4M3) for rows in (m, n)]
    c = np.full((m, n), np.nan, np.float32)

    def values(packed, scale):
        elements = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], -1).reshape(len(packed), k)
        return elements * np.repeat(scale.astype(np.float64), kernels.SCALE_BLOCK, 1)

    def tiled(scale):
        """[groups / 4][m % 32][m / 32][4]: the tensor core's scale tile, one 512-byte block for 128 rows and 4 groups."""
        return np.ascontiguousarray(scale.view(np.uint8).reshape(4, 32, groups // 4, 4).transpose(2, 1, 0, 3))

    code_maps = [
        emulator.TensorMap("16u4_align8b", 2, x, (k, len(x)), (k // 2,), (kernels.SCALED_TILE[2], 128), swizzle="128B")
        for x in codes
    ]
    scale_maps = [
        emulator.TensorMap("uint16", 2, tiled(s), (256, groups // 4), (512,), (256, kernels.SCALED_TILE[2] // 64))
        for s in scales
    ]
    fakes = [cute_runtime.make_fake_compact_tensor(cutlass.Float4E2M1FN, (m, k, 1), stride_order=(1, 0, 2), assumed_align=32)] * 2
    fakes += [cute_runtime.make_fake_compact_tensor(cutlass.Float8E4M3FN, (m * groups,), assumed_align=16)] * 2
    fakes.append(_row_major(cutlass.Float32, m, n))
    _run(kernels.scaled_matmul, fakes, [emulator.Bytes(bytes(12)), *code_maps, *scale_maps, c], (1,), 192)
    np.testing.assert_allclose(c, values(codes[0], scales[0]) @ values(codes[1], scales[1]).T, 1e-4, 1e-2)
