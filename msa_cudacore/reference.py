"""The float64 oracle, computed from the pool bytes, and the measure every other program is held against.

The oracle states the semantics of the decode:

* ``q2k_indices[kv_head, row, j]`` is a logical block of the row's request. An id is dropped, as if it were -1, wherever it
  stands in the row, when it is negative, not below ``max_pages``, or names a block that starts past the row's last visible
  key, or when its page table entry is negative or not below ``num_pages``. Dropped ids are never followed.
* Ids need not be sorted. A block named twice is attended twice: the row is a multiset.
* Query token i of request b stands at ``p = seqused_k[b] - seqlen_q + i`` and sees positions <= p. Bytes of tokens it does
  not see are never read.
* ``lse`` is the natural logarithm of the sum of exp(softmax_scale * k_global_scale * q.k) over what the row sees; a row
  that sees nothing gives zeros and -inf.
* The sign bit of an E4M3 scale is honoured, although no writer of the format sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from msa_cudacore.nvfp4 import as_bytes, dequantize, unswizzle_v_scales
from msa_cudacore.pool import HEAD_DIM, PAGE_SIZE

DEFAULT_SOFTMAX_SCALE = HEAD_DIM**-0.5

_CHUNK = 256
"""Uses of one page handled at once: bounds the scores held to _CHUNK * group * 128 float64."""


def decode(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q2k_indices: np.ndarray,
    *,
    k_scale: np.ndarray,
    v_scale: np.ndarray,
    page_table: np.ndarray,
    seqused_k: np.ndarray,
    k_global_scale: float,
    v_global_scale: float,
    seqlen_q: int = 1,
    softmax_scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sparse decode attention in float64, on NumPy arrays of any strides.

    Shapes are those of :func:`msa_cudacore.prepare_msa_nvfp4_sparse_decode`; q is anything NumPy turns into float64.
    Arguments are taken as valid; the public function checks them. Memory beyond the result: the float64 q of the rows,
    the running maxima and sums, and one dequantised page.

    Returns
    -------
    tuple of numpy.ndarray
        out float64 [batch * seqlen_q, Hq, 128] and lse float64 [batch * seqlen_q, Hq].
    """
    rows, num_q_heads = q.shape[:2]
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    scale = (DEFAULT_SOFTMAX_SCALE if softmax_scale is None else float(softmax_scale)) * float(k_global_scale)
    queries = q.astype(np.float64).reshape(rows, num_kv_heads, group, HEAD_DIM) * scale
    state = _State(
        top=np.full((rows, num_kv_heads, group), -np.inf),
        total=np.zeros((rows, num_kv_heads, group)),
        weighted=np.zeros((rows, num_kv_heads, group, HEAD_DIM)),
    )
    k_scale, v_scale = as_bytes(k_scale), as_bytes(v_scale)

    for head in range(num_kv_heads):
        uses = _visible_uses(q2k_indices[head], page_table, seqused_k, seqlen_q, k.shape[0])
        pages, starts = np.unique(uses.page, return_index=True)
        for page, first, last in zip(pages, starts, [*starts[1:], uses.page.size]):
            live = int(uses.live[first:last].max())
            keys = dequantize(k[page, head, :live], k_scale[page, head, :live])
            # The swizzle interleaves quads of tokens, so the whole tile is unswizzled; only live rows are decoded.
            values = dequantize(v[page, head, :live], unswizzle_v_scales(v_scale[page, head])[:live])
            for row, tokens in _batches(uses, first, last):
                state.attend(head, row, queries[row, head] @ keys[:tokens].T, values[:tokens])

    seen = state.total != 0
    out = np.zeros_like(state.weighted)
    np.divide(state.weighted, state.total[..., None], out=out, where=seen[..., None])
    lse = np.full_like(state.total, -np.inf)
    np.log(state.total, out=lse, where=seen)
    lse += state.top
    return out.reshape(rows, num_q_heads, HEAD_DIM) * float(v_global_scale), lse.reshape(rows, num_q_heads)


class _Uses(NamedTuple):
    """(row, page, tokens it sees there), one entry a kept id, by page, then tokens, then occurrence in the row."""

    row: np.ndarray
    page: np.ndarray
    live: np.ndarray
    occurrence: np.ndarray


