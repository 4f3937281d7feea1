"""The example programs run and print what they must: what a cache of zeros gives, and that the oracle agrees."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Keys of score 0: the first request sees 100 of them, the second the 128 of one whole page.
EXPECTED = "out [2, 64, 128], lse 4.605 to 4.852"


def test_torch_example_prints_the_logarithm_of_the_keys(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "torch_decode.py"))
    assert capsys.readouterr().out.strip().endswith(EXPECTED)


def test_engine_example_agrees_with_the_oracle(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "torch_engine.py"), run_name="__main__")
    *checks, last = capsys.readouterr().out.splitlines()
    assert len(checks) == 8 and all("within bounds" in check for check in checks)
    sizes = [check.partition(",")[0] for check in checks[::2]]
    assert sizes == 3 * ["3 requests in a bucket of 4"] + ["2 requests in a bucket of 2"]
    assert last.endswith("done")


@pytest.mark.gpu
def test_cupy_example_prints_the_logarithm_of_the_keys(capsys):
    pytest.importorskip("cupy")
    runpy.run_path(str(EXAMPLES / "cupy_decode.py"))
    assert capsys.readouterr().out.strip().endswith(EXPECTED)
