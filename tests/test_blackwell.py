"""The Blackwell program in the emulator, with every checker on: the contract, and every order of events.

`python tests/test_blackwell.py` runs the long sweep: many random problems, and many schedules of every
program.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from msa_cudacore import blackwell, emulated, prepare_msa_nvfp4_sparse_decode
from msa_cudacore.blackwell import SPLITS, Configuration, choose_configuration
from msa_cudacore.cases import BF16, Case, random_case
from msa_cudacore.contract import Call, validate
from msa_cudacore.exact_cases import exact_cases, fixture, odd_stride_cases
from msa_cudacore.nvfp4 import quantize, swizzle_v_scales
from msa_cudacore.reference import Report, compare

pytest.importorskip("numba")

EXACT = {case.name: case for case in (*exact_cases(), *odd_stride_cases())}


@dataclass(frozen=True)
class Run:
    """How a problem is run: the program and its grid, and the order of events."""

    splits: int | None = None
    multiprocessors: int = 148
    schedule: str = "random"
    seed: int = 0


def configure(call: Call, run: Run) -> Configuration:
    return choose_configuration(call.problem, run.multiprocessors, run.splits)


def launch(
    case: Case, run: Run = Run(), configuration: Configuration | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Run once into poisoned outputs; (out, lse)."""
    call = validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False)
    out, lse = call.out.owner, call.lse.owner
    out[...], lse[...] = np.nan, np.nan
    emulated.launch(call, configuration or configure(call, run), schedule=run.schedule, seed=run.seed)
    return out, lse


def check(case: Case, run: Run = Run(), configuration: Configuration | None = None) -> Report:
    out, lse = launch(case, run, configuration)
    exact = (case.expected_out, case.expected_lse) if case.expected_out is not None else case.exact()
    report = compare(out, lse, *exact)
    assert report, f"{case}, {run}: {report}"
    return report


def small_case(rng: np.random.Generator, **options) -> Case:
    """A random problem of the whole contract, few items so that it is emulated in seconds."""
    case = random_case(rng, work=10, **options)
    while case.batch * case.seqlen_q * case.num_kv_heads > 12:
        case = random_case(rng, work=10, **options)
    return case


def random_run(rng: np.random.Generator, case: Case) -> Run:
    """Any program and schedule; at most 16 CTAs."""
    items = case.batch * case.seqlen_q * case.num_kv_heads
    fitting = [splits for splits in SPLITS if items * splits <= 16]
    return Run(
        splits=rng.choice([None, *fitting]),
        multiprocessors=int(rng.choice([1, 2, 3, 5, 8, 16])),
        schedule=str(rng.choice(["random", "random", "eager", "late"])),
        seed=int(rng.integers(2**31)),
    )


@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name, rng):
    check(EXACT[name], replace(random_run(rng, EXACT[name]), multiprocessors=16))


@pytest.mark.parametrize("part", range(16))
def test_random_problems(part, rng):
    case = small_case(rng)
    check(case, random_run(rng, case))


def every_program() -> dict[str, tuple[int, Configuration]]:
    """KV heads (items) of a problem of three pages a row, and a configuration, for each program and way
    through it."""
    programs = {f"split{splits}": (1, Configuration(splits, 10, False, splits, 0)) for splits in SPLITS}
    programs["persistent"] = (3, Configuration(1, 10, False, 1, 0))
    programs["last round split"] = (5, Configuration(2, 10, False, 2, 2))
    programs["short"] = (2, Configuration(1, 4, True, 1, 0))
    return programs


def schedule_case(rng: np.random.Generator, kv_heads: int) -> Case:
    return random_case(
        rng, batch=1, seqlen_q=1, group=5, num_kv_heads=kv_heads, topk=3, lengths=[330], max_pages=4
    )


SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize("program", every_program())
def test_every_order_of_events_gives_the_same_bits(program, rng):
    kv_heads, configuration = every_program()[program]
    case = schedule_case(rng, kv_heads)
    report = check(case, configuration=configuration)
    assert report.worst_ratio <= 1.25
    results = {
        tuple(array.tobytes() for array in launch(case, Run(schedule=schedule, seed=seed), configuration))
        for schedule, seed in SCHEDULES
    }
    assert len(results) == 1