def _visible_uses(
    indices: np.ndarray, page_table: np.ndarray, seqused_k: np.ndarray, seqlen_q: int, num_pages: int
) -> _Uses:
    """The ids of one KV head that survive the contract's bounds, with the page and the visible tokens of each."""
    rows = indices.shape[0]
    request, token = np.divmod(np.arange(rows), seqlen_q)
    visible = np.asarray(seqused_k).astype(np.int64)[request] - seqlen_q + token + 1
    ids = np.asarray(indices).astype(np.int64)
    live = np.minimum(visible[:, None] - ids * PAGE_SIZE, PAGE_SIZE)
    row, slot = np.nonzero((ids >= 0) & (ids < page_table.shape[1]) & (live > 0))
    page = np.asarray(page_table)[request[row], ids[row, slot]].astype(np.int64)
    kept = (page >= 0) & (page < num_pages)
    row, page, live = row[kept], page[kept], live[row, slot][kept]
    order = np.lexsort((row, live, page))
    row, page, live = row[order], page[order], live[order]
    # A row may meet the same tokens of the same page more than once (duplicate ids, or two blocks on one page).
    occurrence = np.zeros(row.size, np.int64)
    if row.size:
        fresh = np.ones(row.size, bool)
        fresh[1:] = (row[1:] != row[:-1]) | (page[1:] != page[:-1]) | (live[1:] != live[:-1])
        at = np.arange(row.size)
        occurrence = at - np.maximum.accumulate(np.where(fresh, at, 0))
    order = np.lexsort((row, occurrence, live, page))
    return _Uses(row[order], page[order], live[order], occurrence[order])


def _batches(uses: _Uses, first: int, last: int):
    """(rows, tokens) runs of one page in which no row comes twice and all see the same number of tokens."""
    live, occurrence = uses.live[first:last], uses.occurrence[first:last]
    cuts = np.flatnonzero((np.diff(live) != 0) | (np.diff(occurrence) != 0)) + 1
    for low, high in zip([0, *cuts], [*cuts, last - first]):
        for start in range(low, high, _CHUNK):
            stop = min(start + _CHUNK, high)
            yield uses.row[first + start : first + stop], int(live[low])


@dataclass
class _State:
    """Running softmax: largest score, sum of exp(score - top) and the values weighted alike."""

    top: np.ndarray
    total: np.ndarray
    weighted: np.ndarray

    def attend(self, head: int, row: np.ndarray, scores: np.ndarray, values: np.ndarray) -> None:
        """Add keys with ``scores`` [rows, group, tokens] and ``values`` [tokens, 128] to distinct rows."""
        before = self.top[row, head]
        top = np.maximum(before, scores.max(axis=-1))
        shrink = np.exp(before - top)
        weights = np.exp(scores - top[..., None])
        self.top[row, head] = top
        self.total[row, head] = self.total[row, head] * shrink + weights.sum(axis=-1)
        self.weighted[row, head] = self.weighted[row, head] * shrink[..., None] + weights @ values


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """float64 values rounded once to bfloat16 (nearest, ties to even), as ``ml_dtypes.bfloat16``.

    A plain cast would round to float32 on the way, and so twice.
    """
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(values)
        # bf16 has 8 significant bits; below 2**-126 the step stays at 2**-133.
        step = np.maximum(exponent, -125) - 8
        return np.ldexp(np.rint(np.ldexp(values, -step)), step).astype(np.float32).astype(ml_dtypes.bfloat16)


