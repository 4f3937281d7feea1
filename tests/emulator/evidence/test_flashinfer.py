"""FlashInfer's shipped NVFP4 sparse-decode programs, known to be right on a B200: run here they must agree with the oracle.

Opt in with `MSA_PEER=1`: needs the `flashinfer-python` wheel (0.7.2.post1, installed with --no-deps) and the
`nvidia-cuda-runtime` wheel for the toolkit headers its source includes. The source is read from the installed wheel and
compiled here; the launch follows the wheel's own host code (argument order, tensor maps, cluster and shared-memory sizes).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore import reference
from msa_cudacore.cases import BF16, random_case
from msa_cudacore.ptx import emulator, nvrtc

pytestmark = [pytest.mark.peer, pytest.mark.skipif(os.environ.get("MSA_PEER") != "1", reason="set MSA_PEER=1 to run FlashInfer's programs")]

PROGRAMS = {
    "one_split": ("964bc168196f68c6d253", 1),
    "two_split": ("df2a726f1b0c11c802eb", 2),
    "four_split": ("2342d72176334739de30", 4),
    "eight_split": ("229d54fc8dddea35a745", 8),
    "short": ("ac1f2f3299fa7f8141f1", 8),
}
PERSISTENT_SHARED_BYTES = 227328
SHORT_SHARED_BYTES = 48512
# P is rounded to bfloat16 (up to 2^-9 of each weight), on top of the rounding of the output that the floor stands for.
RATIO = 4.0


@functools.cache
def _module(program: str):
    found = importlib.util.find_spec("flashinfer")
    if found is None:
        pytest.skip("flashinfer-python is not installed")
    from cuda.pathfinder import find_nvidia_header_directory

    headers = find_nvidia_header_directory("cudart")
    if headers is None:
        pytest.skip("no toolkit headers: install nvidia-cuda-runtime")
    folder = Path(found.submodule_search_locations[0]) / "experimental/msa_nvfp4_decode/csrc/cake_msa_nvfp4_decode"
    file = folder / f"cake_msa_nvfp4_decode_{PROGRAMS[program][0]}_kernel.cu"
    options = ("--use_fast_math", "-I", str(headers), "-I", str(folder), "-default-device")
    return emulator.load(nvrtc.compile_ptx(file.read_text(), "sm_100a", name=file.name, options=options, lineinfo=True))


def _page_map(view: np.ndarray, box: tuple[int, ...], swizzle: str):
    """Scale views are seen as [pages, heads, 4, 256] bytes."""
    if view.shape[-1] == 8:
        view = np.lib.stride_tricks.as_strided(view, (*view.shape[:2], 4, 256), (*view.strides[:2], 256, 1))
    return emulator.TensorMap.from_array(view, box, swizzle=swizzle)


def _launch(program: str, case, schedule: str, seed: int):
    name, cluster = PROGRAMS[program]
    rows, heads = case.q.shape[:2]
    q = np.ascontiguousarray(case.q)
    out = np.full(q.shape, np.nan, np.float32).astype(BF16)
    lse = np.full((rows, heads), np.nan, np.float32)
    views = [v.view(np.uint8) for v in (case.k, case.k_scale, case.v, case.v_scale)]
    scale = (128**-0.5 if case.softmax_scale is None else case.softmax_scale) * case.k_global_scale / math.log(2)
    scalars = [
        *map(np.int32, (rows, case.seqlen_q, heads, case.num_kv_heads)), np.float32(scale), np.float32(case.v_global_scale),
        np.int32(case.page_table.shape[1]),
    ]
    metadata = [np.ascontiguousarray(a) for a in (case.page_table, case.q2k_indices, case.seqused_k)]
    items = rows * case.num_kv_heads
    if program == "short":
        strides = [np.int32(s) for v in views for s in v.strides[:2]]
        arguments = [q, *views, out, lse, *metadata, *scalars, *strides]
        grid, block, shared = (items * cluster,), (128,), SHORT_SHARED_BYTES
    else:
        k, k_scale, v, v_scale = views
        # [2, rows, 64]: the two 128-byte halves of each query row.
        halves = q.reshape(rows * heads, 2, 64).transpose(1, 0, 2)
        maps = [
            emulator.TensorMap.from_array(halves, (2, 16, 64), data_type="bfloat16", swizzle="128B"),
            _page_map(k, (1, 1, 128, 64), "64B"), _page_map(k_scale, (1, 1, 4, 256), "none"),
            _page_map(v, (1, 1, 128, 64), "64B"), _page_map(v_scale, (1, 1, 4, 256), "none"),
        ]
        arguments = [*maps, out, lse, *metadata, *scalars]
        grid, block, shared = (items * cluster,), (512,), PERSISTENT_SHARED_BYTES
    _module(program).launch(
        f"kernel_cake_msa_nvfp4_decode_{name}", grid=grid, block=block, cluster=(cluster,), shared_bytes=shared,
        args=arguments, schedule=schedule, seed=seed,
    )
    return out, lse


PROBLEMS = {
    "short": [dict(group=16, seqlen_q=1, lengths=[257], num_kv_heads=1), dict(group=5, seqlen_q=2, lengths=[130, 500]),
              dict(group=8, seqlen_q=1, lengths=[1, 128, 512], num_kv_heads=2)],
    "long": [dict(group=16, seqlen_q=1, lengths=[1000], num_kv_heads=1, max_pages=8),
             dict(group=5, seqlen_q=2, lengths=[2047], num_kv_heads=1, max_pages=16),
             dict(group=8, seqlen_q=1, lengths=[3000, 129], num_kv_heads=1, max_pages=24)],
}


@pytest.mark.parametrize("problem", range(3))
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_shipped_program_agrees_with_the_oracle(program, problem):
    chosen = PROBLEMS["short" if program == "short" else "long"][problem]
    case = random_case(
        np.random.default_rng(), topk=16, layout="planar", hostile=False, strided_inputs=False, score_deviation=2.0, **chosen
    )
    for schedule, seed in [("random", 0), ("late", 0)][: 1 + (problem == 0)]:
        out, lse = _launch(program, case, schedule, seed)
        report = reference.compare(out, lse, *case.exact(), ratio=RATIO)
        assert report, f"{case}: {report}"
