"""What `demo` and `decode` do: make a realistic problem, decode it on a chosen device, time the launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .api import MSANvfp4DecodeRunner, prepare_msa_nvfp4_sparse_decode
from .cases import ARRAYS, Case
from .contract import MAX_GROUP, MAX_SEQLEN_Q, MAX_TOPK, Problem, check_integer
from .launch import device as device_module
from .nvfp4 import E2M1_MAX, E4M3_MAX
from .pool import HEAD_DIM, PAGE_SIZE, empty_pool, pool_views, slot_mapping, write_tokens
from .programs import PROGRAMS, select
from .transfer import BF16, device_empty, move, to_numpy

__all__ = ["FRAMEWORKS", "SMALL_CASE", "Decoded", "build_case", "decode_case"]

FRAMEWORKS = ("auto", "numpy", "cuda", "torch", "cupy")

SMALL_CASE = {"batch": 1, "tokens": 300, "num_q_heads": 16, "num_kv_heads": 1, "topk": 4}
"""Sizes that the emulator decodes in seconds: one work item of two or three pages, with a partial one."""


@dataclass(frozen=True)
class Decoded:
    """The outcome of a decode: host copies of the results, what ran, and the time of one launch."""

    out: np.ndarray
    lse: np.ndarray
    runner: MSANvfp4DecodeRunner
    device: str
    framework: str
    microseconds: float


def build_case(
    *,
    batch: int,
    tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    seqlen_q: int = 1,
    topk: int = 16,
    seed: int | None = None,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda requests, total: requests,
) -> Case:
    """A decode step as serving makes one: K and V of every request go through the cache writer into a pool.

    Requests hold between half of ``tokens`` and all of them; pages are dealt in random order; each (KV head,
    query token) selects its newest block and random others. Global scales are ``amax / (6 * 448)``, which
    uses the whole range of the block scales. ``progress(requests, total)`` may wrap the loop over requests.

    Raises ValueError for a size outside the contract.
    """
    batch = check_integer("batch", batch, 1, 2**20)
    tokens = check_integer("tokens", tokens, 1, 2**24)
    num_kv_heads = check_integer("kv-heads", num_kv_heads, 1, 2**10)
    num_q_heads = check_integer("q-heads", num_q_heads, 1, MAX_GROUP * num_kv_heads)
    if num_q_heads % num_kv_heads:
        given = f"q-heads is {num_q_heads} and kv-heads {num_kv_heads}"
        raise ValueError(f"{given}; accepted is a multiple of the KV heads")
    seqlen_q = check_integer("seqlen-q", seqlen_q, 1, MAX_SEQLEN_Q)
    topk = check_integer("topk", topk, 1, MAX_TOPK)
    if seed is not None:
        seed = check_integer("seed", seed, 0, 2**128 - 1)
    rng = np.random.default_rng(seed)

    lengths = rng.integers(-(-tokens // 2), tokens + 1, batch)
    max_pages = -(-tokens // PAGE_SIZE)
    page_table = rng.permutation(batch * max_pages).reshape(batch, max_pages).astype(np.int32)
    views = pool_views(empty_pool(batch * max_pages, num_kv_heads, fill=0xFF), num_kv_heads)
    # Values beyond six standard deviations are clipped, so that one scale serves every request.
    amplitude = 6.0
    scale = amplitude / (E2M1_MAX * E4M3_MAX)
    for request in progress(range(batch), batch):
        shape = (2, lengths[request], num_kv_heads, HEAD_DIM)
        k, v = rng.standard_normal(shape, dtype=np.float32).clip(-amplitude, amplitude)
        slots = slot_mapping(page_table, request, np.arange(lengths[request]))
        write_tokens(views, k, v, slots, k_global_scale=scale, v_global_scale=scale)

    indices = np.full((num_kv_heads, batch * seqlen_q, topk), -1, np.int32)
    for head, row in np.ndindex(indices.shape[:2]):
        newest = (int(lengths[row // seqlen_q]) - seqlen_q + row % seqlen_q) // PAGE_SIZE
        if newest >= 0:
            others = rng.permutation(newest)[: topk - 1]
            indices[head, row, : others.size + 1] = np.sort(np.append(others, newest))
    return Case(
        q=rng.standard_normal((batch * seqlen_q, num_q_heads, HEAD_DIM)).astype(BF16),
        **views._asdict(),
        q2k_indices=indices,
        page_table=page_table,
        seqused_k=lengths.astype(np.int32),
        k_global_scale=scale,
        v_global_scale=scale,
        seqlen_q=seqlen_q,
        name="demo",
    )


def decode_case(
    case: Case,
    *,
    backend: str = "auto",
    framework: str = "auto",
    splits: int | None = None,
    repeats: int = 100,
) -> Decoded:
    """Decode a case of NumPy arrays and time the launch.

    ``framework`` is the library whose arrays carry the problem: ``numpy`` is the host; ``cuda`` is device
    memory of cuda.core, which needs neither torch nor CuPy; ``auto`` takes a device where one can run the
    backend, else the host.

    Raises what :func:`msa_cudacore.prepare_msa_nvfp4_sparse_decode` raises, and ImportError where the
    framework is absent.
    """
    if framework == "auto":
        framework = "cuda" if _runs_on_a_device(backend) else "numpy"
    elif framework == "cuda":
        device_module.facts(0)  # without a driver its message helps more than that of the first allocation
    as_bits = framework == "cuda"
    arrays = {name: getattr(case, name) for name in ARRAYS}
    if as_bits:
        arrays["q"] = arrays["q"].view(np.uint16)
    options: dict[str, Any] = {"backend": backend, "splits": splits, "bf16_as_uint16": as_bits}
    arguments = case.arguments() | move(arrays, framework)
    if framework == "cuda":
        # DLPack alone offers no way to allocate outputs, so they are given.
        options["out"] = device_empty(case.q.shape, np.uint16)
        options["lse"] = device_empty(case.q.shape[:2], np.float32)
        program, facts = select(backend, "cuda", 0)
        if (needed := program.plan(_problem(case), facts, splits).workspace_bytes) > 0:
            options["workspace_buffer"] = device_empty((needed,), np.uint8)
    runner = prepare_msa_nvfp4_sparse_decode(**arguments, **options)
    on_device = framework != "numpy"
    microseconds = _time_on_device(runner, repeats) if on_device else _time_on_host(runner)
    out = to_numpy(runner.out)
    return Decoded(
        out=out.view(BF16) if as_bits else out,
        lse=to_numpy(runner.lse),
        runner=runner,
        device=str(device_module.facts(0)) if on_device else "host CPU",
        framework=framework,
        microseconds=microseconds,
    )


def _runs_on_a_device(backend: str) -> bool:
    """Whether device 0 exists and serves the backend."""
    if not any(
        program.place == "cuda" and backend in ("auto", "cake", program.backend) for program in PROGRAMS
    ):
        return False
    if device_module.count() == 0:
        if backend not in ("auto", "cake"):
            # Named on purpose: say what is missing instead of running elsewhere.
            device_module.facts(0)
        return False
    try:
        select(backend, "cuda", 0)
    except RuntimeError:
        if backend not in ("auto", "cake"):
            raise
        return False
    return True


def _problem(case: Case) -> Problem:
    return Problem(
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        topk=case.q2k_indices.shape[-1],
        max_pages=case.page_table.shape[1],
        num_pages=case.k.shape[0],
    )


def _time_on_host(runner: MSANvfp4DecodeRunner) -> float:
    start = time.perf_counter()
    runner()
    return (time.perf_counter() - start) * 1e6


def _time_on_device(runner: MSANvfp4DecodeRunner, repeats: int) -> float:
    """Median time of a launch in a run of launches, back to back on one stream; the cache is warm."""
    from cuda.bindings import driver

    def check(result: tuple) -> Any:
        status, *values = result
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the decode failed on the device: {status.name}")
        return values[0] if values else None

    stream = driver.CU_STREAM_LEGACY
    begin, end = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
    runs, inside = 5, max(repeats // 5, 1)
    times = []
    for _ in range(runs + 1):  # the first run warms up
        check(driver.cuEventRecord(begin, stream))
        for _ in range(inside):
            runner.launch(int(stream))
        check(driver.cuEventRecord(end, stream))
        check(driver.cuEventSynchronize(end))
        times.append(check(driver.cuEventElapsedTime(begin, end)) * 1000 / inside)
    check(driver.cuEventDestroy(begin))
    check(driver.cuEventDestroy(end))
    return statistics.median(times[1:])
