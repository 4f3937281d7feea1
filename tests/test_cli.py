"""The command line: the main job, a saved problem, what is installed, and errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from msa_cudacore.launch import device

from msa_cudacore import blackwell, cli, doctor, emulated, portable
from msa_cudacore import demo as demo_module
from msa_cudacore.cases import random_case
from msa_cudacore.demo import build_case, decode_case
from msa_cudacore.programs import backends
from msa_cudacore.reference import compare
from msa_cudacore.transfer import BF16

SMALL = ["--batch", "2", "--tokens", "300", "--q-heads", "8", "--kv-heads", "2", "--no-emulate"]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Which phases last depends on the machine, so none is said to."""
    monkeypatch.setattr(cli, "_PATIENCE", 600)


def run(*arguments: str):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def error_of(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    return lines[0]


@pytest.fixture
def saved(tmp_path, rng):
    case = random_case(rng, batch=2, seqlen_q=2)
    path = tmp_path / "case.npz"
    case.save(path)
    return path, case


def test_demo_runs_the_main_job():
    result = run("demo", *SMALL)
    assert result.exit_code == 0, result.output
    for words in (
        "device",
        "program",
        "splits",
        "rounding floor",
        "time",
        "matches the oracle",
        "8/2",
    ):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_demo_without_a_gpu_also_runs_the_blackwell_kernel_in_the_emulator():
    pytest.importorskip("numba")
    if device.count():
        pytest.skip("a GPU is visible, where the demo runs on it alone")
    result = run("demo", *SMALL, "--emulate", "--json")
    assert result.exit_code == 0, result.output
    emulated = json.loads(result.stdout)["emulated"]
    assert emulated["ok"] and emulated["backend"] == "emulated" and "sm_100a" in emulated["program"]


def test_demo_without_the_emulator_says_how_to_get_it(monkeypatch):
    if device.count():
        pytest.skip("a GPU is visible, where the demo runs on it alone")
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = run("demo", *SMALL, "--emulate")
    assert result.exit_code == 0 and "pip install 'msa-cudacore[emulator]'" in result.stdout


def test_demo_speaks_json():
    result = run("demo", *SMALL, "--json", "--seqlen-q", "3", "--topk", "2", "--backend", "reference")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert facts["ok"] is True and facts["problems"] == [] and facts["worst_ratio"] <= 1.25
    assert facts["program"] == "reference(float64)" and facts["device"] == "host CPU" and facts["splits"] == 1
    assert (facts["batch"], facts["seqlen_q"], facts["topk"], facts["q_heads"], facts["kv_heads"]) == (
        2,
        3,
        2,
        8,
        2,
    )
    assert facts["microseconds"] > 0 and 0 < facts["rounding_floor"] < 3e-3


def test_demo_says_when_the_oracle_is_held_against_itself(capsys):
    facts = json.loads(run("demo", *SMALL, "--backend", "reference", "--json").stdout)
    for backend in ("reference", "portable"):
        cli._print_table(facts | {"backend": backend})
        assert ("matches the oracle, which is this program itself" in capsys.readouterr().out) == (backend == "reference")


def test_demo_saves_a_problem_that_decode_takes(tmp_path):
    problem, results = tmp_path / "problem.npz", tmp_path / "results.npz"
    assert run("demo", *SMALL, "--save", problem, "--seed", "5").exit_code == 0
    result = run("decode", "--input", problem, "--output", results, "--check", "--backend", "reference")
    assert result.exit_code == 0 and "matches the oracle" in result.stdout
    again = build_case(batch=2, tokens=300, num_q_heads=8, num_kv_heads=2, seed=5)
    with np.load(results) as data:
        assert (
            str(data["out_dtype"]) == "bfloat16"
            and str(data["program"]) == "reference(float64)"
            and data["splits"] == 1
        )
        assert compare(data["out"].view(BF16), data["lse"], *again.exact())


def test_decode_without_check_computes_no_oracle_twice(saved, tmp_path):
    path, case = saved
    results = tmp_path / "results.npz"
    result = run("decode", "--input", path, "--output", results, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and "ok" not in facts
    with np.load(results) as data:
        assert compare(data["out"].view(BF16), data["lse"], *case.exact())


def test_phases_that_last_are_named_where_no_terminal_shows_them(monkeypatch, saved, tmp_path):
    class AtOnce:
        def __init__(self, interval, function, args, kwargs):
            self.start, self.cancel = lambda: function(*args, **kwargs), lambda: None

    monkeypatch.setattr(cli.threading, "Timer", AtOnce)
    assert run("demo", *SMALL, "--backend", "reference").stderr.splitlines() == [
        "Writing the NVFP4 cache ...", "Compiling and decoding ...", "Computing the float64 oracle ..."
    ]
    assert run("demo", *SMALL, "--json").stderr == ""
    monkeypatch.setattr(demo_module, "decode_case", lambda case, **options: decode_case(case, backend="reference"))
    done = run("decode", "--input", saved[0], "--output", tmp_path / "out.npz", "--backend", "emulated")
    assert "emulator" in done.stderr and "one to two minutes" in done.stderr and done.stderr.count("\n") == 1


def test_a_result_that_misses_the_bar_exits_with_1(monkeypatch):
    from msa_cudacore.cases import Case

    exact = Case.exact
    monkeypatch.setattr(Case, "exact", lambda self: (exact(self)[0] + 0.5, exact(self)[1]))
    result = run("demo", *SMALL)
    assert result.exit_code == 1 and "DOES NOT MATCH" in result.stdout
    result = run("demo", *SMALL, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "fast"], "backend is 'fast'; accepted are auto"),
        (["--batch", "0"], "batch is 0"),
        (["--tokens", "-1"], "tokens is -1"),
        (["--kv-heads", "3"], "q-heads is 8 and kv-heads 3"),
        (["--q-heads", "64"], "q-heads is 64"),
        (["--seqlen-q", "33"], "seqlen-q is 33"),
        (["--topk", "65"], "topk is 65"),
        (["--splits", "7", "--backend", "reference"], "splits is 7"),
        (["--save", "/nonexistent/x.npz"], "/nonexistent/x.npz"),
        (["--save", ""], "No such file"),
        (["--save", "/dev/full"], "No space left on device: /dev/full"),
        (["--seed", "-1"], "seed is -1"),
        (["--frobnicate"], "No such option"),
        (["--framework", "jax"], "'jax' is not one of"),
        (["more"], "unexpected extra argument"),
    ],
)
def test_demo_errors_are_one_line(arguments, words):
    assert words in error_of("demo", *SMALL, *arguments)


