"""The public function end to end, on every array library and backend that this machine has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msa_cudacore import prepare_msa_nvfp4_sparse_decode
from msa_cudacore.cases import LAYOUTS, random_case
from msa_cudacore.exact_cases import exact_cases, expect, fixture, odd_stride_cases
from msa_cudacore.hard_cases import attention_sink
from msa_cudacore.reference import compare, round_to_bf16
from msa_cudacore.transfer import E4M3

EXACT = {case.name: case for case in exact_cases() + odd_stride_cases()}


def bits(results: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    return tuple(array.tobytes() for array in results)


@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(target, name):
    target.check(EXACT[name])


@pytest.mark.parametrize("name", [name for name, case in EXACT.items() if case.batch > 1])
def test_exact_answers_of_a_part_of_the_batch(main_target, name):
    case = EXACT[name].requests(1, EXACT[name].batch)
    assert case.expected_out is not None
    main_target.check(case)


@pytest.mark.parametrize("name", EXACT)
def test_exact_answers_for_every_split(main_target, name):
    for splits in main_target.splits:
        main_target.check(EXACT[name], splits=splits)


def test_reference_backend_is_the_oracle_rounded_once(rng):
    case = random_case(rng)
    runner = prepare_msa_nvfp4_sparse_decode(**case.arguments(), backend="reference")
    out, lse = case.exact()
    assert runner().tobytes() == round_to_bf16(out).tobytes()
    assert runner.lse.tobytes() == lse.astype(np.float32).tobytes()


def test_reference_backend_rounds_once():
    """Just above a tie of bfloat16; a stop at float32 would drop the last term and go to even."""
    case = replace(fixture(seqused=(1,)), v_global_scale=1 + 2.0**-8 + 2.0**-40)
    out = prepare_msa_nvfp4_sparse_decode(**case.arguments(), backend="reference")()
    assert (out.astype(float) == 1 + 2.0**-7).all()


@pytest.mark.parametrize("part", range(6))
def test_random_problems(target, part, rng):
    """On a GPU 50 problems a part (300 in all) through torch and a third of that through CuPy; 4 a part on
    the host."""
    count = 4 if target.on_host else {"torch": 50, "cupy": 17}[target.framework]
    for _ in range(count):
        case = random_case(rng)
        options = {"splits": int(rng.choice(target.splits))} if rng.random() < 0.5 else {}
        target.check(case, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(64, 4), (32, 2), (16, 1), (8, 1), (1, 1), (3, 1), (10, 2), (7, 1), (36, 3)]
)
def test_head_geometries(main_target, heads, kv_heads, rng):
    main_target.check(
        random_case(
            rng, group=heads // kv_heads, num_kv_heads=kv_heads, seqlen_q=2, lengths=np.array([700, 300])
        )
    )


@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32])
def test_query_tokens(main_target, seqlen_q, rng):
    lengths = np.array([seqlen_q - 1, seqlen_q, 128 + seqlen_q // 2, 513])
    main_target.check(random_case(rng, seqlen_q=seqlen_q, group=4, num_kv_heads=2, topk=16, lengths=lengths))


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 4095])
def test_lengths(main_target, length, rng):
    main_target.check(
        random_case(rng, group=16, num_kv_heads=1, seqlen_q=2, topk=16, lengths=np.array([length]))
    )


@pytest.mark.parametrize("topk", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64])
def test_top_k(main_target, topk, rng):
    main_target.check(
        random_case(rng, topk=topk, group=5, num_kv_heads=2, seqlen_q=1, lengths=np.array([8000, 700]))
    )


@pytest.mark.parametrize("scale_dtype", [np.uint8, E4M3], ids=["uint8", "float8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_scale_types(target, layout, scale_dtype, rng):
    target.check(
        random_case(
            rng,
            layout=layout,
            scale_dtype=scale_dtype,
            num_kv_heads=3,
            batch=3,
            seqlen_q=2,
            strided_inputs=True,
        )
    )


def test_layout_and_scale_type_do_not_change_bits(main_target, rng):
    case = random_case(rng, layout="interleaved", scale_dtype=np.uint8, num_kv_heads=2, batch=3)
    dense = replace(case, **{name: getattr(case, name).copy() for name in ("k", "v", "k_scale", "v_scale")})
    typed = replace(dense, k_scale=dense.k_scale.view(E4M3), v_scale=dense.v_scale.view(E4M3))
    assert bits(main_target.run(case)) == bits(main_target.run(dense)) == bits(main_target.run(typed))


def test_strided_inputs_do_not_change_bits(main_target, rng):
    case = random_case(rng, strided_inputs=True, batch=3, seqlen_q=2)
    dense = {name: getattr(case, name).copy() for name in ("q", "q2k_indices", "page_table", "seqused_k")}
    assert bits(main_target.run(case)) == bits(main_target.run(replace(case, **dense)))


def test_token_major_selection_as_a_transposed_view(target):
    """As many requests as KV heads: shapes cannot tell the two orders apart, strides do."""
    case = EXACT["each head reads its own selection"]
    token_major = np.ascontiguousarray(case.q2k_indices.transpose(1, 0, 2))
    target.check(replace(case, q2k_indices=token_major.transpose(1, 0, 2)))


@pytest.mark.parametrize("deviation", [0.01, 10.0, 30.0])
def test_flat_and_peaked_scores(main_target, deviation, rng):
    case = random_case(
        rng,
        score_deviation=deviation,
        hostile=False,
        lengths=np.array([2048, 1500]),
        group=16,
        num_kv_heads=2,
    )
    main_target.check(case)


@pytest.mark.parametrize("gap", [4, 8, 12])
def test_an_attention_sink_leaves_the_others_their_precision(main_target, gap, rng):
    case = attention_sink(rng, gap, pages=16)
    for splits in main_target.splits:
        main_target.check(case, splits=splits)


@pytest.mark.parametrize("exponent", [-30, -10, 10, 30])
def test_queries_far_from_one(main_target, exponent, rng):
    """A power of two moved between q and softmax_scale changes nothing."""
    case = random_case(rng, hostile=False, batch=2, score_deviation=1.0)
    scale = 128**-0.5 if case.softmax_scale is None else case.softmax_scale
    moved = replace(
        case,
        q=(case.q.astype(np.float32) * 2.0**exponent).astype(case.q.dtype),
        softmax_scale=scale * 2.0**-exponent,
    )
    main_target.check(moved)


def test_one_element_of_the_query_dwarfs_the_others(main_target, rng):
    case = random_case(rng, hostile=False, batch=2, score_deviation=1.0, group=8, num_kv_heads=2)
    case.q[..., 5] *= 64
    main_target.check(replace(case, softmax_scale=0.01))


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [(2.0**-20, 2.0**-20), (1.0, 448 * 6.0), (3e-5, 0.37), (1.0, 1.7e30), (1.0, 3e-30)],
)
def test_global_scales(main_target, k_scale, v_scale, rng):
    """The bar's 0.01 speaks of results near 1: a V scale makes results and errors larger alike, whatever the
    arithmetic, and an element that cancels with them. So results are held to the bar at a scale between 1
    and 2, and follow its powers of two bit for bit.
    """
    case = random_case(rng, hostile=False, batch=2)
    case = replace(case, k_global_scale=k_scale, softmax_scale=0.05 / k_scale * 2.0**-6)
    significand, exponent = np.frexp(v_scale)
    near_1 = replace(case, v_global_scale=2 * float(significand))
    main_target.check(near_1)
    out, lse = main_target.run(near_1)
    scaled_out, scaled_lse = main_target.run(replace(case, v_global_scale=v_scale))
    assert bits((scaled_out, scaled_lse)) == bits(((out * 2.0 ** (exponent - 1)).astype(out.dtype), lse))


def test_every_scale_byte_of_live_tokens(main_target):
    """All 254 finite E4M3 bytes, sign bit included, as K and as V scales."""
    finite = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    case = fixture(seqused=(128,), v_by_block=(1, 1, 1, 1))
    rng = np.random.default_rng(3)
    for view in (case.k_scale, case.v_scale):
        view[2] = rng.permutation(np.resize(finite, view[2].size)).reshape(view[2].shape)
    case.k[2] = rng.integers(0, 256, case.k[2].shape, dtype=np.uint8)
    case.v[2] = rng.integers(0, 256, case.v[2].shape, dtype=np.uint8)
    case.q[...] = rng.normal(size=case.q.shape)
    main_target.check(replace(case, softmax_scale=2.0**-14, v_global_scale=2.0**-8))


def test_every_code_in_every_place(main_target):
    """One key, so out is the dequantised V row itself and lse the dequantised K element under a one-hot
    query."""
    for shift in range(16):
        case = fixture(seqused=(1,), num_q_heads=16, num_kv_heads=1)
        codes = (np.arange(128) + shift) % 16
        case.v[2, 0, 0] = case.k[2, 0, 0] = codes[0::2] | codes[1::2] << 4
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
        case.q[0, np.arange(16), shift * 8 % 128 + np.arange(16) // 2] = 1.0
        expected = values[shift * 8 % 128 + np.arange(16) // 2]
        main_target.check(
            expect(replace(case, softmax_scale=1.0), f"codes shifted by {shift}", values, expected[None])
        )


# What other inputs must not change


def test_every_row_is_written(target):
    """Whatever lay in out and lse before, the same bytes lie there afterwards, empty rows included."""
    case = fixture(seqused=(0, 130, 300), rows=[[0], [0, 1], []])
    for splits in target.splits:
        moved = target.move(case)
        runner = target.prepare(moved, splits=splits)
        seen = []
        for poison in (np.nan, 7.0):
            target.fill(runner.out, poison)
            target.fill(runner.lse, poison)
            runner()
            seen.append(target.results(runner))
        assert bits(seen[0]) == bits(seen[1])
        out, lse = seen[0]
        assert not out[0].view(np.uint16).any() and (lse[0] == -np.inf).all(), "an empty row is +0 and -inf"
        assert not out[2].view(np.uint16).any() and (lse[2] == -np.inf).all()
        assert (out[1].astype(float) == 1).all()


def test_scratch_of_an_earlier_launch_does_not_leak(main_target):
    clean = EXACT["a hole first"]
    poisoned = fixture(seqused=(512,), rows=[[0, 1, 2, 3]])
    poisoned.k_scale[...] = 0x7F
    poisoned.v_scale[...] = 0xFF
    for splits in main_target.splits:
        first = main_target.run(clean, splits=splits)
        main_target.run(poisoned, splits=splits)
        for _ in range(3):
            assert bits(main_target.run(clean, splits=splits)) == bits(first)


def test_same_inputs_twice_give_the_same_bits(target, rng):
    for splits in (None, *target.splits):
        case = random_case(rng, batch=4)
        assert bits(target.run(case, splits=splits)) == bits(target.run(case, splits=splits))


def test_rows_do_not_depend_on_their_batch(main_target, rng):
    """With a fixed split factor the bits of a request are the same alone and in any company."""
    case = random_case(
        rng, batch=9, seqlen_q=2, num_kv_heads=2, topk=16, layout="planar", strided_inputs=False
    )
    for splits in main_target.splits:
        out, lse = main_target.run(case, splits=splits)
        for request in range(case.batch):
            rows = slice(request * 2, request * 2 + 2)
            alone = main_target.run(case.requests(request, request + 1), splits=splits)
            assert bits((out[rows], lse[rows])) == bits(alone), f"request {request}, splits {splits}"


def test_rows_differ_by_two_units_at_most_when_splits_follow_the_batch(main_target, rng):
    """The automatic split factor depends on the batch; a row then changes by roundings alone."""
    case = random_case(
        rng, group=16, num_kv_heads=2, seqlen_q=1, topk=16, lengths=rng.integers(1, 2049, 128), hostile=False
    )
    first = main_target.run(case.requests(0, 1))[0]
    for batch in (8, 32, 128):
        out = main_target.run(case.requests(0, batch))[0][:1]
        # bfloat16 has 8 significant bits; small elements carry the absolute error of the row's large ones.
        unit = 2.0**-7 * np.maximum(
            np.abs(first.astype(float)), np.abs(first.astype(float)).max(axis=-1, keepdims=True) / 8
        )
        assert (np.abs(out.astype(float) - first.astype(float)) <= 2 * unit).all(), f"batch {batch}"


@pytest.mark.parametrize("splits", [None, 1])
def test_width_of_the_page_table_does_not_matter(main_target, splits, rng):
    case = random_case(
        rng, group=8, num_kv_heads=2, seqlen_q=1, topk=16, lengths=np.array([500]), max_pages=4
    )
    results = []
    for columns in (4, 5, 16, 64, 512):
        table = np.full((1, columns), -1, np.int32)
        table[:, :4] = case.page_table
        wide = replace(
            case, page_table=table, q2k_indices=np.where(case.q2k_indices < 4, case.q2k_indices, -1)
        )
        results.append(main_target.run(wide, splits=splits))
        assert compare(*results[-1], *wide.exact())
    if splits is not None:
        assert len({bits(result) for result in results}) == 1


def test_selected_blocks_of_every_count_and_split(main_target, rng):
    """Some CTAs of a split find nothing to do."""
    lengths = np.full(1, 16 * 128)
    case = random_case(rng, group=16, num_kv_heads=2, seqlen_q=1, topk=16, lengths=lengths, hostile=False)
    for count in (1, 2, 3, 7, 15, 16):
        case.q2k_indices[...] = [*range(count), *[-1] * (16 - count)]
        for splits in main_target.splits:
            main_target.check(case, splits=splits)


def test_unsorted_rows_within_tolerance_of_sorted_ones(main_target, rng):
    case = random_case(rng, seqlen_q=1, topk=16, lengths=np.full(2, 2048), hostile=False)
    case.q2k_indices[...] = rng.permuted(np.broadcast_to(np.arange(16), case.q2k_indices.shape), axis=-1)
    main_target.check(case)


def test_split_selection_merges_by_natural_lse(main_target, rng):
    """Two calls over halves of the selection, weighted by exp(lse), give the whole."""
    case = random_case(rng, batch=2, seqlen_q=1, topk=4, lengths=np.array([512, 450]), hostile=False)
    case.q2k_indices[...] = [0, 1, 2, 3]
    exact = case.exact()[0]
    for splits in main_target.splits:
        parts = []
        for ids in ([0, 2, -1, -1], [1, 3, -1, -1]):
            out, lse = main_target.run(
                replace(case, q2k_indices=np.broadcast_to(np.int32(ids), case.q2k_indices.shape)),
                splits=splits,
            )
            parts.append((out.astype(np.float64), lse.astype(np.float64)))
        weights = np.exp([lse - np.maximum(parts[0][1], parts[1][1]) for _, lse in parts])
        merged = (
            sum(out * weight[..., None] for (out, _), weight in zip(parts, weights))
            / weights.sum(axis=0)[..., None]
        )
        error = np.linalg.norm(merged - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        assert (error <= 1e-2).all()


def test_illegal_ids_equal_their_absence(main_target, rng):
    case = random_case(rng, batch=3, seqlen_q=2, topk=16, lengths=np.array([1000, 1, 300]), hostile=False)
    bad = np.array([-2, -(2**31), 2**31 - 1, 2**30, case.page_table.shape[1], case.page_table.shape[1] + 1])
    spoiled = np.where(
        case.q2k_indices < 0, rng.choice(bad, case.q2k_indices.shape), case.q2k_indices
    ).astype(np.int32)
    for splits in main_target.splits:
        clean = main_target.run(case, splits=splits)
        assert bits(main_target.run(replace(case, q2k_indices=spoiled), splits=splits)) == bits(clean)


def test_a_table_row_preceded_by_a_poisonous_word(main_target):
    """-1 as an offset would read the word before the row."""
    case = EXACT["a hole after every id"]
    words = np.full((2, 4), 2**31 - 1, np.int32)
    words[1] = case.page_table[0]
    main_target.check(replace(case, page_table=words[1:]))


def test_more_items_than_a_grid_axis_holds(main_target):
    """65,540 items; every request reads page 0."""
    batch = 16_385
    base = fixture(seqused=(100,), num_q_heads=4)
    base.v[...] = 0x55
    case = replace(
        base,
        q=np.zeros((batch, 4, 128), base.q.dtype),
        q2k_indices=np.tile(base.q2k_indices, (1, batch, 1)),
        page_table=np.zeros((batch, 1), np.int32),
        seqused_k=np.full(batch, 100, np.int32),
    )
    main_target.check(expect(case, "65,540 items", 3.0, np.log(100)))


def test_an_empty_batch(target):
    out, lse = target.run(fixture(seqused=()))
    assert out.shape == (0, 64, 128) and lse.shape == (0, 64)


def test_no_pages_and_no_table_columns(main_target):
    base = fixture(seqused=(5,))
    for case in (
        replace(base, page_table=np.zeros((1, 0), np.int32)),
        replace(base, **{name: getattr(base, name)[:0] for name in ("k", "v", "k_scale", "v_scale")}),
    ):
        main_target.check(expect(case, "nothing to read", 0.0, -np.inf))


def test_lengths_at_the_ends_of_int32(main_target):
    """Two query tokens, so that a 32-bit position would wrap around."""
    case = fixture(seqused=(2**31 - 1, -(2**31), -1), rows=[[0, 3]] * 6, seqlen_q=2)
    out = np.array([1.0, 1, 0, 0, 0, 0])[:, None, None]
    main_target.check(expect(case, "ends of int32", out, [np.log(256)] * 2 + [-np.inf] * 4))


def test_outputs_of_the_caller_are_used(target, rng):
    """Strided ones included; the gaps between rows are left alone."""
    case = random_case(rng, batch=2, seqlen_q=1, group=3, num_kv_heads=2)
    moved = target.move(case)
    wide_out, wide_lse = target.move(replace(case, q=np.zeros((4, 8, 128), case.q.dtype))).q, None
    runner = target.prepare(moved, out=wide_out[1:3, 1:7])
    target.fill(wide_out, 5.0)
    runner()
    wide_lse = runner.lse
    out = target.results(runner)[0]
    assert compare(out, target.results(runner)[1], *case.exact())
    from msa_cudacore.transfer import BF16, to_numpy

    everything = to_numpy(wide_out)
    everything = (everything.view(BF16) if everything.dtype == np.uint16 else everything).astype(float)
    everything[1:3, 1:7] = 5.0
    assert (everything == 5.0).all() and wide_lse.shape == (2, 6)


def test_a_runner_sees_what_is_written_into_its_arrays(target, rng):
    """New queries, selections, pages, lengths and cache bytes, without preparing again."""
    shape = dict(group=4, num_kv_heads=2, seqlen_q=2, topk=16, layout="planar", strided_inputs=False)
    lengths = [rng.integers(1, 900, 3) for _ in range(3)]
    cases = [random_case(rng, lengths=n, max_pages=8, scale_dtype=np.uint8, **shape) for n in lengths]
    pages = min(case.k.shape[0] for case in cases)
    cases = [
        replace(
            c,
            **{n: getattr(c, n)[:pages] for n in ("k", "v", "k_scale", "v_scale")},
            k_global_scale=0.5,
            v_global_scale=0.25,
            softmax_scale=0.02,
        )
        for c in cases
    ]
    moved = target.move(cases[0])
    runner = target.prepare(moved)
    for case in cases:
        fresh = target.move(case)
        for name in ("q", "q2k_indices", "page_table", "seqused_k", "k", "v", "k_scale", "v_scale"):
            getattr(moved, name)[...] = getattr(fresh, name)
        runner()
        assert compare(*target.results(runner), *case.exact())


def test_runner_reports_what_was_chosen(target):
    case = target.move(fixture())
    runner = target.prepare(case)
    if target.backend == "auto":
        assert (runner.backend == "reference") == target.on_host
    else:
        assert runner.backend == target.backend
    assert runner.splits in (1, 2, 4, 8) and runner.workspace_bytes >= 0
    assert runner.program and f"splits={runner.splits}" in repr(runner)
    assert type(runner.out) is type(case.q) and type(runner.lse) is type(case.q)
    assert tuple(runner.out.shape) == (1, 64, 128) and tuple(runner.lse.shape) == (1, 64)
