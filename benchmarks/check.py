"""Are the timed results right? A sample of whole rows of every step, against the float64 oracle.

The oracle works on host copies of the pages that the sampled rows select, and on the values that a
candidate's cache holds: NVFP4 and bf16 caches hold the same (a product of an E2M1 and an E4M3 number has at
most 6 significant bits), an fp8 cache those rounded to E4M3.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from msa_cudacore import reference
from msa_cudacore.nvfp4 import dequantize, unswizzle_v_scales
from msa_cudacore.pool import HEAD_DIM, PAGE_SIZE, PoolViews
from msa_cudacore.transfer import to_numpy

from .workload import Step, Workload

__all__ = ["Checked", "Oracle", "attend"]

LARGEST_ERROR = 1e-2
"""Relative L2 error, mean over the sampled rows, up to which a peer's result passes as the same function.
bf16 arithmetic gives 2e-3. Ours is held to the product's own bars instead, see
:func:`msa_cudacore.reference.compare`."""


@dataclass(frozen=True)
class Checked:
    """How far a candidate's sampled rows lie from the oracle's."""

    passed: bool
    rows: int
    relative_error: float
    """L2 error of an output row over its norm, mean over (token, query head)."""
    floor: float
    """The same error made by merely rounding the exact row to bfloat16."""
    worst_over_floor: float
    largest_lse_error: float | None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Sample:
    step: int
    token: np.ndarray
    out: np.ndarray
    lse: np.ndarray


class Oracle:
    """Exact results of sampled rows of a workload; computed when first asked for, and kept."""

    def __init__(self, workload: Workload, *, rows: int, seed: int) -> None:
        self._workload = workload
        rng = np.random.default_rng(seed)
        self._tokens = [_sample(rng, workload.row.tokens, rows) for _ in workload.steps]
        self._samples: dict[str, list[_Sample]] = {}

    def check(self, results: list[tuple[Any, Any]], cache_format: str, *, ours: bool) -> Checked:
        """Hold the (out, lse) of every step, in host or device memory, against the oracle; lse None is not
        looked at.
        """
        held = "fp8" if cache_format == "fp8" else "exact"
        if held not in self._samples:
            self._samples[held] = [
                _Sample(number, token, *_exact_rows(self._workload, step, token, held))
                for number, (step, token) in enumerate(zip(self._workload.steps, self._tokens, strict=True))
            ]
        outs, lses, exact_outs, exact_lses = [], [], [], []
        for sample in self._samples[held]:
            out, lse = results[sample.step]
            shape = (self._workload.row.tokens, self._workload.row.num_q_heads)
            outs.append(_as_floats(out).reshape(*shape, HEAD_DIM)[sample.token])
            lses.append(sample.lse if lse is None else to_numpy(lse).reshape(shape)[sample.token])
            exact_outs.append(sample.out)
            exact_lses.append(sample.lse)
        report = reference.compare(*(np.concatenate(part) for part in (outs, lses, exact_outs, exact_lses)))
        passed = bool(report) if ours else report.relative_error <= LARGEST_ERROR
        return Checked(
            passed=passed,
            rows=sum(token.size for token in self._tokens),
            relative_error=report.relative_error,
            floor=report.floor,
            worst_over_floor=report.worst_ratio,
            largest_lse_error=None if results[0][1] is None else report.max_lse_error,
            problem="" if passed else "; ".join(report.problems),
        )


def _sample(rng: np.random.Generator, tokens: int, rows: int) -> np.ndarray:
    """The last token, and random others."""
    chosen = rng.permutation(tokens - 1)[: rows - 1]
    return np.sort(np.append(chosen, tokens - 1))


def _as_floats(out: Any) -> np.ndarray:
    host = to_numpy(out)
    return host.view(ml_dtypes.bfloat16) if host.dtype == np.uint16 else host


def _exact_rows(
    workload: Workload, step: Step, token: np.ndarray, held: str
) -> tuple[np.ndarray, np.ndarray]:
    """float64 (out [rows, Hq, 128], lse [rows, Hq]) of some tokens, each treated as a request of its own.

    `held` says which values the cache holds: `exact`, or `fp8`.
    """
    host = step.host
    heads = workload.row.num_kv_heads
    wanted = np.unique(host.tiles[token])
    wanted = wanted[wanted >= 0]
    pages, head = np.divmod(wanted, heads)
    tiles = workload.tiles(pages, head)
    if held == "exact":
        return _decoded(workload, host, token, pages, head, tiles)
    keys, values = (_rounded_to_e4m3(*side) for side in _dequantized(tiles))
    out = np.zeros((token.size, workload.row.num_q_heads, HEAD_DIM))
    lse = np.zeros((token.size, workload.row.num_q_heads))
    group = workload.row.group
    for row, t in enumerate(token):
        for h in range(heads):
            ids = host.tiles[t, h]
            kept = ids >= 0
            at = np.searchsorted(wanted, ids[kept])
            block = host.q2k_indices[h, t, kept].astype(np.int64)
            position = block[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
            mine = slice(h * group, (h + 1) * group)
            out[row, mine], lse[row, mine] = attend(
                host.q[t, mine], keys[at], values[at], position < host.visible[t]
            )
    return out, lse


def _decoded(
    workload: Workload, host: Any, token: np.ndarray, pages: np.ndarray, head: np.ndarray, tiles: PoolViews
) -> tuple[np.ndarray, np.ndarray]:
    """The package's own oracle on a small pool that holds the copied tiles."""
    heads = workload.row.num_kv_heads
    held, compact = np.unique(pages, return_inverse=True)
    views = [np.zeros((held.size, heads, *tile.shape[2:]), np.uint8) for tile in tiles]
    for view, tile in zip(views, tiles, strict=True):
        view[compact, head] = tile[:, 0]
    position = np.full(workload.views.k.shape[0], -1, np.int32)
    position[held] = np.arange(held.size)
    table = host.page_table[token // workload.row.seqlen_q]
    small = PoolViews(*views)
    return reference.decode(
        host.q[token],
        small.k,
        small.v,
        host.q2k_indices[:, token],
        k_scale=small.k_scale,
        v_scale=small.v_scale,
        page_table=np.where(table < 0, -1, position[table]),
        seqused_k=host.visible[token],
        k_global_scale=1.0,
        v_global_scale=1.0,
        seqlen_q=1,
    )


def _dequantized(tiles: PoolViews) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(codes, linear scales) of K and of V."""
    return (tiles.k[:, 0], tiles.k_scale[:, 0]), (tiles.v[:, 0], unswizzle_v_scales(tiles.v_scale[:, 0]))


def _rounded_to_e4m3(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return dequantize(codes, scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention in float64.

    q [group, 128]; keys and values [pages, 128, 128]; visible bool [pages, 128]. Gives out [group, 128] and
    the natural logarithm of the sum of exp(q . k / sqrt(128)) [group].
    """
    keys, values = keys[visible], values[visible]
    scores = q.astype(np.float64) @ keys.T * HEAD_DIM**-0.5
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ values / total, (top + np.log(total))[:, 0]
