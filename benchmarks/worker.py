"""Child process that measures one group of candidates over rows and prints one JSON record a line.

Each group runs in a process of its own: a peer that faults loses its CUDA context, and one that hangs is
killed, without harm to the figures of the others.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from msa_cudacore import programs

from . import ceiling, chain, environment, items, peers
from .arrays import choose
from .candidates import TRIAL_SAMPLES, Bench, Candidate, EmptyKernel, Ours, Unavailable, replayed
from .check import Oracle
from .rows import SWEPT, named
from .timing import Stopwatch
from .workload import Workload, build

__all__ = ["OWN_GROUP", "RECORD", "main", "measure", "one_line"]

OWN_GROUP = "own"
"""The group of the floor, the ceilings and this package's program."""
RECORD = "\x1e"
"""First character of a line that is a record; anything else that a child prints is its log."""
_SECONDS_TO_STOP = 10.0
"""What the start of the process and the last of a series of measurements may take of its time."""


def one_line(text: str, limit: int = 300) -> str:
    """A message fit for a report: one line, and file names without the folders of the machine it comes
    from.
    """
    return re.sub(r"""(?<![\w.:/])/(?:[^\s:'"/]+/)+""", "", " ".join(text.split()))[:limit]


def measure(
    candidate: Candidate, workload: Workload, bench: Bench, oracle: Oracle, *, samples: int
) -> dict[str, Any]:
    """Choose the fastest variant of a candidate on a workload, time it, and check what it computed."""
    variants = candidate.variants(workload, bench)
    refused: dict[str, str] = {}
    trials: dict[str, float] = {}
    if len(variants) > 1:
        for label, prepare in variants.items():
            try:
                prepared = prepare(workload.steps[0])
            except Unavailable as error:
                refused[label] = one_line(str(error))
                continue
            timing = bench.stopwatch.time([prepared.replay], samples=TRIAL_SAMPLES, idle_before=not trials)
            trials[label] = timing.median
            del prepared
        if not trials:
            raise Unavailable("; ".join(f"{label}: {why}" for label, why in refused.items()))
        label = min(trials, key=trials.__getitem__)
    else:
        (label,) = variants
    prepared = [variants[label](step) for step in workload.steps]
    before = environment.clocks(bench.stopwatch.facts.ordinal)
    timing = bench.stopwatch.time([one.replay for one in prepared], samples=samples)
    after = environment.clocks(bench.stopwatch.facts.ordinal)
    record: dict[str, Any] = {
        "configuration": ", ".join(filter(None, (prepared[0].description, label))),
        **timing.as_json(),
        "clocks": {"before": before, "after": after},
    }
    if trials:
        record["trials_us"] = {name: round(median, 3) for name, median in trials.items()}
    if refused:
        record["refused"] = refused
    if prepared[0].out is not None:
        results = replayed(prepared, [one.replay for one in prepared], bench)
        record["check"] = oracle.check(results, candidate.format, ours=candidate.kind == "ours").as_json()
    return record


def _records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    candidates = None
    if options.group != OWN_GROUP:
        # Before anything is allocated: a peer that is not installed costs nothing.
        try:
            candidates = peers.load(options.group)
        except Unavailable as error:
            yield {"candidate": options.group, "skipped": one_line(str(error))}
            return
    arrays = choose(options.device, peers.ARRAYS.get(options.group))
    bench = Bench(Stopwatch(options.device), arrays)
    yield {"environment": environment.versions(), "arrays": arrays.name}
    if candidates is None:
        size = 2 << 30
        yield {"linear_read_bytes": size, "linear_read_us": bench.stopwatch.linear_read(size).median}
    rows, sweep = named(options.rows)
    for row in rows:
        started = time.monotonic()
        workload = build(row, arrays, steps=options.steps, seed=options.seed)
        if candidates is None:
            yield {
                "row": row.name,
                "selected_bytes": workload.selected_bytes,
                "distinct_bytes": workload.distinct_bytes,
                "attended": workload.steps[0].host.attended,
            }
        own = [EmptyKernel(), *ceiling.ceilings(workload), Ours()] if candidates is None else []
        chained = candidates is None and row.name in chain.CHAINED_ROWS
        yield from _measurements(candidates or own, workload, bench, options, chained=chained)
        workload.cache.clear()
        del workload
        arrays.release()
        yield {"row": row.name, "seconds": round(time.monotonic() - started, 2)}
    if sweep and candidates is None:
        yield from _swept(bench, options, began + options.seconds - _SECONDS_TO_STOP)


def _swept(bench: Bench, options: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """The sweep over the number of items, as far as there is time."""
    started = time.monotonic()
    program, facts = programs.select("auto", "cuda", options.device)
    workload = build(SWEPT, bench.arrays, steps=options.steps, seed=options.seed)
    sweep = items.Sweep(workload, bench, items.stretches(program, facts))
    for number in sweep.counts:
        about = {"row": SWEPT.with_batch(number).name, "candidate": items.NAME}
        if time.monotonic() > deadline:
            yield about | {"skipped": "out of time, as all larger numbers of items"}
            break
        take = functools.partial(
            sweep.measure, number, samples=options.samples, check_rows=options.check_rows, seed=options.seed
        )
        yield from _attempt(about, {}, take, bench, options)
    del sweep, workload
    bench.arrays.release()
    yield {"row": items.NAME, "seconds": round(time.monotonic() - started, 2)}


def _measurements(
    candidates: list[Candidate],
    workload: Workload,
    bench: Bench,
    options: argparse.Namespace,
    *,
    chained: bool,
) -> Iterator[dict[str, Any]]:
    oracle = Oracle(workload, rows=options.check_rows, seed=options.seed)
    takes: dict[str, tuple[dict[str, str], Any]] = {}
    for one in candidates:
        description = {"title": one.title, "format": one.format, "kind": one.kind}
        takes[one.name] = description, functools.partial(measure, one)
    if chained:
        takes[chain.NAME] = {}, chain.measure
    for name, (description, take) in takes.items():
        about = {"row": workload.row.name, "candidate": name}
        timed = functools.partial(take, workload, bench, oracle, samples=options.samples)
        yield from _attempt(about, description, timed, bench, options)


def _attempt(
    about: dict[str, str],
    description: dict[str, str],
    take: Callable[[], dict[str, Any]],
    bench: Bench,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Announce a measurement, take it, and tell how it ended; nothing where it was finished before."""
    if f"{about['candidate']}@{about['row']}" in options.finished.split(","):
        return
    yield about | {"started": True}
    about = about | description
    try:
        yield about | take()
    except Unavailable as error:
        yield about | {"skipped": one_line(str(error))}
    except Exception as error:
        traceback.print_exc()
        yield about | {"failed": one_line(f"{type(error).__name__}: {error}")}
        # After a fault the context is lost: this raises too, and a new process goes on behind it.
        bench.stopwatch.stream.sync()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_cudacore.benchmarks.worker")
    parser.add_argument("--group", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check-rows", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="until the process is stopped")
    parser.add_argument("--finished", default="", help="candidate@row pairs to leave out")
    parser.add_argument(
        "--build", action="store_true", help="compile what the group needs, without touching the GPU"
    )
    options = parser.parse_args(arguments)
    if options.build:
        if options.group == OWN_GROUP:
            items.build(*programs.select("auto", "cuda", options.device))
        else:
            peers.build(options.group)
        return 0
    for record in _records(options):
        print(RECORD + json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
