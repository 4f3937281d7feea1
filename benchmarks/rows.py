"""What is measured: decode steps by name, and the selections, page tables and queries of each.

The published rows are those of the reference program (flashinfer-ai/flashinfer, pull request 5875), whose
authors give the GPU time of one launch on a B200. Everything here is NumPy on the host; :mod:`.workload` puts
it on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from msa_cudacore.contract import Problem
from msa_cudacore.pool import HEAD_DIM, PAGE_SIZE, TOKEN_BYTES

__all__ = [
    "QUICK_ROWS",
    "ROWS",
    "SWEEP",
    "SWEPT",
    "TILE_BYTES",
    "TOPK",
    "Row",
    "Selection",
    "find",
    "named",
    "select_pages",
]

TOPK = 16
TILE_BYTES = 2 * PAGE_SIZE * TOKEN_BYTES
"""What one KV head keeps in one page: K and V codes and scales."""


@dataclass(frozen=True)
class Row:
    """One problem size. `kv_tokens` is the context of every request, or the longest one of a ragged row."""

    name: str
    kind: str
    """`bandwidth`, `middle` or `latency`: what a good program is bound by there; or `sweep`."""
    batch: int
    kv_tokens: int
    num_kv_heads: int
    group: int
    seqlen_q: int = 1
    ragged: bool = False
    topk: int = TOPK
    """Pages that every query token selects for each KV head."""
    b200_us: float | None = None
    """Published time of the reference program on a B200, microseconds; None for rows of ours."""
    at_most: float | None = None
    """Target: this many times the page-streaming ceiling's time on an H200; None where there is none."""

    def with_batch(self, batch: int) -> Row:
        """The row of another number of requests, and its name."""
        return replace(self, batch=batch, name=self.name.replace(f"_b{self.batch}_", f"_b{batch}_"))

    @property
    def tokens(self) -> int:
        """Query tokens of the batch."""
        return self.batch * self.seqlen_q

    @property
    def items(self) -> int:
        """(query token, KV head) pairs: the units of independent work."""
        return self.tokens * self.num_kv_heads

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def lengths(self) -> np.ndarray:
        """int64 [batch], KV tokens of each request; a ragged row's are drawn between a half and the whole of
        `kv_tokens`.
        """
        if self.ragged:
            return np.random.default_rng(self.kv_tokens).integers(
                self.kv_tokens // 2, self.kv_tokens + 1, self.batch
            )
        return np.full(self.batch, self.kv_tokens)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: those of every request, selected or not."""
        return int((-(-self.lengths // PAGE_SIZE)).sum())

    @property
    def problem(self) -> Problem:
        """The sizes as the package sees them, with page tables as wide as the longest context."""
        max_pages = int((-(-self.lengths // PAGE_SIZE)).max())
        return Problem(
            self.batch, self.seqlen_q, self.num_q_heads, self.num_kv_heads, self.topk, max_pages, self.num_pages
        )


def _row(
    name: str,
    kind: str,
    at_most: float | None = None,
    b200_us: float | None = None,
) -> Row:
    """Read the sizes off a row's name: tensor-parallel rank, batch, KV tokens and query tokens."""
    rank, batch, context, queries, *rest = name.split("_")
    heads, group = {"tp1": (4, 16), "tp2": (2, 16), "tp4": (1, 16), "tp8": (1, 8)}[rank]
    tokens = {
        "kv257": 257,
        "kv8k": 8192,
        "kv16k": 16384,
        "kv64k": 65536,
        "kv100k": 100_000,
        "kv200k": 200_000,
        "kv1m": 1 << 20,
    }
    return Row(
        name,
        kind,
        int(batch[1:]),
        tokens[context],
        heads,
        group,
        int(queries[1:]),
        "ragged" in rest,
        b200_us=b200_us,
        at_most=at_most,
    )


ROWS: tuple[Row, ...] = (
    _row("tp1_b128_kv8k_q1", "bandwidth", 1.22, 45.3),
    _row("tp1_b32_kv8k_q4", "bandwidth", 1.22, 45.0),
    # Four items for each of an H200's 132 multiprocessors, one request more, and so on to eight for each.
    _row("tp1_b132_kv8k_q1", "bandwidth"),
    _row("tp1_b133_kv8k_q1", "bandwidth"),
    _row("tp1_b160_kv8k_q1", "bandwidth"),
    _row("tp1_b32_kv8k_q8", "bandwidth", 1.45, 74.3),
    _row("tp1_b264_kv8k_q1", "bandwidth"),
    _row("tp1_b32_kv64k_q1", "middle", 1.40, 15.8),
    _row("tp1_b32_kv64k_q1_ragged", "middle", 1.40, 15.8),
    _row("tp2_b64_kv16k_q1", "middle", 1.40, 15.8),
    _row("tp4_b128_kv8k_q1", "middle", 1.40, 15.8),
    _row("tp8_b128_kv64k_q1", "middle", 1.40, 15.7),
    # As many items as multiprocessors, twice as many, and one more than each: where a second wave starts.
    _row("tp4_b132_kv8k_q1", "middle", 1.40),
    _row("tp4_b133_kv8k_q1", "middle", 1.40),
    _row("tp4_b192_kv8k_q1", "middle", 1.40),
    _row("tp1_b32_kv8k_q2", "middle", 1.40, 25.7),
    _row("tp4_b32_kv64k_q8", "middle", 1.40, 26.0),
    _row("tp1_b8_kv100k_q8", "middle", 1.40, 25.9),
    _row("tp4_b264_kv8k_q1", "middle", 1.40),
    _row("tp4_b265_kv8k_q1", "middle", 1.40),
    _row("tp1_b16_kv64k_q1", "latency", 1.45, 12.2),
    _row("tp1_b8_kv100k_q1", "latency", 1.45, 9.8),
    _row("tp1_b4_kv64k_q1", "latency", 1.45),
    _row("tp1_b2_kv64k_q1", "latency", 1.45),
    _row("tp1_b2_kv257_q1_tail", "latency", 1.45, 5.9),
    _row("tp1_b1_kv200k_q1", "latency", 1.45, 7.3),
    _row("tp4_b2_kv64k_q1", "latency", 1.45),
    _row("tp4_b1_kv1m_q1", "latency", 1.45, 7.2),
)