def test_decode_errors_are_one_line(saved, tmp_path):
    path, _ = saved
    out = tmp_path / "out.npz"
    assert "nothing.npz" in error_of("decode", "--input", tmp_path / "nothing.npz", "--output", out)
    broken = tmp_path / "broken.npz"
    broken.write_bytes(path.read_bytes()[:1000])
    assert "not a readable npz" in error_of("decode", "--input", broken, "--output", out)
    np.savez(tmp_path / "empty.npz")
    assert "missing q, k" in error_of("decode", "--input", tmp_path / "empty.npz", "--output", out)
    assert not out.exists()


def test_decode_names_the_argument_that_does_not_fit(saved, tmp_path):
    path, _ = saved
    with np.load(path) as data:
        np.savez(tmp_path / "bad.npz", **{**data, "k_global_scale": -1.0})
    assert "k_global_scale is -1.0" in error_of(
        "decode", "--input", tmp_path / "bad.npz", "--output", tmp_path / "out.npz"
    )


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_decode_does_not_write_over_its_problem(saved, tmp_path, link):
    path, _ = saved
    before, out = path.read_bytes(), path
    if link is not None:
        out = tmp_path / "out.npz"
        getattr(out, link)(path)
    assert f"--output {out} is the file of --input {path}" in error_of("decode", "--input", path, "--output", out)
    assert path.read_bytes() == before
    message = error_of("decode", "--input", tmp_path / "nothing.npz", "--output", path)
    assert "No such file" in message and "nothing.npz" in message


def test_a_gpu_program_without_a_gpu_is_one_line(monkeypatch):
    def absent(ordinal):
        raise device.DriverUnavailable("cuda:0 cannot be used: no driver\nmore lines")

    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(device, "facts", absent)
    assert "cuda:0 cannot be used" in error_of("demo", *SMALL, "--backend", "portable")


def test_missing_framework_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'msa-cudacore[torch]'" in error_of("demo", *SMALL, "--framework", "torch")


