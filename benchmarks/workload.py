"""One row on a device: a pool of random pages, and several decode steps over it to rotate through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msa_cudacore.pool import PoolViews, page_bytes, pool_views
from msa_cudacore.transfer import to_numpy

from .arrays import Arrays
from .rows import TILE_BYTES, Row, Selection, select_pages

__all__ = ["Step", "Workload", "build", "first_requests"]


@dataclass(frozen=True)
class Step:
    """One decode step on the device, and its host side."""

    host: Selection
    q: Any
    q2k_indices: Any
    page_table: Any
    seqused_k: Any


@dataclass
class Workload:
    """The device side of a row.

    Both global scales are 1. Codes are uniformly random and block scales lie between 0.25 and 0.47, which
    gives elements and scores a standard deviation of about 1.
    """

    row: Row
    arrays: Arrays
    views: PoolViews
    steps: tuple[Step, ...]
    cache: dict[str, Any] = field(default_factory=dict)
    """Other forms of the pool that peers read, by name; one at a time is kept, see :meth:`form`."""

    def form(self, name: str, make: Any) -> Any:
        """Another form of the pool, made once. Making one drops the others: a bf16 pool takes gigabytes."""
        if name not in self.cache:
            self.cache.clear()
            self.arrays.release()
            self.cache[name] = make()
        return self.cache[name]

    @property
    def selected_bytes(self) -> int:
        """Bytes of the pages that a step selects, counted as often as they are selected; mean over the
        steps.
        """
        return int(np.mean([step.host.tile_list.size for step in self.steps])) * TILE_BYTES

    @property
    def distinct_bytes(self) -> int:
        """The same with every page of a KV head counted once."""
        return int(np.mean([np.unique(step.host.tile_list).size for step in self.steps])) * TILE_BYTES

    def tiles(self, pages: np.ndarray, heads: np.ndarray) -> PoolViews:
        """Host copies of chosen (page, head) tiles, each view as [n, 1, 128, inner]."""
        index = self.arrays.put(pages.astype(np.int64)), self.arrays.put(heads.astype(np.int64))
        return PoolViews(*(to_numpy(view[index])[:, None] for view in self.views))


def build(row: Row, arrays: Arrays, *, steps: int, seed: int) -> Workload:
    """Draw a row's pool on the device and `steps` decode steps on the host.

    Every step has page table, selections and queries of its own, so that consecutive steps find nothing of
    each other in a cache.
    """
    pool = arrays.random_bytes((row.num_pages, page_bytes(row.num_kv_heads)), seed)
    views = pool_views(pool, row.num_kv_heads)
    for scales in (views.k_scale, views.v_scale):
        # Keep three random mantissa bits under one exponent: E4M3 bytes 0x28 to 0x2F.
        scales &= 0x07
        scales += 0x28
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(steps):
        host = select_pages(row, rng)
        drawn.append(
            Step(
                host,
                *(arrays.put(part) for part in (host.q, host.q2k_indices, host.page_table, host.lengths)),
            )
        )
    arrays.finish()
    return Workload(row, arrays, views, tuple(drawn))


def first_requests(workload: Workload, batch: int) -> Workload:
    """The first requests of every step, on the same pool: views, nothing is drawn or copied."""
    row = workload.row
    tokens = batch * row.seqlen_q
    requests, rows, selected = slice(batch), slice(tokens), (slice(None), slice(tokens))

    def cut(step: Step) -> Step:
        host = step.host
        return Step(
            Selection(
                host.lengths[requests],
                host.page_table[requests],
                host.q2k_indices[selected],
                host.q[rows],
                host.visible[rows],
            ),
            step.q[rows],
            step.q2k_indices[selected],
            step.page_table[requests],
            step.seqused_k[requests],
        )

    steps = tuple(cut(step) for step in workload.steps)
    return Workload(row.with_batch(batch), workload.arrays, workload.views, steps)
