"""The trial of all configurations without a GPU: what is admitted, timed, checked and written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from msa_cudacore import reference
from msa_cudacore.benchmarks import configurations
from msa_cudacore.benchmarks.candidates import Bench, Prepared
from msa_cudacore.benchmarks.configurations import admitted, row_of
from msa_cudacore.benchmarks.timing import Timing
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.portable import Configuration, choose_configuration

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_data import HostArrays, exact  # noqa: E402

H200 = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 227 * 1024, 228 * 1024, True)
A100 = DeviceFacts(0, "NVIDIA A100", (8, 0), 108, 163 * 1024, 164 * 1024, False)
L4 = DeviceFacts(0, "NVIDIA L4", (8, 9), 58, 99 * 1024, 100 * 1024, False)


@given(
    items=st.integers(1, 1500), pages=st.integers(1, 64), topk=st.integers(1, 64),
    facts=st.sampled_from((H200, A100, L4)),
)
def test_the_chosen_configuration_comes_first_and_is_admitted_for_itself(items, pages, topk, facts):
    problem = row_of(items, min(pages, topk), topk).problem
    found = list(admitted(problem, facts))
    assert found[0] == choose_configuration(problem, facts)
    assert len(set(found)) == len(found) > 3
    for one in found:
        assert one.shared_bytes <= facts.shared_bytes_per_block and one.block <= 512
        assert 32 * one.ids_per_lane >= topk
        assert facts.clusters or one.cluster == 1
        ctas = one.ctas(items, facts.multiprocessors)
        left, each = one.leftovers(items, facts.multiprocessors), problem.pages_per_item
        if one.pieces:
            assert 0 < left * one.pieces <= ctas * one.item_slots * one.piece_slots and each >= one.pieces
        if one.last_splits > 1:
            assert 0 < left * one.last_splits <= ctas * one.item_slots // 4 and each >= one.last_splits
        if one.shared_item:
            assert 0 < left <= ctas and each > one.item_slots


def test_rows_select_as_many_pages_as_they_say():
    for pages, topk in ((1, 16), (16, 16), (5, 64), (64, 64)):
        row = row_of(3, pages, topk)
        assert row.problem.pages_per_item == pages and row.items == 3 and row.topk == topk


class Gpu:
    """Ten multiprocessors; a replay says how long it takes."""

    facts = DeviceFacts(0, "none", (9, 0), 10, 227 * 1024, 228 * 1024, True)
    stream = SimpleNamespace(sync=lambda: None)

    def __init__(self, *_):
        self.timed = []

    def time(self, replays, *, samples, idle_before=True):
        took = [replay() for replay in replays]
        self.timed.append((took[0], len(replays), samples))
        return Timing(tuple(took[number % len(took)] for number in range(samples)))


@pytest.fixture
def faked(monkeypatch):
    """Exact results from every configuration, in 10 us without a split and 10.5 with two; others take 20."""
    answers = {}

    def prepare(self, step):
        key = id(self.workload)
        if key not in answers:
            answers[key] = self.workload, exact(self.workload)
        number = next(n for n, one in enumerate(self.workload.steps) if one is step)
        exact_out, exact_lse = answers[key][1][number]
        out, lse = np.zeros_like(step.q), np.zeros(step.q.shape[:2], np.float32)

        def replay():
            out[...] = reference.round_to_bf16(exact_out * faked.spoil.get(self.configuration.splits, 1.0))
            lse[...] = exact_lse
            return {1: 10.0, 2: 10.5}.get(self.configuration.splits, 20.0)

        return Prepared(replay, out, lse)

    faked = SimpleNamespace(spoil={})
    monkeypatch.setattr(configurations.Forced, "prepare", prepare)
    return faked


def test_what_comes_close_is_timed_again_and_checked(faked):
    gpu = Gpu()
    medians = configurations.measure(row_of(2, 3, 16), Bench(gpu, HostArrays()), seed=1)
    chosen = choose_configuration(row_of(2, 3, 16).problem, gpu.facts)
    assert next(iter(medians)) == chosen and chosen.splits == 4
    assert {one.splits: median for one, median in medians.items()} == {1: 10.0, 2: 10.5, 4: 20.0}
    again = {took for took, steps, _ in gpu.timed if steps == 4}
    assert again == {10.0, 10.5, 20.0}  # the chosen one, too, however far off it is
    assert sum(steps == 4 and took == 20.0 for took, steps, _ in gpu.timed) == 3
    faked.spoil[2] = 1.02
    with pytest.raises(RuntimeError, match=r"^2 items of 3 pages, splits=2.*: out row"):
        configurations.measure(row_of(2, 3, 16), Bench(gpu, HostArrays()), seed=1)
    faked.spoil = {4: 1.02}
    with pytest.raises(RuntimeError, match="splits=4"):
        configurations.measure(row_of(2, 3, 16), Bench(gpu, HostArrays()), seed=1)


def test_the_command_says_and_writes_what_is_best(faked, monkeypatch, tmp_path):
    monkeypatch.setattr(configurations, "Stopwatch", Gpu)
    monkeypatch.setattr(configurations, "choose", lambda device: HostArrays())
    monkeypatch.setattr(configurations.environment, "machine", lambda device: {"gpu": "none"})
    compiled = []
    monkeypatch.setattr(configurations, "_compile", lambda found, facts: compiled.extend(found))
    path = tmp_path / "all.json"
    arguments = ["--items", "2,3", "--pages", "1,3", "--output", str(path)]
    result = CliRunner().invoke(configurations.command, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert " 1 pages,    2 items:  10.00 us, best  10.00" in lines
    assert any(line.startswith(" 3 pages,    2 items:  20.00 us, best  10.00 (") for line in lines)
    assert set(compiled) >= {choose_configuration(row_of(2, pages, 16).problem, Gpu.facts) for pages in (1, 3)}
    written = json.loads(path.read_text())
    assert [(one["pages"], one["items"]) for one in written["figures"]] == [(1, 2), (1, 3), (3, 2), (3, 3)]
    for figure in written["figures"]:
        assert figure["chosen"] in figure["median_us"] and set(figure["median_us"]) <= set(written["configurations"])
    assert written["command"] == "python -m msa_cudacore.benchmarks.configurations --items 2,3 --pages 1,3"


@pytest.mark.parametrize("numbers", ["", "a", "1,,2", "0", "1,-3"])
def test_numbers_are_refused_by_value(numbers):
    result = CliRunner().invoke(configurations.command, ["--items", numbers])
    assert result.exit_code == 2 and repr(numbers) in result.output and "positive integers" in result.output


def test_no_more_pages_are_asked_for_than_are_selected():
    result = CliRunner().invoke(configurations.command, ["--pages", "16,32"])
    assert result.exit_code == 2 and "--pages: 32; accepted are at most --topk, 16" in result.output


def test_without_a_gpu_the_command_says_so(monkeypatch):
    def no_driver(ordinal):
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(configurations, "Stopwatch", no_driver)
    result = CliRunner().invoke(configurations.command, [])
    assert result.exit_code == 1 and result.output == "Error: no CUDA driver\n"


def test_labels_name_what_differs_from_the_plainest():
    assert configurations._label(Configuration(1, 1, False, 2)) == "plain"
    split = Configuration(2, 4, False, 1, table=True, cooperative=True)
    assert configurations._label(split) == "page_slots=2, splits=4, table=True, cooperative=True"
