"""What a further decode step takes: a chain of steps in one CUDA graph, each behind the last, launched in the
ordinary way and with `enable_pdl`.

A step's own figure contains the start of a graph and a start from cold; in a decoding model a kernel follows
another at once. The chain is one graph of all rotating steps; a further step's time is that of the chain
without that of a graph of its first step alone, over the number of the others. The four graphs (both ways,
one step and all) are replayed by turns, so that a drift of the clocks is in all of them.

L2 is cold where a chain begins. No step reads a byte that an earlier one of its chain has read, other than
the machine code and pages that both selected by chance, for which see :func:`read_before`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import environment
from .candidates import Bench, Ours, Prepared, Unavailable, replayed
from .check import Oracle
from .timing import Timing, programmatic_edges
from .workload import Workload

__all__ = ["CHAINED_ROWS", "NAME", "WAYS", "measure", "read_before"]

NAME = "chain"
CHAINED_ROWS = (
    "tp4_b1_kv1m_q1",
    "tp1_b2_kv64k_q1",
    "tp1_b16_kv64k_q1",
    "tp1_b32_kv64k_q1",
    "tp1_b128_kv8k_q1",
)
WAYS = {"ordinary": False, "enable_pdl": True}


def measure(workload: Workload, bench: Bench, oracle: Oracle, *, samples: int) -> dict[str, Any]:
    """Time both ways on a workload, `samples` replays of each graph, and check what every chain computed."""
    count = len(workload.steps)
    if count < 2:
        raise Unavailable("a chain needs two steps or more")
    if bench.stopwatch.facts.compute_capability < (9, 0):
        raise Unavailable("dependent launches need compute capability 9.0 or later")
    ways = {name: _Way(workload, bench, enable_pdl) for name, enable_pdl in WAYS.items()}
    before = environment.clocks(bench.stopwatch.facts.ordinal)
    timed = _by_turns(ways, bench, samples)
    after = environment.clocks(bench.stopwatch.facts.ordinal)
    record: dict[str, Any] = {
        "steps": count,
        "read_before": round(read_before(workload), 4),
        "clocks": {"before": before, "after": after},
        "ways": {},
    }
    for name, way in ways.items():
        one, all_steps = timed[name]
        further = Timing(tuple((a - b) / (count - 1) for a, b in zip(all_steps, one, strict=True)))
        record["ways"][name] = {
            "configuration": way.steps[0].description,
            "one_us": statistics.median(one),
            "all_us": statistics.median(all_steps),
            "further_us": further.median,
            "further_p10_us": further.p10,
            "further_p90_us": further.p90,
            "programmatic_edges": way.programmatic_edges,
            "checks": way.checks(bench, oracle),
            "one_samples_us": [round(sample, 3) for sample in one],
            "all_samples_us": [round(sample, 3) for sample in all_steps],
        }
    return record


class _Way:
    """Every step captured alone, and a chain that begins with each."""

    def __init__(self, workload: Workload, bench: Bench, enable_pdl: bool) -> None:
        ours = Ours()
        self.steps = [
            ours.prepare(step, workload, bench, enable_pdl=enable_pdl) for step in workload.steps
        ]
        self.chains = []
        self.programmatic_edges = 0
        """Of each chain's graph: how many launches may begin before their predecessor has ended."""
        for first in range(len(self.steps)):
            replay, self.programmatic_edges = _captured(rotated(self.steps, first), bench)
            if self.programmatic_edges != (len(self.steps) - 1 if enable_pdl else 0):
                raise RuntimeError(
                    f"the graph of {len(self.steps)} steps has {self.programmatic_edges} programmatic edges "
                    f"with enable_pdl={enable_pdl}"
                )
            self.chains.append(replay)

    def checks(self, bench: Bench, oracle: Oracle) -> list[dict[str, Any]]:
        """Of the steps alone, and of each chain, which writes the results of all."""
        graphs = [[step.replay for step in self.steps], *([chain] for chain in self.chains)]
        results = (replayed(self.steps, replays, bench) for replays in graphs)
        return [oracle.check(one, Ours.format, ours=True).as_json() for one in results]


def rotated(steps: Sequence[Any], first: int) -> list[Any]:
    return [*steps[first:], *steps[:first]]


def _captured(steps: Sequence[Prepared], bench: Bench) -> tuple[Any, int]:
    """A graph of steps one behind the other, and the number of its programmatic edges."""
    edges: list[int] = []

    def enqueue(builder: Any) -> None:
        for step in steps:
            step.keep.launch(builder)
        edges.append(programmatic_edges(builder))

    replay = bench.stopwatch.capture(enqueue)
    return replay, edges[0]


def _by_turns(
    ways: dict[str, _Way], bench: Bench, samples: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Samples of one step and of the chain that begins with it, for each way: those of a turn, which begins
    with the same step in all graphs, at the same place of each list.
    """
    count = len(next(iter(ways.values())).steps)
    graphs = [(name, number) for name in ways for number in (0, 1)]
    replays, order = [], []
    for first in range(count):
        # Nothing is always the first of a batch of samples, or always behind the same graph.
        turn = rotated(graphs, first % len(graphs))
        order += turn
        for name, number in turn:
            way = ways[name]
            replays.append(way.chains[first] if number else way.steps[first].replay)
    timing = bench.stopwatch.time(replays, samples=samples * len(graphs))
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for place, sample in enumerate(timing.samples):
        name, number = order[place % len(order)]
        found[name][number].append(sample)
    return found


def read_before(workload: Workload) -> float:
    """Share of the pages of further steps that an earlier step of their chain has read, mean over the chains.

    Selections are drawn from one pool. Whether such a page is still in L2 depends on what was read since.
    """
    lists = [step.host.tile_list for step in workload.steps]
    shares = []
    for first in range(len(lists)):
        read, *others = rotated(lists, first)
        for tiles in others:
            shares.append(float(np.isin(tiles, read).mean()))
            read = np.union1d(read, tiles)
    return statistics.mean(shares)
