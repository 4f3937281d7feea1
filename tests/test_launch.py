"""Compilation, its cache, and streams, on a machine with or without a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from msa_cudacore.launch import compile as compile_module
from msa_cudacore.launch import device as device_module
from msa_cudacore.launch.compile import CompileError, compile_cubin
from msa_cudacore.launch.kernel import Geometry, Launch
from msa_cudacore.launch.memory import ZeroedWords
from msa_cudacore.launch.stream import from_handle, resolve
from msa_cudacore.ptx import nvrtc, source
from msa_cudacore.ptx.cache import cache_directory

KERNEL = 'extern "C" __global__ void scale(float* p, float s) { p[threadIdx.x] *= s; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MSA_CUDACORE_CACHE", str(tmp_path))
    return tmp_path / "programs"


def entries(directory: Path) -> list[Path]:
    return [path for path in (directory / "entries").rglob("*") if path.is_file()]


def compiled_again(*arguments, **keywords) -> bool:
    """Whether a call ran the compiler; only a fresh compilation has a log."""
    return bool(compile_cubin(*arguments, **keywords).log)


def test_second_compilation_comes_from_the_cache(cache):
    first = compile_cubin(KERNEL, "sm_90a")
    second = compile_cubin(KERNEL, "sm_90a")
    assert first.code == second.code and first.code.startswith(b"\x7fELF")
    assert first.log and not second.log
    assert first.resources()["scale"].spill_store_bytes == 0


def test_key_covers_source_and_architecture(cache):
    compile_cubin(KERNEL, "sm_90a")
    assert compiled_again(KERNEL.replace("*=", "+="), "sm_90a")
    assert compiled_again(KERNEL, "sm_80")
    assert not compiled_again(KERNEL, "sm_90a")


def test_key_covers_headers(cache, tmp_path):
    header, kernel = tmp_path / "factor.cuh", tmp_path / "k.cu"
    kernel.write_text('#include "factor.cuh"\n' + KERNEL.replace("*= s", "*= s * kFactor"))
    header.write_text("constexpr float kFactor = 2.0f;\n")
    compile_cubin(source.load(kernel), "sm_90a")
    assert not compiled_again(source.load(kernel), "sm_90a")
    header.write_text("constexpr float kFactor = 3.0f;\n")
    assert compiled_again(source.load(kernel), "sm_90a")


@pytest.mark.parametrize("damage", ["truncated", "emptied", "one byte changed"])
def test_damaged_entry_is_compiled_again_and_replaced(cache, damage):
    good = compile_cubin(KERNEL, "sm_90a").code
    (entry,) = entries(cache)
    data = bytearray(entry.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "emptied":
        data = bytearray()
    else:
        data[len(data) // 2] ^= 0xFF
    entry.write_bytes(bytes(data))
    assert compiled_again(KERNEL, "sm_90a")
    assert compile_cubin(KERNEL, "sm_90a").code == good and not compiled_again(KERNEL, "sm_90a")


def test_eight_cold_processes_at_once_agree(cache):
    script = (
        "import hashlib, sys; from msa_cudacore.launch.compile import compile_cubin\n"
        "print(hashlib.sha256(compile_cubin(sys.argv[1], 'sm_90a').code).hexdigest())\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, KERNEL], stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 8
    assert len(digests) == 1 and len(entries(cache)) == 1


def test_cache_that_cannot_be_opened_warns_and_compiles(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("MSA_CUDACORE_CACHE", str(blocked / "programs"))
    with pytest.warns(RuntimeWarning, match="MSA_CUDACORE_CACHE"):
        assert compile_cubin(KERNEL, "sm_90a").code


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write to read-only folders")
def test_read_only_home_still_compiles(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compile_cubin(KERNEL, "sm_90a").code


def test_write_that_fails_does_not_lose_the_program(cache, monkeypatch):
    class Full(dict):
        def __setitem__(self, key, value):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_module, "_open_cache", Full)
    assert compile_cubin(KERNEL, "sm_90a").code


def test_cache_can_be_switched_off(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSA_CUDACORE_CACHE", " OFF")
    assert cache_directory("programs") is cache_directory("emulator") is None
    assert compiled_again(KERNEL, "sm_90a") and compiled_again(KERNEL, "sm_90a")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["programs", "emulator"])
def test_all_caches_lie_in_one_folder(monkeypatch, tmp_path, part):
    assert cache_directory(part) == tmp_path / part
    for unset in (monkeypatch.delenv, lambda name: monkeypatch.setenv(name, "")):
        unset("MSA_CUDACORE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_directory(part) == tmp_path / "msa_cudacore" / part
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_directory(part) == Path.home() / ".cache" / "msa_cudacore" / part


def test_unknown_architecture_names_what_nvrtc_knows():
    with pytest.raises(CompileError, match=r"NVRTC \d+\.\d+ cannot compile for sm_35\n.*sm_90"):
        compile_cubin(KERNEL, "sm_35")
    with pytest.raises(ValueError, match="arch must look like"):
        nvrtc.compile_ptx(KERNEL, "hopper")


def test_compiler_error_names_our_file_and_line(tmp_path):
    header, kernel = tmp_path / "broken.cuh", tmp_path / "k.cu"
    header.write_text("\n__device__ int f() { return nothing; }\n")
    kernel.write_text('#include "broken.cuh"\n' + KERNEL)
    for compile_it in (lambda text: compile_cubin(text, "sm_90a"), nvrtc.compile_ptx):
        with pytest.raises(CompileError, match=r'broken\.cuh\(2\).*"nothing" is undefined'):
            compile_it(source.load(kernel))


def test_flattening_refuses_what_is_not_there(tmp_path):
    kernel = tmp_path / "k.cu"
    kernel.write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(ValueError, match=r"k\.cu:1: #include <cuda_fp16\.h>: device code must be freestanding"):
        source.load(kernel)
    kernel.write_text('\n#include "missing.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r'k\.cu:2: #include "missing\.cuh"'):
        source.load(kernel)


def test_flattening_includes_each_header_once_and_keeps_line_numbers(tmp_path):
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nconstexpr int kA = 1;\n')
    (tmp_path / "b.cuh").write_text("#pragma once\nconstexpr int kB = 1;\n")
    kernel = tmp_path / "k.cu"
    kernel.write_text('#include "a.cuh"\n#include "b.cuh"\n' + KERNEL)
    text = source.load(kernel, "constexpr int kSet = 7;")
    assert text.count("kA = 1") == text.count("kB = 1") == text.count("kSet = 7") == 1
    ptx = nvrtc.compile_ptx(text, "sm_90a", lineinfo=True)
    (index,) = re.findall(r'\.file\s+(\d+) "[^"]*k\.cu"', ptx)
    assert set(re.findall(rf"\.loc\s+{index} (\d+) ", ptx)) == {"3"}


def test_grid_must_hold_whole_clusters():
    with pytest.raises(ValueError, match="grid 6 is no multiple of the cluster size 4"):
        Geometry(grid=6, block=128, cluster=4)


@pytest.mark.parametrize("count", [1, 3])
def test_a_launch_needs_as_many_arguments_as_the_kernel_takes(count):
    with pytest.raises(TypeError, match=f"scale takes 2 arguments, {count} were bound"):
        Launch(SimpleNamespace(num_arguments=2), Geometry(grid=1, block=32), [np.int32(0)] * count, entry="scale")


def test_arguments_of_a_launch_have_fixed_widths():
    with pytest.raises(TypeError, match="argument 1 of scale is a int; accepted are NumPy scalars"):
        Launch(SimpleNamespace(num_arguments=2), Geometry(grid=1, block=32), [np.int32(0), 1], entry="scale")


class Foreign:
    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return 0, self._handle


class TorchLike:
    cuda_stream = 1


class CupyLike:
    ptr = 2


def test_streams_of_every_kind_resolve():
    from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM

    assert resolve(0) is resolve(1) is resolve(Foreign(0)) is resolve(TorchLike()) is LEGACY_DEFAULT_STREAM
    assert resolve(2) is resolve(CupyLike()) is from_handle(2) is PER_THREAD_DEFAULT_STREAM
    assert resolve(LEGACY_DEFAULT_STREAM) is LEGACY_DEFAULT_STREAM


@pytest.mark.parametrize("stream", ["0", 1.0, True, object()])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(TypeError, match="stream is a .*accepted are a cuda.core stream"):
        resolve(stream)


def test_negative_stream_handle_is_refused():
    with pytest.raises(ValueError, match="stream is -1"):
        resolve(-1)


# ---- Memory of a program's own


class RecordingDriver:
    """The driver calls of `launch.memory`, in place of a device's; `fails` names one that does."""

    def __init__(self, monkeypatch, fails: str = "") -> None:
        from cuda.bindings import driver

        self.calls: list[tuple] = []
        self.mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        good, bad = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

        def exchange(mode):
            before, self.mode = self.mode, mode
            return good, before

        def recorded(name, *values):
            def call(*arguments):
                assert self.mode == relaxed, f"{name} breaks a capture that is under way"
                self.calls.append((name, *map(int, arguments)))
                return (bad, *values) if name == fails else (good, *values)

            return call

        monkeypatch.setattr(device_module, "current", lambda ordinal: contextlib.nullcontext())
        monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
        for name, *values in (
            ("cuMemAlloc", 4096), ("cuMemFree",), ("cuStreamCreate", 7), ("cuStreamDestroy",),
            ("cuMemsetD32Async",), ("cuStreamSynchronize",),
        ):
            monkeypatch.setattr(driver, name, recorded(name, *values))

    def only(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


def test_zeroed_words_are_zero_before_they_are_handed_out_and_freed_once(monkeypatch):
    driver = RecordingDriver(monkeypatch)
    captured = driver.mode
    words = ZeroedWords(5, 0)
    assert words.pointer == 4096 and driver.mode == captured
    assert driver.only("cuMemAlloc", "cuMemsetD32Async", "cuStreamSynchronize", "cuMemFree") == [
        ("cuMemAlloc", 20), ("cuMemsetD32Async", 4096, 0, 5, 7), ("cuStreamSynchronize", 7),
    ]
    del words
    assert driver.only("cuMemFree") == [("cuMemFree", 4096)] and driver.mode == captured
    assert driver.only("cuStreamDestroy") == [("cuStreamDestroy", 7)]


@pytest.mark.parametrize("fails", ["cuStreamCreate", "cuMemsetD32Async", "cuStreamSynchronize"])
def test_words_that_cannot_be_zeroed_are_freed(monkeypatch, fails):
    driver = RecordingDriver(monkeypatch, fails)
    captured = driver.mode
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        ZeroedWords(5, 0)
    assert driver.only("cuMemFree") == [("cuMemFree", 4096)] and driver.mode == captured
    assert len(driver.only("cuStreamDestroy")) == (fails != "cuStreamCreate")
