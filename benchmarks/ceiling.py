"""The page-streaming ceiling: kernels that read the selected pages and do nothing else.

Register loads and bulk copies, each over a small sweep of shapes and grids. The time of the better one is
what a decode program is held against: it bounds from below what any program that reads these pages once as
listed can take. `distinct` is the same with every tile read once, the bound for a program that decodes a page
once for all tokens that chose it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from msa_cudacore.launch.kernel import Geometry
from msa_cudacore.ptx.source import load as load_source

from .candidates import Bench, Prepared, Unavailable
from .rows import TILE_BYTES
from .workload import Step, Workload

__all__ = ["REGISTER_SHAPES", "BulkCeiling", "RegisterCeiling", "bulk_source", "ceilings", "register_source"]

_FOLDER = Path(__file__).parent
REGISTER_SHAPES = ((128, 9), (192, 6), (384, 3), (288, 4), (96, 6), (192, 3), (32, 9), (96, 3))
"""(threads of a CTA, 16-byte loads of a thread): whole tiles, halves and quarters of one."""
_CTAS_PER_SM = (1, 2, 4, 8, 16)
_THREADS_PER_SM = 2048
_MOST_STAGES = 16
_MOST_NUMBERS = 4096
"""Tile numbers that a CTA of the bulk kernel keeps in shared memory."""

Variant = tuple[str, Callable[[Step], Prepared]]


@functools.cache
def register_source(threads: int, loads: int) -> str:
    return load_source(
        _FOLDER / "stream_registers.cu",
        f"constexpr int kThreads = {threads};\nconstexpr int kLoads = {loads};\n",
    )


@functools.cache
def bulk_source(sides: int) -> str:
    return load_source(_FOLDER / "stream_bulk.cu", f"constexpr int kSides = {sides};\n")


class _Ceiling:
    name: str
    format, kind = "nvfp4", "ceiling"

    def __init__(self, distinct: bool) -> None:
        self._distinct = distinct

    def settings(self, bench: Bench) -> list[Any]:
        """What is worth trying on the device, whatever there is to read. Raises :class:`Unavailable`."""
        raise NotImplementedError

    def at(self, setting: Any, workload: Workload, bench: Bench) -> Variant | None:
        """The launch that a setting makes of a workload, by name; None where it cannot read that much."""
        raise NotImplementedError

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        found: dict[str, Callable[[Step], Prepared]] = {}
        for setting in self.settings(bench):
            variant = self.at(setting, workload, bench)
            if variant is not None:
                # Several settings make the same grid of the few pages of a small workload.
                found.setdefault(*variant)
        return found

    def _arguments(
        self, step: Step, workload: Workload, bench: Bench
    ) -> tuple[object, int, list[np.generic]]:
        """The tile list on the device (to be kept alive), its length, and the kernel arguments up to the
        heads.
        """
        tiles = step.host.tile_list
        if self._distinct:
            tiles = np.unique(tiles)
        heads = workload.row.num_kv_heads
        if heads & (heads - 1):
            raise Unavailable(f"the ceiling kernels take a power of two of KV heads, not {heads}")
        listed = bench.arrays.put(tiles)
        bench.arrays.finish()
        pointers = (np.uint64(bench.arrays.pointer(array)) for array in (workload.views.k, listed))
        return listed, tiles.size, [*pointers, np.int32(tiles.size), np.int32(int(math.log2(heads)))]


class RegisterCeiling(_Ceiling):
    def __init__(self, distinct: bool = False) -> None:
        super().__init__(distinct)
        self.name = "ceiling_registers" + ("_distinct" if distinct else "")
        self.title = "page streaming, 16-byte register loads" + (", each page once" if distinct else "")

    def settings(self, bench: Bench) -> list[tuple[int, int, int]]:
        """(threads, loads, CTAs of a multiprocessor)."""
        return [
            (threads, loads, per_sm)
            for threads, loads in REGISTER_SHAPES
            for per_sm in _CTAS_PER_SM
            if per_sm * threads <= _THREADS_PER_SM
        ]

    def at(self, setting: tuple[int, int, int], workload: Workload, bench: Bench) -> Variant:
        threads, loads, per_sm = setting
        pieces = workload.steps[0].host.tile_list.size * TILE_BYTES // (threads * loads * 16)
        grid = min(bench.stopwatch.facts.multiprocessors * per_sm, pieces)
        name = f"{threads} threads x {loads} loads, {grid} CTAs"
        return name, self._prepare(workload, bench, threads, loads, grid)

    def _prepare(
        self, workload: Workload, bench: Bench, threads: int, loads: int, grid: int
    ) -> Callable[[Step], Prepared]:
        def prepare(step: Step) -> Prepared:
            listed, _, arguments = self._arguments(step, workload, bench)
            sink = bench.arrays.empty((1,), "int32")
            launch = bench.stopwatch.bind(
                register_source(threads, loads),
                "stream_registers",
                Geometry(grid=grid, block=threads),
                (*arguments, np.uint64(bench.arrays.pointer(sink))),
            )
            return Prepared(bench.stopwatch.capture(launch), keep=(listed, sink))

        return prepare


class BulkCeiling(_Ceiling):
    def __init__(self, distinct: bool = False) -> None:
        super().__init__(distinct)
        self.name = "ceiling_bulk" + ("_distinct" if distinct else "")
        self.title = "page streaming, bulk copies" + (", each page once" if distinct else "")

    def settings(self, bench: Bench) -> list[tuple[int, int]]:
        """(sides of a tile that are read together, CTAs of a multiprocessor)."""
        if bench.stopwatch.facts.compute_capability < (9, 0):
            raise Unavailable("bulk copies need compute capability 9.0 or later")
        return [(sides, per_sm) for sides in (1, 2) for per_sm in (1, 2, 4, 8)]

    def at(self, setting: tuple[int, int], workload: Workload, bench: Bench) -> Variant | None:
        sides, per_sm = setting
        facts = bench.stopwatch.facts
        pieces = workload.steps[0].host.tile_list.size * 2 // sides
        grid = min(facts.multiprocessors * per_sm, pieces)
        numbers = -(-pieces // grid)
        # 1 KiB of each CTA's shared memory is the system's.
        room = (
            min(facts.shared_bytes_per_multiprocessor // per_sm - 1024, facts.shared_bytes_per_block)
            - 4 * numbers
        )
        stages = min(_MOST_STAGES, numbers, room // (sides * TILE_BYTES // 2 + 8))
        if numbers > _MOST_NUMBERS or stages < 1:
            return None
        name = f"{'whole' if sides == 2 else 'half'} tiles, {stages} stages, {grid} CTAs"
        return name, self._prepare(workload, bench, sides, stages, grid)

    def _prepare(
        self, workload: Workload, bench: Bench, sides: int, stages: int, grid: int
    ) -> Callable[[Step], Prepared]:
        def prepare(step: Step) -> Prepared:
            listed, count, arguments = self._arguments(step, workload, bench)
            numbers = -(-count * 2 // sides // grid)
            geometry = Geometry(
                grid=grid,
                block=32,
                shared_bytes=stages * (sides * TILE_BYTES // 2 + 8) + 4 * numbers,
            )
            launch = bench.stopwatch.bind(
                bulk_source(sides), "stream_bulk", geometry, (*arguments, np.int32(stages))
            )
            return Prepared(bench.stopwatch.capture(launch), keep=listed)

        return prepare


def ceilings(workload: Workload) -> list[_Ceiling]:
    """The ceilings that say something on a row: `distinct` only where tokens of a request share pages."""
    found: list[_Ceiling] = [RegisterCeiling(), BulkCeiling()]
    if workload.distinct_bytes < workload.selected_bytes:
        found += [RegisterCeiling(distinct=True), BulkCeiling(distinct=True)]
    return found
