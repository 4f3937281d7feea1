"""The two kernels of the Triton peer. A module of its own, because importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode", "merge"]

_SIZES = ["seqlen_q", "heads", "group", "tokens", "max_pages"]
"""Sizes that one compiled kernel serves whatever they are; strides are specialised for being multiples of
16.
"""


@triton.jit
def _values(code, factor):
    """float16 [128, 64] of E2M1 codes uint16 [128, 64], of which the low four bits count, and their factors
    float16.
    """
    # An E2M1 magnitude in the low bits of binary16's exponent and the top bit of its mantissa is 2**-14 of
    # its value, subnormals included.
    bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0 * factor


@triton.jit
def _halves(codes, scales):
    """float16 [128, 64] twice, the even and the odd elements of packed codes uint8 [128, 64] with scales
    uint8 [128, 8].
    """
    factor = scales.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (128, 8, 8)), (128, 64))
    code = codes.to(tl.uint16)
    return _values(code, factor), _values(code >> 4, factor)


@triton.jit(do_not_specialize=_SIZES)
def decode(
    q,
    k,
    v,
    k_scale,
    v_scale,
    q2k,
    page_table,
    seqused,
    out,
    lse,
    partial,
    state,
    seqlen_q,
    heads,
    group,
    tokens,
    max_pages,
    page_stride,
    code_head_stride,
    scale_head_stride,
    score_scale,
    WHOLE: tl.constexpr,
    TOPK: tl.constexpr,
    GROUP: tl.constexpr,
):
    item = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    token = item // heads
    head = item % heads
    request = token // seqlen_q
    visible = tl.load(seqused + request) - seqlen_q + token % seqlen_q + 1

    row = tl.arange(0, GROUP)
    key = tl.arange(0, 128)
    byte = tl.arange(0, 64)
    block_scale = tl.arange(0, 8)
    q_rows = (token * heads + head).to(tl.int64) * group + row
    # Packed codes come apart into even and odd elements without a shuffle, so everything is kept in these
    # halves.
    half_at = q_rows[:, None] * 128 + 2 * byte[None, :]
    # float16 holds a code times its scale exactly, and queries too unless they are beyond 65504 or below
    # 2**-16.
    even_query = tl.load(q + half_at, mask=row[:, None] < group, other=0.0).to(tl.float16)
    odd_query = tl.load(q + half_at + 1, mask=row[:, None] < group, other=0.0).to(tl.float16)
    code_at = key[:, None] * 64 + byte[None, :]
    k_scale_at = key[:, None] * 8 + block_scale[None, :]
    v_scale_at = (key[:, None] // 4) * 32 + block_scale[None, :] * 4 + key[:, None] % 4

    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    even = tl.zeros((GROUP, 64), tl.float32)
    odd = tl.zeros((GROUP, 64), tl.float32)
    share = TOPK // splits
    ids = q2k + (head * tokens + token) * TOPK + split * share
    for j in range(share):
        block = tl.load(ids + j)
        # Selections are padded at the tail, so an empty slot adds nothing: every key of it is masked.
        page = tl.load(page_table + request * max_pages + tl.maximum(block, 0)).to(tl.int64)
        start = page * page_stride + head * code_head_stride
        scale_start = page * page_stride + head * scale_head_stride
        seen = key < tl.where(block < 0, 0, visible - block * 128)
        # Stale tokens may hold NaN scales, which a zero weight would not cancel.
        even_keys, odd_keys = _halves(
            tl.load(k + start + code_at),
            tl.load(k_scale + scale_start + k_scale_at, mask=seen[:, None], other=0),
        )
        scores = tl.dot(even_query, tl.trans(even_keys))
        scores = tl.dot(odd_query, tl.trans(odd_keys), scores) * score_scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        even_values, odd_values = _halves(
            tl.load(v + start + code_at),
            tl.load(v_scale + scale_start + v_scale_at, mask=seen[:, None], other=0),
        )
        shares = weights.to(tl.float16)
        even = tl.dot(shares, even_values, even * shrink[:, None])
        odd = tl.dot(shares, odd_values, odd * shrink[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        top = new_top

    if WHOLE:
        mask = row < group
        safe = tl.where(total == 0.0, 1.0, total)
        tl.store(out + half_at, (even / safe[:, None]).to(tl.bfloat16), mask=mask[:, None])
        tl.store(out + half_at + 1, (odd / safe[:, None]).to(tl.bfloat16), mask=mask[:, None])
        tl.store(lse + q_rows, (top + tl.log2(total)) * 0.6931471805599453, mask=mask)
    else:
        at = item.to(tl.int64) * splits + split
        partial_at = (at * GROUP + row[:, None]) * 128 + 2 * byte[None, :]
        tl.store(partial + partial_at, even)
        tl.store(partial + partial_at + 1, odd)
        tl.store(state + at * 2 * GROUP + row, top)
        tl.store(state + at * 2 * GROUP + GROUP + row, total)


@triton.jit(do_not_specialize=["group", "splits"])
def merge(partial, state, out, lse, group, splits, GROUP: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, GROUP)
    dim = tl.arange(0, 128)
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    weighted = tl.zeros((GROUP, 128), tl.float32)
    for split in range(splits):
        at = item * splits + split
        other_top = tl.load(state + at * 2 * GROUP + row)
        other_total = tl.load(state + at * 2 * GROUP + GROUP + row)
        other = tl.load(partial + (at * GROUP + row[:, None]) * 128 + dim[None, :])
        new_top = tl.maximum(top, other_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        mine, theirs = tl.exp2(top - base), tl.exp2(other_top - base)
        weighted = weighted * mine[:, None] + other * theirs[:, None]
        total = total * mine + other_total * theirs
        top = new_top
    q_rows = item * group + row
    mask = row < group
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + q_rows[:, None] * 128 + dim[None, :],
        (weighted / safe[:, None]).to(tl.bfloat16),
        mask=mask[:, None],
    )
    tl.store(lse + q_rows, (top + tl.log2(total)) * 0.6931471805599453, mask=mask)