def test_usage_errors_are_one_line():
    assert "Missing option '--input'" in error_of("decode")
    assert "'many' is not a valid integer. See 'main demo --help'." in error_of("demo", "--batch", "many")
    assert "No such command 'unknown'. See 'main --help'." in error_of("unknown")
    assert "No such option" in error_of("--unknown")
    assert "'--input'. See" in error_of("decode")


def test_help_states_the_ranges_and_names_that_are_accepted():
    text = " ".join(run("demo", "--help").stdout.split())
    for option in ("batch", "tokens", "kv-heads", "seqlen-q", "topk"):
        accepted = error_of("demo", f"--{option}", str(2**40)).rpartition("from ")[2]
        assert accepted in text[text.index(f"--{option} ") :].split(" --")[0], option
    assert f"1 to {error_of('demo', '--kv-heads', '1', '--q-heads', '1025').rpartition(' to ')[2]} for each KV head" in text
    assert all(name in text[text.index("--backend") : text.index("--framework")] for name in backends())
    assert all(", ".join(map(str, splits)) in text for splits in (blackwell.SPLITS, portable.SPLITS))


def test_an_interrupt_is_no_failed_check(monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "build_case", interrupted)
    done = run("demo", *SMALL)
    assert done.exit_code == 130 and done.stderr == "Interrupted.\n"


def test_commands_are_listed_in_one_whole_line_each():
    listed = run("--help").output.split("Commands:")[1].strip().splitlines()
    assert len(listed) == len(cli._LAZY) + 3 and not any(line.endswith("...") for line in listed)


@pytest.mark.filterwarnings("error")
def test_infinite_queries_are_checked_in_silence(saved, tmp_path):
    arrays = dict(np.load(saved[0]))
    arrays["q"] = np.full(arrays["q"].shape, 1e300)
    np.savez(tmp_path / "infinite.npz", **arrays)
    done = run("decode", "--input", str(tmp_path / "infinite.npz"), "--output", str(tmp_path / "out.npz"), "--check")
    assert done.exit_code == 0 and done.stderr == ""


def test_without_a_command_the_help_is_shown():
    assert "Commands:" in run().output


def test_results_are_written_before_they_are_judged(saved, tmp_path, monkeypatch):
    from msa_cudacore.cases import Case

    path, case = saved
    exact = Case.exact
    monkeypatch.setattr(Case, "exact", lambda self: (exact(self)[0] + 0.5, exact(self)[1]))
    assert run("decode", "--input", path, "--output", tmp_path / "out.npz", "--check").exit_code == 1
    with np.load(tmp_path / "out.npz") as data:
        assert compare(data["out"].view(BF16), data["lse"], *exact(case))


def test_an_output_that_cannot_be_written_is_one_line(saved):
    path, _ = saved
    assert "No space left on device: /dev/full" in error_of(
        "decode", "--input", path, "--output", "/dev/full", "--json"
    )


@pytest.mark.parametrize("framework", ["cuda", "torch"])
def test_device_arrays_without_a_device_are_one_line(framework):
    if (
        framework == "torch"
        and pytest.importorskip("torch").cuda.is_available()
        or framework == "cuda"
        and device.count()
    ):
        pytest.skip("there is a device")
    assert (
        "cannot be used" in (message := error_of("demo", *SMALL, "--framework", framework))
        or "sees no CUDA device" in message
    )