def scaled_pages(rng: np.random.Generator, sizes: list[float], group: int = 3) -> Case:
    """Keys of page p are `sizes[p]` times a unit normal: the largest score moves from page to page."""
    pages, tokens = len(sizes), 128 * len(sizes)
    keys = rng.normal(size=(pages, 1, 128, 128)) * np.reshape(sizes, (-1, 1, 1, 1))
    (k, k_scale), (v, v_scale) = (quantize(x, 1.0) for x in (keys, rng.normal(size=keys.shape)))
    return Case(
        q=(rng.normal(size=(1, group, 128)) * 8).astype(BF16), k=k, v=v, k_scale=k_scale,
        v_scale=swizzle_v_scales(v_scale), q2k_indices=np.arange(pages, dtype=np.int32).reshape(1, 1, -1),
        page_table=np.arange(pages, dtype=np.int32)[None],
        seqused_k=np.array([tokens - 3], np.int32), name=f"pages of sizes {sizes}",
        # A sharp row is one row of V: without this factor a bfloat16 row, whose rounding floor of zero nobody
        # meets.
        v_global_scale=0.7,
    )


@pytest.mark.parametrize(
    "sizes", [[0.01, 1, 4, 16], [16, 0.01, 16, 0.1], [0.1, 0.1, 0.1, 30], [8, 4, 2, 1]], ids=str
)
@pytest.mark.parametrize("splits", [1, 2])
def test_origins_move_with_the_scores(sizes, splits, rng):
    check(scaled_pages(rng, [size / 4 for size in sizes]), Run(splits=splits))


def test_without_moving_origins_the_weights_would_overflow(rng, monkeypatch):
    """The test above reaches the code it is meant for."""
    text = blackwell.source(Configuration(1, 4, True, 1, 0).constants)
    mutated = text.replace("!(largest(y) <= state.limit)", "state.limit < ORIGIN_MARGIN")
    assert mutated != text
    assert "outside atol" in str(broken(mutated, scaled_pages(rng, [0.01, 0.25, 1, 4]), monkeypatch))


@pytest.mark.parametrize("gap", [8, 12, 16])
def test_keys_beside_an_attention_sink_keep_their_precision(gap, rng):
    """One key `gap` nats above all others, with values of zero: the others alone make the output."""
    case = scaled_pages(rng, [0.02, 0.02])
    k, k_scale, v = case.k.copy(), case.k_scale.copy(), case.v.copy()
    k[1, 0, 5], v[1, 0, 5] = 0, 0
    k[1, 0, 5, 0] = 0x07  # dim 0 is 6, times the scale 1
    k_scale[1, 0, 5] = 0x38
    q = case.q.astype(np.float64)
    q[..., 0] = gap * 128**0.5 / 6
    case = replace(case, q=q.astype(BF16), k=k, k_scale=k_scale, v=v)
    assert check(case).floor > 1e-4


@pytest.mark.parametrize("outlier", [100.0, 1e5, 1e-30])
@pytest.mark.parametrize("part", range(3))
def test_queries_with_outliers_over_keys_of_zero(outlier, part, rng):
    """Where few terms of q fail: one channel dwarfs the others and meets keys that are zero there."""
    case = scaled_pages(rng, [0.25, 0.25], group=16)
    q = case.q.astype(np.float64)
    q[..., 5] *= outlier
    k = case.k.copy()
    k[..., 2] &= 0x0F  # dim 5 is the high nibble of byte 2
    check(replace(case, q=q.astype(BF16), k=k))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_query_that_is_not_finite_spoils_its_own_head_alone(value, rng):
    case = scaled_pages(rng, [0.25, 0.25])
    clean = launch(case)
    q = case.q.copy()
    q[0, 1, 77] = value
    out, lse = launch(replace(case, q=q))
    assert np.isnan(out[0, 1].astype(np.float32)).all() and np.isnan(lse[0, 1])
    for head in (0, 2):
        assert out[0, head].tobytes() == clean[0][0, head].tobytes() and lse[0, head] == clean[1][0, head]


def test_every_scale_byte_of_live_tokens():
    """One token for each scale byte but the NaNs, sign included, on the K and on the V side."""
    case = fixture(seqused=(128,), num_q_heads=16, num_kv_heads=1)
    scales = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    for start in (0, len(scales) - 128):
        tokens = np.repeat(scales[start : start + 128][:, None], 8, axis=1)
        k_scale, v_scale = case.k_scale.copy(), case.v_scale.copy()
        page = int(case.page_table[0, 0])
        k_scale[page, 0], v_scale[page, 0] = tokens, swizzle_v_scales(tokens[::-1])
        q = np.linspace(-1, 1, case.q.size).reshape(case.q.shape).astype(BF16)
        check(replace(
            case, q=q, k_scale=k_scale, v_scale=v_scale, softmax_scale=0.002, expected_out=None,
            expected_lse=None,
        ))


