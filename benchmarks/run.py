"""Runs groups of candidates in child processes, one after another, and gathers their records.

Our program, the ceilings and the floor come first; then each peer. What a peer can compile without the GPU is compiled
in the background meanwhile. A child that dies is restarted behind the candidate that killed it; one that is out of time
is stopped.
"""

from __future__ import annotations

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

from . import environment, peers
from .rows import Row
from .worker import OWN_GROUP, RECORD, one_line

__all__ = ["Plan", "Results", "run"]

_LOG_LINES = 12
_LEAST_SECONDS = 20.0
"""A peer that has less time than this is not started: importing and building the inputs alone would take it."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how thoroughly."""

    rows: tuple[Row, ...]
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
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each group its array library, seconds and, where it did not run, the reason."""

    def as_json(self) -> dict[str, Any]:
        return {**self.about, "groups": self.groups, "rows": self.rows, "measurements": self.measurements}


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
                "samples": plan.samples, "rotating_steps": plan.steps, "checked_rows_per_step": plan.check_rows,
                "seed": plan.seed, "timing": "CUDA graph replay between two events, L2 flushed by reading, median",
            },
        }
    )
    builds = {group: _build_in_background(group) for group in plan.peers}
    _run_group(OWN_GROUP, plan, results, started + plan.budget_seconds, progress)
    for number, group in enumerate(plan.peers):
        left = started + plan.budget_seconds - time.monotonic()
        if left < _LEAST_SECONDS:
            results.groups[group] = {"skipped": f"out of time: {plan.budget_seconds:.0f} s for the whole run"}
            continue
        # Half again its even share of what is left: some groups are done sooner than others.
        deadline = time.monotonic() + min(left, max(_LEAST_SECONDS, 1.5 * left / (len(plan.peers) - number)))
        progress(group, "waiting for its compilation")
        builds[group].join(max(0.0, deadline - time.monotonic() - _LEAST_SECONDS))
        _run_group(group, plan, results, deadline, progress)
    results.about["seconds"] = round(time.monotonic() - started, 1)
    return results


def _command(group: str, plan: Plan, finished: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "msa_cudacore.benchmarks.worker", "--group", group,
        "--rows", ",".join(row.name for row in plan.rows), "--device", str(plan.device), "--samples", str(plan.samples),
        "--steps", str(plan.steps), "--check-rows", str(plan.check_rows), "--seed", str(plan.seed),
        "--finished", ",".join(finished),
    ]


def _build_in_background(group: str) -> threading.Thread:
    def build() -> None:
        # What goes wrong here comes up again, and is recorded, when the group runs.
        subprocess.run(
            [sys.executable, "-m", "msa_cudacore.benchmarks.worker", "--group", group, "--rows", "", "--build"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    return thread


def _run_group(group: str, plan: Plan, results: Results, deadline: float, progress: Progress) -> None:
    began = time.monotonic()
    about = results.groups.setdefault(group, {})
    finished: list[str] = []
    while True:
        current: dict[str, Any] | None = None
        log: list[str] = []
        child = subprocess.Popen(
            _command(group, plan, finished), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        late = threading.Event()

        def stop(child: subprocess.Popen = child, late: threading.Event = late) -> None:
            late.set()
            child.kill()

        timer = threading.Timer(max(1.0, deadline - time.monotonic()), stop)
        timer.start()
        before = len(finished)
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith(RECORD):
                log = [*log[1 - _LOG_LINES :], one_line(line)]
                continue
            record = json.loads(line[1:])
            if record.get("started"):
                current = record
                progress(group, f"{record['row']}: {record['candidate']}")
                continue
            if _take(record, group, results):
                current = None
                finished.append(f"{record['candidate']}@{record['row']}")
        status = child.wait()
        timer.cancel()
        if status == 0:
            break
        if late.is_set():
            about["failed"] = "stopped: out of time"
        else:
            about["log"] = log
        if current is not None and f"{current['candidate']}@{current['row']}" not in finished:
            why = "out of time" if late.is_set() else f"its process ended with {status}: {' | '.join(log[-2:])[-200:]}"
            results.measurements.append({"row": current["row"], "candidate": current["candidate"], "group": group, "failed": why})
            finished.append(f"{current['candidate']}@{current['row']}")
        if late.is_set() or time.monotonic() > deadline:
            break
        if len(finished) == before:
            about["failed"] = f"the process ended with {status} before it measured anything: {' | '.join(log[-2:])[-300:]}"
            break
    about["seconds"] = round(time.monotonic() - began, 1)


def _take(record: dict[str, Any], group: str, results: Results) -> bool:
    """Put a record where it belongs; True if it ends a (row, candidate) measurement."""
    if "row" in record and "candidate" in record:
        results.measurements.append(record | {"group": group})
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
