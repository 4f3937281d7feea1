"""The report, the time line, the command line, and that seeds reproduce a run."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from click.testing import CliRunner

from msa_cudacore.ptx import emulator
from msa_cudacore.ptx.emulator.cli import command

SOURCE = """extern "C" __global__ void k(const float* x, float* out, int n) {
  __shared__ float s[64];
  float v = 0;
  for (int i = threadIdx.x; i < n; i += 64) v = v * 2 + x[i];
  s[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x < 32) out[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x + 32];
}"""


@pytest.fixture(scope="module")
def module():
    return emulator.compile(SOURCE, "sm_90a", name="report.cu")


def launch(module, **more):
    x = np.arange(256, dtype=np.float32)
    out = np.zeros(32, np.float32)
    return module.launch("k", (1,), (64,), [x, out, np.int32(256)], **more), out


def test_counts_by_class_warp_and_line(module):
    report, _ = launch(module)
    assert report.warp_instructions == sum(report.by_class.values()) == sum(report.by_warp)
    assert report.by_warp[0] > report.by_warp[1] > 0
    assert report.by_class["barrier"] == 2
    assert report.bytes["global load"] == 256 * 4 and report.bytes["global store"] == 128
    assert report.bytes["shared store"] == 256 and report.bytes["shared load"] == 256
    assert sum(e.lanes for e in report.lines if e.text.startswith("ld.global")) == 256
    assert any(line.endswith("report.cu:4") for line in report.by_source)
    assert report.shared_wavefronts == report.ideal_wavefronts == 4
    assert "warp instructions" in report.summary() and "shared memory" in report.summary()


def test_the_same_seed_gives_the_same_run(module):
    spans = [launch(module, seed=5, trace=True)[0].timeline.spans for _ in range(2)]
    assert spans[0] == spans[1]
    assert launch(module, seed=6, trace=True)[0].timeline.spans != spans[0]


def test_trace_and_picture(module, tmp_path):
    report, _ = launch(module, trace=True)
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"warp 0", "warp 1"}
    executed = sum(e["dur"] for e in slices if e["cat"] not in ("wait", "asynchronous"))
    assert executed >= report.warp_instructions
    report.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="trace=True"):
        launch(module)[0].plot()


def test_a_report_exists_after_a_fault(module):
    with pytest.raises(emulator.Fault):
        module.launch("k", (1,), (64,), [np.zeros(8, np.float32), np.zeros(32, np.float32), np.int32(256)])


def test_command_line(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    run = CliRunner().invoke(
        command,
        [
            str(path),
            "f32[256]:random",
            "f32[32]",
            "i32=256",
            "--block",
            "64",
            "--arch",
            "sm_90a",
            "--seeds",
            "2",
            "--lines",
            "2",
            "--save",
            f"1={tmp_path / 'out.npy'}",
            "--trace",
            str(tmp_path / "t.json"),
        ],
    )
    assert run.exit_code == 0, run.output
    assert "k: " in run.output and "most executed" in run.output
    assert np.load(tmp_path / "out.npy").any() and (tmp_path / "t.json").exists()


def test_command_line_reports_faults_and_bad_arguments(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    run = CliRunner().invoke(
        command, [str(path), "f32[16]", "f32[32]", "i32=256", "--block", "64", "--arch", "sm_90a"]
    )
    assert run.exit_code == 1 and "out-of-bounds" in run.output
    run = CliRunner().invoke(command, [str(path), "f32{16}", "f32[32]", "i32=256", "--block", "64"])
    assert run.exit_code != 0 and "expected f32[1024]" in run.output
    broken = tmp_path / "broken.ptx"
    broken.write_text(".version 8.0\n.target sm_90\n.address_size 64\n.entry k() { frob.u32; }")
    run = CliRunner().invoke(command, [str(broken)])
    assert run.exit_code == 1 and "PTX line 4" in run.output


def test_command_line_says_what_a_picture_needs(tmp_path, monkeypatch):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else find(name))
    run = CliRunner().invoke(command, [str(path), "--picture", str(tmp_path / "picture.png")])
    assert run.exit_code == 2 and "pip install 'msa-cudacore[bench]'" in run.output
