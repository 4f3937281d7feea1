"""Single instructions against words that an H200 computed.

`h200_words.npz` holds, for every form of `instruction_forms.FORMS`, operand words and the result words of an H200 (CUDA 13.0
driver, assembled by ptxas 13.0 for sm_90a, 2026-11-30): `text` [forms], `words` uint64 [forms, (a, b, c, result), 48].
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from instruction_forms import FORMS, LANES, module_text  # noqa: E402

from msa_cudacore.ptx import emulator  # noqa: E402

GROUPS = sorted({form.text.split(";")[-1].strip().split(".")[0] for form in FORMS})


@functools.cache
def _captured():
    with np.load(Path(__file__).parent / "h200_words.npz") as data:
        return dict(zip(data["text"].tolist(), data["words"], strict=True))


def emulate(index: int, operands: np.ndarray) -> np.ndarray:
    """Result words uint64 [LANES] of form `index` on operand words [3, LANES]."""
    out = np.full(LANES, 0xDEADBEEF, np.uint64)
    emulator.load(module_text([FORMS[index]])).launch("f0", grid=(1,), block=(LANES,), args=[*np.ascontiguousarray(operands), out])
    return out


def disagreements(form, operands: np.ndarray, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Lanes where a word is wrong. Any NaN equals any NaN only where the hardware's own result is inexact."""
    wrong = got != want
    for kind, words in zip(form.sources, operands, strict=False):
        if kind == "position":
            # Positions and lengths beyond 255 are outside the manual's range; some captured lanes have them.
            wrong &= words <= 255
    if form.error is None:
        return wrong
    x, y = (w.astype(np.uint32).view(np.float32).astype(np.float64) for w in (got, want))
    with np.errstate(invalid="ignore"):
        near = (np.abs(x - y) <= form.error * np.abs(y) + 2.0**-126) | (np.isnan(x) & np.isnan(y)) | (x == y)
    return wrong & ~near


@pytest.mark.parametrize("group", GROUPS)
def test_an_instruction_gives_the_words_of_an_h200(group):
    problems = []
    for index, form in enumerate(FORMS):
        if form.text.split(";")[-1].strip().split(".")[0] != group:
            continue
        words = _captured()[form.text]
        got = emulate(index, words[:3])
        lanes = np.flatnonzero(disagreements(form, words[:3], got, words[3]))
        if len(lanes):
            i = lanes[0]
            a, b, c, want = (hex(w) for w in words[:, i])
            problems.append(f"{form.text}: {len(lanes)} lanes, first a={a} b={b} c={c}: {hex(got[i])}, H200 {want}")
    assert not problems, "\n".join(problems)
