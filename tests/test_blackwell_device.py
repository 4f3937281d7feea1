"""What the Blackwell program hands to a device, seen by a device that cannot run it: tensor maps and kernel
arguments.

Any part of compute capability 9.0 has tensor copies. A kernel with the program's own parameter list copies
one box through each of the four maps, and reports the scalars.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msa_cudacore.launch import device as device_module
from msa_cudacore.launch import stream as stream_module
from msa_cudacore.ptx.source import load_text

from msa_cudacore import blackwell
from msa_cudacore.blackwell import BlackwellProgram
from msa_cudacore.cases import random_case
from msa_cudacore.contract import validate
from msa_cudacore.pool import page_bytes, pool_views
from msa_cudacore.transfer import to_numpy

KERNEL = blackwell._KERNEL
SCALARS = (
    "q_row", "q_head", "q2k_row", "out_row", "lse_head", "items", "seqlen_q", "num_kv_heads", "group", "topk",
    "max_pages", "num_pages", "unsplit_rounds", "round_rows", "round_heads", "score_scale", "v_global_scale",
)


def probe(constants: str) -> str:
    """A kernel with the entry's parameters. Boxes of the last page and head go to `out`, scalars and CTAs to
    `lse`."""
    text = KERNEL.read_text()
    start = text.index('extern "C"')
    signature = text[start : text.index("{", start)]
    copies = "".join(
        f"ptx::cp_async_bulk_tensor_4d("
        f"to + {at}, {name}, 0, 0, num_kv_heads - 1, num_pages - 1, full, policy);\n"
        for name, at in (("k_map", 0), ("v_map", 8192), ("k_scale_map", 16384), ("v_scale_map", 17408))
    )
    reports = "".join(f"numbers[{i}] = static_cast<float>({name});\n" for i, name in enumerate(SCALARS))
    return load_text(f"""
#include "cp_async_bulk_tensor.cuh"
#include "mbarrier.cuh"
constexpr u32 THREADS = {blackwell._THREADS};
{constants}
{signature} {{
  extern __shared__ __align__(1024) u8 boxes[];
  __shared__ u64 barrier;
  if (blockIdx.x != gridDim.x - 1) return;
  const ptx::SharedAddress full = ptx::shared_address(&barrier), to = ptx::shared_address(boxes);
  const u64 policy = 0x12F0000000000000ull;  // evict first
  if (threadIdx.x == 0) {{
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_arrive_expect_tx(full, 18432);
    {copies}
    float* numbers = reinterpret_cast<float*>(lse);
    {reports}
    numbers[{len(SCALARS)}] = gridDim.x;
  }}
  __syncthreads();
  ptx::mbarrier_wait_parity(full, 0);
  for (u32 i = threadIdx.x; i < 18432; i += blockDim.x) out[i] = boxes[i];
}}
""", "probe.cu")


@pytest.fixture(params=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Any:
    library = pytest.importorskip(request.param)
    if device_module.facts(0).compute_capability < (9, 0):
        pytest.skip("tensor copies need compute capability 9.0")
    return library


def empty(library: Any, shape: tuple[int, ...]) -> Any:
    if library.__name__ == "torch":
        return library.empty(shape, dtype=library.uint8, device="cuda")
    return library.empty(shape, library.uint8)


def fill(library: Any, array: Any, values: np.ndarray) -> None:
    array[...] = library.as_tensor(values) if library.__name__ == "torch" else library.asarray(values)


def views_of(library: Any, layout: str, heads: int, rng: np.random.Generator) -> tuple[dict[str, Any],
dict[str, np.ndarray]]:
    """K, V and their scales on the device, and the bytes of the last page on the host."""
    pages = {"beyond 4 GiB": 80}.get(layout, 5)
    if layout == "separate":
        views = {name: empty(library, (pages, heads, 128, inner)) for name, inner in
                 (("k", 64), ("v", 64), ("k_scale", 8), ("v_scale", 8))}
    else:
        size = page_bytes(heads)
        apart = {"planar": size, "pages apart": size + 4096 + 16, "beyond 4 GiB": 1 << 26}[layout]
        views = pool_views(empty(library, (pages, apart))[:, :size], heads)._asdict()
    last = {name: rng.integers(0, 256, view.shape[1:], np.uint8) for name, view in views.items()}
    for name, view in views.items():
        fill(library, view[pages - 1], last[name])
    return views, last


def swizzled(tile: np.ndarray, width: int) -> np.ndarray:
    """Shared-memory image of a box: 16-byte chunks move by bits of their 128-byte line (CUDA programming
    guide)."""
    offsets = np.arange(tile.size)
    image = np.empty(tile.size, np.uint8)
    image[offsets ^ (offsets >> 7 & width // 16 - 1) << 4] = tile.reshape(-1)
    return image


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["planar", "separate", "pages apart", "beyond 4 GiB"])
@pytest.mark.parametrize(("heads", "splits"), [(4, 1), (1, 8)])
def test_a_device_sees_the_pages_and_the_arguments(library, layout, heads, splits, rng, monkeypatch):
    case = random_case(
        rng, batch=5, seqlen_q=1, group=16, num_kv_heads=heads, topk=16, max_pages=16, lengths=[300] * 5,
        strided_inputs=False,
    )
    views, last = views_of(library, layout, heads, rng)
    place = "cuda" if library.__name__ == "torch" else None
    moved = replace(case.to(library.__name__, place, bf16_as_uint16=True), **views)  # CuPy may lack bfloat16
    call = validate(**moved.arguments(), out=None, lse=None, bf16_as_uint16=True)

    facts = device_module.facts(0)
    architecture = "sm_{}{}a".format(*facts.compute_capability)
    monkeypatch.setitem(blackwell.ARCHITECTURES, facts.compute_capability, architecture)
    monkeypatch.setattr(blackwell, "source", probe)
    program = BlackwellProgram()
    plan = program.plan(call.problem, facts, splits)
    (step,) = program.bind(call, facts, plan, None).steps
    stream = stream_module.current(library.__name__, 0)()
    step(stream)
    stream.sync()

    assert call.problem.num_pages == (80 if layout == "beyond 4 GiB" else 5)
    image = to_numpy(call.out.owner).view(np.uint8).reshape(-1)[:18432]
    head = heads - 1
    np.testing.assert_array_equal(image[:8192], swizzled(last["k"][head], 64))
    np.testing.assert_array_equal(image[8192:16384], swizzled(last["v"][head], 128))
    np.testing.assert_array_equal(image[16384:17408], last["k_scale"][head].reshape(-1))
    np.testing.assert_array_equal(image[17408:], last["v_scale"][head].reshape(-1))
    numbers = dict(zip((*SCALARS, "ctas"), to_numpy(call.lse.owner).reshape(-1)))
    problem = call.problem
    assert numbers == {
        "q_row": 16 * heads * 256, "q_head": 256, "q2k_row": call.q2k_indices.canonical_strides()[1],
        "out_row": 16 * heads * 256, "lse_head": 4, "items": problem.items, "seqlen_q": 1,
        "num_kv_heads": heads, "group": 16, "topk": 16, "max_pages": problem.max_pages,
        "num_pages": problem.num_pages, "unsplit_rounds": 0,
        "round_rows": plan.configuration.ctas // heads, "round_heads": plan.configuration.ctas % heads,
        "score_scale": np.float32(call.score_scale), "v_global_scale": np.float32(call.v_global_scale),
        "ctas": plan.configuration.ctas,
    }
