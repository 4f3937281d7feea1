"""Chains of dependent steps without a GPU: what is replayed, how the figures follow from the samples, what is
checked, and what a report shows of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from msa_cudacore import reference
from msa_cudacore.benchmarks import chain, report, worker
from msa_cudacore.benchmarks.candidates import Bench, Ours, Prepared, Unavailable
from msa_cudacore.benchmarks.check import Oracle
from msa_cudacore.benchmarks.rows import ROWS, find
from msa_cudacore.benchmarks.timing import Timing
from msa_cudacore.benchmarks.workload import build

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_data import HostArrays, canned, exact  # noqa: E402


class GraphGpu:
    """Captures launches as a list; a launch runs when its graph is replayed and says how long it took."""

    facts = SimpleNamespace(ordinal=0, compute_capability=(9, 0))
    stream = SimpleNamespace(sync=lambda: None)

    def __init__(self):
        self.replayed = []

    def capture(self, enqueue):
        graph = []
        enqueue(graph)

        def replay():
            self.replayed.append([launch.number for launch in graph])
            return sum(launch.run(number) for number, launch in enumerate(graph))

        return replay

    def time(self, replays, *, samples, idle_before=True):
        self.replayed.clear()
        # Each sample is a little longer than the one before, as of a GPU that gets warm.
        return Timing(tuple(replays[place % len(replays)]() + place * 1e-4 for place in range(samples)))


class FakeOurs(Ours):
    """A step takes 8 us where it is the first of its graph, and behind another 5, or 4 as a dependent launch.
    `late`: one that is not the first of its graph computes what this makes of the exact output.
    """

    late = staticmethod(lambda out: out)

    def __init__(self):
        pass

    def prepare(self, step, workload, bench, *, enable_pdl=False):
        out, lse = np.zeros_like(step.q), np.zeros(step.q.shape[:2], np.float32)
        number = next(number for number, one in enumerate(workload.steps) if one is step)
        exact_out, exact_lse = exact(workload)[number]

        def run(place):
            out[...] = reference.round_to_bf16(self.late(exact_out) if place else exact_out)
            lse[...] = exact_lse
            return 8.0 if place == 0 else 4.0 if enable_pdl else 5.0

        launch = SimpleNamespace(number=number, dependent=enable_pdl, run=run)
        keep = SimpleNamespace(launch=lambda graph: graph.append(launch))
        return Prepared(bench.stopwatch.capture(keep.launch), out, lse, description="fake", keep=keep)


@pytest.fixture(scope="module")
def workload():
    """Three steps of two requests of up to 40 pages."""
    row = replace(find("tp4_b2_kv64k_q1")[0], batch=2, kv_tokens=5000)
    return build(row, HostArrays(), steps=3, seed=5)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(chain, "Ours", FakeOurs)
    monkeypatch.setattr(chain, "programmatic_edges", lambda graph: sum(one.dependent for one in graph[1:]))
    monkeypatch.setattr(chain.environment, "clocks", lambda ordinal: {"sm_mhz": 1980})
    return Bench(GraphGpu(), HostArrays())


def measured(workload, bench, samples=20):
    return chain.measure(workload, bench, Oracle(workload, rows=2, seed=1), samples=samples)


def test_a_further_step_is_the_chain_without_its_first_step(workload, bench):
    record = measured(workload, bench)
    assert record["steps"] == 3 and set(record["ways"]) == {"ordinary", "enable_pdl"}
    for way, further, edges in (("ordinary", 5.0, 0), ("enable_pdl", 4.0, 2)):
        figures = record["ways"][way]
        assert figures["one_us"] == pytest.approx(8, abs=1e-2)
        assert figures["all_us"] == pytest.approx(8 + 2 * further, abs=1e-2)
        # Samples of one turn are compared: the drift of the fake GPU is 1e-4 from sample to sample.
        for name in ("further_us", "further_p10_us", "further_p90_us"):
            assert figures[name] == pytest.approx(further, abs=2e-4)
        assert figures["programmatic_edges"] == edges
        assert len(figures["one_samples_us"]) == len(figures["all_samples_us"]) == 20
    assert json.loads(json.dumps(record)) == record


def test_all_graphs_are_replayed_by_turns_and_each_chain_begins_with_another_step(workload, bench):
    ways = {name: chain._Way(workload, bench, flag) for name, flag in chain.WAYS.items()}
    chain._by_turns(ways, bench, samples=6)
    turns = [bench.stopwatch.replayed[start : start + 4] for start in range(0, 24, 4)]
    for number, turn in enumerate(turns):
        first = number % 3
        order = [first, (first + 1) % 3, (first + 2) % 3]
        assert sorted(turn) == sorted([[first], [first], order, order])
    # No graph has the same place in all turns.
    assert {len(turn[0]) for turn in turns} == {1, 3}


def test_results_of_every_chain_are_checked(workload, bench, monkeypatch):
    ways = measured(workload, bench)["ways"].values()
    for figures in ways:
        # The steps alone and three chains, each with two rows of three steps.
        assert [check["rows"] for check in figures["checks"]] == [6] * 4
        assert all(check["passed"] for check in figures["checks"])
    monkeypatch.setattr(FakeOurs, "late", staticmethod(lambda out: out * 1.02))
    for figures in measured(workload, bench)["ways"].values():
        assert [check["passed"] for check in figures["checks"]] == [True, False, False, False]


def test_a_chain_that_leaves_a_step_out_is_found(workload, bench, monkeypatch):
    """Outputs are NaN before each chain that is checked."""
    captured = bench.stopwatch.capture

    def without_the_last(enqueue):
        def shortened(graph):
            enqueue(graph)
            del graph[2:]

        return captured(shortened)

    bench.stopwatch.capture = without_the_last
    checks = measured(workload, bench)["ways"]["ordinary"]["checks"]
    assert [check["passed"] for check in checks] == [True, False, False, False]


def test_dependent_launches_that_a_graph_does_not_have_are_an_error(workload, bench, monkeypatch):
    monkeypatch.setattr(chain, "programmatic_edges", lambda graph: 0)
    with pytest.raises(RuntimeError, match="3 steps has 0 programmatic edges with enable_pdl=True"):
        measured(workload, bench)


def test_what_cannot_be_chained_says_why(workload, bench):
    with pytest.raises(Unavailable, match="two steps"):
        measured(replace(workload, steps=workload.steps[:1]), bench)
    bench.stopwatch.facts = SimpleNamespace(ordinal=0, compute_capability=(8, 9))
    with pytest.raises(Unavailable, match=r"9\.0"):
        measured(workload, bench)


def test_pages_that_were_read_before_are_those_of_all_earlier_steps(workload):
    selected = [{int(tile) for tile in step.host.tiles.ravel() if tile >= 0} for step in workload.steps]
    shares = []
    for first in range(3):
        order = selected[first:] + selected[:first]
        shares.append(len(order[1] & order[0]) / len(order[1]))
        shares.append(len(order[2] & (order[0] | order[1])) / len(order[2]))
    assert 0.3 < np.mean(shares) < 0.6
    assert chain.read_before(workload) == pytest.approx(np.mean(shares))


def test_chained_rows_exist():
    assert set(chain.CHAINED_ROWS) <= {row.name for row in ROWS}


@pytest.mark.parametrize("group, chained", [("own", ["tp4_b1_kv1m_q1"]), ("torch", [])])
def test_a_worker_chains_the_steps_of_some_rows_for_this_package_alone(
    workload, monkeypatch, capsys, group, chained
):
    def renamed(row, *_, **__):
        return replace(workload, row=replace(workload.row, name=row.name))

    monkeypatch.setattr(worker, "choose", lambda device, wanted: HostArrays())
    monkeypatch.setattr(worker, "build", renamed)
    stopwatch = SimpleNamespace(linear_read=lambda size: Timing((480.0,)))
    monkeypatch.setattr(worker, "Stopwatch", lambda ordinal: stopwatch)
    monkeypatch.setattr(worker.peers, "load", lambda group: [Ours()])
    monkeypatch.setattr(worker, "measure", lambda candidate, *_, **__: {"median_us": 1.0})
    monkeypatch.setattr(worker.chain, "measure", lambda *_, samples: {"steps": samples})
    rows = "tp4_b2_kv64k_q1,tp4_b1_kv1m_q1"
    assert worker.main(["--group", group, "--rows", rows, "--samples", "7"]) == 0
    lines = capsys.readouterr().out.split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith(worker.RECORD)]
    assert [one for one in records if "steps" in one] == [
        {"row": name, "candidate": "chain", "steps": 7} for name in chained
    ]


def with_chains():
    """The canned results with a row that was chained and two that were not."""
    right = {"passed": True, "rows": 8, "relative_error": 1.6e-3, "floor": 1.6e-3, "worst_over_floor": 1.04}

    def way(one_us, all_us, further_us, **check):
        check = right | check
        return {
            "one_us": one_us, "all_us": all_us, "further_us": further_us, "further_p10_us": further_us - 0.1,
            "further_p90_us": further_us + 0.2, "programmatic_edges": 3, "checks": [check, check],
        }  # fmt: skip

    about = {"candidate": "chain", "group": "own"}
    chained = {"row": "tp4_b1_kv1m_q1", "steps": 4, "read_before": 0.031} | about
    chained["ways"] = {
        "ordinary": way(7.1, 19.2, 4.04), "enable_pdl": way(7.0, 17.9, 3.62, worst_over_floor=1.06),
    }  # fmt: skip
    others = [
        {"row": "tp1_b2_kv64k_q1", "skipped": "dependent launches need 9.0"} | about,
        {"row": "tp1_b128_kv8k_q1", "failed": "its process ended with 3"} | about,
    ]
    return canned() | {"chains": [chained, *others]}


def test_the_report_has_chains_and_why_there_are_none(tmp_path, capsys):
    lines = report.markdown(with_chains()).splitlines()
    for line in (
        "## Dependent launches",
        "| tp4_b1_kv1m_q1 | 1 | 4 | 7.10 | 19.20 | 4.04 | 3.94 to 4.24 | 7.00 | 17.90 | 3.62 | 3.52 to 3.82 "
        "| 0.42 | 3% |",
        "* tp1_b2_kv64k_q1: dependent launches need 9.0",
        "* tp1_b128_kv8k_q1: its process ended with 3",
        "| ours, chain, enable_pdl | nvfp4 | 16 | 1.60e-03 | 1.60e-03 | 1.06 |",
    ):
        assert line in lines, line
    written = report.write(with_chains(), tmp_path)
    assert json.loads(written[0].read_text()) == with_chains()
    assert sum('"candidate": "chain"' in line for line in written[0].read_text().splitlines()) == 3
    report.show(with_chains())
    assert "4.04" in capsys.readouterr().out


def test_results_of_before_there_were_chains_are_reported_as_they_were(capsys):
    assert "chains" not in canned() and "Dependent launches" not in report.markdown(canned())
    assert report.failures(canned()) == []
    report.show(canned())
    assert "chain" not in capsys.readouterr().out


def test_a_chain_that_is_wrong_or_missing_is_a_failure():
    results = with_chains()
    results["chains"][0]["ways"]["enable_pdl"]["checks"][1] = {"passed": False, "problem": "out[0] is off"}
    assert report.failures(results) == [
        "tp4_b1_kv1m_q1: a chain of steps (enable_pdl) does not match the oracle: out[0] is off",
        "tp1_b128_kv8k_q1: the chain of steps did not run: its process ended with 3",
    ]
