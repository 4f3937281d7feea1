"""Kernels that Triton compiles for three architectures give NumPy's answers in the emulator.

`h200_triton.json` holds what an H200 made of the sm_90 programs on the inputs of seed 7 (2026-11-30): for each kernel the
SHA-256 of all its arrays before and after the launch. Left out are the kernels whose results pass through ex2.approx,
lg2.approx or rcp.approx, or depend on the order of the blocks.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).parent))

import triton_harness  # noqa: E402
from triton_cases import CASES, HostMap  # noqa: E402

from msa_cudacore.ptx import emulator  # noqa: E402

# Triton orders tensor memory by barriers alone (no tcgen05.fence), and lets tensor copies overwrite the shared word that
# tcgen05.alloc wrote, without a proxy fence in between.
CHECKS = emulator.Checks(tcgen05_fences=False, proxy_overwrites=False)
RUNS = [(case, target) for case in CASES for target in case.targets]


@pytest.mark.parametrize(("case", "target"), RUNS, ids=[f"{c.name}-sm_{t}" for c, t in RUNS])
def test_a_triton_kernel_gives_the_answer_of_numpy(case, target):
    compiled = triton_harness.compile_case(case, target)
    module = emulator.load(compiled.asm["ptx"])
    arguments = case.build(np.random.default_rng())
    copies = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    expected = case.expected(copies)
    seed = int.from_bytes(os.urandom(2))
    triton_harness.launch(module, case, compiled, arguments, target, schedule="random", seed=seed, checks=CHECKS)
    for name, (relative, absolute) in case.tolerance.items():
        got = _output(arguments, name)
        want = np.asarray(expected[name])
        if relative == absolute == 0:
            np.testing.assert_array_equal(got.astype(want.dtype), want, err_msg=name)
        else:
            np.testing.assert_allclose(got.astype(np.float64), want, relative, absolute, err_msg=name)
    for name, value in arguments.items():
        # Nothing but the outputs is written.
        written = (*case.tolerance, *case.unordered)
        if isinstance(value, np.ndarray) and not any(output.startswith(name) for output in written):
            np.testing.assert_array_equal(value.view(np.uint8), copies[name].view(np.uint8), err_msg=name)


_RECORDED = json.loads((Path(__file__).parent / "h200_triton.json").read_text())


@pytest.mark.skipif(triton.__version__ != _RECORDED["triton"], reason="the recorded words are of another Triton's code")
@pytest.mark.parametrize("name", _RECORDED["digests"])
def test_a_triton_kernel_gives_the_bits_of_an_h200(name):
    case = next(c for c in CASES if c.name == name)
    before, after = _RECORDED["digests"][name]
    arguments = case.build(np.random.default_rng(_RECORDED["seed"]))
    arrays = [
        arguments[p] for p in inspect.signature(case.kernel.fn).parameters if isinstance(arguments.get(p), np.ndarray)
    ]
    if _digest(arrays) != before:
        pytest.skip("this NumPy draws other numbers from the seed")
    compiled = triton_harness.compile_case(case, 90)
    triton_harness.launch(emulator.load(compiled.asm["ptx"]), case, compiled, arguments, 90, checks=CHECKS)
    assert _digest(arrays) == after


def _digest(arrays) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def _output(arguments: dict, name: str) -> np.ndarray:
    """`out_head` is the part of `out` that has an order-independent answer: its first eleven words."""
    return arguments["out"][:11] if name == "out_head" else arguments[name]


def test_at_least_twenty_kernels_for_each_of_three_targets():
    kernels = {target: {c.kernel.fn.__name__ for c, t in RUNS if t == target} for target in (80, 90, 100)}
    assert all(len(names) >= 20 for names in kernels.values()), {t: len(n) for t, n in kernels.items()}
    assert any(isinstance(v, HostMap) for c in CASES for v in c.build(np.random.default_rng()).values())
