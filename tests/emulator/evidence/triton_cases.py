"""One Case for each Triton kernel (some kernels have several): argument types, constants, fresh inputs, the NumPy
answer and the tolerance that the types allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import triton_kernels as kernels

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
POINTERS = {
    np.dtype(np.float64): "*fp64",
    np.dtype(np.float32): "*fp32",
    np.dtype(np.float16): "*fp16",
    np.dtype(BF16): "*bf16",
    np.dtype(E4M3): "*fp8e4nv",
    np.dtype(E5M2): "*fp8e5",
    np.dtype(np.int64): "*i64",
    np.dtype(np.int32): "*i32",
    np.dtype(np.int8): "*i8",
    np.dtype(np.uint8): "*u8",
}
ALL = (80, 90, 100)
EXACT = (0.0, 0.0)


@dataclass(frozen=True)
class HostMap:
    """A tensor map that the launcher encodes: the array and the tile; Triton chooses the swizzle."""

    array: np.ndarray
    tile: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """`build(rng)` gives the arguments by name: arrays (in place), HostMap, numpy scalars. `expected(arguments)` is
    computed before the launch; `tolerance` is (relative, absolute) by output name."""

    name: str
    kernel: object
    build: Callable[[np.random.Generator], dict]
    expected: Callable[[dict], dict]
    tolerance: dict
    constants: dict = field(default_factory=dict)
    grid: tuple[int, ...] = (1,)
    warps: int = 4
    stages: int = 3
    targets: tuple[int, ...] = ALL
    unordered: tuple[str, ...] = ()
    """Outputs whose values depend on the order of the blocks."""


def poisoned(shape, dtype=np.float32):
    """An output nobody has written: NaN, or a value no kernel produces."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.full(shape, 113, dtype)
    return np.full(shape, np.nan, np.float32).astype(dtype)


def f64(x):
    return np.asarray(x).astype(np.float64)


def _saxpy(rng):
    n = 1000
    return dict(x=rng.normal(size=n).astype(np.float32), y=rng.normal(size=n).astype(np.float32), out=poisoned(n),
                a=np.float32(1.7), n=np.int32(n))


def _softmax(rng):
    return dict(x=(4 * rng.normal(size=(5, 300))).astype(np.float16), out=poisoned((5, 300)), columns=np.int32(300))


def _softmax_answer(a):
    e = np.exp(f64(a["x"]) - f64(a["x"]).max(1, keepdims=True))
    return dict(out=e / e.sum(1, keepdims=True))


def _norm(rng, dtype, bias):
    shape = (4, 200)
    extra = dict(bias=rng.normal(size=200).astype(dtype)) if bias else {}
    return dict(x=(3 * rng.normal(size=shape) + 1).astype(dtype), weight=rng.normal(size=200).astype(dtype), **extra,
                out=poisoned(shape, dtype), columns=np.int32(200), eps=np.float32(1e-5))


def _layer_norm_answer(a):
    x = f64(a["x"])
    centred = x - x.mean(1, keepdims=True)
    return dict(out=centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * f64(a["weight"]) + f64(a["bias"]))


def _rms_norm_answer(a):
    x = f64(a["x"])
    return dict(out=x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * f64(a["weight"]))


def _welford(rng):
    return dict(x=(rng.normal(size=(8, 128)) * 2 + 100).astype(np.float32), mean_out=poisoned(8), var_out=poisoned(8))


def _argmax(rng):
    # Few distinct values, so that ties must be broken towards the first place.
    return dict(x=rng.integers(0, 20, size=(8, 64)).astype(np.float32), value_out=poisoned(8),
                index_out=poisoned(8, np.int32), min_index_out=poisoned(8, np.int32))


def _argmax_answer(a):
    x = a["x"]
    return dict(value_out=x.max(1), index_out=x.argmax(1), min_index_out=x.argmin(1))


def _cumulative(rng):
    return dict(x=rng.integers(-50, 50, 512).astype(np.int32), sum_out=poisoned(512, np.int32), product_out=poisoned(512))


def _cumulative_answer(a, reverse):
    x = a["x"][::-1] if reverse else a["x"]
    out = dict(sum_out=np.cumsum(x), product_out=np.cumprod(1 + f64(x) / 1024))
    return {k: v[::-1] if reverse else v for k, v in out.items()}