def relative_error(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|values - exact| / |exact| in the L2 norm over the last axis; 0/0 is 0, and a zero row that is not met is inf."""
    exact = np.asarray(exact, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.linalg.norm(np.asarray(values).astype(np.float64) - exact, axis=-1)
        ratio = error / np.linalg.norm(exact, axis=-1)
    return np.where(error == 0, 0.0, ratio)


def rounding_floor(exact: np.ndarray) -> np.ndarray:
    """The relative L2 error, per last-axis row, that storing the exact row in bfloat16 already makes."""
    return relative_error(round_to_bf16(exact), exact)


@dataclass(frozen=True)
class Report:
    """Outcome of :func:`compare`. ``problems`` is empty when every bar was met; a report is true when it is.

    Errors are over the rows whose exact values are finite; ``worst_row`` (row, query head) has the largest ratio of its
    relative L2 error to the bf16 rounding floor.
    """

    problems: tuple[str, ...]
    max_abs_error: float
    max_lse_error: float
    relative_error: float
    floor: float
    worst_ratio: float
    worst_row: tuple[int, int]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        state = "; ".join(self.problems) if self.problems else "within bounds"
        return (
            f"{state} (largest error {self.max_abs_error:.3g}, lse {self.max_lse_error:.3g}; relative L2 "
            f"{self.relative_error:.3g} against a bf16 floor of {self.floor:.3g}; worst row {self.worst_row} "
            f"at {self.worst_ratio:.3f} of its floor)"
        )


_FP32_ROUNDOFF = 2.0**-24


def compare(
    out: np.ndarray,
    lse: np.ndarray,
    exact_out: np.ndarray,
    exact_lse: np.ndarray,
    *,
    atol: float = 1e-2,
    rtol: float = 1e-2,
    ratio: float = 1.25,
) -> Report:
    """Hold ``out`` [rows, Hq, 128] and ``lse`` [rows, Hq] against the oracle's float64 results.

    The bars: every element within ``atol + rtol * |exact|``; for each (row, query head) a relative L2 error of at most
    ``ratio`` times :func:`rounding_floor`; NaN, +inf and -inf exactly where the oracle has them. A row whose exact values
    are all bf16 numbers has a floor of zero and must therefore be met exactly. A floor above zero counts as 2^-24, FP32's
    unit roundoff, at least: where one key outweighs the others by 2^80 and its value is zero, the exact result holds
    their 2^-80 to eight bits, which no sum of FP32 weights can.
    """
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)
    exact_out, exact_lse = np.asarray(exact_out, np.float64), np.asarray(exact_lse, np.float64)
    if out.shape != exact_out.shape or lse.shape != exact_lse.shape:
        wanted = f"{exact_out.shape} and {exact_lse.shape}"
        raise ValueError(f"out {out.shape} and lse {lse.shape} do not have the exact shapes {wanted}")
    problems = []
    for name, got, exact in (("out", out, exact_out), ("lse", lse, exact_lse)):
        problems += _elementwise(name, got, exact, atol, rtol)

    finite, known = np.isfinite(exact_out).all(axis=-1), np.isfinite(exact_lse)
    error = np.where(finite, relative_error(out, exact_out), 0.0)
    floor = np.where(finite, rounding_floor(exact_out), 0.0)
    floor = np.where(floor > 0.0, np.maximum(floor, _FP32_ROUNDOFF), floor)
    error = np.where(np.isnan(error), np.inf, error)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(error == 0, 0.0, error / floor)
    worst = np.unravel_index(int(ratios.argmax()), ratios.shape) if ratios.size else (0, 0)
    worst_ratio = float(ratios[worst]) if ratios.size else 0.0
    if worst_ratio > ratio:
        problems.append(
            f"out row {worst[0]}, query head {worst[1]}: relative L2 error {error[worst]:.4g} is {worst_ratio:.3f} times "
            f"the bf16 rounding floor {floor[worst]:.4g}; at most {ratio} is allowed "
            f"({int((ratios > ratio).sum())} rows are over)"
        )
    return Report(
        problems=tuple(problems),
        max_abs_error=_largest(np.abs(out[finite] - exact_out[finite])),
        max_lse_error=_largest(np.abs(lse[known] - exact_lse[known])),
        relative_error=float(error[finite].mean()) if finite.any() else 0.0,
        floor=float(floor[finite].mean()) if finite.any() else 0.0,
        worst_ratio=worst_ratio,
        worst_row=(int(worst[0]), int(worst[1])),
    )


def _elementwise(name: str, got: np.ndarray, exact: np.ndarray, atol: float, rtol: float) -> list[str]:
    problems = []
    special = ~np.isfinite(exact)
    with np.errstate(invalid="ignore"):
        same = np.where(np.isnan(exact), np.isnan(got), got == exact)
        off = np.where(special, 0.0, np.abs(got - exact) - (atol + rtol * np.abs(exact)))
    off = np.where(np.isnan(off), np.inf, off)
    if (special & ~same).any():
        at = tuple(int(i) for i in np.argwhere(special & ~same)[0])
        problems.append(f"{name}{list(at)} is {got[at]}, must be {exact[at]} ({int((special & ~same).sum())} such)")
    if (off > 0).any():
        at = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        problems.append(
            f"{name}{list(at)} is {got[at]:.6g}, exact {exact[at]:.6g}: outside atol {atol:g} + rtol {rtol:g} "
            f"({int((off > 0).sum())} of {off.size} elements)"
        )
    return problems


def _largest(errors: np.ndarray) -> float:
    return float(np.max(errors)) if errors.size else 0.0
