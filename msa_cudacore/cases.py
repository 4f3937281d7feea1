"""Whole decode problems as data, and random ones over the contract.

A :class:`Case` holds every argument of :func:`msa_cudacore.prepare_msa_nvfp4_sparse_decode` as NumPy arrays.
It moves to torch or CuPy with strides, gaps and shared allocations kept, and is saved by
:mod:`msa_cudacore.case_file`. Problems with known exact answers are in :mod:`msa_cudacore.exact_cases`,
those whose arithmetic is hard in :mod:`msa_cudacore.hard_cases`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msa_cudacore import reference
from msa_cudacore.contract import MAX_GROUP
from msa_cudacore.nvfp4 import E4M3_NAN, quantize, swizzle_v_scales
from msa_cudacore.pool import (
    CODE_BYTES,
    HEAD_DIM,
    PAGE_SIZE,
    SCALE_BYTES,
    PoolViews,
    aligned_bytes,
    page_bytes,
    pool_views,
)
from msa_cudacore.transfer import BF16, E4M3, move

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
ARRAYS = ("q", "k", "v", "k_scale", "v_scale", "q2k_indices", "page_table", "seqused_k")
LAYOUTS = ("planar", "interleaved", "separate", "head_major")


@dataclass(frozen=True)
class Case:
    """One decode step: the public function's arguments, and the exact results where they are known."""

    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    q2k_indices: Any
    page_table: Any
    seqused_k: Any
    k_global_scale: float = 1.0
    v_global_scale: float = 1.0
    seqlen_q: int = 1
    softmax_scale: float | None = None
    name: str = "case"
    expected_out: np.ndarray | None = None
    expected_lse: np.ndarray | None = None

    @property
    def batch(self) -> int:
        return self.seqused_k.shape[0]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    def arguments(self) -> dict[str, Any]:
        """All arguments of the public function by name."""
        names = (*ARRAYS, "k_global_scale", "v_global_scale", "seqlen_q", "softmax_scale")
        return {name: getattr(self, name) for name in names}

    def requests(self, first: int, end: int) -> Case:
        """The requests from `first` to before `end` as a batch of their own, on the same pool."""
        tokens = slice(first * self.seqlen_q, end * self.seqlen_q)
        return replace(
            self,
            q=self.q[tokens],
            q2k_indices=self.q2k_indices[:, tokens],
            page_table=self.page_table[first:end],
            seqused_k=self.seqused_k[first:end],
            expected_out=None if self.expected_out is None else self.expected_out[tokens],
            expected_lse=None if self.expected_lse is None else self.expected_lse[tokens],
        )

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64 from the oracle; for cases of NumPy arrays."""
        arguments = self.arguments()
        if self.q.dtype == np.uint16:
            arguments["q"] = self.q.view(BF16)
        # NaN and infinite queries pass through in silence, as on a device.
        with np.errstate(all="ignore"):
            return reference.decode(**arguments)

    def __str__(self) -> str:
        return (
            f"{self.name}: batch {self.batch}, seqlen_q {self.seqlen_q}, "
            f"heads {self.num_q_heads}/{self.num_kv_heads}, top-k {self.q2k_indices.shape[-1]}, "
            f"{self.k.shape[0]} pages, table width {self.page_table.shape[1]}, scales {self.k_scale.dtype}"
        )

    def to(self, framework: str, device: Any = None, *, bf16_as_uint16: bool = False) -> Case:
        """The same problem in another array library: see :func:`msa_cudacore.transfer.move`.

        ``bf16_as_uint16`` hands q over as its bits.
        """
        arrays = {name: getattr(self, name) for name in ARRAYS}
        if bf16_as_uint16:
            arrays["q"] = arrays["q"].view(np.uint16)
        return replace(self, **move(arrays, framework, device))

    def save(self, path: Any) -> None:
        """Write the problem as npz; see :func:`msa_cudacore.case_file.save`."""
        from msa_cudacore import case_file

        case_file.save(self, path)

    @staticmethod
    def load(path: Any) -> Case:
        """Read a problem from npz; see :func:`msa_cudacore.case_file.load`."""
        from msa_cudacore import case_file

        return case_file.load(path)


def random_case(
    rng: np.random.Generator,
    *,
    group: int | None = None,
    num_kv_heads: int | None = None,
    seqlen_q: int | None = None,
    batch: int | None = None,
    topk: int | None = None,
    lengths: np.ndarray | None = None,
    max_pages: int | None = None,
    layout: str | None = None,
    scale_dtype: Any = None,
    hostile: bool = True,
    strided_inputs: bool | None = None,
    score_deviation: float | None = None,
    work: int = 1500,
) -> Case:
    """A random legal problem; whatever is left out is drawn from the whole contract.

    ``hostile`` adds what a correct reader survives: NaN scales in dead tokens and unused pages, gaps of 0xFF,
    garbage in unused page table slots, -1 anywhere in a row, illegal ids and pages, unsorted and repeated
    ids, shared pages, zero, subnormal and negative block scales. ``score_deviation`` is about the standard
    deviation of the scores. ``work`` bounds the (row, KV head, page) tiles of drawn sizes, so that the oracle
    takes a fraction of a second. ``layout`` is one of ``LAYOUTS``.
    """
    group = group or int(rng.integers(1, MAX_GROUP + 1))
    num_kv_heads = num_kv_heads or int(rng.choice([1, 2, 3, 4, 4, 5, 8]))
    seqlen_q = seqlen_q or int(rng.choice([1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32]))
    topk = topk or int(rng.choice([16, 16, 16, 16, 1, 2, 3, 7, 8, 15, 17, 32, 64]))
    if lengths is not None:
        lengths = np.asarray(lengths, np.int64)
        batch = lengths.size
    blocks = int(rng.choice([1, 2, 5, 18, 40]))
    if batch is None:
        most = min(work // (seqlen_q * num_kv_heads * min(blocks, topk)), 300 // blocks, 24)
        batch = int(rng.integers(1, max(most, 1) + 1))
    if lengths is None:
        if max_pages is not None:
            blocks = min(blocks, max_pages)
        lengths = _lengths(rng, batch, seqlen_q, blocks)
    used = -(-lengths // PAGE_SIZE)
    max_pages = max_pages or max(int(used.max(initial=0)), 1) + int(rng.integers(0, 4))

    page_table, num_pages = _page_table(rng, used, max_pages, hostile)
    live = _live_tokens(page_table, lengths, num_pages)
    indices = _selection(rng, lengths, seqlen_q, num_kv_heads, topk, max_pages, hostile)
    if hostile and rng.random() < 0.3:
        holes = rng.random(page_table.shape) < 0.1
        page_table[holes] = rng.choice(_illegal(num_pages), int(holes.sum()))

    softmax_scale = None if rng.random() < 0.5 else float(np.exp(rng.uniform(np.log(0.01), 0)))
    k_global_scale, v_global_scale = np.exp(rng.uniform(np.log([0.02, 0.01]), np.log([20.0, 1.0]))).tolist()
    sides = [_side(rng, num_pages, num_kv_heads, live, hostile) for _ in "kv"]
    (k_codes, k_scales), (v_codes, v_scales) = sides
    layout = layout or str(rng.choice(LAYOUTS))
    views = _lay_out(rng, layout, PoolViews(k_codes, v_codes, k_scales, swizzle_v_scales(v_scales)))
    scale_dtype = np.dtype(scale_dtype if scale_dtype is not None else (np.uint8, E4M3)[rng.integers(2)])
    views = views._replace(k_scale=views.k_scale.view(scale_dtype), v_scale=views.v_scale.view(scale_dtype))

    score_deviation = score_deviation or float(rng.choice([0.3, 1.0, 3.0, 6.0]))
    effective = reference.DEFAULT_SOFTMAX_SCALE if softmax_scale is None else softmax_scale
    q = rng.normal(size=(batch * seqlen_q, group * num_kv_heads, HEAD_DIM))
    if rng.random() < 0.3:
        q[..., rng.integers(0, HEAD_DIM, 3)] *= 20.0
        score_deviation = min(score_deviation, 1.0)
    q[rng.random(q.shape[:2]) < 0.05] = 0.0
    q *= score_deviation / (effective * k_global_scale * _TYPICAL_VALUE * HEAD_DIM**0.5)
    arrays = {
        "q": q.astype(BF16),
        "q2k_indices": indices.astype(np.int32),
        "page_table": page_table.astype(np.int32),
        "seqused_k": lengths.astype(np.int32),
    }
    if strided_inputs or (strided_inputs is None and rng.random() < 0.4):
        arrays = {name: _spread(rng, name, array) for name, array in arrays.items()}
    else:
        arrays["q"] = _dense(arrays["q"])
    return Case(
        **arrays,
        **views._asdict(),
        k_global_scale=k_global_scale,
        v_global_scale=v_global_scale,
        seqlen_q=seqlen_q,
        softmax_scale=softmax_scale,
        name=f"random {layout}",
    )


_TYPICAL_VALUE = 2.9
"""Root mean square of uniformly drawn E2M1 codes: the size of K and V elements under block scales near 1."""


def _lengths(rng: np.random.Generator, batch: int, seqlen_q: int, blocks: int) -> np.ndarray:
    longest = blocks * PAGE_SIZE
    kinds = [
        rng.integers(1, longest + 1, batch),
        np.full(batch, longest),
        rng.integers(1, blocks + 1, batch) * PAGE_SIZE,
        rng.integers(0, seqlen_q + 1, batch),
        rng.integers(0, 3, batch),
    ]
    lengths = np.choose(rng.choice(5, batch, p=[0.5, 0.15, 0.15, 0.1, 0.1]), kinds)
    return np.minimum(lengths, longest).astype(np.int64)


def _illegal(count: int) -> list[int]:
    """Ids that name nothing among ``count`` things."""
    return [-1, -2, INT32_MIN, count, min(count + 1, INT32_MAX), INT32_MAX]


def _page_table(
    rng: np.random.Generator, used: np.ndarray, max_pages: int, hostile: bool
) -> tuple[np.ndarray, int]:
    spare = int(rng.integers(0, 4))
    num_pages = max(int(used.sum()) + spare, 1)
    free = rng.permutation(num_pages)
    if hostile:
        table = rng.choice([*_illegal(num_pages), 0, num_pages - 1], (used.size, max_pages))
    else:
        table = np.full((used.size, max_pages), -1)
    start = 0
    for request, count in enumerate(used):
        table[request, :count] = free[start : start + count]
        start += count
    if hostile and used.size > 1 and rng.random() < 0.5:
        # Prefix caching: some requests begin with the pages of another.
        for request in np.flatnonzero(rng.random(used.size) < 0.5):
            other = int(rng.integers(used.size))
            shared = int(rng.integers(0, min(used[request], used[other]) + 1))
            table[request, :shared] = table[other, :shared]
    return table, num_pages


def _live_tokens(page_table: np.ndarray, lengths: np.ndarray, num_pages: int) -> np.ndarray:
    """For every physical page, how many of its tokens some request has written."""
    tokens = np.clip(lengths[:, None] - np.arange(page_table.shape[1]) * PAGE_SIZE, 0, PAGE_SIZE)
    live = np.zeros(num_pages, np.int64)
    np.maximum.at(live, page_table[tokens > 0], tokens[tokens > 0])
    return live


def _selection(
    rng: np.random.Generator,
    lengths: np.ndarray,
    seqlen_q: int,
    num_kv_heads: int,
    topk: int,
    max_pages: int,
    hostile: bool,
) -> np.ndarray:
    indices = np.full((num_kv_heads, lengths.size * seqlen_q, topk), -1, np.int64)
    per_row = np.broadcast_to(np.repeat(lengths, seqlen_q), indices.shape[:2])
    for (head, row), length in np.ndenumerate(per_row):
        seen = length - seqlen_q + row % seqlen_q + 1
        # A speculative token may be offered blocks that only later tokens of its request can see.
        reach = length if hostile and rng.random() < 0.2 else seen
        blocks = int(-(-max(reach, 0) // PAGE_SIZE))
        count = min(blocks, topk)
        if rng.random() < 0.2:
            count = int(rng.integers(0, count + 1))
        chosen = rng.permutation(blocks)[:count]
        if hostile and count and rng.random() < 0.1:
            chosen = rng.choice(chosen, count)
        elif not (hostile and rng.random() < 0.1):
            chosen = np.sort(chosen)
        line = indices[head, row]
        line[:count] = chosen
        if hostile and rng.random() < 0.15:
            bad = rng.choice([*_illegal(max_pages), min(blocks, INT32_MAX)], topk)
            line[:] = np.where(line < 0, bad, line)
        if hostile and rng.random() < 0.15:
            line[:] = rng.permutation(line)
    return indices


def _side(
    rng: np.random.Generator, num_pages: int, num_kv_heads: int, live: np.ndarray, hostile: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes [pages, Hkv, 128, 64] and linear scales [pages, Hkv, 128, 8] of K or V."""
    shape = (num_pages, num_kv_heads, PAGE_SIZE)
    codes = rng.integers(0, 256, (*shape, CODE_BYTES), dtype=np.uint8)
    scales = rng.integers(0x30, 0x40, (*shape, SCALE_BYTES), dtype=np.uint8)  # 0.5 to 1.875
    if rng.random() < 0.5:
        # What a writer makes of Gaussian data with an outlier channel; a few tiles, dealt to all pages.
        tiles = rng.normal(scale=_TYPICAL_VALUE, size=(6, PAGE_SIZE, HEAD_DIM))
        tiles[..., rng.integers(HEAD_DIM)] *= 4.0
        tile_codes, tile_scales = quantize(tiles, 1.0)
        deal = rng.integers(0, 6, shape[:2])
        codes, scales = tile_codes[deal], tile_scales[deal]
    if hostile:
        rare = rng.random(scales.shape)
        scales[rare < 0.03] &= 7  # zero and subnormal
        if rng.random() < 0.3:
            scales[rare > 0.5] |= 0x80
        dead = np.arange(PAGE_SIZE) >= live[:, None]
        scales[np.broadcast_to(dead[:, None, :, None], scales.shape) & (rare < 0.6)] = E4M3_NAN
        scales[np.broadcast_to(dead[:, None, :, None], scales.shape) & (rare >= 0.6)] = 0xFF
    return codes, scales