def test_debug_shows_the_traceback():
    result = run("--debug", "demo", "--batch", "0")
    assert isinstance(result.exception, ValueError)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom msa_cudacore.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\n"
        "assert result.exit_code == 0 and 'emulate' in result.output\n"
        "heavy = ('torch', 'cupy', 'numba', 'matplotlib', 'cuda.core')\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "args: 0 given"),
        (["--grid", "0", "null"], "'--grid': '0': accepted are one to three sizes"),
        (["--block", "32,x", "null"], "'--block': '32,x' is not a list of sizes"),
        (["--seeds", "0", "null"], "'--seeds': 0 is not in the range x>=1"),
        (["--entry", "other", "null"], "name='other'"),
        (["f32[-1]"], "'f32[-1]': '-1' is not a list of sizes"),
        (["i32=99999999999"], "'i32=99999999999': Python integer 99999999999 out of bounds"),
        (["absent.npy"], "'absent.npy': "),
        (["f32[32"], "'f32[32': the size lacks its ']'"),
        (["bytes[32"], "'bytes[32': the size lacks its ']'"),
        (["bytes[32]]"], "'bytes[32]]': after the size of bytes"),
        (["--trace", "/nonexistent/trace.json", "null"], "--trace: '/nonexistent/trace.json': accepted is a file"),
        (["--picture", "/", "null"], "--picture: '/': accepted is a file"),
        (["--save", "0=/nonexistent/out.npy", "f32[1]"], "--save: '/nonexistent/out.npy': accepted is a file"),
        (["--save", "0=out.npy", "i32=1"], "--save: '0=out.npy': accepted is N=file.npy with N an array argument"),
    ],
)
def test_emulate_tells_an_error_from_a_failed_check_by_the_exit_code(tmp_path, arguments, words):
    pytest.importorskip("numba")
    kernel = tmp_path / "kernel.ptx"
    kernel.write_text(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel(.param .u64 p)\n{\nret;\n}\n"
    )
    assert words in error_of("emulate", str(kernel), *arguments)
    kernel.write_bytes(bytes([0x7F, 0xFF, 0xFE]))
    assert "kernel.ptx is not text, so neither PTX nor CUDA C++" in error_of("emulate", str(kernel))
    kernel.write_text("")
    assert "the module has no kernel. See 'main emulate --help'." in error_of("emulate", str(kernel))


def test_emulate_names_its_run_where_no_terminal_shows_it(monkeypatch, tmp_path):
    emulator = pytest.importorskip("msa_cudacore.ptx.emulator")
    said = []

    @contextmanager
    def status(text, *, quiet):
        said.append(text)
        yield

    class Module:
        entries = ("kernel",)

        def launch(self, *arguments, **options):
            assert len(said) == 1
            raise ValueError("launched")

    monkeypatch.setattr(cli, "status", status)
    monkeypatch.setattr(emulator, "load", lambda text: Module())
    kernel = tmp_path / "kernel.ptx"
    kernel.write_text("")
    assert "launched" in error_of("emulate", str(kernel))
    assert "Running kernel in the emulator" in said[0] and "one to two minutes" in said[0]


def test_emulate_help_explains_every_option():
    pytest.importorskip("numba")
    from msa_cudacore.ptx.emulator.cli import command

    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_a_lazy_command_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(cli._LAZY, "emulate", ("a_package_that_is_absent", "command", "Help.", "emulator"))
    assert "pip install 'msa-cudacore[emulator]'" in error_of("emulate")


