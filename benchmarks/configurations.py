"""Is the automatic choice right? Times the configurations of the portable program that a problem admits.

`python -m msa_cudacore.benchmarks.configurations` goes through numbers of items with one KV head of 16 query
heads, for each number of pages that an item selects, and writes each configuration's time beside the chosen
one's. This is what the crossovers in `msa_cudacore/portable.py` were set by, on an H200; run it on another GPU
before you trust them there.
"""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from msa_cudacore.api import bind_plan
from msa_cudacore.contract import Problem, validate
from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.pool import PAGE_SIZE
from msa_cudacore.portable import Configuration, PortableProgram, choose_configuration, exact_arch, source

from . import environment
from .arrays import choose
from .candidates import Bench, Ours, Prepared, arguments_of, replayed
from .check import Oracle
from .rows import SWEPT, TOPK, Row
from .timing import Stopwatch
from .workload import Step, Workload, build

__all__ = ["Forced", "admitted", "command", "measure", "row_of"]

_CONTEXT = 512
"""Pages of a request's context where an item selects the whole top-k."""
_TRIAL_SAMPLES, _SAMPLES, _TURNS = 5, 24, 3
_CLOSE = 1.12
"""Configurations up to this many times the best first figure are timed again, by turns."""
_ITEMS = (
    1, 2, 4, 8, 9, 12, 15, 16, 17, 20, 24, 28, 30, 31, 32, 33, 36, 40, 44, 45, 50, 58, 66, 67, 76, 88, 89, 100, 116, 132,
    133, 148, 149, 165, 166, 182, 198, 199, 231, 264, 265, 280, 281, 330, 331, 363, 396, 397, 412, 430, 462, 463, 528,
    529, 594, 660, 661, 792, 793, 858, 924, 925, 1056, 1057, 1188,
)  # fmt: skip
"""Around the changes of configuration on 132 multiprocessors with 16 pages, and between them."""

PROGRAM = PortableProgram()


def admitted(problem: Problem, facts: DeviceFacts) -> Iterator[Configuration]:
    """Configurations that can run a problem on a device: the chosen one, whatever it is, and then all that the
    kernel's static assertions and the device's shared memory allow (`kernels/portable_plan.cuh`), but for 16 splits
    through the workspace and, on 9.0, several item slots without the table or two that go on.
    """
    ids_per_lane = 1 if problem.topk <= 32 else 2
    candidates = itertools.chain(
        (choose_configuration(problem, facts),),
        (replace(one, ids_per_lane=ids_per_lane) for one in _shapes(max(problem.pages_per_item, 1), facts)),
    )
    for one in dict.fromkeys(candidates):
        if one.shared_bytes <= facts.shared_bytes_per_block and _takes(one, problem, facts.multiprocessors):
            yield one


def _shapes(pages: int, facts: DeviceFacts) -> Iterator[Configuration]:
    most = 1 << (pages - 1).bit_length()
    roomy = facts.compute_capability[0] == 9
    for page_slots, splits in itertools.product((1, 2, 4), (1, 2, 4, 8, 16)):
        if page_slots * splits > max(most, page_slots):
            continue
        clusters = (False, True) if splits > 1 and facts.clusters else (False,)
        for cluster, table, cooperative in itertools.product(clusters, (False, roomy), (False, True)):
            if splits < 16 or cluster:
                yield Configuration(page_slots, splits, cluster, 1, table=table, cooperative=cooperative)
            if cooperative and page_slots == 1 and not table and (splits < 16 or cluster):
                yield Configuration(1, splits, cluster, 1, warps_per_page=8, cooperative=True)
    for item_slots, page_slots in ((2, 1), (2, 2), (4, 1)):
        yield Configuration(page_slots, 1, False, 1, item_slots, table=roomy)
    if not roomy:
        return
    for splits in (1, 2, 4, 8):
        yield Configuration(1, 1, False, 1, 8, warps_per_page=2, table=True, last_splits=splits)
        yield Configuration(1, 1, False, 1, 4, table=True, last_splits=splits)
    yield Configuration(1, 1, False, 1, 4, table=True, many_items=True)
    yield Configuration(1, 1, False, 1, 4, table=True, shared_item=True)
    for pieces, piece_slots in ((8, 1), (4, 1), (4, 2)):
        yield Configuration(4, 1, False, 1, table=True, pieces=pieces, piece_slots=piece_slots)
        if piece_slots == 1:
            yield Configuration(2, 1, False, 1, 2, table=True, pieces=pieces, piece_slots=1)
    yield Configuration(4, 1, False, 1, table=True, pieces=4, piece_slots=2, pairs=True)


