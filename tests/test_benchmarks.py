"""The benchmarks without a GPU: rows, checks, the child processes, peers, and that the ceilings compile."""

from __future__ import annotations

import copy
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from msa_cudacore import reference
from msa_cudacore.benchmarks import ceiling, peers, run, worker
from msa_cudacore.benchmarks import timing as timing_module
from msa_cudacore.benchmarks.candidates import Bench, Prepared, Unavailable
from msa_cudacore.benchmarks.check import Oracle, attend
from msa_cudacore.benchmarks.rows import ROWS, TILE_BYTES, find, select_pages
from msa_cudacore.benchmarks.timing import Stopwatch, Timing
from msa_cudacore.benchmarks.workload import build
from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.ptx.source import load as load_source

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_data import HostArrays, exact  # noqa: E402

PUBLISHED_ITEMS = {
    # flashinfer-ai/flashinfer, pull request 5875: work items of each row.
    "tp1_b128_kv8k_q1": 512, "tp1_b32_kv64k_q1": 128, "tp1_b32_kv64k_q1_ragged": 128, "tp1_b16_kv64k_q1": 64,
    "tp1_b8_kv100k_q1": 32, "tp1_b1_kv200k_q1": 4, "tp2_b64_kv16k_q1": 128, "tp4_b128_kv8k_q1": 128,
    "tp4_b1_kv1m_q1": 1,
    "tp8_b128_kv64k_q1": 128, "tp1_b2_kv257_q1_tail": 8, "tp1_b32_kv8k_q2": 256, "tp1_b32_kv8k_q4": 512,
    "tp1_b32_kv8k_q8": 1024, "tp4_b32_kv64k_q8": 256, "tp1_b8_kv100k_q8": 256,
}  # fmt: skip


@pytest.fixture
def small():
    """A row of three requests of 700 tokens with two query tokens each, and two steps over its pool."""
    row = replace(find("tp1_b32_kv8k_q2")[0], batch=3, kv_tokens=700)
    return build(row, HostArrays(), steps=2, seed=5)


