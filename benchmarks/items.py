"""A decode step's time over the number of items: the staircase on which the rows are single points.

Items go to multiprocessors in whole numbers, and the program takes other machine code for other numbers of
them; so the time over the items is a staircase. Here they are counted through: one KV head, so that items are
requests, on a pool that is drawn once. A step of fewer items is the first requests of the largest one.

Where the machine code changes is asked of the program (:func:`stretches`), and measured on both sides of each
change; so is each further item for every multiprocessor (:func:`counts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from msa_cudacore import portable
from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.program import Program

from . import environment
from .candidates import TRIAL_SAMPLES, Bench, Ours, Prepared, Unavailable, replayed
from .ceiling import BulkCeiling, RegisterCeiling
from .check import Oracle
from .rows import SWEEP, SWEPT, Row
from .workload import Workload, first_requests

__all__ = ["NAME", "Sweep", "build", "counts", "stretches"]

NAME = SWEEP
_SAMPLES = 24
"""At most, of each figure: the rows have more, and there are many counts."""
_TRIED = (1 / 32, 1 / 8, 1 / 2, 2, 8)
"""Items for each multiprocessor at which all settings of the ceilings are tried."""


def stretches(program: Program, facts: DeviceFacts, row: Row = SWEPT) -> list[range]:
    """The numbers of requests up to a row's for which a program runs the same machine code, in order."""

    def compiled(batch: int) -> str:
        return _configuration(program, facts, row, batch).constants

    numbers = (list(same) for _, same in itertools.groupby(range(1, row.batch + 1), key=compiled))
    return [range(same[0], same[-1] + 1) for same in numbers]


def _configuration(program: Program, facts: DeviceFacts, row: Row, batch: int) -> Any:
    return program.plan(row.with_batch(batch).problem, facts, None).configuration


def build(program: Program, facts: DeviceFacts, row: Row = SWEPT) -> None:
    """Compile what the sweep runs into the program cache, without touching the GPU; the largest numbers
    first, because a sweep that has begun starts with the smallest.
    """
    if program.backend != portable.PortableProgram.backend:
        return
    configurations = (
        _configuration(program, facts, row, same[-1]) for same in reversed(stretches(program, facts, row))
    )
    for source in dict.fromkeys(map(portable.source, configurations)):
        compile_cubin(source, portable.exact_arch(facts.compute_capability), name="portable.cu")


def counts(same: Sequence[range], multiprocessors: int) -> list[int]:
    """Which numbers of items to measure.

    The first and the last of each stretch; as many as multiprocessors, twice as many and so on, and one more
    than each; powers of two up to the first; and evenly between, at most a quarter of them apart.
    """
    most = same[-1][-1]
    chosen = {one for stretch in same for one in (stretch[0], stretch[-1])}
    chosen |= {one for full in range(multiprocessors, most, multiprocessors) for one in (full, full + 1)}
    chosen |= {1 << bit for bit in range(multiprocessors.bit_length())}
    ends = sorted(one for one in chosen if one <= most)
    for low, high in itertools.pairwise(ends):
        parts = -(-(high - low) // max(multiprocessors // 4, 1))
        chosen |= {low + (high - low) * part // parts for part in range(1, parts)}
    return sorted(one for one in chosen if one <= most)


class Sweep:
    """The largest workload, and what was found out about the ceilings on the way."""

    def __init__(self, workload: Workload, bench: Bench, same: Sequence[range]) -> None:
        self._workload, self._bench, self._same = workload, bench, same
        multiprocessors = bench.stopwatch.facts.multiprocessors
        self.counts = counts(same, multiprocessors)
        most = self.counts[-1]
        self._tried_at = sorted({min(max(int(share * multiprocessors), 1), most) for share in _TRIED})
        self._readers = {one.name: one for one in (RegisterCeiling(), BulkCeiling())}
        self._best: dict[int, tuple[str, Any]] = {}
        """By number of items: the name of the ceiling and the setting of it that were best there."""

    def measure(self, items: int, *, samples: int, check_rows: int, seed: int) -> dict[str, Any]:
        """Time this package and the ceiling on the first requests of all steps, and check the results."""
        bench, ordinal = self._bench, self._bench.stopwatch.facts.ordinal
        workload = first_requests(self._workload, items)
        samples = min(samples, _SAMPLES)
        ours = [Ours().prepare(step, workload, bench) for step in workload.steps]
        reading = {
            (name, label): [prepare(step) for step in workload.steps]
            for name, label, prepare in self._ceilings(items, workload)
        }
        before = environment.clocks(ordinal)
        timing = bench.stopwatch.time([one.replay for one in ours], samples=samples)
        ceilings = []
        for (name, label), prepared in reading.items():
            replays = [one.replay for one in prepared]
            read = bench.stopwatch.time(replays, samples=samples, idle_before=False)
            ceilings.append({"name": name, "configuration": label} | read.as_json())
        after = environment.clocks(ordinal)
        results = replayed(ours, [one.replay for one in ours], bench)
        oracle = Oracle(workload, rows=check_rows, seed=seed)
        same = next(stretch for stretch in self._same if items in stretch)
        return {
            "items": items,
            "same_code": [same[0], same[-1]],
            "selected_bytes": workload.selected_bytes,
            "ours": {
                "configuration": ours[0].description,
                **timing.as_json(),
                "check": oracle.check(results, Ours.format, ours=True).as_json(),
            },
            "ceilings": ceilings,
            "clocks": {"before": before, "after": after},
        }

    def _ceilings(self, items: int, workload: Workload) -> list[tuple[str, str, Callable[..., Prepared]]]:
        """The settings that were best at the next smaller and the next larger number that was tried."""
        smaller = [tried for tried in self._tried_at if tried <= items][-1:]
        larger = [tried for tried in self._tried_at if tried >= items][:1]
        best = dict.fromkeys(self._best_at(tried) for tried in smaller + larger)
        found = ((name, self._readers[name].at(setting, workload, self._bench)) for name, setting in best)
        return [(name, *variant) for name, variant in found if variant is not None]

    def _best_at(self, items: int) -> tuple[str, Any]:
        if items not in self._best:
            workload = first_requests(self._workload, items)
            medians: dict[str, tuple[float, str, Any]] = {}
            for one in self._readers.values():
                try:
                    settings = one.settings(self._bench)
                except Unavailable:
                    continue
                for setting in settings:
                    variant = one.at(setting, workload, self._bench)
                    if variant is None or variant[0] in medians:
                        continue
                    label, prepare = variant
                    prepared = prepare(workload.steps[0])
                    timing = self._bench.stopwatch.time(
                        [prepared.replay], samples=TRIAL_SAMPLES, idle_before=not medians
                    )
                    medians[label] = timing.median, one.name, setting
            self._best[items] = min(medians.values(), key=lambda found: found[0])[1:]
        return self._best[items]