def _takes(one: Configuration, problem: Problem, multiprocessors: int) -> bool:
    """Whether every item has an item slot, or parts for which there are slots, and pages for the parts."""
    items, pages = problem.items, problem.pages_per_item
    if (one.item_slots == 8 or one.pairs) and one.ids_per_lane > 1:
        return False
    if one.pairs and multiprocessors % 2:
        return False
    left = one.leftovers(items, multiprocessors)
    if one.pieces:
        slots = multiprocessors * one.item_slots
        return pages >= one.pieces and 0 < left * one.pieces <= slots * one.piece_slots
    if one.last_splits > 1:
        slots = one.ctas(items, multiprocessors) * one.item_slots // 4
        return pages >= one.last_splits and 0 < left * one.last_splits <= slots
    if one.shared_item:
        return pages > one.item_slots and 0 < left <= multiprocessors
    return not one.many_items or items > one.item_slots * multiprocessors


@dataclass(frozen=True)
class Forced:
    """A configuration, chosen or not, prepared as the public function prepares the chosen one."""

    configuration: Configuration
    workload: Workload
    bench: Bench

    def prepare(self, step: Step) -> Prepared:
        arguments = arguments_of(step, self.workload, self.bench)
        call = validate(**arguments, softmax_scale=None, out=None, lse=None)
        facts = self.bench.stopwatch.facts
        runner = bind_plan(call, PROGRAM, facts, PROGRAM.plan_of(self.configuration, call.problem, facts))
        return Prepared(self.bench.stopwatch.capture(runner.launch), runner.out, runner.lse, keep=runner)


def measure(row: Row, bench: Bench, seed: int) -> dict[Configuration, float]:
    """Median microseconds of each admitted configuration, the chosen one first: of one decode step or, for those
    that come close to the best, of four in turn, whose results are checked.
    """
    workload = build(row, bench.arrays, steps=4, seed=seed)
    oracle = Oracle(workload, rows=2, seed=seed)
    medians: dict[Configuration, float] = {}
    for one in admitted(row.problem, bench.stopwatch.facts):
        step = Forced(one, workload, bench).prepare(workload.steps[0])
        medians[one] = bench.stopwatch.time([step.replay], samples=_TRIAL_SAMPLES, idle_before=not medians).median
    close: dict[Configuration, list[Callable[[], None]]] = {}
    kept = []  # a graph does not keep its runner
    for one in medians:
        if one != next(iter(medians)) and medians[one] > _CLOSE * min(medians.values()):
            continue
        prepared = [Forced(one, workload, bench).prepare(step) for step in workload.steps]
        kept.append(prepared)
        close[one] = [step.replay for step in prepared]
        checked = oracle.check(replayed(prepared, close[one], bench), Ours.format, ours=True)
        if not checked.passed:
            raise RuntimeError(f"{row.name}, {_label(one)}: {checked.problem}")
    again: dict[Configuration, list[float]] = {one: [] for one in close}
    for _, (one, replays) in itertools.product(range(_TURNS), close.items()):
        again[one].append(bench.stopwatch.time(replays, samples=_SAMPLES, idle_before=False).median)
    return medians | {one: statistics.median(turns) for one, turns in again.items()}


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{text!r}; accepted are positive integers, separated by commas")
    return numbers


