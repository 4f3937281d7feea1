"""The runner on a GPU: captures, replay, streams, workspace, threads, and what a launch does not do."""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from msa_cudacore import msa_nvfp4_decode_workspace_size, prepare_msa_nvfp4_sparse_decode
from msa_cudacore.cases import Case, random_case
from msa_cudacore.exact_cases import exact_cases, fixture
from msa_cudacore.pool import page_bytes, pool_views
from msa_cudacore.reference import compare
from msa_cudacore.transfer import BF16, to_numpy

ARRAYS = ("q", "k", "v", "k_scale", "v_scale", "q2k_indices", "page_table", "seqused_k")
SPLITS = (1, 2, 4, 8)


@pytest.fixture
def without_clusters(monkeypatch):
    """The device reported as one without clusters, so that splits merge through the workspace."""
    from msa_cudacore.launch import device

    facts = device.facts
    monkeypatch.setattr(device, "facts", lambda ordinal: replace(facts(ordinal), clusters=False))


def snapshot(target, runner) -> tuple[bytes, bytes]:
    return tuple(array.tobytes() for array in target.results(runner))


def assert_right(target, runner, case: Case) -> None:
    report = compare(*target.results(runner), *case.exact())
    assert report, f"{case}: {report}"


def small_case(rng, **shape) -> Case:
    shape = (
        dict(group=8, num_kv_heads=2, seqlen_q=1, topk=16, lengths=np.array([1500, 300]), hostile=False)
        | shape
    )
    return random_case(rng, **shape)