def _lay_out(rng: np.random.Generator, layout: str, parts: PoolViews) -> PoolViews:
    """Copy dense parts into one of ``LAYOUTS``; gaps hold 0xFF."""
    num_pages, heads = parts.k.shape[:2]
    if layout in ("planar", "interleaved"):
        layers = 1 if layout == "planar" else 3
        pool = aligned_bytes((num_pages, layers, page_bytes(heads)), 0xFF)
        views = pool_views(pool[:, layers // 2], heads)
        for view, part in zip(views, parts):
            view[...] = part
        return views
    if layout not in LAYOUTS:
        raise ValueError(f"layout: one of {', '.join(LAYOUTS)} is needed, got {layout!r}")
    views = []
    for part in parts:
        tile = PAGE_SIZE * part.shape[-1]
        inner, outer = (heads, num_pages) if layout == "separate" else (num_pages, heads)
        near = tile + 16 * int(rng.integers(0, 5))
        far = near * inner + 16 * int(rng.integers(0, 9))
        start = 16 * int(rng.integers(0, 4))
        raw = aligned_bytes((start + far * outer,), 0xFF)
        strides = (far, near) if layout == "separate" else (near, far)
        view = np.ndarray(part.shape, np.uint8, raw, start, (*strides, part.shape[-1], 1))
        view[...] = part
        views.append(view)
    return PoolViews(*views)


def _dense(array: np.ndarray) -> np.ndarray:
    """A C-ordered copy on a 256-byte boundary."""
    copy = aligned_bytes((array.nbytes,)).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _spread(rng: np.random.Generator, name: str, array: np.ndarray) -> np.ndarray:
    """The same values as a slice of a wider array whose other elements are all ones bits."""
    if name == "q2k_indices" and rng.random() < 0.5:
        return array.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    axis = 0 if name == "seqused_k" else 1 if name in ("q", "page_table") else 2
    shape = list(array.shape)
    shape[axis] += 3
    count = int(np.prod(shape)) * array.itemsize
    wide = aligned_bytes((count,), 0xFF).view(array.dtype).reshape(shape)
    place = tuple(slice(2, 2 + n) if i == axis else slice(None) for i, n in enumerate(array.shape))
    wide[place] = array
    return wide[place]
