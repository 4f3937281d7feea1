"""Small problems whose arithmetic is hard: far and flat logits, sinks, outliers, queries of every size.

Each is made for the weak spot of some online softmax or of some conversion; `HARD` names them all,
and :mod:`msa_cudacore.reference` has their exact results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .cases import Case, random_case
from .nvfp4 import quantize, swizzle_v_scales
from .transfer import BF16

__all__ = ["HARD", "attention_sink", "few_pages"]


def few_pages(rng: np.random.Generator, sizes: list[float], group: int = 3) -> Case:
    """Keys of page p are `sizes[p]` times a unit normal: the largest score moves from page to page."""
    pages, tokens = len(sizes), 128 * len(sizes)
    keys = rng.normal(size=(pages, 1, 128, 128)) * np.reshape(sizes, (-1, 1, 1, 1))
    (k, k_scale), (v, v_scale) = (quantize(x, 1.0) for x in (keys, rng.normal(size=keys.shape)))
    return Case(
        q=(rng.normal(size=(1, group, 128)) * 8).astype(BF16),
        k=k, v=v, k_scale=k_scale, v_scale=swizzle_v_scales(v_scale),
        q2k_indices=np.arange(pages, dtype=np.int32).reshape(1, 1, -1),
        page_table=np.arange(pages, dtype=np.int32)[None],
        seqused_k=np.array([tokens - 3], np.int32),
        name=f"pages of sizes {sizes}",
        # A sharp row is one row of V: without this factor a bfloat16 row, and its rounding floor would be 0.
        v_global_scale=0.7,
    )


def attention_sink(rng: np.random.Generator, gap: float, pages: int = 6) -> Case:
    """One key outweighs the others by exp(gap) and has no value: only the small weights make the result."""
    case = random_case(
        rng, hostile=False, group=16, num_kv_heads=1, seqlen_q=1, topk=pages, lengths=[128 * pages],
        score_deviation=0.5,
    )
    case.q2k_indices[...] = np.arange(pages)
    sink = case.page_table[0, 0], 0, 0
    case.k[..., 0] &= 0xF0  # dim 0 tells the sink from the others
    case.k[sink][0] |= 7
    case.k_scale.view(np.uint8)[sink][0] = 0x38
    case.v[sink] = 0
    scale = 128**-0.5 if case.softmax_scale is None else case.softmax_scale
    case.q[..., 0] = gap / (6 * scale * case.k_global_scale)
    return case


def zero_queries(rng: np.random.Generator) -> Case:
    """Scores of zero under about the smallest scale that is accepted: no factor of it makes a NaN."""
    case = few_pages(rng, [0.25] * 3)
    return replace(case, q=np.zeros_like(case.q), softmax_scale=1e-38, name="zero queries")


def moved_queries(rng: np.random.Generator, exponent: int) -> Case:
    """A power of two moved between q and the scale changes nothing."""
    case = few_pages(rng, [0.25] * 3)
    q = (case.q.astype(np.float32) * np.float32(2.0**exponent)).astype(BF16)
    return replace(case, q=q, softmax_scale=128**-0.5 * 2.0**-exponent, name=f"queries times 2^{exponent}")


def mixed_queries(rng: np.random.Generator) -> Case:
    """Heads of one item from subnormal to huge, one of them zero: each has a scale of its own."""
    case = few_pages(rng, [0.25] * 3, group=7)
    q = case.q.astype(np.float32)
    q[0] *= np.array([2.0**-130, 2.0**-60, 2.0**-20, 0, 1, 2.0**4, 2.0**6], np.float32)[:, None]
    return replace(case, q=q.astype(BF16), name="heads of all sizes")


def far_logits(rng: np.random.Generator, exponent: int) -> Case:
    """Logits of about 2^exponent whose scores are small integers: softmax sees ties, and nothing else."""
    case = few_pages(rng, [1.0] * 4)
    k_scale = np.full_like(case.k_scale, 0x38)
    q = np.zeros(case.q.shape, np.float32)
    q[0, :, :2] = [[1, 1], [-1, 2], [0.5, 0]]
    scale = 2.0 ** min(exponent - 4, 60)
    q *= 2.0 ** (exponent - 4) / scale
    name = f"logits of 2^{exponent}"
    return replace(case, q=q.astype(BF16), k_scale=k_scale, softmax_scale=scale, name=name)


def outlier(rng: np.random.Generator, factor: float) -> Case:
    """One channel dwarfs the others and meets keys that are zero there."""
    case = few_pages(rng, [0.25] * 2)
    q = case.q.astype(np.float64)
    q[..., 5] *= factor
    case.k[..., 2] &= 0x0F  # dim 5 is the high nibble of byte 2
    return replace(case, q=q.astype(BF16), name=f"an outlier of {factor:g}")


HARD: dict[str, Callable[[np.random.Generator], Case]] = {
    "sink 4": functools.partial(attention_sink, gap=4.0),
    "sink 12": functools.partial(attention_sink, gap=12.0),
    "zero queries, tiny scale": zero_queries,
    "huge queries": functools.partial(moved_queries, exponent=100),
    "tiny queries": functools.partial(moved_queries, exponent=-120),
    "heads of all sizes": mixed_queries,
    "logits of 2^12": functools.partial(far_logits, exponent=12),
    "logits of 2^24": functools.partial(far_logits, exponent=24),
    "logits of 2^60": functools.partial(far_logits, exponent=60),
    "logits of 2^120": functools.partial(far_logits, exponent=120),
    "scores rise": functools.partial(few_pages, sizes=[0.01, 0.25, 1, 4]),
    "scores fall": functools.partial(few_pages, sizes=[4, 0.01, 1, 0.1]),
    "scores flat, then sharp": functools.partial(few_pages, sizes=[0.02, 0.02, 0.02, 8]),
    "outlier": functools.partial(outlier, factor=100.0),
    "fewer keys than query tokens": lambda rng: random_case(
        rng, batch=1, seqlen_q=5, num_kv_heads=1, topk=4, lengths=[2], max_pages=2
    ),
}