def with_negative_key_scales(rng: np.random.Generator) -> Case:
    """One K scale in twenty has its sign: the lanes that order the scales take different ways."""
    case = scaled_pages(rng, [0.25] * 5)
    signs = (rng.random(case.k_scale.shape) < 0.05).astype(np.uint8) << 7
    return replace(case, k_scale=case.k_scale.view(np.uint8) ^ signs)


def test_a_few_negative_key_scales(rng):
    check(with_negative_key_scales(rng))


def test_lanes_wait_for_each_other_after_negating():
    """A problem in which lanes with negative K scales came late, and read scales that others had overwritten."""
    check(small_case(np.random.default_rng(2880010876)), Run(splits=1, multiprocessors=1, schedule="eager"))


def test_backend_emulated_runs_the_public_function(rng):
    case = small_case(rng, num_kv_heads=2, batch=1, seqlen_q=2)
    runner = prepare_msa_nvfp4_sparse_decode(**case.arguments(), backend="emulated")
    assert runner.backend == "emulated" and "emulated blackwell(sm_100a" in runner.program
    assert runner.workspace_bytes == 0
    for _ in range(2):
        runner.out[...], runner.lse[...] = np.nan, np.nan
        assert runner() is runner.out
        assert compare(runner.out, runner.lse, *case.exact())
        # The second launch reads new lengths and selections from the bound arrays.
        case.seqused_k[...] = np.maximum(case.seqused_k // 2, 1)
        case.q2k_indices[..., -1] = 0


def test_auto_on_host_arrays_stays_the_oracle(rng):
    case = small_case(rng)
    assert prepare_msa_nvfp4_sparse_decode(**case.arguments()).backend == "reference"


@pytest.mark.parametrize("splits", [3, 16])
def test_split_factor_that_is_not_served_is_refused(splits, rng):
    with pytest.raises(ValueError, match=f"splits is {splits}; backend 'emulated' accepts 1, 2, 4, 8"):
        prepare_msa_nvfp4_sparse_decode(**small_case(rng).arguments(), backend="emulated", splits=splits)


def test_an_empty_pool_and_an_empty_batch():
    case = fixture(seqused=(5,))
    empty = {name: getattr(case, name)[:0] for name in ("k", "v", "k_scale", "v_scale")}
    out, lse = launch(replace(case, **empty))
    assert (out.astype(np.float32) == 0).all() and (lse == -np.inf).all()
    runner = prepare_msa_nvfp4_sparse_decode(**case.requests(0, 0).arguments(), backend="emulated")
    assert runner().shape == (0, *case.q.shape[1:])


def broken(text: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> Report | Exception:
    """What comes of a case when the kernel's source is `text`: the comparison, or the first fault of a few
    schedules."""
    from msa_cudacore.ptx import emulator
    from msa_cudacore.ptx.nvrtc import compile_ptx

    module = emulator.load(compile_ptx(text, emulated.ARCHITECTURE))
    monkeypatch.setattr(emulated, "_module", lambda constants: module)
    for schedule, seed in [*SCHEDULES, ("random", 3)]:
        try:
            out, lse = launch(case, Run(schedule=schedule, seed=seed), Configuration(1, 4, True, 1, 0))
        except emulator.Fault as fault:
            return fault
        report = compare(out, lse, *case.exact())
        if not report:
            return report
    return report


# What each line is for, seen by leaving it out: (text, replacement).
SYNCHRONISATION = {
    "weights reach the MMA's proxy": ("ptx::fence_proxy_async_shared_cta();\n      // Also", "// Also"),
    "query terms reach the MMA's proxy": (
        "ptx::fence_proxy_async_shared_cta();\n  arrive_warp(shared.query_full",
        "arrive_warp(shared.query_full",
    ),
    "K scales reach the copy's proxy": (
        "make_uint4(words[4], words[5], words[6], words[7]);\n  ptx::fence_proxy_async_shared_cta();",
        "make_uint4(words[4], words[5], words[6], words[7]);",
    ),
    "V^T is stored before it is announced": (
        "ptx::tcgen05_wait_st();\n      ptx::tcgen05_fence_before_thread_sync();\n      __syncwarp();",
        "__syncwarp();",
    ),
    "V^T and K scales are not overwritten while they are read": (
        "wait(page.barriers().output_done, sequence.parity ^ 1);\n      ptx::tcgen05_fence_after",
        "ptx::tcgen05_fence_after",
    ),
    "weights are complete before they are read": ("wait(barriers.weights_full, page.parity_before());", ""),
    "V^T is complete before it is read": ("wait(barriers.values_full, page.parity_before());", ""),
    "scores are complete before they are read": ("wait(page.barriers().scores_full, sequence.parity);", ""),
    "the score MMA waits for its scales": (
        "wait(page.stage_barriers().keys_ready, page.at.stage_parity);",
        "",
    ),
    "a stage is not refilled while it is read": ("wait(barriers.free, ring.parity ^ 1);", ""),
    "origins are exchanged over a barrier": ("ptx::barrier_cta_sync(SOFTMAX_BARRIER, ROLE_THREADS);", ""),
    "the accumulator is complete before it leaves": (
        "wait(shared.item_done[item_buffer.index], item_buffer.parity);",
        "",
    ),
}


@pytest.mark.parametrize("line", SYNCHRONISATION)
def test_leaving_out_a_synchronisation_is_noticed(line, rng, monkeypatch):
    text = blackwell.source(Configuration(1, 4, True, 1, 0).constants)
    original, replacement = SYNCHRONISATION[line]
    assert text.count(original) == 1, f"{line}: stands {text.count(original)} times in the source"
    case = scaled_pages(rng, [0.25] * 6)
    result = broken(text.replace(original, replacement), case, monkeypatch)
    assert not isinstance(result, Report) or not result, "nothing noticed"


def negative_scales(case: Case, rng: np.random.Generator) -> Case:
    """Half of the K scales negative, as no cache writer makes them."""
    signs = rng.integers(0, 2, case.k_scale.shape, dtype=np.uint8) << 7
    return replace(case, k_scale=(case.k_scale.view(np.uint8) | signs).view(case.k_scale.dtype))


# Exchanges between lanes of one warp: (text, replacement).
LANE_EXCHANGES = {
    "factors of the output": ("factors[lane] = factor;\n  }\n  __syncwarp();", "factors[lane] = factor;\n  }"),
    "K scales change places": ("overwritten below.\n    __syncwarp();", "overwritten below."),
}


@pytest.mark.parametrize("program", every_program())
def test_lanes_of_a_warp_exchange_data_only_behind_a_common_instruction(program, rng, monkeypatch):
    from msa_cudacore.ptx import emulator

    kv_heads, configuration = every_program()[program]
    case = negative_scales(schedule_case(rng, kv_heads), rng)
    monkeypatch.setattr(emulated, "launch", partial(emulated.launch, checks=emulator.Checks(warp_races=True)))
    for schedule, seed in SCHEDULES[1:3]:
        check(case, Run(schedule=schedule, seed=seed), configuration)


@pytest.mark.parametrize("line", LANE_EXCHANGES)
def test_lanes_of_a_warp_that_do_not_wait_for_each_other_are_noticed(line, rng, monkeypatch):
    from msa_cudacore.ptx import emulator
    from msa_cudacore.ptx.nvrtc import compile_ptx

    configuration = Configuration(1, 4, True, 1, 0)
    text = blackwell.source(configuration.constants)
    assert text.count(LANE_EXCHANGES[line][0]) == 1
    module = emulator.load(compile_ptx(text.replace(*LANE_EXCHANGES[line]), emulated.ARCHITECTURE))
    case = negative_scales(schedule_case(rng, 1), rng)
    call = validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False)
    monkeypatch.setattr(emulated, "_module", lambda constants: module)
    with pytest.raises(emulator.Fault, match="no instruction that both lanes execute together"):
        emulated.launch(call, configuration, schedule="eager", checks=emulator.Checks(warp_races=True))


def sweep(problems: int, schedules: int, seed: int) -> None:
    """The long run behind the tests above; prints one line for each problem and program."""
    start, worst = time.monotonic(), 0.0
    for index in range(problems):
        rng = np.random.default_rng([seed, index])
        case = small_case(rng)
        run = random_run(rng, case)
        report = check(case, run)
        worst = max(worst, report.worst_ratio)
        print(f"{index}: {case}; {run}: {report.worst_ratio:.3f}", flush=True)
    programs = every_program().items()
    for (name, (kv_heads, configuration)), number in itertools.product(programs, range(schedules)):
        rng = np.random.default_rng([seed, number])
        run = Run(schedule=["random", "random", "random", "eager", "late"][number % 5], seed=number)
        worst = max(worst, check(schedule_case(rng, kv_heads), run, configuration).worst_ratio)
        print(f"{name}, schedule {run.schedule} {run.seed}", flush=True)
    print(f"{problems} problems and {schedules} schedules of every program without a finding; "
          f"worst row {worst:.3f} of its floor; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sweep(*(numbers + [200, 20, 1][len(numbers) :]))
