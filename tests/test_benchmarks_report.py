"""The benchmark's reports, and its command, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from msa_cudacore.benchmarks import cli, report, run
from msa_cudacore.benchmarks.rows import ROWS, find
from msa_cudacore.cli import main
from msa_cudacore.launch import device as device_module

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_data import canned  # noqa: E402


def test_a_report_compares_with_the_better_ceiling_and_ignores_wrong_peers():
    big, late = report.summarize(canned())
    assert (big.ceiling, big.distinct_ceiling) == (44.0, 36.0)
    assert big.over_ceiling == pytest.approx(1.25)
    assert big.peers() == {"torch_sdpa_bf16": 990.0, "triton_nvfp4": 300.0} and big.peers("nvfp4") == {
        "triton_nvfp4": 300.0
    }
    assert late.peers() == {} and late.distinct_ceiling is None


def test_the_markdown_has_every_figure_and_every_reason():
    text = report.markdown(canned())
    for line in (
        "| tp1_b32_kv8k_q8 | 1024 | 302.0 | 4.0 | 44.0 | 36.0 | 55.0 | 54.9 to 55.3 | 1.25 | 1.45 | 5.45 "
        "| 5.45 | 74.3 |",
        "| tp4_b1_kv1m_q1 | 1 | 0.3 | 4.1 | 5.6 | - | 8.4 | 8.3 to 8.7 | 1.50 | 1.45 | - | - | 7.2 |",
        "| tp4_b1_kv1m_q1 | 8.4 | - | 7.0 (wrong) |",
        "* unfused: nvmath is not installed",
        "* torch_sdpa_bf16 on tp4_b1_kv1m_q1: out of memory",
        "A linear read of 2 GiB runs at 4.61 TB/s.",
    ):
        assert line in text.splitlines(), line


def test_files_are_written_and_the_json_comes_back(tmp_path):
    written = report.write(canned(), tmp_path / "h200")
    assert [path.name for path in written] == [
        "results.json",
        "table.md",
        "time.svg",
        "fraction.svg",
        "roofline.svg",
    ]
    assert json.loads(written[0].read_text()) == canned()
    for path in written[2:]:
        text = path.read_text()
        assert "<svg" in text and "NVIDIA H200" in text
    assert "tp1_b32_kv8k_q8" in written[2].read_text()


def test_a_row_without_an_aim_is_shown_like_the_others(tmp_path):
    results = canned()
    aimless = "tp1_b133_kv8k_q1"
    assert find(aimless)[0].at_most is None
    for one in results["measurements"]:
        if one["row"] == "tp1_b32_kv8k_q8":
            one["row"] = aimless
    table = report.markdown(results)
    assert "| tp1_b133_kv8k_q1 | 532 | 0.0 | 4.0 | 44.0 | 36.0 | 55.0 | 54.9 to 55.3 | 1.25 | - |" in table
    report.write(results, tmp_path)
    fraction = (tmp_path / "fraction.svg").read_text()
    assert "tp1_b133_kv8k_q1 (532 items)" in fraction and "target" in fraction


def test_a_wrong_or_missing_result_of_ours_is_a_failure():
    results = canned()
    assert report.failures(results) == []
    ours = [one for one in results["measurements"] if one["candidate"] == "ours"]
    ours[0]["check"] |= {"passed": False, "problem": "out[0] is off"}
    del ours[1]["check"], ours[1]["median_us"]
    ours[1]["failed"] = "launch failed"
    assert report.failures(results) == [
        "tp1_b32_kv8k_q8: ours does not match the oracle: out[0] is off",
        "tp4_b1_kv1m_q1: ours did not run: launch failed",
    ]


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_rows_are_listed_without_a_gpu():
    listed = invoke("--list")
    assert listed.exit_code == 0
    assert all(row.name in listed.output for row in ROWS) and "flashinfer" in listed.output
    assert "\u2026" not in listed.output and max(map(len, listed.output.splitlines())) <= 80, "cells are cut short"
    for what in ("bandwidth", "1,048,576", "up to 65,536", "seqlen_q", "published"):
        assert what in listed.output
    found = json.loads(invoke("--list", "--json").stdout)
    assert [row["name"] for row in found["rows"]] == [row.name for row in ROWS] and "flashinfer" in found["peers"]


def test_without_a_gpu_bench_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(device_module, "count", lambda: 0)
    failed = invoke()
    assert failed.exit_code == 2
    assert (
        failed.stderr.strip()
        == "Error: bench needs a GPU: --device is 0 and no CUDA device is visible (see msa-cudacore doctor)"
    )


@pytest.mark.parametrize(
    "arguments, named",
    [(("--rows", "tp9"), "'tp9'"), (("--peers", "triton,vllm"), "'vllm'"), 
     (("--samples", "2"), "'--samples'"),
     (("--device", "-1"), "'--device'")],
)  # fmt: skip
def test_bad_options_are_named(arguments, named):
    failed = invoke(*arguments)
    assert failed.exit_code == 2 and named in failed.stderr


def test_bench_writes_its_files_and_fails_when_ours_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_require_gpu", lambda device: None)
    plans, commands = [], []

    def pretend(plan, *, command, progress):
        plans.append(plan)
        commands.append(command)
        progress("own", "tp4_b1_kv1m_q1: ours")
        results = run.Results(
            about={
                key: value for key, value in canned().items() if key not in ("groups", "rows", "measurements")
            }
        )
        results.groups, results.rows, results.measurements = (
            canned()[key] for key in ("groups", "rows", "measurements")
        )
        return results

    monkeypatch.setattr(cli, "run", pretend)
    passed = invoke("--quick", "--peers", "torch", "--output", str(tmp_path / "out"))
    assert passed.exit_code == 0, passed.output
    assert "tp4_b1_kv1m_q1" in passed.output and (tmp_path / "out" / "results.json").is_file()
    assert plans[0].peers == ("torch",) and len(plans[0].rows) == 3 and plans[0].steps == 2
    rows = "tp1_b128_kv8k_q1,tp1_b32_kv64k_q1,tp1_b1_kv200k_q1"
    assert commands == [f"msa-cudacore bench --quick --rows {rows} --peers torch --samples 30"]
    as_json = invoke("--json")
    invoke("--json", "--quick")
    assert commands[1:] == ["msa-cudacore bench", f"msa-cudacore bench --quick --rows {rows} --samples 30"]
    assert json.loads(as_json.stdout)["machine"]["gpu"] == "NVIDIA H200"
    monkeypatch.setattr(
        report, "failures", lambda results: ["tp4_b1_kv1m_q1: ours does not match the oracle"]
    )
    assert invoke("--output", str(tmp_path / "out")).exit_code == 1