@contextlib.contextmanager
def captured(stream: int):
    """Capture a stream in the strictest mode; yields a list that receives the node types."""
    from cuda.bindings import driver

    def check(result):
        status, *values = result
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return values

    nodes: list = []
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    try:
        yield nodes
    finally:
        (graph,) = check(driver.cuStreamEndCapture(stream))
    _, count = check(driver.cuGraphGetNodes(graph))
    found, _ = check(driver.cuGraphGetNodes(graph, count))
    nodes += [check(driver.cuGraphNodeGetType(node))[0].name for node in found[:count]]
    check(driver.cuGraphDestroy(graph))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_a_launch_is_kernels_and_nothing_else(gpu_target, splits, rng):
    """Allocation and synchronisation are illegal under strict capture; the captured graph holds kernel nodes
    alone."""
    import torch

    runner = gpu_target.prepare(gpu_target.move(small_case(rng)), splits=splits)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with captured(stream.cuda_stream) as nodes:
        runner.launch(stream)
    assert nodes and set(nodes) == {"CU_GRAPH_NODE_TYPE_KERNEL"}
    assert len(nodes) == len(runner._steps)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_the_profiler_sees_our_kernels_alone(gpu_target, splits, rng):
    import torch
    from torch.profiler import ProfilerActivity, profile

    runner = gpu_target.prepare(gpu_target.move(small_case(rng)), splits=splits)
    runner()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(10):
            runner()
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    on_device = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 10 * len(runner._steps) and all(name.startswith("msa_") for name in on_device), (
        on_device
    )
    calls = {e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CPU}
    assert not [
        c for c in calls if any(word in c for word in ("Malloc", "Alloc", "Memset", "Memcpy", "Free"))
    ], calls


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_replay_after_changes_in_place_equals_eager(gpu_target, splits, rng):
    """Captured on length 1, then replayed on other queries, ids, pages, lengths and bytes, growing and
    shrinking."""
    import torch

    shape = dict(
        group=16,
        num_kv_heads=4,
        seqlen_q=1,
        topk=16,
        layout="planar",
        strided_inputs=False,
        scale_dtype=np.uint8,
    )
    lengths = [[1, 1, 1, 1], [2048, 65536 // 16, 0, 129], [3, 0, 2048, 1], [1, 1, 1, 1]]
    cases = [random_case(rng, lengths=np.array(n), max_pages=32, **shape) for n in lengths]
    pages = max(case.k.shape[0] for case in cases)
    scales = dict(k_global_scale=0.5, v_global_scale=0.25, softmax_scale=0.02)

    def padded(case: Case) -> Case:
        views = pool_views(np.full((pages, page_bytes(4)), 0xFF, np.uint8), 4)
        for name, view in views._asdict().items():
            view[: case.k.shape[0]] = getattr(case, name)
        table = np.where(case.page_table < case.k.shape[0], case.page_table, -1)
        return replace(case, **views._asdict(), page_table=table.astype(np.int32), **scales)

    cases = [padded(case) for case in cases]
    moved = gpu_target.move(cases[0])
    runner = gpu_target.prepare(moved, splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner()
    for case in cases:
        fresh = gpu_target.move(case)
        for name in ARRAYS:
            getattr(moved, name).copy_(getattr(fresh, name))
        gpu_target.fill(runner.out, np.nan)
        graph.replay()
        replayed = snapshot(gpu_target, runner)
        assert_right(gpu_target, runner, case)
        gpu_target.fill(runner.out, np.nan)
        runner()
        assert snapshot(gpu_target, runner) == replayed
        again = gpu_target.prepare(fresh, splits=splits)
        again()
        assert snapshot(gpu_target, again) == replayed


@pytest.mark.gpu
def test_illegal_ids_written_after_capture_are_dropped(gpu_target):
    import torch

    case = fixture(seqused=(512,), rows=[[0, 1, 2, 3]], v_by_block=(4, 1, 3, 4))
    moved = gpu_target.move(case)
    for splits in SPLITS:
        moved.q2k_indices.copy_(torch.from_numpy(case.q2k_indices))
        moved.page_table.copy_(torch.from_numpy(case.page_table))
        runner = gpu_target.prepare(moved, splits=splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner()
        for ids, pages in (([2**31 - 1, 1, -2, 2], None), ([0, 1, 2, 3], {0: 2**31 - 1, 3: -1})):
            moved.q2k_indices[..., :4] = torch.tensor(ids, dtype=torch.int32)
            for column, page in (pages or {}).items():
                moved.page_table[:, column] = page
            graph.replay()
            out, lse = gpu_target.results(runner)
            assert (out.astype(float) == 2.0).all() and np.allclose(lse, np.log(256), atol=1e-5)


@pytest.mark.gpu
def test_arrays_stay_alive_with_the_runner(gpu_target, rng):
    import torch

    case = small_case(rng)
    runner = gpu_target.prepare(gpu_target.move(case), splits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner()
    gc.collect()
    torch.cuda.empty_cache()
    scribbled = [torch.full((2**20,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(64)]
    graph.replay()
    assert_right(gpu_target, runner, case)
    del scribbled


# Streams and threads


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["int", "torch", "protocol", "cuda.core", "cupy", "current", "legacy", "per-thread"]
)
def test_the_launch_goes_to_the_stream_it_is_given(gpu_target, kind, rng):
    """The query is written late on that very stream; a launch anywhere else would read NaN."""
    import torch

    case = small_case(rng)
    moved = gpu_target.move(case)
    query = moved.q.clone()
    moved.q.fill_(float("nan"))
    runner = gpu_target.prepare(moved)
    if kind == "per-thread":
        side = torch.cuda.ExternalStream(2)
    else:
        side = torch.cuda.default_stream() if kind == "legacy" else torch.cuda.Stream()
    torch.cuda.synchronize()
    if kind == "cupy":
        argument = pytest.importorskip("cupy").cuda.ExternalStream(side.cuda_stream)
    elif kind == "cuda.core":
        from cuda.core import Stream

        argument = Stream.from_handle(side.cuda_stream)
    elif kind == "protocol":
        argument = type("Wrapper", (), {"__cuda_stream__": lambda self: (0, side.cuda_stream)})()
    else:
        argument = {"torch": side, "current": None, "legacy": 1}.get(kind, side.cuda_stream)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        moved.q.copy_(query)
        runner.launch(argument)
    torch.cuda.synchronize()
    assert_right(gpu_target, runner, case)


@pytest.mark.gpu
def test_the_current_stream_of_cupy_is_the_default(rng):
    cupy = pytest.importorskip("cupy")
    case = small_case(rng)
    moved = case.to("cupy", bf16_as_uint16=True)
    query = moved.q.copy()
    moved.q[...] = 0x7FC0
    runner = prepare_msa_nvfp4_sparse_decode(**moved.arguments(), bf16_as_uint16=True)
    busy = cupy.zeros(2**26, cupy.float32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(50):
            busy += 1
        moved.q[...] = query
        runner()
        stream.synchronize()
    assert compare(to_numpy(runner.out).view(BF16), to_numpy(runner.lse), *case.exact())


@pytest.mark.gpu
def test_a_fresh_thread_may_launch(gpu_target, rng):
    import torch

    case = small_case(rng)
    runner = gpu_target.prepare(gpu_target.move(case))
    torch.cuda.synchronize()
    errors = []

    def launch():
        try:
            runner.launch(0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert_right(gpu_target, runner, case)


@pytest.mark.gpu
def test_another_device_than_the_current_one(gpu_target, rng):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device is visible, two are needed")
    case = small_case(rng)
    moved = case.to("torch", "cuda:1")
    runner = prepare_msa_nvfp4_sparse_decode(**moved.arguments())
    runner()
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert_right(gpu_target, runner, case)
    mixed = replace(moved, q=moved.q.to("cuda:0"))
    with pytest.raises(ValueError, match="cuda:1"):
        prepare_msa_nvfp4_sparse_decode(**mixed.arguments())


# Workspace


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_a_dirty_workspace_does_not_matter_and_its_end_is_respected(
    portable_target, without_clusters, splits, rng
):
    import torch

    case = small_case(rng)
    moved = portable_target.move(case)
    needed = portable_target.prepare(moved, splits=splits).workspace_bytes
    assert needed > 0 or splits == 1
    region = torch.full((needed + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    runner = portable_target.prepare(moved, splits=splits, workspace_buffer=region[:needed])
    graph = torch.cuda.CUDAGraph()
    results = []
    for launch in (runner, runner, graph.replay, graph.replay):
        if launch == graph.replay and len(results) == 2:
            with torch.cuda.graph(graph):
                runner()
        region[:needed].fill_(0xFF)
        portable_target.fill(runner.out, np.nan)
        launch()
        results.append(snapshot(portable_target, runner))
        assert (region[needed:] == 0xFF).all()
    assert len(set(results)) == 1
    assert_right(portable_target, runner, case)


@pytest.mark.gpu
def test_the_stated_workspace_size_suffices(portable_target, without_clusters, rng):
    for splits in (None, *SPLITS):
        for seqlen_q in (1, 3):
            case = random_case(
                rng, group=16, num_kv_heads=4, seqlen_q=seqlen_q, topk=16, batch=2, hostile=False
            )
            size = msa_nvfp4_decode_workspace_size(2, 4, "cuda", seqlen_q=seqlen_q, splits=splits)
            assert portable_target.prepare(portable_target.move(case), splits=splits).workspace_bytes <= size


@pytest.mark.gpu
def test_two_runners_share_a_workspace_on_one_stream(portable_target, without_clusters, rng):
    import torch

    cases = [small_case(rng, lengths=np.full(batch, 1000)) for batch in (1, 8)]
    moved = [portable_target.move(case) for case in cases]
    size = max(portable_target.prepare(m, splits=8).workspace_bytes for m in moved)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    runners = [portable_target.prepare(m, splits=8, workspace_buffer=workspace) for m in moved]
    for runner in runners * 50:
        runner()
    for runner, case in zip(runners, cases):
        assert_right(portable_target, runner, case)


@pytest.mark.gpu
def test_unfit_workspaces_are_refused(portable_target, without_clusters, rng):
    import torch

    moved = portable_target.move(small_case(rng))
    needed = portable_target.prepare(moved, splits=4).workspace_bytes
    region = torch.empty(needed + 64, dtype=torch.uint8, device="cuda")
    for buffer in (
        region[: needed - 1],
        region[1 : 1 + needed],
        torch.empty(needed, dtype=torch.uint8),
        moved.k.reshape(-1)[:8],
    ):
        with pytest.raises(ValueError, match="workspace_buffer"):
            portable_target.prepare(moved, splits=4, workspace_buffer=buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(3))
def test_random_problems_merged_through_the_workspace(portable_target, without_clusters, part, rng):
    for _ in range(20):
        portable_target.check(random_case(rng), splits=int(rng.choice([2, 4, 8])))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "share, kind",
    [
        (1.01, "leftovers in 8"), (1.2, "leftovers in 4"), (1.45, "pairs"), (2.01, "leftovers in 8"),
        (2.4, "leftovers in 4"), (3.05, "the last in 8 splits"), (3.2, "the last in 4 splits"),
        (3.45, "the last in 2 splits"), (4.2, "share one more"), (6.2, "the last in 8 splits"),
        (6.9, "the last in 2 splits"), (8.5, "share one more"), (9.1, "the last in 8 splits"),
    ],
)
def test_leftovers_of_every_multiprocessor(portable_target, share, kind, rng):
    """A few items more than multiprocessors have slots for, launched and replayed from dirty workspaces."""
    import torch

    from msa_cudacore.launch import device

    items = int(share * device.facts(0).multiprocessors)
    lengths = rng.integers(0, 128 * 9, items)
    case = random_case(rng, group=16, num_kv_heads=1, seqlen_q=1, topk=16, lengths=lengths, max_pages=9)
    moved = portable_target.move(case)
    needed = portable_target.prepare(moved).workspace_bytes
    workspace = torch.full((max(needed, 16),), 0xFF, dtype=torch.uint8, device="cuda")
    runner = portable_target.prepare(moved, workspace_buffer=workspace)
    assert device.facts(0).compute_capability != (9, 0) or kind in runner.program
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner()
    results = []
    for launch in (runner, runner, graph.replay, runner, graph.replay):
        workspace.fill_(0xFF)
        portable_target.fill(runner.out, np.nan)
        launch()
        results.append(snapshot(portable_target, runner))
    assert len(set(results)) == 1
    assert_right(portable_target, runner, case)


@pytest.mark.gpu
def test_counters_of_a_runner_that_has_gone_are_not_those_of_another(portable_target, without_clusters, rng):
    """Runners made, launched and dropped in a row: every one finds zeros."""
    cases = [small_case(rng, lengths=np.full(batch, 1000)) for batch in (1, 3, 8)]
    for case in cases * 5:
        runner = portable_target.prepare(portable_target.move(case), splits=8)
        runner()
        runner()
        assert_right(portable_target, runner, case)
        del runner


@pytest.mark.gpu
def test_runners_come_and_go_while_a_stream_is_captured(portable_target, without_clusters, rng):
    """In the strictest mode, a runner with counters is prepared and another dropped."""
    import torch

    case = small_case(rng, lengths=np.full(3, 1200))
    moved = portable_target.move(case)
    old = portable_target.prepare(moved, splits=8)
    old()
    torch.cuda.synchronize()
    workspace = torch.empty(old.workspace_bytes, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        del old
        gc.collect()
        new = portable_target.prepare(moved, splits=8, workspace_buffer=workspace)
        new()
    for _ in range(3):
        workspace.fill_(0xFF)
        portable_target.fill(new.out, np.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(portable_target, new, case)


@pytest.mark.gpu
def test_a_runner_dropped_in_flight_keeps_its_counters_until_the_end(portable_target, without_clusters, rng):
    import torch

    case = small_case(rng, lengths=np.full(3, 1200))
    moved = portable_target.move(case)
    for _ in range(20):
        runner = portable_target.prepare(moved, splits=8)
        for _ in range(20):
            runner()
        results = runner.out, runner.lse
        del runner
        torch.full((4096,), 7, dtype=torch.int32, device="cuda")  # where freed words would be
    torch.cuda.synchronize()
    assert compare(*map(to_numpy, results), *case.exact())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["an empty request beside a full one", "a row that selects nothing", "causal edge inside a page"]
)
def test_exact_answers_merged_through_the_workspace(portable_target, without_clusters, name):
    case = next(case for case in exact_cases() if case.name == name)
    for splits in (2, 4, 8):
        portable_target.check(case, splits=splits)


@pytest.mark.gpu
def test_both_merges_give_the_same_answer(portable_target, monkeypatch, rng):
    from msa_cudacore.launch import device

    case = small_case(rng)
    with_clusters = portable_target.run(case, splits=8)
    facts = device.facts
    monkeypatch.setattr(device, "facts", lambda ordinal: replace(facts(ordinal), clusters=False))
    for results in (with_clusters, portable_target.run(case, splits=8)):
        assert compare(*results, *case.exact())


# What a sanitizer should watch, and what a call costs


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_representative_problems(gpu_target, splits):
    """Small problems of every kind, fixed, for `compute-sanitizer ... pytest -k representative`."""
    rng = np.random.default_rng(20)
    shapes = [
        dict(group=16, num_kv_heads=1, seqlen_q=1, topk=16, lengths=np.array([700, 1, 0])),
        dict(group=3, num_kv_heads=2, seqlen_q=4, topk=17, lengths=np.array([130])),
        dict(group=1, num_kv_heads=1, seqlen_q=1, topk=64, lengths=np.array([513])),
    ]
    for shape in shapes:
        gpu_target.check(random_case(rng, **shape), splits=splits)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_representative_problems_merged_through_the_workspace(portable_target, without_clusters, splits):
    test_representative_problems(portable_target, splits)


@pytest.mark.gpu
def test_host_cost_of_a_launch_is_reported(gpu_target, rng, capsys):
    import torch

    case = small_case(rng, lengths=np.array([2048]))
    lines = []
    for splits in (None, *SPLITS):
        runner = gpu_target.prepare(gpu_target.move(case), splits=splits)
        stream = torch.cuda.current_stream()
        for name, call in (("runner()", runner), ("runner.launch(stream)", lambda: runner.launch(stream))):
            costs = []
            for _ in range(200):
                start = time.perf_counter_ns()
                call()
                costs.append(time.perf_counter_ns() - start)
                torch.cuda.synchronize()
            lines.append(
                f"host cost of {name}, splits {splits}: median {statistics.median(costs) / 1000:.2f} us"
            )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert_right(gpu_target, runner, case)
