"""The sweep over the number of items without a GPU: what is measured and against what, what is checked, and
what a report shows of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from msa_cudacore import reference
from msa_cudacore.benchmarks import cli, items, report, run, worker
from msa_cudacore.benchmarks.candidates import Bench, Ours, Prepared
from msa_cudacore.benchmarks.check import Oracle
from msa_cudacore.benchmarks.configurations import _label, row_of
from msa_cudacore.benchmarks.rows import QUICK_ROWS, ROWS, SWEPT, named
from msa_cudacore.benchmarks.timing import Timing
from msa_cudacore.benchmarks.workload import build, first_requests
from msa_cudacore.blackwell import BlackwellProgram
from msa_cudacore.cli import main
from msa_cudacore.contract import Problem
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.portable import PortableProgram, choose_configuration, source

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_data import HostArrays, canned, exact  # noqa: E402

H200 = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 227 * 1024, 228 * 1024, True)
L4 = DeviceFacts(0, "NVIDIA L4", (8, 9), 58, 99 * 1024, 100 * 1024, False)
B200 = DeviceFacts(0, "NVIDIA B200", (10, 0), 148, 227 * 1024, 228 * 1024, True)
DEVICES = [
    pytest.param(program, facts, id=facts.name)
    for program, facts in ((PortableProgram(), H200), (PortableProgram(), L4), (BlackwellProgram(), B200))
]


def configuration(number, facts=H200):
    return choose_configuration(Problem(number, 1, 16, 1, 16, 64, 64 * SWEPT.batch), facts)


def test_stretches_end_where_the_configuration_changes():
    same = items.stretches(PortableProgram(), H200)
    assert [number for stretch in same for number in stretch] == list(range(1, 1201))
    for stretch in same:
        assert len({configuration(number) for number in stretch}) == 1
    for before, after in zip(same, same[1:]):
        assert configuration(before[-1]) != configuration(after[0])
    assert 12 < len(same) < 40


@pytest.mark.parametrize("program, facts", DEVICES)
def test_both_sides_of_every_change_are_measured_and_evenly_between(program, facts):
    same = items.stretches(program, facts)
    chosen = items.counts(same, facts.multiprocessors)
    assert chosen == sorted(set(chosen)) and (chosen[0], chosen[-1]) == (1, 1200)
    for stretch in same:
        assert {stretch[0], stretch[-1]} <= set(chosen)
    for full in range(facts.multiprocessors, 1200, facts.multiprocessors):
        assert {full, full + 1} <= set(chosen)
    assert {1, 2, 4, 8, 16, 32} <= set(chosen)
    gaps = np.diff(chosen)
    assert gaps.max() <= facts.multiprocessors // 4
    # A quarter of a minute is meant for all.
    assert len(chosen) <= (90 if facts is H200 else 180)


def test_every_kernel_of_the_sweep_is_compiled_beforehand_the_last_one_first(monkeypatch):
    compiled = []
    monkeypatch.setattr(items, "compile_cubin", lambda *what, name: compiled.append((*what, name)))
    items.build(PortableProgram(), H200)
    wanted = dict.fromkeys(source(configuration(number)) for number in range(1200, 0, -1))
    assert compiled == [(one, "sm_90a", "portable.cu") for one in wanted]
    items.build(BlackwellProgram(), B200)
    assert len(compiled) == len(wanted)


@pytest.fixture(scope="module")
def workload():
    """Two steps of forty requests of 20 pages."""
    row = replace(SWEPT, batch=40, name="tp4_b40_kv8k_q1", kv_tokens=2500)
    return build(row, HostArrays(), steps=2, seed=5)


def test_the_first_requests_are_steps_of_their_own_on_the_same_pool(workload):
    first = first_requests(workload, 7)
    assert (first.row.name, first.row.items) == ("tp4_b7_kv8k_q1", 7)
    assert first.selected_bytes == 7 * 16 * 18432
    outs = []
    for cut, whole, (out, lse) in zip(first.steps, workload.steps, exact(workload)):
        assert np.array_equal(cut.host.tiles, whole.host.tiles[:7])
        # Pages lie anywhere in the pool.
        assert cut.host.tiles.max() > first.row.num_pages
        assert np.array_equal(cut.q, whole.q[:7]) and np.shares_memory(cut.q, whole.q)
        for part in (cut.q2k_indices[0], cut.page_table, cut.seqused_k):
            assert part.shape[0] == 7
        outs.append((reference.round_to_bf16(out[:7]), lse[:7].astype(np.float32)))
    checked = Oracle(first, rows=3, seed=2).check(outs, "nvfp4", ours=True)
    assert checked.passed and checked.rows == 6
    outs[1][0][6, 3] *= 1.02
    assert not Oracle(first, rows=3, seed=2).check(outs, "nvfp4", ours=True).passed


class SweptGpu:
    """Launches are named; a replay takes what `times` says of its name. Ten multiprocessors."""

    facts = SimpleNamespace(
        ordinal=0, multiprocessors=10, compute_capability=(9, 0),
        shared_bytes_per_block=227 * 1024, shared_bytes_per_multiprocessor=228 * 1024,
    )  # fmt: skip
    stream = SimpleNamespace(sync=lambda: None)

    def __init__(self, times):
        self.times, self.timed = times, []

    def bind(self, source, entry, geometry, arguments):
        return entry, SimpleNamespace(grid=geometry.grid, block=geometry.block, tiles=int(arguments[2]))

    def capture(self, launch):
        return lambda: launch

    def time(self, replays, *, samples, idle_before=True):
        done = [replay() for replay in replays]
        self.timed.append((done[0], len(done), samples))
        return Timing(tuple(self.times(*done[number % len(done)]) for number in range(samples)))


class SweptOurs(Ours):
    """Computes the exact results, times `spoil`."""

    spoil = 1.0
    answers = None

    def prepare(self, step, workload, bench, *, enable_pdl=False):
        out, lse = np.zeros_like(step.q), np.zeros(step.q.shape[:2], np.float32)
        number = next(n for n, one in enumerate(workload.steps) if one is step)
        exact_out, exact_lse = (part[: len(out)] for part in self.answers[number])

        def replay():
            out[...] = reference.round_to_bf16(exact_out * self.spoil)
            lse[...] = exact_lse
            return "ours", len(out)

        return Prepared(replay, out, lse, description=f"fake of {len(out)}")


def times(entry, launched):
    """Of few tiles the register kernel on the smallest grid is best, of more than 100 bulk copies on the
    largest.
    """
    if entry == "ours":
        return 10.0 + launched
    if entry == "stream_registers":
        return 6.0 + launched.grid / 1e3 + launched.block / 1e6
    return 9.0 if launched.tiles <= 100 else 5.0 - launched.grid / 1e3


@pytest.fixture
def sweep(workload, monkeypatch):
    monkeypatch.setattr(items, "Ours", SweptOurs)
    monkeypatch.setattr(SweptOurs, "answers", exact(workload))
    monkeypatch.setattr(items.environment, "clocks", lambda ordinal: {"sm_mhz": 1980})
    gpu = SweptGpu(times)
    return items.Sweep(workload, Bench(gpu, HostArrays()), [range(1, 11), range(11, 41)])


def test_a_number_of_items_is_timed_like_a_row_and_checked(sweep, monkeypatch):
    record = sweep.measure(7, samples=100, check_rows=2, seed=1)
    assert (record["items"], record["same_code"]) == (7, [1, 10])
    assert record["selected_bytes"] == 7 * 16 * 18432
    ours = record["ours"]
    assert ours["median_us"] == 17.0 and ours["samples_us"] == [17.0] * 24
    assert ours["configuration"] == "fake of 7" and ours["check"]["passed"] and ours["check"]["rows"] == 4
    assert json.loads(json.dumps(record)) == record
    # Both steps take turns.
    assert (("ours", 7), 2, 24) in sweep._bench.stopwatch.timed
    monkeypatch.setattr(SweptOurs, "spoil", 1.02)
    assert not sweep.measure(7, samples=5, check_rows=2, seed=1)["ours"]["check"]["passed"]


def test_settings_of_the_ceilings_are_tried_at_a_few_numbers_alone(sweep):
    """Of ten multiprocessors at 1, 5 and 20 items, and at the largest."""
    timed = sweep._bench.stopwatch.timed

    def tried():
        count = sum(samples == 15 for *_, samples in timed)
        timed.clear()
        return count

    first = sweep.measure(1, samples=24, check_rows=1, seed=1)
    assert tried() > 10 and [one["name"] for one in first["ceilings"]] == ["ceiling_registers"]
    # Between 5 and 20 the better of what was best at both is the ceiling, on a grid of its own.
    second = sweep.measure(11, samples=24, check_rows=1, seed=1)
    assert tried() > 20
    assert {one["name"] for one in second["ceilings"]} == {"ceiling_registers", "ceiling_bulk"}
    assert all(len(one["samples_us"]) == 24 for one in second["ceilings"])
    third = sweep.measure(13, samples=24, check_rows=1, seed=1)
    assert tried() == 0 and [one["name"] for one in third["ceilings"]] == [
        one["name"] for one in second["ceilings"]
    ]
    (point,) = report.points({"items": [third]})
    assert (point.ours, point.ceiling) == (23.0, 4.92)


def worked(monkeypatch, capsys, workload, *arguments, measure=None):
    """Records of a worker that sweeps three numbers of items."""

    class FakeSweep:
        counts = (1, 2, 40)

        def __init__(self, workload, bench, same):
            pass

        def measure(self, number, **how):
            if measure is not None:
                return measure(number)
            return {"items": number} | how

    monkeypatch.setattr(worker, "choose", lambda device, wanted: HostArrays())
    monkeypatch.setattr(worker, "build", lambda row, arrays, **_: workload)
    stopwatch = SimpleNamespace(
        linear_read=lambda size: Timing((480.0,)), stream=SimpleNamespace(sync=lambda: None)
    )
    monkeypatch.setattr(worker, "Stopwatch", lambda ordinal: stopwatch)
    monkeypatch.setattr(worker.peers, "load", lambda group: [])
    monkeypatch.setattr(worker.programs, "select", lambda *_: (PortableProgram(), H200))
    monkeypatch.setattr(worker.items, "Sweep", FakeSweep)
    assert worker.main([*arguments, "--rows", "items", "--samples", "7"]) == 0
    lines = capsys.readouterr().out.split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith(worker.RECORD)]
    return [one for one in records if "candidate" in one and "started" not in one], records


def test_a_worker_sweeps_for_this_package_alone(monkeypatch, capsys, workload):
    told, records = worked(monkeypatch, capsys, workload, "--group", "own")
    how = {"samples": 7, "check_rows": 2, "seed": 1, "candidate": "items"}
    assert told == [{"row": f"tp4_b{n}_kv8k_q1", "items": n} | how for n in (1, 2, 40)]
    assert records[-1]["row"] == "items" and records[-1]["seconds"] >= 0
    assert worked(monkeypatch, capsys, workload, "--group", "torch")[0] == []


def test_a_worker_goes_on_behind_a_number_that_fails_or_is_finished(monkeypatch, capsys, workload):
    def measure(number):
        if number == 2:
            raise OSError("no such launch")
        return {"items": number}

    told, _ = worked(
        monkeypatch, capsys, workload, "--group", "own", "--finished", "items@tp4_b1_kv8k_q1", measure=measure
    )
    assert [one.get("failed") or one["items"] for one in told] == ["OSError: no such launch", 40]


def test_a_worker_stops_sweeping_before_it_is_stopped(monkeypatch, capsys, workload):
    told, _ = worked(monkeypatch, capsys, workload, "--group", "own", "--seconds", "10")
    assert told == [
        {"row": "tp4_b1_kv8k_q1", "candidate": "items"}
        | {"skipped": "out of time, as all larger numbers of items"}
    ]
    assert report.failures(canned() | {"items": [told[0] | {"group": "own"}]}) == []


def test_records_of_the_sweep_are_kept_apart():
    results = run.Results(about={})
    for candidate in ("ours", "items", "chain"):
        results.add({"row": "tp4_b133_kv8k_q1", "candidate": candidate})
    kept = results.as_json()
    assert [len(kept[key]) for key in ("measurements", "items", "chains")] == [1, 1, 1]


def point(number, same, us, read, what="item_slots=1, table", splits=1, **check):
    check = {
        "passed": True, "rows": 8, "relative_error": 1.6e-3, "floor": 1.6e-3, "worst_over_floor": 1.05,
    } | check  # fmt: skip
    return {
        "row": f"tp4_b{number}_kv8k_q1", "candidate": "items", "group": "own", "items": number,
        "same_code": list(same),
        "ours": {
            "configuration": f"portable(sm_90a, splits={splits}, {what})", "median_us": us, "check": check,
        },
        "ceilings": [{"name": name, "median_us": one} for name, one in read.items()],
        "clocks": {"before": {"sm_mhz": 1755}, "after": None},
    }  # fmt: skip


def swept():
    """The canned results with a sweep that was cut short."""
    both = {"ceiling_bulk": 14.5, "ceiling_registers": 15.0}
    return canned() | {
        "items": [
            point(1, (1, 8), 7.0, {"ceiling_registers": 5.0}, splits=16),
            point(8, (1, 8), 8.4, {"ceiling_registers": 5.6}, splits=16),
            point(9, (9, 200), 9.0, {"ceiling_registers": 6.0}, worst_over_floor=1.07),
            point(132, (9, 200), 19.6, both),
            point(133, (9, 200), 29.0, {}),
            point(199, (9, 200), 30.0, both),
            {"row": "tp4_b200_kv8k_q1", "candidate": "items", "group": "own", "skipped": "out of time"},
        ]
    }


def test_the_report_has_a_line_for_each_step_of_the_staircase(tmp_path, capsys):
    lines = report.markdown(swept()).splitlines()
    for line in (
        "## Over the number of items",
        "| 1 to 8 | splits=16, item_slots=1, table | 7.0 to 8.4 | 5.0 to 5.6 | 1.40 to 1.50 |",
        "| 9 to 132 | item_slots=1, table | 9.0 to 19.6 | 6.0 to 14.5 | 1.50 to 1.35 |",
        "| 133 to 199 | item_slots=1, table | 29.0 to 30.0 | - to 14.5 | - to 2.07 |",
        "* tp4_b200_kv8k_q1: out of time",
        "| ours, sweep | nvfp4 | 48 | 1.60e-03 | 1.60e-03 | 1.07 |",
    ):
        assert line in lines, line
    assert any("SM clock 1755 to 1755 MHz" in line for line in lines)
    written = report.write(swept(), tmp_path)
    text = written[0].read_text()
    assert json.loads(text) == swept()
    assert sum('"candidate": "items"' in line for line in text.splitlines()) == 7
    report.show(swept())
    assert "133 to 199" in capsys.readouterr().out


def test_the_picture_has_every_configuration(tmp_path):
    written = report.write(swept(), tmp_path)
    assert written[-1].name == "items.svg"
    text = written[-1].read_text()
    for what in ("1 to 8", "9 to 200", "splits=16, item_slots=1, table", "NVIDIA H200", "page-streaming"):
        assert what in text, what


def test_a_sweep_alone_has_its_own_report(tmp_path, capsys):
    results = swept() | {"measurements": [], "rows": {}}
    text = report.markdown(results)
    assert "| 1 to 8 |" in text and "## Peers" not in text and "best peer" not in text
    written = [path.name for path in report.write(results, tmp_path)]
    assert written == ["results.json", "table.md", "items.svg"]
    report.show(results)
    assert "best peer" not in capsys.readouterr().out


def test_results_of_before_there_was_a_sweep_are_reported_as_they_were(tmp_path, capsys):
    assert "items" not in canned() and "Over the number" not in report.markdown(canned())
    assert report.failures(canned()) == []
    assert "items.svg" not in [path.name for path in report.write(canned(), tmp_path)]
    report.show(canned())
    assert "configuration" not in capsys.readouterr().out


def test_a_wrong_or_failed_number_of_items_is_a_failure():
    results = swept()
    results["items"][1]["ours"]["check"] = {"passed": False, "problem": "out[0] is off"}
    results["items"][6] = {"row": "tp4_b200_kv8k_q1", "candidate": "items", "failed": "its process ended"}
    assert report.failures(results) == [
        "tp4_b8_kv8k_q1, sweep: ours does not match the oracle: out[0] is off",
        "tp4_b200_kv8k_q1, sweep: did not run: its process ended",
    ]


def test_the_sweep_is_named_like_a_row():
    assert named("items") == ((), True) and named(" items, ") == ((), True)
    rows, sweep = named("tp4_b132_kv8k_q1,items")
    assert [row.name for row in rows] == ["tp4_b132_kv8k_q1"] and sweep
    assert named("tp4_b132_")[1] is False
    with pytest.raises(ValueError, match="'item'.*tp4_b1_kv1m_q1, items"):
        named("item")
    with pytest.raises(ValueError, match="no row is named"):
        named(" , ")


@pytest.mark.parametrize(
    "arguments, rows, sweep, peers, spelled",
    [
        ((), ROWS, True, 4, "msa-cudacore bench"),
        (("--rows", "items"), (), True, 0, "msa-cudacore bench --rows items"),
        (("--rows", "items", "--peers", "torch"), (), True, 0, "msa-cudacore bench --rows items"),
        (
            ("--rows", "tp4_b1_,items", "--peers", "torch"), named("tp4_b1_")[0], True, 1,
            "msa-cudacore bench --rows tp4_b1_kv1m_q1,items --peers torch",
        ),
        (
            ("--rows", "tp4_b1_", "--peers", "none"), named("tp4_b1_")[0], False, 0,
            "msa-cudacore bench --rows tp4_b1_kv1m_q1 --peers none",
        ),
        (("--rows", "tp"), ROWS, False, 4, "msa-cudacore bench --rows " + ",".join(row.name for row in ROWS)),
        (
            ("--quick",), named(",".join(QUICK_ROWS))[0], False, 0,
            f"msa-cudacore bench --quick --rows {','.join(QUICK_ROWS)} --samples 30",
        ),
        (
            ("--quick", "--rows", "items"), (), True, 0,
            "msa-cudacore bench --quick --rows items --samples 30",
        ),
    ],
)  # fmt: skip
def test_a_full_run_sweeps_and_a_choice_does_where_it_is_named(
    monkeypatch, arguments, rows, sweep, peers, spelled
):
    monkeypatch.setattr(cli, "_require_gpu", lambda device: None)
    taken = []

    def pretend(plan, *, command, progress):
        taken.append((plan, command))
        return run.Results(about={"machine": {"gpu": "NVIDIA H200"}})

    monkeypatch.setattr(cli, "run", pretend)
    monkeypatch.setattr(report, "failures", lambda results: [])
    done = CliRunner().invoke(main, ["bench", "--json", *arguments])
    assert done.exit_code == 0, done.output
    ((plan, command),) = taken
    assert (plan.rows, plan.sweep, len(plan.peers), command) == (rows, sweep, peers, spelled)
    words = run._command("own", plan, [])
    assert named(words[words.index("--rows") + 1]) == (plan.rows, sweep)


def test_the_list_has_the_sweep():
    listed = CliRunner().invoke(main, ["bench", "--list"])
    assert "items: a sweep over 1 to 1,200 items" in listed.output
    assert max(map(len, listed.output.splitlines())) <= 80
    found = json.loads(CliRunner().invoke(main, ["bench", "--list", "--json"]).stdout)
    assert found["sweep"]["name"] == "items" and found["sweep"]["batch"] == 1200


def test_committed_results_are_those_of_the_present_choice():
    """So that nobody takes the figures for those of a program that would run otherwise."""
    folder = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200"
    results = json.loads((folder / "results.json").read_text())
    planned = {row.name: row for row in ROWS}
    kept = [(SWEPT.with_batch(one["items"]), one["ours"]) for one in results["items"]]
    kept += [(planned[one["row"]], one) for one in results["measurements"] if one["candidate"] == "ours"]
    assert len(kept) > 90
    for row, measured in kept:
        assert measured["configuration"] == PortableProgram().plan(row.problem, H200, None).description, row.name
    for name, topk in (("configurations", 16), ("configurations_32", 32)):
        tried = json.loads((folder / f"{name}.json").read_text())
        for one in tried["figures"]:
            assert tried["topk"] == topk and one["pages"] == topk
            chosen = choose_configuration(row_of(one["items"], topk, topk).problem, H200)
            assert tried["configurations"][one["chosen"]] == _label(chosen), one["items"]