def _recurrence(rng):
    return dict(decay=rng.uniform(0.5, 1, (64, 16)).astype(np.float32), x=rng.normal(size=(64, 16)).astype(np.float32),
                out=poisoned((64, 16)))


def _recurrence_answer(a):
    h, rows = np.zeros(16), []
    for decay, x in zip(f64(a["decay"]), f64(a["x"]), strict=True):
        h = decay * h + x
        rows.append(h)
    return dict(out=np.stack(rows))


def _sort(rng):
    return dict(x=rng.integers(-1000, 1000, (4, 64)).astype(np.int32), out=poisoned((4, 64), np.int32))


def _histogram(rng, n):
    return dict(x=rng.integers(0, 16, n).astype(np.int32), counts=np.zeros(16, np.int32), n=np.int32(n))


def _histogram_answer(a):
    return dict(counts=np.bincount(a["x"], minlength=16))


def _medley(rng):
    out = np.zeros(17, np.int32)
    out[:3] = [-(2**31), 2**31 - 1, -1]
    return dict(x=rng.integers(-(2**20), 2**20, 6).astype(np.int32), out=out, total=np.zeros(68, np.float32),
                ticket_out=poisoned(6, np.int32))


def _medley_answer(a):
    x = a["x"]
    fold = [x.max(), x.min(), np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x)]
    total = np.concatenate([6 * 0.25 * np.arange(64), np.full(4, 6 * 16.0)])
    return dict(out_head=np.concatenate([fold, x]), total=total)


def _locked(rng):
    return dict(x=rng.integers(-9, 9, 5 * 128).astype(np.float32), total=np.zeros(1, np.float32), lock=np.zeros(1, np.int32))


def _gather_rows(rng):
    return dict(table=rng.normal(size=(50, 80)).astype(BF16), index=rng.integers(0, 50, 9).astype(np.int64),
                out=poisoned((9, 80), BF16), columns=np.int32(80))


def _gather_tile(rng):
    return dict(x=rng.normal(size=(16, 32)).astype(np.float32), index=rng.integers(0, 32, (16, 32)).astype(np.int32),
                out=poisoned((16, 32)))


def _transpose(rng):
    return dict(x=rng.normal(size=(70, 45)).astype(np.float32), out=poisoned((45, 70)), rows=np.int32(70),
                columns=np.int32(45))


def _join(rng):
    return dict(x=rng.normal(size=64).astype(np.float32), y=rng.normal(size=64).astype(np.float32),
                even_out=poisoned(64), out=poisoned(128))


def _join_answer(a):
    both = np.stack([a["x"], a["y"]], 1).reshape(-1)
    difference = (a["x"] - a["y"]).reshape(4, 8, 2).transpose(2, 0, 1).reshape(-1)
    return dict(out=both[::-1], even_out=difference)


def _mathematics(rng):
    x = rng.uniform(-6, 6, 256).astype(np.float32)
    x[:4] = [1.0, -1.0, 0.5, 2.0]
    return dict(x=x, out=poisoned((12, 256)), n=np.int32(256))


def _mathematics_answer(a):
    from math import erf

    x = f64(a["x"])
    rows = [np.exp(x), np.exp2(x), np.log(abs(x) + 0.5), np.log2(abs(x) + 0.5), np.sin(x),
            np.cos(f64(a["x"] * np.float32(1000))), np.sqrt(abs(x)), 1 / x, [erf(v) for v in x],
            np.floor(x) + np.ceil(f64(a["x"] * np.float32(3))), np.tanh(x), x * x + 1]
    return dict(out=np.array(rows, dtype=np.float64))


def _integers(rng):
    y = rng.integers(-(2**31), 2**31, 256).astype(np.int32)
    y[y == 0] = 3
    y[::3] = rng.integers(1, 100, len(y[::3]))
    return dict(x=rng.integers(-(2**31), 2**31, 256).astype(np.int32), y=y, out=poisoned((6, 256), np.int32),
                wide_out=poisoned(256, np.int64), n=np.int32(256))