@click.command()
@click.option("--items", default=",".join(map(str, _ITEMS)), callback=_numbers, help="Numbers of items, comma-separated.")
@click.option(
    "--pages",
    default=str(TOPK),
    show_default=True,
    callback=_numbers,
    help="Pages that an item selects, comma-separated: the top-k, or all of a narrower page table.",
)
@click.option("--topk", type=click.IntRange(1, 64), default=TOPK, show_default=True, help="Width of a selection.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random pools and selections.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON, too.")
def command(
    items: tuple[int, ...], pages: tuple[int, ...], topk: int, device: int, seed: int, output: Path | None
) -> None:
    """Time the configurations of the portable program, and print how far the chosen one is from the best."""
    if max(pages) > topk:
        raise click.BadParameter(f"{max(pages)}; accepted are at most --topk, {topk}", param_hint="--pages")
    try:
        bench = Bench(Stopwatch(device), choose(device))
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    facts = bench.stopwatch.facts
    rows = [row_of(count, each, topk) for each, count in itertools.product(pages, items)]
    _compile({one for row in rows for one in admitted(row.problem, facts)}, facts)
    names: dict[Configuration, str] = {}
    figures = []
    for row in rows:
        medians = measure(row, bench, seed)
        chosen, best = next(iter(medians)), min(medians, key=medians.__getitem__)
        each = row.problem.pages_per_item
        click.echo(
            f"{each:2} pages, {row.items:4} items: {medians[chosen]:6.2f} us, best {medians[best]:6.2f}"
            + ("" if best == chosen else f" ({_label(best)})")
        )
        for one in medians:
            names.setdefault(one, f"c{len(names)}")
        figures.append(
            {
                "pages": each,
                "items": row.items,
                "chosen": names[chosen],
                "median_us": {names[one]: round(median, 2) for one, median in medians.items()},
            }
        )
        bench.arrays.release()
    if output is not None:
        about = {
            "command": _spelled(items, pages, topk, seed),
            "date": datetime.date.today().isoformat(),
            "kernels_sha256": environment.kernel_identity(),
            "machine": environment.machine(device),
            "versions": environment.versions(),
            "topk": topk,
            "configurations": {name: _label(one) for one, name in names.items()},
        }
        lines = ",\n".join(f"  {json.dumps(figure)}" for figure in figures)
        output.write_text(json.dumps(about, indent=1)[:-2] + f',\n "figures": [\n{lines}\n ]\n}}\n')
        click.echo(f"wrote {output}")


def _spelled(items: tuple[int, ...], pages: tuple[int, ...], topk: int, seed: int) -> str:
    """The command that measures the same, wherever its figures go."""
    words = ["python -m msa_cudacore.benchmarks.configurations"]
    for option, given, default in (
        ("--items", items, _ITEMS), ("--pages", pages, (TOPK,)), ("--topk", (topk,), (TOPK,)), ("--seed", (seed,), (1,)),
    ):  # fmt: skip
        if given != default:
            words += [option, ",".join(map(str, given))]
    return " ".join(words)


def row_of(items: int, pages: int, topk: int) -> Row:
    """The sweep's row, whose requests are items, with other contexts: each selects `pages` pages."""
    tokens = PAGE_SIZE * (pages if pages < topk else max(_CONTEXT, pages))
    return replace(SWEPT, name=f"{items} items of {pages} pages", batch=items, kv_tokens=tokens, topk=topk)


def _label(one: Configuration) -> str:
    """What differs from the plainest configuration, in the terms of :class:`Configuration`."""
    plain: dict[str, Any] = vars(Configuration(1, 1, False, one.ids_per_lane))
    return ", ".join(f"{name}={value}" for name, value in vars(one).items() if value != plain[name]) or "plain"


def _compile(configurations: set[Configuration], facts: DeviceFacts) -> None:
    """Into the program cache; NVRTC takes seconds for each. In processes, because it compiles one program at a time,
    and new ones, because the driver does not survive a fork.
    """
    arch = exact_arch(facts.compute_capability)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_cubin, source(one), arch, name="portable.cu") for one in configurations]
        with click.progressbar(jobs, label=f"compiling {len(jobs)} configurations", file=sys.stderr) as bar:
            for job in bar:
                job.result()


if __name__ == "__main__":
    command()
