"""Programmatic dependent launch: a step that begins before its predecessor has ended must not see what that has
yet to write. On a device the predecessor lets the step start, takes its time, and only then writes what the step
reads. That no access to global memory stands ahead of the wait is read from machine code where programs are
compiled: `test_kernels.py`, `test_blackwell_plan.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msa_cudacore import portable, prepare_msa_nvfp4_sparse_decode
from msa_cudacore.cases import Case, random_case
from msa_cudacore.launch import device as device_module
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.reference import compare

def test_parts_without_dependent_launches_refuse(monkeypatch):
    from msa_cudacore import api

    ada = DeviceFacts(0, "NVIDIA L4", (8, 9), 58, 99 * 1024, 100 * 1024, False)
    monkeypatch.setattr(api, "select", lambda backend, place, ordinal: (portable.PortableProgram(), ada))
    case = random_case(np.random.default_rng(1))
    with pytest.raises(ValueError, match=r"enable_pdl is True.*NVIDIA L4.*9\.0 or later"):
        prepare_msa_nvfp4_sparse_decode(**case.arguments(), enable_pdl=True)


def test_host_programs_ignore_it(rng):
    case = random_case(rng, work=200)
    runner = prepare_msa_nvfp4_sparse_decode(**case.arguments(), enable_pdl=True)
    assert compare(runner(), runner.lse, *case.exact())


# Every CTA lets dependents start and reads what is there, so that old lines lie in the L1 of every SM; after a while
# each writes its share.
PREDECESSOR = """
#include "control.cuh"
extern "C" __global__ void write_late(uint4* to, const uint4* from, i32 count, i64 cycles, u32* sink) {
  ptx::griddepcontrol_launch_dependents();
  u32 sum = 0;
  for (i32 i = threadIdx.x; i < count; i += blockDim.x) sum ^= to[i].x ^ to[i].y ^ to[i].z ^ to[i].w;
  if (sum == 0x9E3779B9u) *sink = sum;
  const i64 start = clock64();
  while (clock64() - start < cycles) {
  }
  for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""
WRITTEN = ("q", "q2k_indices", "page_table", "seqused_k")


def another_step(case: Case, rng: np.random.Generator) -> Case:
    """Other queries, selections, page tables and lengths, of the same shapes and over the same pool."""
    lengths = rng.integers(1, case.page_table.shape[1] * 128, case.seqused_k.shape)
    heads, rows, topk = case.q2k_indices.shape
    ids = rng.permuted(np.tile(np.arange(topk + 4), (heads, rows, 1)), axis=-1)[..., :topk]
    return replace(
        case,
        q=rng.permuted(case.q.astype(np.float32), axis=-1).astype(case.q.dtype),
        q2k_indices=np.sort(ids).astype(np.int32),
        page_table=rng.integers(0, case.k.shape[0], case.page_table.shape).astype(np.int32),
        seqused_k=lengths.astype(np.int32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("items", [1, 8, 16, 32, 64, 100, 140, 200, 270, 350, 400, 600, 700, 810])
def test_a_step_that_starts_early_sees_what_its_predecessor_writes_late(gpu_target, items, rng):
    torch = pytest.importorskip("torch")
    from msa_cudacore.launch.kernel import Geometry, Launch, load
    from msa_cudacore.launch.stream import resolve
    from msa_cudacore.ptx.source import load_text

    shape = dict(group=2, num_kv_heads=1, seqlen_q=1, topk=16, max_pages=24, strided_inputs=False)
    lengths = np.full(items, 128)
    first = random_case(rng, lengths=lengths, layout="planar", scale_dtype=np.uint8, hostile=False, **shape)
    steps = [another_step(first, rng) for _ in range(2)]
    sizes = [-(-getattr(first, name).nbytes // 256) * 256 for name in WRITTEN]
    starts = np.cumsum([0, *sizes])

    def packed(step: Case) -> np.ndarray:
        block = np.zeros(starts[-1], np.uint8)
        for name, at in zip(WRITTEN, starts):
            array = np.ascontiguousarray(getattr(step, name))
            block[at : at + array.nbytes] = array.view(np.uint8).reshape(-1)
        return block

    blocks = [torch.from_numpy(packed(step)).cuda() for step in steps]
    bound = blocks[0].clone()
    moved = gpu_target.move(first)
    views = {}
    for name, at in zip(WRITTEN, starts):
        like = getattr(moved, name)
        views[name] = bound[at : at + like.nbytes].view(like.dtype).view(like.shape)
    runner = gpu_target.prepare(replace(moved, **views), enable_pdl=True)
    sink = torch.zeros(4, dtype=torch.uint8, device="cuda")
    facts = device_module.facts(0)
    geometry = Geometry(grid=facts.multiprocessors, block=256)
    arch = portable.exact_arch(facts.compute_capability)
    kernel = load(load_text(PREDECESSOR), arch, "write_late", name="write_late.cu", ordinal=0, geometry=geometry)
    stream = torch.cuda.Stream()
    exact = [step.exact() for step in steps]

    def write(block):
        pointers = (np.uint64(bound.data_ptr()), np.uint64(block.data_ptr()))
        arguments = (*pointers, np.int32(starts[-1] // 16), np.int64(100_000), np.uint64(sink.data_ptr()))
        return Launch(kernel, geometry, arguments, entry="write_late")

    writes = [write(block) for block in blocks]
    for turn in range(6):
        gpu_target.fill(runner.out, np.nan)
        torch.cuda.synchronize()
        writes[turn % 2](resolve(stream))
        runner.launch(stream)
        stream.synchronize()
        report = compare(*gpu_target.results(runner), *exact[turn % 2])
        assert report, f"turn {turn}: {report}"


# The first lets dependents start and waits for the second, for which it has no patience of more than some
# cycles; the second does not wait for anything.
MEETING = """
#include "control.cuh"
extern "C" __global__ void wait_for_it(volatile u32* word, i64 cycles) {
  ptx::griddepcontrol_launch_dependents();
  const i64 start = clock64();
  while (word[0] == 0 && clock64() - start < cycles) {
  }
  word[1] = word[0];
}
extern "C" __global__ void be_there(volatile u32* word) { word[0] = 1; }
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [True, False])
def test_a_replayed_graph_lets_a_dependent_launch_begin_before_its_predecessor_ends(dependent):
    """Of graphs that are captured as the benchmarks capture theirs."""
    torch = pytest.importorskip("torch")
    from msa_cudacore.benchmarks.timing import Stopwatch, programmatic_edges
    from msa_cudacore.launch.kernel import Geometry
    from msa_cudacore.ptx.source import load_text

    stopwatch = Stopwatch(0)
    if stopwatch.facts.compute_capability < (9, 0):
        pytest.skip("no dependent launches before compute capability 9.0")
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    pointer, source, geometry = np.uint64(words.data_ptr()), load_text(MEETING), Geometry(grid=1, block=1)
    first = stopwatch.bind(source, "wait_for_it", geometry, (pointer, np.int64(20_000_000)))
    second = stopwatch.bind(source, "be_there", replace(geometry, dependent=dependent), (pointer,))
    edges = []

    def enqueue(builder):
        first(builder)
        second(builder)
        edges.append(programmatic_edges(builder))

    replay = stopwatch.capture(enqueue)
    for _ in range(3):
        words.zero_()
        torch.cuda.synchronize()
        replay()
        stopwatch.stream.sync()
        assert words.tolist() == [1, int(dependent)]
    assert edges == [int(dependent)]
    stopwatch.close()