def _integers_answer(a):
    x, y = a["x"].astype(object), a["y"].astype(object)

    def divide(p, q):  # C division truncates toward zero; Python's floors
        return np.array([abs(i) // abs(j) * (1 if (i < 0) == (j < 0) else -1) for i, j in zip(p, q, strict=True)], object)

    def wrap(v, bits):
        return np.array([(int(i) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for i in v], np.int64)

    quotient = divide(x, y)
    counts = [int(i % 2**32).bit_count() + (32 - int(j % 2**32).bit_length()) for i, j in zip(x, y, strict=True)]
    shifted = wrap([j << 20 for j in y], 64).astype(object)
    million = np.full(len(x), 1000003, object)
    remainder = shifted - divide(shifted, million) * million
    rows = [quotient, x - quotient * y, (x // 8) ^ wrap(y * 4, 32).astype(object),
            [(int(i) % 2**32 * (int(j) % 2**32)) >> 32 for i, j in zip(x, y, strict=True)], counts,
            np.minimum(x, y) - np.maximum(x, 7) * abs(y)]
    wide = divide(x * y, np.full(len(x), 77, object)) + remainder
    return dict(out=np.stack([wrap(r, 32) for r in rows]), wide_out=wrap(wide, 64))


def _casts(rng):
    x = np.concatenate([rng.normal(size=192) * 2.0 ** rng.integers(-18, 14, 192),
                        [0.0, -0.0, np.inf, -np.inf, 65504, 65520, 65536, -1e9, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25],
                        rng.normal(size=53)]).astype(np.float32)
    return dict(x=x, f16_out=poisoned(256, np.float16), bf16_out=poisoned(256, BF16), e5m2_out=poisoned(256, E5M2),
                i8_out=poisoned(256, np.int8), round_trip_out=poisoned(256))


def _saturating_e5m2(x):
    """Triton's cast saturates finite overflow as cvt.satfinite does: to the largest finite value, infinities too."""
    return np.clip(x, -57344, 57344).astype(E5M2)


def _casts_answer(a):
    x = a["x"]
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.clip(np.trunc(f64(x) * 16), -(2**31), 2**31 - 1).astype(np.int64)
        return dict(f16_out=x.astype(np.float16), bf16_out=x.astype(BF16), e5m2_out=_saturating_e5m2(x),
                    i8_out=whole.astype(np.int8), round_trip_out=_saturating_e5m2(x).astype(np.float32))


def _cast_e4m3(rng):
    x = (rng.normal(size=256) * 2.0 ** rng.integers(-11, 10, 256)).astype(np.float32)
    x[:6] = [448, 464, 465, 1e9, -1e9, 2.0**-10]
    return dict(x=x, e4m3_out=poisoned(256, E4M3), round_trip_out=poisoned(256, np.float16))


def _cast_e4m3_answer(a):
    narrow = np.clip(a["x"], -448, 448).astype(E4M3)
    return dict(e4m3_out=narrow, round_trip_out=narrow.astype(np.float16))


def _philox(rng):
    return dict(seed=np.int32(rng.integers(0, 2**31)), out=poisoned(128, np.int32), uniform_out=poisoned(128))


def _philox_answer(a):
    key, counter = [int(a["seed"]), 0], [[i, 0, 0, 0] for i in range(128)]
    words = []
    for c in counter:
        k = list(key)
        for _ in range(10):
            low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [high >> 32 ^ c[1] ^ k[0], high % 2**32, low >> 32 ^ c[3] ^ k[1], low % 2**32]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        words.append(c[0])
    whole = np.array(words, np.uint32).view(np.int32)
    positive = np.where(whole < 0, -whole.astype(np.int64) - 1, whole)
    return dict(out=whole, uniform_out=positive * 4.6566127342e-10)


def _collatz(rng):
    return dict(x=np.array([1, 7, 27, 97], np.int32), steps_out=poisoned(4, np.int32))


def _double(rng):
    return dict(x=rng.normal(size=256), out=poisoned(2, np.float64))


def _double_answer(a):
    return dict(out=np.array([a["x"].sum(), np.sqrt(a["x"] ** 2 + 1).max() / 3]))


def _cross_entropy(rng):
    return dict(logits=(rng.normal(size=(4, 300)) * 5).astype(np.float32), label=rng.integers(0, 300, 4).astype(np.int32),
                loss_out=poisoned(4), columns=np.int32(300))


def _cross_entropy_answer(a):
    x = f64(a["logits"])
    return dict(loss_out=np.log(np.exp(x).sum(1)) - x[np.arange(4), a["label"]])


def _matmul(rng, m, n, k, dtype, out, column_major):
    if np.dtype(dtype) == np.int8:
        a, b = rng.integers(-128, 128, (m, k)).astype(dtype), rng.integers(-128, 128, (k, n)).astype(dtype)
    else:
        a, b = rng.normal(size=(m, k)).astype(dtype), rng.normal(size=(k, n)).astype(dtype)
    stored = np.ascontiguousarray(b.T) if column_major else b
    return dict(a=a, b=stored, c=poisoned((m, n), out), K=np.int32(k), stride_a=np.int32(k),
                stride_b=np.int32(k if column_major else n), stride_c=np.int32(n))


def _matmul_answer(a, column_major):
    wide = np.int64 if a["a"].dtype == np.int8 else np.float64
    b = a["b"].T if column_major else a["b"]
    return dict(c=a["a"].astype(wide) @ b.astype(wide))


def matmul_case(name, dtype, tolerance, m=64, n=64, k=128, block_k=32, grid=(1, 1), out=np.float32, precision="ieee",
                column_major=False, stages=3, warps=4, targets=ALL):
    return Case(name, kernels.matmul, lambda rng: _matmul(rng, m * grid[0], n * grid[1], k, dtype, out, column_major),
                lambda a: _matmul_answer(a, column_major), dict(c=tolerance),
                dict(M=m, N=n, BLOCK_K=block_k, PRECISION=precision, B_COLUMN_MAJOR=column_major, STAGES=stages),
                grid=grid, warps=warps, stages=stages, targets=targets)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _scaled(rng, m, n, k, formats, block):
    def operand(rows, fmt):
        if fmt == "e2m1":
            return rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
        return rng.normal(size=(rows, k)).astype(E4M3 if fmt == "e4m3" else E5M2)

    def scale(rows):
        if block == 16:
            return rng.uniform(0.1, 4, (rows, k // block)).astype(E4M3)
        return rng.integers(124, 131, (rows, k // block)).astype(np.uint8)

    return dict(a=operand(m, formats[0]), a_scale=scale(m), b=operand(n, formats[1]), b_scale=scale(n), c=poisoned((m, n)))


def _scaled_answer(a):
    def value(x, s):
        if x.dtype == np.uint8:
            x = np.stack([_E2M1[x & 15], _E2M1[x >> 4]], -1).reshape(len(x), -1)
        s = f64(s) if s.dtype != np.uint8 else 2.0 ** (s.astype(int) - 127)
        return f64(x) * np.repeat(s, f64(x).shape[1] // s.shape[1], 1)

    return dict(c=value(a["a"], a["a_scale"]) @ value(a["b"], a["b_scale"]).T)


def scaled_case(name, formats, block, m=128, n=64, k=128, tolerance=(1e-4, 1e-3), targets=ALL):
    return Case(name, kernels.matmul_scaled, lambda rng: _scaled(rng, m, n, k, formats, block), _scaled_answer,
                dict(c=tolerance), dict(M=m, N=n, K=k, A_FORMAT=formats[0], B_FORMAT=formats[1], BLOCK=block),
                targets=targets)


def _tensor_map_matmul(rng, m, n, k):
    return dict(a=rng.normal(size=(m, k)).astype(np.float16), b=rng.normal(size=(n, k)).astype(np.float16),
                c=poisoned((m, n), np.float16), M=np.int32(m), N=np.int32(n), K=np.int32(k))


def _host_map_matmul(rng, m, n, k):
    a, b = rng.normal(size=(m, k)).astype(BF16), rng.normal(size=(n, k)).astype(BF16)
    return dict(map_a=HostMap(a, (128, 64)), map_b=HostMap(b, (64, 64)), c=poisoned((m, n)), M=np.int32(m),
                N=np.int32(n), K=np.int32(k))


def _copy(rng):
    return dict(x=rng.normal(size=(50, 36)).astype(np.float32), out=poisoned((50, 36)),
                add_to=rng.normal(size=(50, 36)).astype(np.float32), ROWS=np.int32(50), COLUMNS=np.int32(36))


def _gather_map(rng):
    return dict(x=rng.normal(size=(40, 64)).astype(np.float16), index=rng.integers(0, 40, 8).astype(np.int32),
                out=poisoned((8, 64), np.float16), ROWS=np.int32(40), COLUMNS=np.int32(64))


def _split_k(rng):
    return dict(a=rng.normal(size=(32, 96)).astype(np.float16), b=rng.normal(size=(96, 32)).astype(np.float16),
                c=np.zeros((32, 32), np.float32), K=np.int32(96))


def _attention(rng, tokens, head):
    q, k, v = (rng.normal(size=(tokens, head)).astype(np.float16) for _ in range(3))
    return dict(q=q, k=k, v=v, out=poisoned((tokens, head), np.float16), lse_out=poisoned(tokens), tokens=np.int32(tokens),
                scale=np.float32(head**-0.5))


def _attention_answer(a, causal):
    s = f64(a["q"]) @ f64(a["k"]).T * float(a["scale"])
    if causal:
        s = np.where(np.tril(np.ones_like(s)) > 0, s, -np.inf)
    peak = s.max(1, keepdims=True)
    e = np.exp(s - peak)
    return dict(out=e @ f64(a["v"]) / e.sum(1, keepdims=True), lse_out=(np.log(e.sum(1, keepdims=True)) + peak)[:, 0])


def _dequantised(rng):
    return dict(a=rng.normal(size=(32, 64)).astype(BF16), codes=rng.integers(0, 256, (32, 32)).astype(np.uint8),
                scales=rng.uniform(0.25, 2, (4, 32)).astype(BF16), c=poisoned((32, 32)))


def _dequantised_answer(a):
    codes = np.stack([a["codes"] & 15, a["codes"] >> 4], 1).reshape(64, 32).astype(np.float32) - 8
    weights = (codes.astype(BF16) * np.repeat(a["scales"], 16, 0)).astype(np.float64)
    return dict(c=f64(a["a"]) @ weights)


def tensor_map_case(name, specialise, targets, m=128, n=64, k=128):
    return Case(name, kernels.matmul_tensor_map, lambda rng: _tensor_map_matmul(rng, m, n, k),
                lambda a: dict(c=f64(a["a"]) @ f64(a["b"]).T), dict(c=(2e-3, 2e-2)),
                dict(TILE_M=128, TILE_N=64, TILE_K=64, WARP_SPECIALIZE=specialise, STAGES=2), targets=targets)


CASES = (
    Case("saxpy", kernels.saxpy, _saxpy, lambda a: dict(out=1.7 * f64(a["x"]) + a["y"]), dict(out=(1e-6, 1e-6)),
         dict(BLOCK=256), grid=(4,)),
    Case("softmax_rows", kernels.softmax_rows, _softmax, _softmax_answer, dict(out=(1e-5, 1e-8)), dict(BLOCK=512),
         grid=(5,)),
    Case("layer_norm_f16", kernels.layer_norm, lambda rng: _norm(rng, np.float16, True), _layer_norm_answer,
         dict(out=(1e-3, 2e-3)), dict(BLOCK=256), grid=(4,)),
    Case("rms_norm_bf16", kernels.rms_norm, lambda rng: _norm(rng, BF16, False), _rms_norm_answer,
         dict(out=(8e-3, 1e-3)), dict(BLOCK=128), grid=(4,), warps=2),
    Case("welford_rows", kernels.welford_rows, _welford,
         lambda a: dict(mean_out=f64(a["x"]).mean(1), var_out=f64(a["x"]).var(1)),
         dict(mean_out=(1e-6, 0), var_out=(1e-4, 1e-5)), dict(ROWS=8, COLUMNS=128)),
    Case("argmax_rows", kernels.argmax_rows, _argmax, _argmax_answer,
         dict(value_out=EXACT, index_out=EXACT, min_index_out=EXACT), dict(ROWS=8, COLUMNS=64)),
    Case("cumulative", kernels.cumulative, _cumulative, lambda a: _cumulative_answer(a, False),
         dict(sum_out=EXACT, product_out=(1e-5, 0)), dict(BLOCK=512, REVERSE=False)),
    Case("cumulative_reverse", kernels.cumulative, _cumulative, lambda a: _cumulative_answer(a, True),
         dict(sum_out=EXACT, product_out=(1e-5, 0)), dict(BLOCK=512, REVERSE=True)),
    Case("linear_recurrence", kernels.linear_recurrence, _recurrence, _recurrence_answer, dict(out=(1e-4, 1e-5)),
         dict(CHANNELS=16, STEPS=64)),
    Case("sort_rows", kernels.sort_rows, _sort, lambda a: dict(out=-np.sort(-a["x"], 1)), dict(out=EXACT),
         dict(ROWS=4, COLUMNS=64)),
    Case("histogram_atomic", kernels.histogram_atomic, lambda rng: _histogram(rng, 700), _histogram_answer,
         dict(counts=EXACT), dict(BLOCK=256), grid=(3,)),
    Case("histogram_builtin", kernels.histogram_builtin,
         lambda rng: {k: v for k, v in _histogram(rng, 512).items() if k != "n"}, _histogram_answer, dict(counts=EXACT),
         dict(BLOCK=512, BINS=16)),
    Case("atomic_medley", kernels.atomic_medley, _medley, _medley_answer, dict(out_head=EXACT, total=EXACT),
         dict(BLOCK=64), grid=(6,), warps=2, unordered=("ticket_out",)),
    Case("locked_sum", kernels.locked_sum, _locked, lambda a: dict(total=f64(a["x"]).sum(keepdims=True), lock=[0]),
         dict(total=EXACT, lock=EXACT), dict(BLOCK=128), grid=(5,)),
    Case("gather_rows", kernels.gather_rows, _gather_rows, lambda a: dict(out=a["table"][a["index"]]), dict(out=EXACT),
         dict(BLOCK=128), grid=(9,)),
    Case("gather_in_tile", kernels.gather_in_tile, _gather_tile,
         lambda a: dict(out=np.take_along_axis(a["x"], a["index"], 1)), dict(out=EXACT), dict(ROWS=16, COLUMNS=32)),
    Case("transpose", kernels.transpose, _transpose, lambda a: dict(out=a["x"].T), dict(out=EXACT), dict(BLOCK=32),
         grid=(3, 2)),
    Case("reshape_join", kernels.reshape_join, _join, _join_answer, dict(out=EXACT, even_out=EXACT), dict(BLOCK=64),
         warps=1),
    Case("mathematics", kernels.mathematics, _mathematics, _mathematics_answer, dict(out=(3e-6, 1e-6)), dict(BLOCK=256)),
    Case("integers", kernels.integers, _integers, _integers_answer, dict(out=EXACT, wide_out=EXACT), dict(BLOCK=256)),
    Case("casts", kernels.casts, _casts, _casts_answer,
         dict(f16_out=EXACT, bf16_out=EXACT, e5m2_out=EXACT, i8_out=EXACT, round_trip_out=EXACT), dict(BLOCK=256)),
    Case("cast_e4m3", kernels.cast_e4m3, _cast_e4m3, _cast_e4m3_answer, dict(e4m3_out=EXACT, round_trip_out=EXACT),
         dict(BLOCK=256), targets=(90, 100)),
    Case("philox", kernels.philox, _philox, _philox_answer, dict(out=EXACT, uniform_out=(1e-6, 0)), dict(BLOCK=128)),
    Case("collatz", kernels.collatz, _collatz, lambda a: dict(steps_out=[0, 16, 111, 118]), dict(steps_out=EXACT),
         grid=(4,), warps=1),
    Case("sum_double", kernels.sum_double, _double, _double_answer, dict(out=(1e-13, 0)), dict(BLOCK=256)),
    Case("cross_entropy", kernels.cross_entropy, _cross_entropy, _cross_entropy_answer, dict(loss_out=(1e-5, 1e-5)),
         dict(BLOCK=128), grid=(4,)),
    matmul_case("matmul_f16", np.float16, (1e-4, 1e-3)),
    matmul_case("matmul_bf16_column_major", BF16, (1e-4, 1e-3), column_major=True, grid=(2, 1), block_k=64),
    matmul_case("matmul_f16_small", np.float16, (1e-3, 2e-2), m=16, n=32, k=64, out=np.float16, warps=2),
    matmul_case("matmul_tf32", np.float32, (1e-3, 3e-2), precision="tf32", k=64),
    matmul_case("matmul_tf32x3", np.float32, (1e-5, 1e-4), precision="tf32x3", m=32, n=32, k=64, warps=2),
    matmul_case("matmul_fma", np.float32, (1e-5, 1e-4), precision="ieee", m=32, n=32, k=32),
    matmul_case("matmul_e5m2", E5M2, (1e-3, 2e-2), column_major=True, block_k=64),
    matmul_case("matmul_e4m3", E4M3, (1e-3, 2e-2), column_major=True, block_k=64, targets=(90, 100)),
    matmul_case("matmul_i8", np.int8, EXACT, out=np.int32, column_major=True, block_k=64, m=32, n=32, warps=2,
                targets=(80, 90)),
    matmul_case("matmul_f64", np.float64, (1e-12, 1e-12), m=16, n=16, k=32, block_k=16, out=np.float64, warps=1),
    scaled_case("mxfp8", ("e4m3", "e4m3"), 32, targets=(90, 100)),
    scaled_case("mxfp8_mixed", ("e5m2", "e4m3"), 32, targets=(90, 100)),
    scaled_case("mxfp4", ("e2m1", "e2m1"), 32),
    scaled_case("mxfp8_mxfp4", ("e5m2", "e2m1"), 32),
    scaled_case("nvfp4", ("e2m1", "e2m1"), 16, targets=(90, 100)),
    tensor_map_case("tensor_map_matmul", False, ALL),
    tensor_map_case("warp_specialised_matmul", True, (90, 100)),
    Case("host_map_matmul", kernels.matmul_host_map, lambda rng: _host_map_matmul(rng, 128, 64, 192),
         lambda a: dict(c=f64(a["map_a"].array) @ f64(a["map_b"].array).T), dict(c=(1e-4, 1e-3)),
         dict(TILE_M=128, TILE_N=64, TILE_K=64, WARP_SPECIALIZE=False, STAGES=3), grid=(1, 1), targets=(90, 100)),
    Case("host_map_warp_specialised", kernels.matmul_host_map, lambda rng: _host_map_matmul(rng, 128, 64, 256),
         lambda a: dict(c=f64(a["map_a"].array) @ f64(a["map_b"].array).T), dict(c=(1e-4, 1e-3)),
         dict(TILE_M=128, TILE_N=64, TILE_K=64, WARP_SPECIALIZE=True, STAGES=3), grid=(1, 1), targets=(100,)),
    Case("copy_tensor_map", kernels.copy_tensor_map, _copy,
         lambda a: dict(out=a["x"] + np.float32(1), add_to=a["add_to"] + a["x"]), dict(out=EXACT, add_to=EXACT),
         dict(TILE_R=32, TILE_C=16), grid=(2, 3)),
    Case("gather_scatter_tensor_map", kernels.gather_scatter_tensor_map, _gather_map,
         lambda a: dict(out=a["x"][a["index"]][::-1]), dict(out=EXACT), dict(COUNT=8, TILE_C=64), targets=(100,)),
    Case("split_k_atomic", kernels.split_k_atomic, _split_k, lambda a: dict(c=f64(a["a"]) @ f64(a["b"])),
         dict(c=(1e-4, 1e-4)), dict(M=32, N=32, BLOCK_K=32), grid=(3,)),
    Case("flash_attention", kernels.flash_attention, lambda rng: _attention(rng, 128, 64),
         lambda a: _attention_answer(a, False), dict(out=(5e-3, 3e-3), lse_out=(1e-4, 1e-4)),
         dict(TILE_Q=64, TILE_K=32, HEAD=64, CAUSAL=False, STAGES=2), grid=(2,)),
    Case("flash_attention_causal", kernels.flash_attention, lambda rng: _attention(rng, 128, 32),
         lambda a: _attention_answer(a, True), dict(out=(5e-3, 3e-3), lse_out=(1e-4, 1e-4)),
         dict(TILE_Q=64, TILE_K=64, HEAD=32, CAUSAL=True, STAGES=3), grid=(2,)),
    Case("dequantised_matmul", kernels.dequantised_matmul, _dequantised, _dequantised_answer, dict(c=(1e-3, 3e-2)),
         dict(M=32, N=32, K=64, GROUP=16)),
)
