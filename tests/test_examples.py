"""The example programs run and print what a cache of zeros must give."""

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


@pytest.mark.gpu
def test_cupy_example_prints_the_logarithm_of_the_keys(capsys):
    pytest.importorskip("cupy")
    runpy.run_path(str(EXAMPLES / "cupy_decode.py"))
    assert capsys.readouterr().out.strip().endswith(EXPECTED)
