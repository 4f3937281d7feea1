"""Planted synchronisation, memory and descriptor faults: each is reported by the right checker at the right line, and the
kernel without it is silent and right under a hundred schedules."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx import emulator, nvrtc, source

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from planted import KERNELS, Kernel, Map  # noqa: E402

MUTATIONS = [(kernel, fault) for kernel in KERNELS for fault in kernel.faults]
SCHEDULES = [("random", seed) for seed in range(5)] + [("eager", 0), ("late", 0)]


def path_of(kernel: Kernel) -> Path:
    return HERE / "kernels" / f"{kernel.name}.cu"


@functools.lru_cache(maxsize=4)
def _module(name: str, fault: str):
    kernel = next(k for k in KERNELS if k.name == name)
    names = ", ".join(["none", *kernel.faults])
    choice = f"enum class Fault {{ {names} }};\nconstexpr Fault fault = Fault::{fault};"
    text = source.load(path_of(kernel), choice)
    return emulator.load(nvrtc.compile_ptx(text, kernel.arch, name=f"{name}.cu", lineinfo=True))


def _launch(kernel: Kernel, fault: str, arguments: list, schedule: str, seed: int):
    passed = [
        emulator.TensorMap.from_array(a.array, a.box) if isinstance(a, Map) else a for a in arguments
    ]
    _module(kernel.name, fault).launch(
        kernel.name, grid=(kernel.grid,), block=(kernel.block,), cluster=(kernel.cluster,), args=passed,
        schedule=schedule, seed=seed,
    )


def _marked_lines(kernel: Kernel, fault: str) -> set[int]:
    lines = path_of(kernel).read_text().splitlines()
    return {i for i, line in enumerate(lines, 1) if re.search(rf"// <- (?:.* )?{fault}(?: |$)", line)}


def _lines_of(source, kernel: Kernel) -> set[int]:
    """Lines of the kernel's own file, among the place itself and the calls it was inlined through."""
    return {int(line) for line in re.findall(rf"\b{kernel.name}\.cu:(\d+)", str(source))}


def _array(argument):
    return argument.array if isinstance(argument, Map) else argument


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_the_correct_kernel_is_silent_and_right_under_a_hundred_seeds(kernel):
    rng = np.random.default_rng()
    for schedule, seed in [("random", seed) for seed in range(100)] + [("eager", 0), ("late", 0)]:
        arguments = kernel.build(rng, "none")
        expected = kernel.expected(arguments)
        _launch(kernel, "none", arguments, schedule, seed)
        for position, value in expected.items():
            np.testing.assert_array_equal(_array(arguments[position]), value, err_msg=f"{schedule} {seed}")


@pytest.mark.parametrize(("kernel", "fault"), MUTATIONS, ids=[f"{k.name}-{f}" for k, f in MUTATIONS])
def test_a_planted_fault_is_reported_by_the_right_checker_at_its_line(kernel, fault):
    """Every schedule must either report it, rightly, or (if the interleaving hides it) run through; one must report."""
    rng = np.random.default_rng(0)
    marked = _marked_lines(kernel, fault)
    assert marked, f"no line of {kernel.name}.cu is marked '// <- {fault}'"
    reports = []
    for schedule, seed in SCHEDULES:
        try:
            _launch(kernel, fault, kernel.build(rng, fault), schedule, seed)
        except emulator.Fault as found:
            reports.append(found)
            lines = _lines_of(found.source, kernel)
            assert found.kind in kernel.faults[fault], f"{schedule} {seed}: {found}"
            assert lines & marked, f"{schedule} {seed}: line {sorted(lines)}, expected {sorted(marked)}: {found}"
    assert reports, "no schedule reported it"


def test_every_fault_is_planted_and_every_plant_is_listed():
    for kernel in KERNELS:
        used = set(re.findall(r"Fault::(\w+)", path_of(kernel).read_text()))
        assert used <= set(kernel.faults), kernel.name
        # The others are planted in the tensor map that the launch passes.
        assert {f for f in kernel.faults if f not in used} <= {"box_one_row_too_tall", "box_one_row_too_short"}
    assert len(MUTATIONS) >= 40