SWEEP = "items"
"""Name of the sweep over the number of items, see :mod:`.items`."""
SWEPT = _row("tp4_b1200_kv8k_q1", "sweep")
"""Its largest step."""

QUICK_ROWS = ("tp1_b128_kv8k_q1", "tp1_b32_kv64k_q1", "tp1_b1_kv200k_q1")


def find(names: str) -> tuple[Row, ...]:
    """Rows by comma-separated names; a name may also be the beginning of several. Raises ValueError."""
    chosen: dict[str, Row] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        exact = [row for row in ROWS if row.name == name]
        matching = exact or [row for row in ROWS if row.name.startswith(name)]
        if not matching:
            known = ", ".join([*(row.name for row in ROWS), SWEEP])
            raise ValueError(f"no row is called, or begins with, {name!r}; there are {known}")
        chosen.update((row.name, row) for row in matching)
    if not chosen:
        raise ValueError(f"no row is named in {names!r}")
    return tuple(row for row in ROWS if row.name in chosen)


def named(names: str) -> tuple[tuple[Row, ...], bool]:
    """Rows as :func:`find` finds them, and whether the sweep is named among them, or alone."""
    parts = [part.strip() for part in names.split(",")]
    others = [part for part in parts if part and part != SWEEP]
    sweep = SWEEP in parts
    return find(",".join(others)) if others or not sweep else (), sweep


@dataclass(frozen=True)
class Selection:
    """The host side of one decode step."""

    lengths: np.ndarray
    """int32 [batch], KV tokens of each request."""
    page_table: np.ndarray
    """int32 [batch, max_pages], a permutation of all pages; -1 past a request's last page."""
    q2k_indices: np.ndarray
    """int32 [num_kv_heads, tokens, 16], ascending, -1 at the tail."""
    q: np.ndarray
    """bfloat16 [tokens, num_q_heads, 128], standard normal."""
    visible: np.ndarray
    """int64 [tokens], keys that a query token may see: its position plus one."""

    @property
    def tiles(self) -> np.ndarray:
        """int64 [tokens, num_kv_heads, 16]: page * num_kv_heads + head of every selected page, -1 where there
        is none.
        """
        heads, tokens, _ = self.q2k_indices.shape
        ids = self.q2k_indices.transpose(1, 0, 2).astype(np.int64)
        request = np.arange(tokens) // (tokens // self.lengths.size)
        page = self.page_table[request[:, None, None], np.maximum(ids, 0)].astype(np.int64)
        return np.where(ids < 0, -1, page * heads + np.arange(heads)[:, None])

    @property
    def tile_list(self) -> np.ndarray:
        """int32: the tiles that a step reads, token by token, as often as they are selected."""
        tiles = self.tiles
        return tiles[tiles >= 0].astype(np.int32)

    @property
    def attended(self) -> int:
        """(query token, KV head, key) triples that are not masked: the arithmetic of a step."""
        full = (self.q2k_indices >= 0).sum(axis=(0, 2)) * PAGE_SIZE
        missing = -(-self.visible // PAGE_SIZE) * PAGE_SIZE - self.visible
        return int((full - missing * self.q2k_indices.shape[0]).sum())


def select_pages(row: Row, rng: np.random.Generator) -> Selection:
    """Draw a step: each (token, KV head) selects its last page and random others of its request."""
    lengths = row.lengths
    blocks = -(-lengths // PAGE_SIZE)
    max_pages = int(blocks.max())
    used = np.arange(max_pages) < blocks[:, None]
    page_table = np.full((row.batch, max_pages), -1, np.int32)
    page_table[used] = rng.permutation(row.num_pages)

    token = np.arange(row.tokens)
    visible = lengths[token // row.seqlen_q] - row.seqlen_q + token % row.seqlen_q + 1
    last = (visible - 1) // PAGE_SIZE
    block = np.arange(max_pages)
    draw = rng.random((row.num_kv_heads, row.tokens, max_pages))
    draw = np.where(block > last[:, None], -1.0, np.where(block == last[:, None], 2.0, draw))
    count = min(row.topk, max_pages)
    chosen = np.argpartition(-draw, count - 1, axis=-1)[..., :count]
    beyond = np.take_along_axis(draw, chosen, axis=-1) < 0
    chosen = np.sort(np.where(beyond, max_pages, chosen), axis=-1)
    indices = np.full((row.num_kv_heads, row.tokens, row.topk), -1, np.int32)
    indices[..., :count] = np.where(chosen == max_pages, -1, chosen)

    q = rng.standard_normal((row.tokens, row.num_q_heads, HEAD_DIM), dtype=np.float32).astype(
        ml_dtypes.bfloat16
    )
    return Selection(lengths.astype(np.int32), page_table, indices, q, visible)
