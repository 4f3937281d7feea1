"""Kernels written in Triton, whose PTX the emulator runs: each takes pointers (or tensor maps) and sizes, and states in
one line what it computes. Triton reads their source, so they live in a module of their own."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# --- elementwise, reductions, scans ------------------------------------------------------------------------------


@triton.jit
def saxpy(x, y, out, a, n, BLOCK: tl.constexpr):
    """out = a * x + y, the tail masked."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, a * tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside, other=0.0), mask=inside)


@triton.jit
def softmax_rows(x, out, columns, BLOCK: tl.constexpr):
    """Softmax of each row."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def layer_norm(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """Layer norm of each row by a two-pass mean and variance."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    v = tl.load(x + row * columns + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, axis=0) / columns
    centred = tl.where(inside, v - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w = tl.load(weight + i, mask=inside).to(tl.float32)
    b = tl.load(bias + i, mask=inside).to(tl.float32)
    tl.store(out + row * columns + i, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    """RMS norm of each row, walked in blocks so that the loop stays a loop."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * columns + i, mask=i < columns, other=0.0).to(tl.float32)
        total += v * v
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * columns + i, mask=i < columns, other=0.0).to(tl.float32)
        w = tl.load(weight + i, mask=i < columns, other=0.0).to(tl.float32)
        tl.store(out + row * columns + i, (v * scale * w).to(out.dtype.element_ty), mask=i < columns)


@triton.jit
def _welford(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    share = tl.where(count == 0.0, 0.0, count_b / count)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def welford_rows(x, mean_out, var_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and variance of each row by a three-operand custom reduction."""
    r = tl.arange(0, ROWS)
    v = tl.load(x + r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    mean, m2, count = tl.reduce((v, tl.zeros_like(v), tl.full(v.shape, 1.0, tl.float32)), 1, _welford)
    tl.store(mean_out + r, mean)
    tl.store(var_out + r, m2 / count)


@triton.jit
def argmax_rows(x, value_out, index_out, min_index_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest value, its first place, and the first place of the smallest, of each row."""
    r = tl.arange(0, ROWS)
    v = tl.load(x + r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    value, index = tl.max(v, axis=1, return_indices=True)
    tl.store(value_out + r, value)
    tl.store(index_out + r, index)
    tl.store(min_index_out + r, tl.argmin(v, axis=1))


@triton.jit
def cumulative(x, sum_out, product_out, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """Running sum of int32 and running product of float32."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(sum_out + i, tl.cumsum(v, axis=0, reverse=REVERSE))
    tl.store(product_out + i, tl.cumprod(1.0 + v.to(tl.float32) * 0.0009765625, axis=0, reverse=REVERSE))


@triton.jit
def _affine(a0, b0, a1, b1):
    return a1 * a0, a1 * b0 + b1


@triton.jit
def linear_recurrence(decay, x, out, CHANNELS: tl.constexpr, STEPS: tl.constexpr):
    """h[t] = decay[t] * h[t-1] + x[t] for every channel, by an associative scan along rows of a tile."""
    i = tl.arange(0, STEPS)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    _, h = tl.associative_scan((tl.load(decay + i), tl.load(x + i)), 0, _affine)
    tl.store(out + i, h)


@triton.jit
def sort_rows(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each row sorted, descending."""
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + i, tl.sort(tl.load(x + i), descending=True))


# --- atomics, histograms, gathers --------------------------------------------------------------------------------


@triton.jit
def histogram_atomic(x, counts, n, BLOCK: tl.constexpr):
    """counts[v] += 1 for each value, by global atomics without a result."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + i, mask=i < n, other=0), 1, mask=i < n, sem="relaxed")


@triton.jit
def histogram_builtin(x, counts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """The histogram of one block by tl.histogram."""
    tl.store(counts + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, BLOCK)), BINS))


@triton.jit
def atomic_medley(x, out, total, ticket_out, BLOCK: tl.constexpr):
    """Every read-modify-write on its own word: max, min, and, or, xor, xchg, cas, a float sum and a ticket."""
    pid = tl.program_id(0)
    v = tl.load(x + pid)
    tl.atomic_max(out + 0, v)
    tl.atomic_min(out + 1, v)
    tl.atomic_and(out + 2, v)
    tl.atomic_or(out + 3, v)
    tl.atomic_xor(out + 4, v)
    tl.atomic_xchg(out + 5 + pid, v)
    old = tl.atomic_cas(out + 16, pid, pid + 1)
    tl.store(ticket_out + pid, old)
    i = tl.arange(0, BLOCK)
    tl.atomic_add(total + i, i.to(tl.float32) * 0.25)
    tl.atomic_add(total + BLOCK + i % 4, tl.full([BLOCK], 1.0, tl.float32))


@triton.jit
def locked_sum(x, total, lock, BLOCK: tl.constexpr):
    """Blocks add their sums under a spin lock (atomic_cas to take it, atomic_xchg to give it back)."""
    v = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), axis=0)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    before = tl.load(total)
    # All warps load, one thread stores.
    tl.debug_barrier()
    tl.store(total, before + v)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@triton.jit
def gather_rows(table, index, out, columns, BLOCK: tl.constexpr):
    """out[r] = table[index[r]]."""
    row = tl.program_id(0)
    source = tl.load(index + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(out + row * columns + i, tl.load(table + source * columns + i, mask=i < columns), mask=i < columns)


@triton.jit
def gather_in_tile(x, index, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[r, c] = x[r, index[r, c]] by tl.gather on a tile held in registers."""
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 1))


# --- layout and arithmetic ---------------------------------------------------------------------------------------


@triton.jit
def transpose(x, out, rows, columns, BLOCK: tl.constexpr):
    """out = x.T, tile by tile through shared memory."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + r[:, None] * columns + c[None, :], mask=(r < rows)[:, None] & (c < columns)[None, :])
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(tile), mask=(c < columns)[:, None] & (r < rows)[None, :])


@triton.jit
def reshape_join(x, y, even_out, out, BLOCK: tl.constexpr):
    """Interleave, split, flip and permute."""
    i = tl.arange(0, BLOCK)
    both = tl.interleave(tl.load(x + i), tl.load(y + i))
    tl.store(out + tl.arange(0, 2 * BLOCK), tl.flip(both))
    even, odd = tl.split(tl.reshape(both, [BLOCK, 2]))
    turned = tl.permute(tl.reshape(even - odd, [4, BLOCK // 8, 2]), [2, 0, 1])
    tl.store(even_out + i, tl.reshape(turned, [BLOCK]))


@triton.jit
def mathematics(x, out, n, BLOCK: tl.constexpr):
    """Twelve functions of one argument, a row each."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + 0 * n + i, tl.exp(v))
    tl.store(out + 1 * n + i, tl.exp2(v))
    tl.store(out + 2 * n + i, tl.log(tl.abs(v) + 0.5))
    tl.store(out + 3 * n + i, tl.log2(tl.abs(v) + 0.5))
    tl.store(out + 4 * n + i, tl.sin(v))
    tl.store(out + 5 * n + i, tl.cos(v * 1000.0))
    tl.store(out + 6 * n + i, tl.sqrt_rn(tl.abs(v)))
    tl.store(out + 7 * n + i, tl.div_rn(1.0, v))
    tl.store(out + 8 * n + i, tl.erf(v))
    tl.store(out + 9 * n + i, tl.floor(v) + tl.ceil(v * 3.0))
    tl.store(out + 10 * n + i, libdevice.tanh(v))
    tl.store(out + 11 * n + i, tl.fma(v, v, 1.0))


@triton.jit
def integers(x, y, out, wide_out, n, BLOCK: tl.constexpr):
    """Integer division, remainder, shifts, bit counts and high products, 32 and 64 bits."""
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + 0 * n + i, a // b)
    tl.store(out + 1 * n + i, a % b)
    tl.store(out + 2 * n + i, (a >> 3) ^ (b << 2))
    tl.store(out + 3 * n + i, tl.umulhi(a, b))
    tl.store(out + 4 * n + i, libdevice.popc(a) + libdevice.clz(b))
    tl.store(out + 5 * n + i, tl.minimum(a, b) - tl.maximum(a, 7) * tl.abs(b))
    tl.store(wide_out + i, a.to(tl.int64) * b.to(tl.int64) // 77 + (b.to(tl.int64) << 20) % 1000003)


@triton.jit
def casts(x, f16_out, bf16_out, e5m2_out, i8_out, round_trip_out, BLOCK: tl.constexpr):
    """float32 to the narrow types, and back from float8."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(f16_out + i, v.to(tl.float16))
    tl.store(bf16_out + i, v.to(tl.bfloat16))
    narrow = v.to(tl.float8e5)
    tl.store(e5m2_out + i, narrow)
    tl.store(i8_out + i, (v * 16.0).to(tl.int32).to(tl.int8))
    tl.store(round_trip_out + i, narrow.to(tl.float32))


@triton.jit
def cast_e4m3(x, e4m3_out, round_trip_out, BLOCK: tl.constexpr):
    """float32 to E4M3 and back through float16."""
    i = tl.arange(0, BLOCK)
    narrow = tl.load(x + i).to(tl.float8e4nv)
    tl.store(e4m3_out + i, narrow)
    tl.store(round_trip_out + i, narrow.to(tl.float16))


@triton.jit
def philox(seed, out, uniform_out, BLOCK: tl.constexpr):
    """The Philox 4x32 counter generator."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.randint(seed, i))
    tl.store(uniform_out + i, tl.rand(seed, i))


@triton.jit
def collatz(x, steps_out):
    """Steps until 1: a loop whose length depends on the data."""
    v = tl.load(x + tl.program_id(0))
    steps = 0
    while v != 1:
        if v % 2 == 0:
            v = v // 2
        else:
            v = 3 * v + 1
        steps += 1
    tl.store(steps_out + tl.program_id(0), steps)


@triton.jit
def sum_double(x, out, BLOCK: tl.constexpr):
    """Sum, product with a constant and largest, in float64."""
    v = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tl.sum(v, axis=0))
    tl.store(out + 1, tl.max(tl.sqrt(v * v + 1.0), axis=0) / 3.0)


@triton.jit
def cross_entropy(logits, label, loss_out, columns, BLOCK: tl.constexpr):
    """-log softmax at the label, with a running maximum over blocks."""
    row = tl.program_id(0)
    peak = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(logits + row * columns + i, mask=i < columns, other=-float("inf"))
        top = tl.maximum(peak, tl.max(v, axis=0))
        total = total * tl.exp(peak - top) + tl.sum(tl.exp(v - top), axis=0)
        peak = top
    at = tl.load(logits + row * columns + tl.load(label + row))
    tl.store(loss_out + row, tl.log(total) + peak - at)


# --- matrix products ---------------------------------------------------------------------------------------------


@triton.jit
def matmul(a, b, c, K, stride_a, stride_b, stride_c, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr,
           PRECISION: tl.constexpr, B_COLUMN_MAJOR: tl.constexpr, STAGES: tl.constexpr):
    """C = A B for one M x N tile a block, K in software-pipelined steps."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, BLOCK_K)
    wide: tl.constexpr = tl.float32 if c.dtype.element_ty.primitive_bitwidth == 16 else c.dtype.element_ty
    acc = tl.zeros([M, N], dtype=wide)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        ta = tl.load(a + m[:, None] * stride_a + (start + k)[None, :])
        if B_COLUMN_MAJOR:
            tb = tl.load(b + n[None, :] * stride_b + (start + k)[:, None])
        else:
            tb = tl.load(b + (start + k)[:, None] * stride_b + n[None, :])
        acc = tl.dot(ta, tb, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    tl.store(c + m[:, None] * stride_c + n[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def matmul_scaled(a, a_scale, b, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_FORMAT: tl.constexpr,
                  B_FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """C = (A * scales) (B * scales) by tl.dot_scaled; 4-bit operands packed along K."""
    pack_a: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    pack_b: tl.constexpr = 2 if B_FORMAT == "e2m1" else 1
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    ka = tl.arange(0, K // pack_a)
    kb = tl.arange(0, K // pack_b)
    s = tl.arange(0, K // BLOCK)
    ta = tl.load(a + m[:, None] * (K // pack_a) + ka[None, :])
    tb = tl.load(b + n[None, :] * (K // pack_b) + kb[:, None])
    sa = tl.load(a_scale + m[:, None] * (K // BLOCK) + s[None, :])
    sb = tl.load(b_scale + n[:, None] * (K // BLOCK) + s[None, :])
    acc = tl.dot_scaled(ta, sa, A_FORMAT, tb, sb, B_FORMAT)
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def matmul_tensor_map(a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                      WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr):
    """C = A B.T with tensor maps that the kernel itself builds; persistent over tiles."""
    map_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [TILE_M, TILE_K])
    map_b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [TILE_N, TILE_K])
    map_c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [TILE_M, TILE_N])
    tiles_n = tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TILE_M) * tiles_n, tl.num_programs(0)):
        m = tile // tiles_n * TILE_M
        n = tile % tiles_n * TILE_N
        acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
        for k in tl.range(0, K, TILE_K, warp_specialize=WARP_SPECIALIZE, num_stages=STAGES):
            acc = tl.dot(map_a.load([m, k]), map_b.load([n, k]).T, acc)
        map_c.store([m, n], acc.to(tl.float16))


@triton.jit
def matmul_host_map(map_a, map_b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                    WARP_SPECIALIZE: tl.constexpr, STAGES: tl.constexpr):
    """C = A B.T with tensor maps passed as kernel parameters."""
    m = tl.program_id(0) * TILE_M
    n = tl.program_id(1) * TILE_N
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for k in tl.range(0, K, TILE_K, warp_specialize=WARP_SPECIALIZE, num_stages=STAGES):
        acc = tl.dot(map_a.load([m, k]), map_b.load([n, k]).T, acc)
    i = (m + tl.arange(0, TILE_M))[:, None] * N + (n + tl.arange(0, TILE_N))[None, :]
    tl.store(c + i, acc)


@triton.jit
def copy_tensor_map(x, out, add_to, ROWS, COLUMNS, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """out = x + 1 and add_to += x by tensor maps over a ragged array (edges filled and clipped by the copy engine)."""
    map_x = tl.make_tensor_descriptor(x, [ROWS, COLUMNS], [COLUMNS, 1], [TILE_R, TILE_C])
    map_out = tl.make_tensor_descriptor(out, [ROWS, COLUMNS], [COLUMNS, 1], [TILE_R, TILE_C])
    map_add = tl.make_tensor_descriptor(add_to, [ROWS, COLUMNS], [COLUMNS, 1], [TILE_R, TILE_C])
    r = tl.program_id(0) * TILE_R
    c = tl.program_id(1) * TILE_C
    v = map_x.load([r, c])
    map_out.store([r, c], v + 1.0)
    map_add.atomic_add([r, c], v)


@triton.jit
def gather_scatter_tensor_map(x, index, out, ROWS, COLUMNS, COUNT: tl.constexpr, TILE_C: tl.constexpr):
    """out[r] = x[index[r]] by the tensor copy's gather, and its scatter to reversed rows."""
    map_x = tl.make_tensor_descriptor(x, [ROWS, COLUMNS], [COLUMNS, 1], [1, TILE_C])
    map_out = tl.make_tensor_descriptor(out, [COUNT, COLUMNS], [COLUMNS, 1], [1, TILE_C])
    i = tl.arange(0, COUNT)
    v = map_x.gather(tl.load(index + i), 0)
    map_out.scatter(v, COUNT - 1 - i, 0)


@triton.jit
def split_k_atomic(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """C += A B, the K range split over blocks that meet by float atomics."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]))
    tl.atomic_add(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def flash_attention(q, k, v, out, lse_out, tokens, scale, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
                    HEAD: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr):
    """softmax(scale Q K.T) V by the running maximum, one query tile a block; lse in natural logarithm."""
    rows = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    d = tl.arange(0, HEAD)
    tq = tl.load(q + rows[:, None] * HEAD + d[None, :])
    peak = tl.full([TILE_Q], -float("inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, HEAD], tl.float32)
    last = (tl.program_id(0) + 1) * TILE_Q if CAUSAL else tokens
    for start in tl.range(0, last, TILE_K, num_stages=STAGES):
        columns = start + tl.arange(0, TILE_K)
        tk = tl.load(k + columns[None, :] * HEAD + d[:, None])
        s = tl.dot(tq, tk) * (scale * 1.4426950408889634)
        if CAUSAL:
            s = tl.where(rows[:, None] >= columns[None, :], s, -float("inf"))
        top = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - top[:, None])
        keep = tl.exp2(peak - top)
        total = total * keep + tl.sum(p, axis=1)
        tv = tl.load(v + columns[:, None] * HEAD + d[None, :])
        acc = tl.dot(p.to(tv.dtype), tv, acc * keep[:, None])
        peak = top
    tl.store(out + rows[:, None] * HEAD + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse_out + rows, (peak + tl.log2(total)) * 0.6931471805599453)


@triton.jit
def dequantised_matmul(a, codes, scales, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """C = A W with W held as unsigned 4-bit codes, two a byte along K, one scale a group of K."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    packed = tl.load(codes + (k[:, None] // 2) * N + n[None, :])
    nibble = ((packed >> ((k[:, None] % 2) * 4)) & 15).to(tl.int32) - 8
    w = nibble.to(tl.bfloat16) * tl.load(scales + (k[:, None] // GROUP) * N + n[None, :])
    acc = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), w)
    tl.store(c + m[:, None] * N + n[None, :], acc)
