"""The first launch of a process, captured into a CUDA graph: nothing is left to load, compile or allocate."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FIRST_LAUNCH = """
import sys
import numpy as np
from msa_cudacore import prepare_msa_nvfp4_sparse_decode as prepare
from msa_cudacore.cases import random_case
from msa_cudacore.reference import compare
from msa_cudacore.transfer import to_numpy

route, splits = sys.argv[1], int(sys.argv[2])
lengths = np.array([2000, 0, 300])
case = random_case(np.random.default_rng(), group=16, num_kv_heads=4, seqlen_q=1, topk=16, lengths=lengths)
if route == "torch":
    import torch

    moved = case.to("torch")
    runner = prepare(**moved.arguments(), splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        runner()
    runner.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
elif route == "cupy":
    import cupy

    moved = case.to("cupy", bf16_as_uint16=True)
    runner = prepare(**moved.arguments(), splits=splits, bf16_as_uint16=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        runner()
        graph = stream.end_capture()
        runner.out.fill(0x7FC0)
        graph.launch(stream)
        stream.synchronize()
else:
    from cuda.core import Device

    moved = case.to("torch")
    runner = prepare(**moved.arguments(), splits=splits)
    device = Device()
    device.set_current()
    stream = device.create_stream()
    builder = stream.create_graph_builder()
    builder.begin_building("global")
    runner.launch(builder)
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
out = to_numpy(runner.out)
report = compare(out.view("bfloat16") if out.dtype == np.uint16 else out, to_numpy(runner.lse), *case.exact())
sys.exit(None if report else str(report))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("route", ["torch", "cupy", "cuda.core"])
def test_the_first_launch_of_a_process_may_be_captured(route, splits):
    pytest.importorskip("torch" if route == "cuda.core" else route)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_MODULE_LOADING"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LAUNCH, route, str(splits)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