def test_installed_command_runs_in_a_process():
    done = subprocess.run(
        [sys.executable, "-m", "msa_cudacore.cli", "demo", *SMALL, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True
    done = subprocess.run(
        [sys.executable, "-m", "msa_cudacore.cli", "demo", "--batch", "-3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "batch is -3" in done.stderr


# bench


def test_bench_lists_what_it_would_measure():
    assert "no row is called, or begins with, 'nope'" in error_of("bench", "--list", "--rows", "nope")
    assert "--peers names 'nope'" in error_of("bench", "--list", "--peers", "nope")
    listed = json.loads(run("bench", "--list", "--json", "--rows", "tp4_b1_,tp8", "--peers", "triton").stdout)
    assert [row["name"] for row in listed["rows"]] == ["tp8_b128_kv64k_q1", "tp4_b1_kv1m_q1"]
    assert (listed["chained"], listed["sweep"], listed["peers"]) == (["tp4_b1_kv1m_q1"], None, ["triton"])
    printed = run("bench", "--list", "--rows", "items").stdout
    assert "items: a sweep" in printed and "Peers: none" in printed and "tp1_" not in printed


def test_a_clone_that_hides_the_installed_package_is_told(tmp_path):
    (tmp_path / "msa_cudacore").mkdir()
    for file in Path(cli.__file__).parent.glob("*.py"):
        (tmp_path / "msa_cudacore" / file.name).write_bytes(file.read_bytes())
    # Without `site` no finder of an editable installation steps in.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from msa_cudacore import prepare_msa_nvfp4_sparse_decode"],
        capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    first, last = (line for line in done.stderr.splitlines() if line.startswith("ModuleNotFoundError"))
    assert first == "ModuleNotFoundError: No module named 'msa_cudacore.launch'"
    assert last.startswith(first) and str(tmp_path) in last and "pip install -e" in last


# doctor


def test_doctor_prints_and_speaks_json():
    result = run("doctor")
    assert result.exit_code == 0 and "cuda-core" in result.stdout and "reference" in result.stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert {package["name"] for package in found["packages"]} >= {"numpy", "cuda-core", "torch"}
    assert "reference" in found["host_programs"] and found["nvrtc"]


def diagnose_with(monkeypatch, *, driver=(13, 0), facts=(), versions=None):
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    monkeypatch.setattr(device, "count", lambda: len(facts))
    monkeypatch.setattr(device, "facts", lambda ordinal: facts[ordinal])
    if versions is not None:
        monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    return doctor.diagnose()


def facts_of(capability: tuple[int, int]) -> device.DeviceFacts:
    return device.DeviceFacts(0, "A GPU", capability, 132, 232_448, 233_472, capability >= (9, 0))


def test_doctor_says_which_programs_run(monkeypatch):
    found = diagnose_with(monkeypatch, facts=(facts_of((9, 0)), facts_of((7, 5))))
    assert found.gpus[0].programs["portable"] == "runs"
    assert "8.0 or later" in found.gpus[1].programs["portable"]
    assert any("runs no program" in line for line in found.advice)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (dict(driver=None), "No NVIDIA driver"),
        (dict(driver=(12, 4)), "supports CUDA 12.4, kernels need 13.0"),
        (dict(driver=(13, 0)), "no device is visible"),
        (dict(facts=(facts_of((9, 0)),), versions={"torch": "2.13.0+cpu"}), "torch is a CPU build"),
        (dict(versions={"cupy-cuda13x": None}), "msa-cudacore[cupy]"),
        (dict(versions={"ml_dtypes": None}), "ml_dtypes is missing: pip install ml_dtypes"),
    ],
)
def test_doctor_advises(monkeypatch, given, advice):
    assert any(advice in line for line in diagnose_with(monkeypatch, **given).advice)


def test_doctor_says_that_the_emulator_needs_numba(monkeypatch):
    monkeypatch.setattr(emulated.importlib.util, "find_spec", lambda name: None)
    assert "numba" in doctor.diagnose().host_programs["emulated"]
    printed = " ".join(run("doctor").stdout.split())
    assert "emulated │ needs numba (pip install 'msa-cudacore[emulator]')" in printed
    message = error_of("demo", *SMALL, "--backend", "emulated", "--framework", "numpy")
    assert "backend 'emulated' cannot run on the host: emulated: needs numba" in message


def test_doctor_cuts_no_path_short(monkeypatch, tmp_path):
    from msa_cudacore.ptx.cache import CACHE_VARIABLE

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / ("[a]" + "programs" * 12)))
    printed = run("doctor").stdout
    second = [line.split("│")[2].strip() for line in printed.splitlines() if line.count("│") == 4]
    assert "\u2026" not in printed and doctor.diagnose().cache in "".join(second)


def test_doctor_notices_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    from msa_cudacore.ptx.cache import CACHE_VARIABLE

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert any(CACHE_VARIABLE in line for line in doctor.diagnose().advice)
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert "off" in doctor.diagnose().cache


# On a device


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cuda", "torch", "cupy"])
@pytest.mark.parametrize("splits", [None, 4])
def test_demo_on_a_device(framework, splits):
    if framework != "cuda":
        pytest.importorskip(framework)
    arguments = ["--splits", str(splits)] if splits else []
    result = run("demo", *SMALL, "--framework", framework, "--json", *arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["ok"] and facts["backend"] != "reference" and facts["device"].startswith("cuda:0")


@pytest.mark.gpu
def test_bare_device_memory_needs_no_framework(rng):
    code = (
        "import sys, json\nfrom click.testing import CliRunner\nfrom msa_cudacore.cli import main\n"
        f"result = CliRunner().invoke(main, ['demo', *{SMALL!r}, '--json'])\n"
        "assert json.loads(result.stdout)['framework'] == 'cuda', result.output\n"
        "sys.exit(' '.join(m for m in ('torch', 'cupy') if m in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_bare_device_memory_merged_through_a_workspace(monkeypatch, rng):
    from dataclasses import replace

    facts = device.facts
    monkeypatch.setattr(device, "facts", lambda ordinal: replace(facts(ordinal), clusters=False))
    case = random_case(rng, batch=2, seqlen_q=1)
    decoded = decode_case(case, splits=4, repeats=5)
    assert decoded.runner.workspace_bytes > 0 and compare(decoded.out, decoded.lse, *case.exact())