def test_rows_have_the_published_work_items():
    assert {row.name: row.items for row in ROWS if row.b200_us is not None} == PUBLISHED_ITEMS
    assert {1, 2, 4, 8, 16, 32, 64, 128, 132, 133, 264, 265, 528, 532, 640, 1056} <= {row.items for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_selection_is_the_last_page_and_fifteen_others(row):
    drawn = select_pages(row, np.random.default_rng(3))
    lengths = np.repeat(drawn.lengths, row.seqlen_q)
    visible = lengths - row.seqlen_q + np.tile(np.arange(row.seqlen_q), row.batch) + 1
    blocks = -(-visible // 128)
    assert drawn.q2k_indices.shape == (row.num_kv_heads, row.tokens, 16)
    assert drawn.q.shape == (row.tokens, row.num_q_heads, 128) and drawn.q.dtype == ml_dtypes.bfloat16
    for head in range(row.num_kv_heads):
        for ids, count in zip(drawn.q2k_indices[head, :64], blocks[:64]):
            kept = ids[ids >= 0]
            assert kept.size == min(16, count) and (ids[kept.size :] == -1).all()
            assert kept[-1] == count - 1 and (np.diff(kept) > 0).all()
    used = drawn.page_table[drawn.page_table >= 0]
    assert np.array_equal(np.sort(used), np.arange(row.num_pages))
    assert (drawn.page_table >= 0).sum(axis=1).tolist() == (-(-drawn.lengths // 128)).tolist()


def test_ragged_requests_differ_and_reach_half_of_the_context():
    lengths = find("tp1_b32_kv64k_q1_ragged")[0].lengths
    assert len(set(lengths.tolist())) > 16 and lengths.min() >= 32768 and lengths.max() <= 65536


def test_tiles_and_bytes_follow_the_page_table(small):
    step = small.steps[0].host
    tiles = step.tiles
    for token, head, j in np.argwhere(step.q2k_indices.transpose(1, 0, 2) >= 0):
        block = step.q2k_indices[head, token, j]
        assert tiles[token, head, j] == step.page_table[token // 2, block] * 4 + head
    assert (tiles[step.q2k_indices.transpose(1, 0, 2) < 0] == -1).all()
    assert small.selected_bytes == 6 * 4 * 6 * TILE_BYTES
    # 700 tokens in six pages, all of which both tokens of a request select.
    assert small.distinct_bytes == small.selected_bytes // 2
    assert step.attended == 4 * 3 * (699 + 700)


def test_steps_of_a_workload_differ(small):
    first, second = (step.host for step in small.steps)
    assert not np.array_equal(first.page_table, second.page_table)
    assert not np.array_equal(first.q, second.q)


def test_rows_are_found_by_name_and_by_beginning():
    assert [row.name for row in find("tp4_b132,tp1_b1_")] == ["tp4_b132_kv8k_q1", "tp1_b1_kv200k_q1"]
    assert [row.name for row in find("tp1_b32_kv64k_q1")] == ["tp1_b32_kv64k_q1"]
    with pytest.raises(ValueError, match="'tp9'"):
        find("tp1_b1_,tp9")
    with pytest.raises(ValueError, match="no row is named"):
        find(" , ")


@pytest.mark.parametrize("cache_format", ["nvfp4", "bf16"])
def test_the_check_passes_exact_results_and_refuses_wrong_ones(small, cache_format):
    oracle = Oracle(small, rows=3, seed=2)
    results = [(reference.round_to_bf16(out), lse.astype(np.float32)) for out, lse in exact(small)]
    checked = oracle.check(results, cache_format, ours=True)
    assert checked.passed and checked.rows == 6
    assert checked.worst_over_floor == pytest.approx(1.0)
    last = small.row.tokens - 1
    for spoil in (1e-2, np.nan):
        wrong = copy.deepcopy(results)
        wrong[1][0][last, 37] *= ml_dtypes.bfloat16(1 + spoil)
        assert not oracle.check(wrong, cache_format, ours=True).passed
    assert not oracle.check([results[0], results[0]], cache_format, ours=False).passed


def test_peers_are_held_to_the_values_that_their_cache_holds(small):
    """An fp8 cache's exact results are no NVFP4 cache's, and are recognised as right."""
    token = small.row.tokens - 1
    step = small.steps[0]
    outs = []
    for one in small.steps:
        out = np.zeros((small.row.tokens, small.row.num_q_heads, 128))
        for t in range(small.row.tokens):
            for head in range(small.row.num_kv_heads):
                keys, values = fp8_pages(small, one, t, head)
                mine = slice(head * 16, head * 16 + 16)
                out[t, mine] = attend(
                    one.host.q[t, mine],
                    keys,
                    values,
                    np.arange(keys.shape[0] * 128).reshape(-1, 128) < one.host.visible[t],
                )[0]
        outs.append((reference.round_to_bf16(out), None))
    oracle = Oracle(small, rows=3, seed=2)
    assert oracle.check(outs, "fp8", ours=False).relative_error < 3e-3
    assert not oracle.check(outs, "nvfp4", ours=False).passed
    assert step.host.tiles[token].shape == (4, 16)


def fp8_pages(workload, step, token, head):
    """Keys and values of all six pages of a request, rounded to E4M3, by an independent spelling of the V
    swizzle.
    """
    from msa_cudacore.nvfp4 import dequantize

    pages = step.host.page_table[token // workload.row.seqlen_q]
    k, v, k_scale, v_scale = (view[pages, head] for view in workload.views)
    flat = v_scale.reshape(len(pages), -1)
    linear = np.empty_like(v_scale)
    for t in range(128):
        for group in range(8):
            linear[:, t, group] = flat[:, (t // 4) * 32 + group * 4 + t % 4]
    return (
        dequantize(codes, scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for codes, scales in ((k, k_scale), (v, linear))
    )


class FakeStopwatch:
    """Replays at once; a replay's time is what the fake candidate says."""

    class facts:
        ordinal = 0
        multiprocessors = 132

    class stream:
        @staticmethod
        def sync():
            pass

    def time(self, replays, *, samples, idle_before=True):
        times = [replay() for replay in replays]
        return Timing(tuple(times[number % len(times)] for number in range(samples)))


class FakeCandidate:
    name, title, format, kind = "fake", "a fake", "nvfp4", "peer"

    def __init__(self, workload, spoil=1.0):
        self.answers = {id(step): pair for step, pair in zip(workload.steps, exact(workload), strict=True)}
        self.spoil = spoil

    def variants(self, workload, bench):
        def refuse(step):
            raise Unavailable("too wide")

        return {
            "slow": lambda step: self.prepare(step, 9.0),
            "fast": lambda step: self.prepare(step, 4.0),
            "none": refuse,
        }

    def prepare(self, step, microseconds):
        out = np.zeros_like(step.q)
        lse = np.zeros(step.q.shape[:2], np.float32)

        def replay():
            exact_out, exact_lse = self.answers[id(step)]
            out[...] = reference.round_to_bf16(exact_out * self.spoil)
            lse[...] = exact_lse / np.log(2)
            return microseconds

        return Prepared(replay, out, lse, float(np.log(2)))


def test_the_fastest_variant_is_timed_on_every_step_and_checked(small, monkeypatch):
    monkeypatch.setattr(worker.environment, "clocks", lambda ordinal: {"sm_mhz": 1980})
    bench = Bench(FakeStopwatch(), small.arrays)
    record = worker.measure(FakeCandidate(small), small, bench, Oracle(small, rows=2, seed=1), samples=7)
    assert record["configuration"] == "fast" and record["median_us"] == 4.0 and len(record["samples_us"]) == 7
    assert record["trials_us"] == {"slow": 9.0, "fast": 4.0} and record["refused"] == {"none": "too wide"}
    assert record["check"]["passed"] and record["check"]["largest_lse_error"] < 1e-5
    spoiled = worker.measure(
        FakeCandidate(small, 1.02), small, bench, Oracle(small, rows=2, seed=1), samples=7
    )
    assert not spoiled["check"]["passed"]


def test_quantiles_of_a_timing():
    timing = Timing(tuple(float(n) for n in (5, 1, 2, 3, 4, 11, 6, 7, 8, 9, 10)))
    assert (timing.median, timing.p10, timing.p90) == (6.0, 2.0, 10.0)


class FakeGpu:
    """Enough of a stream and its events for the stopwatch: time is the number of operations enqueued so
    far.
    """

    def __init__(self, enough):
        self.enough, self.held, self.now, self.events = enough, [], 0, []

    def record(self, event):
        self.now += 1
        event.at = self.now

    def sync(self):
        self.events.clear()

    def event(self):
        gpu = self

        class Event:
            is_done = property(lambda self: gpu.held[-1] < gpu.enough)

            def __sub__(self, other):
                return (self.at - other.at) / 1e3

        return Event()

    def bind(self, source, entry, geometry, arguments):
        assert entry == "hold"
        self.held.append(int(arguments[0]))
        return lambda stream: None


def stopwatch_on(gpu):
    stopwatch = Stopwatch.__new__(Stopwatch)
    stopwatch.stream, stopwatch._event, stopwatch.bind = gpu, gpu.event, gpu.bind
    stopwatch._flush = lambda stream: None
    stopwatch._hold = 1000
    return stopwatch


def test_samples_of_a_batch_that_the_gpu_began_early_are_taken_again():
    gpu = FakeGpu(enough=4000)
    replayed = []

    def replay(number):
        replayed.append(number)
        gpu.now += number

    timing = stopwatch_on(gpu).time([lambda: replay(1), lambda: replay(5)], samples=60, idle_before=False)
    # Two operations of the events' own; the steps take turns across batches too.
    assert timing.samples == (2.0, 6.0) * 30
    batches = 60 // timing_module._BATCH
    assert gpu.held == [1000, 2000] + [4000] * batches
    assert len(replayed) == 2 + timing_module._BATCH * (2 + batches)


def test_a_host_that_never_gets_ahead_is_an_error():
    with pytest.raises(RuntimeError, match="enqueue"):
        stopwatch_on(FakeGpu(enough=1 << 62)).time([lambda: None], samples=5)


@pytest.mark.parametrize(
    "text, line",
    [
        ("Error at /work/x/include/a.cuh:67:\n new batch", "Error at a.cuh:67: new batch"),
        ("1/2 of 3/4, see https://a.org/b", "1/2 of 3/4, see https://a.org/b"),
        ("cannot open '/tmp/a b'", "cannot open 'a b'"),
    ],
)
def test_messages_in_a_report_name_no_folders(text, line):
    assert worker.one_line(text) == line


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_ceilings_compile_without_spilling(arch):
    for threads, loads in ceiling.REGISTER_SHAPES:
        used = compile_cubin(ceiling.register_source(threads, loads), arch, use_cache=False).resources()[
            "stream_registers"
        ]
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)
    assert {"empty", "hold", "read_buffer"} <= set(
        compile_cubin(load_source(ceiling._FOLDER / "probe.cu"), arch, use_cache=False).resources()
    )
    if arch != "sm_80":
        for sides in (1, 2):
            used = compile_cubin(ceiling.bulk_source(sides), arch, use_cache=False).resources()["stream_bulk"]
            assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)


def test_no_kernel_body_of_the_benchmarks_holds_assembly():
    for path in [*ceiling._FOLDER.glob("*.cu"), *ceiling._FOLDER.glob("*.cuh")]:
        assert "asm" not in path.read_text(encoding="utf-8"), path.name


CHILD = """
import json, sys, time
finished = sys.argv[sys.argv.index("--finished") + 1].split(",")
def say(**record):
    print({mark!r} + json.dumps(record), flush=True)
say(environment={{}}, arrays="numpy")
for name, act in {acts!r}:
    if name + "@tp1_b1_kv200k_q1" in finished:
        continue
    about = dict(row="tp1_b1_kv200k_q1", candidate=name)
    say(**about, started=True)
    if act == "die":
        print("illegal memory access", flush=True)
        sys.exit(3)
    if act == "hang":
        time.sleep(600)
    say(**about, title=name, format="nvfp4", kind="peer", median_us=1.0)
"""


def run_children(monkeypatch, tmp_path, acts, seconds=60.0):
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD.format(mark=worker.RECORD, acts=acts)))
    monkeypatch.setattr(
        run,
        "_command",
        lambda group, plan, finished: [sys.executable, str(script), "--finished", ",".join(finished)],
    )
    results = run.Results(about={})
    run._run_group(
        "triton", run.Plan(rows=find("tp1_b1_")), results, run.time.monotonic() + seconds, lambda *_: None
    )
    return results


def test_a_peer_that_kills_its_process_costs_its_own_figure_only(monkeypatch, tmp_path):
    results = run_children(monkeypatch, tmp_path, [("first", "work"), ("bad", "die"), ("last", "work")])
    found = {one["candidate"]: one for one in results.measurements}
    assert list(found) == ["first", "bad", "last"]
    assert found["first"]["median_us"] == found["last"]["median_us"] == 1.0
    assert "ended with 3: illegal memory access" in found["bad"]["failed"]


def test_chains_of_steps_are_kept_apart_however_they_end(monkeypatch, tmp_path):
    results = run_children(monkeypatch, tmp_path, [("first", "work"), ("chain", "die"), ("last", "work")])
    assert [one["candidate"] for one in results.measurements] == ["first", "last"]
    assert [one["failed"] for one in results.chains] == ["its process ended with 3: illegal memory access"]
    results = run_children(monkeypatch, tmp_path, [("first", "work"), ("chain", "work")])
    assert [one["candidate"] for one in results.measurements] == ["first"]
    assert [one["median_us"] for one in results.as_json()["chains"]] == [1.0]


def test_a_peer_that_hangs_is_stopped(monkeypatch, tmp_path):
    results = run_children(monkeypatch, tmp_path, [("first", "work"), ("bad", "hang")], seconds=3.0)
    assert [one.get("failed") for one in results.measurements] == [None, "out of time"]
    assert results.groups["triton"]["failed"] == "out of time"


def test_a_child_that_cannot_start_is_reported_once(monkeypatch, tmp_path):
    monkeypatch.setattr(
        run, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such thing')"]
    )
    results = run.Results(about={})
    run._run_group(
        "torch", run.Plan(rows=find("tp1_b1_")), results, run.time.monotonic() + 60, lambda *_: None
    )
    assert "no such thing" in results.groups["torch"]["failed"] and results.measurements == []


def test_an_absent_peer_says_why():
    absent = {"flashinfer": "flashinfer", "unfused": "nvmath"}
    for group, package in absent.items():
        try:
            found = peers.load(group)
        except Unavailable as error:
            assert "not installed" in str(error) or "cannot be imported" in str(error)
        else:
            assert found and package in sys.modules
    with pytest.raises(ValueError, match="'vllm'"):
        peers.load("vllm")


@pytest.fixture
def torch_on_the_host(monkeypatch):
    """Arrays of torch on the CPU, and no graph to capture into: what the torch peers compute, without a
    GPU.
    """
    torch = pytest.importorskip("torch")
    from msa_cudacore.benchmarks.arrays import TorchArrays
    from msa_cudacore.benchmarks.peers import torch_forms

    arrays = TorchArrays.__new__(TorchArrays)
    arrays._torch, arrays.device = torch, torch.device("cpu")
    arrays.finish = arrays.release = lambda: None
    monkeypatch.setattr(torch_forms, "capture", lambda bench, compute: Prepared(lambda: None, *compute()))
    return arrays


@pytest.mark.parametrize("number", [0, 1], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("tokens", [257, 700, 2500])
def test_the_torch_peers_compute_the_same_step(torch_on_the_host, number, tokens):
    row = replace(find("tp1_b32_kv8k_q2")[0], batch=2, kv_tokens=tokens)
    workload = build(row, torch_on_the_host, steps=2, seed=11)
    candidate = peers.load("torch")[number]
    bench = Bench(FakeStopwatch(), torch_on_the_host)
    prepared = [candidate.variants(workload, bench)[""](step) for step in workload.steps]
    checked = Oracle(workload, rows=3, seed=4).check(
        [(one.out, one.lse) for one in prepared], candidate.format, ours=False
    )
    assert checked.passed, checked
    assert checked.relative_error < 5e-3


def test_the_pool_in_fp8_is_the_pool_rounded(torch_on_the_host, small):
    import torch

    from msa_cudacore.benchmarks.peers import torch_forms

    row = small.row
    workload = build(row, torch_on_the_host, steps=1, seed=11)
    keys, values = torch_forms.dequantized_pool(workload, torch.float8_e4m3fn)
    pages = workload.steps[0].host.page_table[1]
    want = fp8_pages(replace_views(workload), workload.steps[0], 2, 3)
    for got, exact_values in zip((keys, values), want):
        assert np.array_equal(got[pages * 4 + 3].float().numpy(), exact_values)


def replace_views(workload):
    """The same workload with NumPy views."""
    from msa_cudacore.pool import PoolViews

    return replace(workload, views=PoolViews(*(view.numpy() for view in workload.views)))


class FakeDevice(FakeStopwatch):
    def __init__(self, ordinal):
        pass

    class _Timing:
        median = 480.0

    def linear_read(self, size):
        return self._Timing()


def test_a_worker_tells_what_it_did_row_by_row(monkeypatch, small, capsys):
    """Skips, failures and figures of a group, and what was finished before is left out."""

    class Failing(FakeCandidate):
        name = "failing"

        def variants(self, workload, bench):
            raise OSError("cannot open /tmp/cache/x")

    class Skipping(FakeCandidate):
        name = "skipping"

        def variants(self, workload, bench):
            raise Unavailable("needs more memory")

    candidates = [kind(small) for kind in (Failing, Skipping, FakeCandidate)]
    monkeypatch.setattr(
        worker,
        "build",
        lambda row, arrays, *, steps, seed: replace(small, row=replace(small.row, name=row.name)),
    )
    monkeypatch.setattr(worker, "choose", lambda device, wanted: small.arrays)
    monkeypatch.setattr(worker, "Stopwatch", FakeDevice)
    monkeypatch.setattr(worker.environment, "clocks", lambda ordinal: None)
    monkeypatch.setattr(peers, "load", lambda group: candidates)
    rows = "tp1_b1_kv200k_q1,tp4_b1_kv1m_q1"
    finished = "fake@tp1_b1_kv200k_q1"
    assert worker.main(["--group", "torch", "--rows", rows, "--samples", "5", "--finished", finished]) == 0
    lines = capsys.readouterr().out.split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith(worker.RECORD)]
    told = [
        (
            one["row"].partition("_")[0],
            one["candidate"],
            one.get("failed") or one.get("skipped") or one["median_us"],
        )
        for one in records
        if "candidate" in one and "started" not in one
    ]
    refusals = [("failing", "OSError: cannot open x"), ("skipping", "needs more memory")]
    assert told == [("tp1", *one) for one in refusals] + [("tp4", *one) for one in refusals] + [
        ("tp4", "fake", 4.0)
    ]
    assert records[0]["arrays"] == "numpy" and [
        one["row"] for one in records if "seconds" in one
    ] == rows.split(",")


def test_an_absent_group_costs_nothing(monkeypatch, capsys):
    def load(group):
        raise Unavailable("nvmath is not installed")

    monkeypatch.setattr(peers, "load", load)
    assert worker.main(["--group", "unfused", "--rows", "tp4_b1_"]) == 0
    assert (
        capsys.readouterr().out
        == worker.RECORD + '{"candidate": "unfused", "skipped": "nvmath is not installed"}\n'
    )
