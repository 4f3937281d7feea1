"""Fixtures: fresh random data with a printed seed, what machine code must have, and the machines on which the
public function is run.

Nothing here touches CUDA before a test that needs it starts.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.cases import Case
from msa_cudacore.programs import select
from msa_cudacore.reference import Report, compare
from msa_cudacore.transfer import BF16, to_numpy

# No deadline: a busy machine is no fault of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="seed of the random data, as a failing test printed it"
    )


@functools.lru_cache(maxsize=None)
def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    from msa_cudacore.launch import device

    if device.count() == 0:
        return "no CUDA device is visible"
    capability = device.facts(0).compute_capability
    return None if capability >= (8, 0) else f"{device.facts(0)} is older than compute capability 8.0"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(reason)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random data each run; a failing test shows the seed, and ``--seed`` repeats it."""
    seed = request.config.getoption("--seed")
    seed = secrets.randbits(32) if seed is None else seed
    print(f"random data: --seed {seed}")
    return np.random.default_rng(seed)


# Loads, stores, atomics, reductions and bulk copies; LDS, STS, ATOMS, LDC, LDTM and the like stay inside an SM.
_GLOBAL = re.compile(r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UBLK\w+|UTMALDG|UTMASTG|UTMAREDG|UTMAPF)(\.|$)")
_LEAVES = ("EXIT", "RET", "BRX", "CALL")


@pytest.fixture
def assert_waits_first() -> Callable[[bytes, str, Any], None]:
    """Asserts of an entry's machine code that a dependent launch waits for its predecessor (ACQBULK) before it touches
    global memory, and lets its own dependents start (PREEXIT). `ld.global.nc` may be moved across an `asm volatile` by
    a compiler, so the machine code is what counts. Skips the test without nvdisasm.
    """
    from benchmarks.blackwell_sass import disassemble, disassembler, parse

    def check(code: bytes, entry: str, configuration: Any) -> None:
        if disassembler() is None:
            pytest.skip("nvdisasm is not installed (it comes with the test extra)")
        instructions = parse(disassemble(code), entry)
        waits = [at for at, instruction in enumerate(instructions) if instruction.opcode == "ACQBULK"]
        assert len(waits) == 1 and instructions[waits[0]].guard == "", configuration
        before, after = instructions[: waits[0]], instructions[waits[0] :]
        early = [i.text for i in before if _GLOBAL.match(i.opcode) or i.opcode in _LEAVES]
        assert not early, (configuration, early)
        around = [i.text for i in before if i.target is not None and i.target > waits[0]]
        assert not around, (configuration, around)
        assert any(instruction.opcode == "PREEXIT" for instruction in after), configuration
        assert any(_GLOBAL.match(instruction.opcode) for instruction in after), configuration

    return check


@dataclass(frozen=True)
class Target:
    """One way to call the public function: an array library, a device and a backend."""

    framework: str
    device: Any
    backend: str
    bf16_as_uint16: bool = False

    @property
    def on_host(self) -> bool:
        return self.framework == "numpy" or self.device == "cpu"

    @property
    def splits(self) -> tuple[int, ...]:
        """The split factors that the backend takes."""
        return (1,) if self.on_host else (1, 2, 4, 8)

    def move(self, case: Case) -> Case:
        return case.to(self.framework, self.device, bf16_as_uint16=self.bf16_as_uint16)

    def prepare(self, case: Case, **options: Any) -> Any:
        """A runner for an already moved case."""
        options.setdefault("backend", self.backend)
        return prepare_msa_nvfp4_sparse_decode(
            **case.arguments(), bf16_as_uint16=self.bf16_as_uint16, **options
        )

    def fill(self, array: Any, value: float) -> None:
        """Set every element; a bfloat16 array kept as bits takes the bits of the value."""
        if str(array.dtype).endswith("uint16"):
            value = int(np.asarray(value, BF16).view(np.uint16))
        array[...] = value

    def results(self, runner: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = to_numpy(runner.out), to_numpy(runner.lse)
        return (out.view(BF16) if out.dtype == np.uint16 else out), lse

    def run(self, case: Case, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Prepare, poison the outputs with NaN, launch once, and return NumPy copies of (out, lse)."""
        runner = self.prepare(self.move(case), **options)
        self.fill(runner.out, np.nan)
        self.fill(runner.lse, np.nan)
        assert runner() is runner.out
        return self.results(runner)

    def check(self, case: Case, **options: Any) -> Report:
        """Run and hold against the answers the case carries, or else the oracle's; fails with the worst row's
        name."""
        out, lse = self.run(case, **options)
        exact = (case.expected_out, case.expected_lse) if case.expected_out is not None else case.exact()
        report = compare(out, lse, *exact)
        assert report, f"{case}, options {options}: {report}"
        return report


TARGETS = {
    "numpy": Target("numpy", None, "reference"),
    "numpy-bits": Target("numpy", None, "auto", bf16_as_uint16=True),
    "torch-cpu": Target("torch", "cpu", "auto"),
    "torch": Target("torch", "cuda", "portable"),
    "torch-blackwell": Target("torch", "cuda", "blackwell"),
    "cupy": Target("cupy", None, "portable"),
    "cupy-bits": Target("cupy", None, "auto", bf16_as_uint16=True),
}


def _get(name: str) -> Target:
    target = TARGETS[name]
    if target.framework != "numpy":
        pytest.importorskip(target.framework)
    if not target.on_host:
        if target.framework == "torch" and not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("this torch sees no CUDA device")
        try:
            select(target.backend, "cuda", 0)
        except RuntimeError as refusal:
            pytest.skip(str(refusal))
    if name == "cupy":
        try:
            pytest.importorskip("cupy").empty(1, BF16)
        except (TypeError, ValueError) as error:
            pytest.skip(f"this CuPy has no bfloat16: {error}")
    return target


def _params(*names: str) -> list:
    return [name if TARGETS[name].on_host else pytest.param(name, marks=pytest.mark.gpu) for name in names]


@pytest.fixture(params=_params(*TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    """Every way to call the public function."""
    return _get(request.param)


@pytest.fixture(params=_params("numpy", "torch", "torch-blackwell"))
def main_target(request: pytest.FixtureRequest) -> Target:
    """The oracle on host arrays and each GPU program on torch tensors: for what does not depend on the array
    library."""
    return _get(request.param)


@pytest.fixture(params=_params("torch", "torch-blackwell"))
def gpu_target(request: pytest.FixtureRequest) -> Target:
    """Each GPU program on torch tensors."""
    return _get(request.param)


@pytest.fixture
def portable_target() -> Target:
    """The program that can merge through a workspace, on torch tensors; the test carries the ``gpu`` mark."""
    return _get("torch")
