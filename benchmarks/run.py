"""Runs groups of candidates in child processes, one after another, and gathers their records.

Our program, the ceilings and the floor come first; then each peer. What a peer, or the sweep over the number
of items, can compile without the GPU is compiled in the background meanwhile. A child that dies is restarted
behind the candidate that killed it; one that is out of time is stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msa_cudacore

from . import chain, environment, items, peers
from .rows import SWEEP, Row
from .worker import OWN_GROUP, RECORD, one_line

__all__ = ["Plan", "Results", "run"]

_LOG_LINES = 12
_LEAST_SECONDS = 20.0
"""A peer that has less time than this is not started: importing and building the inputs alone would take
it.
"""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how thoroughly."""

    rows: tuple[Row, ...]
    sweep: bool = True
    """Over the number of items, see :mod:`.items`."""
    peers: tuple[str, ...] = tuple(peers.ARRAYS)
    samples: int = 100
    steps: int = 4
    check_rows: int = 2
    seed: int = 1
    device: int = 0
    budget_seconds: float = 900.0
    """Time for everything. Each group gets a share of what is left; ours is never cut short for a peer."""


@dataclass
class Results:
    """Everything that a run found; :mod:`.report` writes it down."""

    about: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bytes and arithmetic of each row, by name."""
    measurements: list[dict[str, Any]] = field(default_factory=list)
    """One record for each (row, candidate): timed, skipped or failed."""
    chains: list[dict[str, Any]] = field(default_factory=list)
    """The same for each row whose steps were chained, see :mod:`.chain`."""
    items: list[dict[str, Any]] = field(default_factory=list)
    """The same for each number of items of the sweep, see :mod:`.items`."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each group its array library, seconds and, where it did not run, the reason."""

    def add(self, record: dict[str, Any]) -> None:
        """Take a record of any kind."""
        kinds = {chain.NAME: self.chains, items.NAME: self.items}
        kinds.get(record["candidate"], self.measurements).append(record)

    def as_json(self) -> dict[str, Any]:
        lists = {"measurements": self.measurements, "chains": self.chains, "items": self.items}
        return {**self.about, "groups": self.groups, "rows": self.rows, **lists}


Progress = Callable[[str, str], None]
"""Called with (group, what it is doing) whenever something new begins."""


def run(plan: Plan, *, command: str, progress: Progress) -> Results:
    """Measure a plan on a CUDA device. Raises :class:`msa_cudacore.DriverUnavailable` where there is none."""
    started = time.monotonic()
    results = Results(
        about={
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "version": msa_cudacore.__version__,
            "kernels_sha256": environment.kernel_identity(),
            "machine": environment.machine(plan.device),
            "versions": environment.versions(),
            "method": {
                "samples": plan.samples,
                "rotating_steps": plan.steps,
                "checked_rows_per_step": plan.check_rows,
                "seed": plan.seed,
                "timing": "CUDA graph replay between two events, L2 flushed by reading, median",
            },
        }
    )
    own = (OWN_GROUP,) if plan.sweep else ()
    builds = {group: _start_build(group, plan.device) for group in (*own, *plan.peers)}
    try:
        _run_group(OWN_GROUP, plan, results, started + plan.budget_seconds, progress)
        for number, group in enumerate(plan.peers):
            left = started + plan.budget_seconds - time.monotonic()
            if left < _LEAST_SECONDS:
                results.groups[group] = {
                    "skipped": f"out of time: {plan.budget_seconds:.0f} s for the whole run"
                }
                continue
            # Half again its even share of what is left: some groups are done sooner than others.
            deadline = time.monotonic() + min(
                left, max(_LEAST_SECONDS, 1.5 * left / (len(plan.peers) - number))
            )
            progress(group, "waiting for its compilation")
            with contextlib.suppress(subprocess.TimeoutExpired):
                builds[group].wait(max(0.0, deadline - time.monotonic() - _LEAST_SECONDS))
            _run_group(group, plan, results, deadline, progress)
    finally:
        for build in builds.values():
            build.kill()
    results.about["seconds"] = round(time.monotonic() - started, 1)
    return results


def _command(group: str, plan: Plan, finished: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "msa_cudacore.benchmarks.worker",
        "--group",
        group,
        "--rows",
        ",".join([*(row.name for row in plan.rows), *([SWEEP] if plan.sweep else [])]),
        "--device",
        str(plan.device),
        "--samples",
        str(plan.samples),
        "--steps",
        str(plan.steps),
        "--check-rows",
        str(plan.check_rows),
        "--seed",
        str(plan.seed),
        "--finished",
        ",".join(finished),
    ]


def _start_build(group: str, device: int) -> subprocess.Popen:
    """Compile what a group needs, beside the measurements: what goes wrong comes up again when the group
    runs.
    """
    command = [
        sys.executable,
        "-m",
        "msa_cudacore.benchmarks.worker",
        "--group",
        group,
        "--rows",
        "",
        "--device",
        str(device),
        "--build",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _run_group(group: str, plan: Plan, results: Results, deadline: float, progress: Progress) -> None:
    began = time.monotonic()
    about = results.groups.setdefault(group, {})
    finished: list[str] = []
    while True:
        before = len(finished)
        left = ["--seconds", f"{deadline - time.monotonic():.1f}"]
        child = _Child([*_command(group, plan, finished), *left], deadline)
        child.read(group, results, finished, progress)
        if child.status == 0:
            break
        end = (
            "out of time"
            if child.late
            else f"its process ended with {child.status}: {' | '.join(child.log[-2:])[-250:]}"
        )
        if child.current is not None:
            row, candidate = child.current
            results.add({"row": row, "candidate": candidate, "group": group, "failed": end})
            finished.append(f"{candidate}@{row}")
        if child.late or len(finished) == before:
            about["failed"] = end
            break
        about["log"] = child.log
    about["seconds"] = round(time.monotonic() - began, 1)


class _Child:
    """A worker process, stopped at a deadline."""

    def __init__(self, command: list[str], deadline: float) -> None:
        self.current: tuple[str, str] | None = None
        """Row and candidate that it has begun and not finished."""
        self.log: list[str] = []
        self.late = False
        self.status: int | None = None
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._timer = threading.Timer(max(1.0, deadline - time.monotonic()), self._stop)

    def _stop(self) -> None:
        self.late = True
        self._process.kill()

    def read(self, group: str, results: Results, finished: list[str], progress: Progress) -> None:
        """Take its records until it ends."""
        self._timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if not line.startswith(RECORD):
                    self.log = [*self.log[1 - _LOG_LINES :], one_line(line)]
                    continue
                record = json.loads(line[1:])
                if record.get("started"):
                    self.current = record["row"], record["candidate"]
                    progress(group, f"{record['row']}: {record['candidate']}")
                elif _take(record, group, results):
                    self.current = None
                    finished.append(f"{record['candidate']}@{record['row']}")
            self.status = self._process.wait()
        finally:
            self._timer.cancel()
            self._process.kill()


def _take(record: dict[str, Any], group: str, results: Results) -> bool:
    """Put a record where it belongs; True if it ends a (row, candidate) measurement."""
    if "row" in record and "candidate" in record:
        results.add(record | {"group": group})
        return True
    if "selected_bytes" in record:
        results.rows[record.pop("row")] = record
    elif "row" in record:
        results.groups[group].setdefault("row_seconds", {})[record["row"]] = record["seconds"]
    elif "environment" in record:
        results.groups[group]["arrays"] = record["arrays"]
    elif "linear_read_us" in record:
        results.about["linear_read"] = record
    else:
        results.groups[group]["skipped"] = record["skipped"]
    return False
