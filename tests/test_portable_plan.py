"""The choice of a configuration is a pure function of the problem and the device's facts."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_cudacore import msa_nvfp4_decode_workspace_size
from msa_cudacore.cases import random_case
from msa_cudacore.contract import Problem, validate
from msa_cudacore.launch import device as device_module
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.portable import (
    ENTRY, SPLITS, Configuration, PortableProgram, choose_configuration, exact_arch, kernel_arguments, source,
)


def device(capability=(9, 0), multiprocessors=132) -> DeviceFacts:
    shared = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) * 1024
    return DeviceFacts(0, "test", capability, multiprocessors, shared, shared + 1024, capability[0] >= 9)


def problem(batch=1, seqlen_q=1, hkv=4, group=16, topk=16, max_pages=64) -> Problem:
    return Problem(batch, seqlen_q, hkv * group, hkv, topk, max_pages, num_pages=1)


def test_large_batches_are_not_split_and_small_ones_are():
    assert choose_configuration(problem(batch=128), device()).splits == 1
    assert choose_configuration(problem(batch=1), device()).splits > 1


def test_leftovers_smooth_the_steps_behind_one_and_two_items_for_each_multiprocessor():
    def chosen(items, **sizes):
        c = choose_configuration(problem(batch=items, hkv=1, **sizes), device())
        assert c.pairs == (c.piece_slots == 2)
        return c.item_slots, c.pieces, c.piece_slots

    assert [chosen(items) for items in (132, 133, 148, 149, 165, 166, 198, 199)] == [
        (1, 0, 0), (1, 8, 1), (1, 8, 1), (1, 4, 1), (1, 4, 1), (1, 4, 2), (1, 4, 2), (2, 0, 0),
    ]
    assert [chosen(items) for items in (264, 265, 280, 281, 330, 331)] == [
        (2, 0, 0), (2, 8, 1), (2, 8, 1), (2, 4, 1), (2, 4, 1), (4, 0, 0),
    ]
    assert chosen(133, max_pages=7) == (1, 4, 1) and chosen(133, max_pages=4) == (1, 0, 0)


def test_pairs_of_ctas_share_leftovers_where_clusters_of_two_take_all_multiprocessors():
    def chosen(facts, **sizes):
        return choose_configuration(problem(hkv=1, **sizes), facts)

    pairs = chosen(device(), batch=192)
    assert pairs.pairs and pairs.cluster == 2 and pairs.ctas(192, 132) == 132
    # They meet neither in a workspace nor by counters.
    assert pairs.workspace_bytes(problem(batch=192, hkv=1), 132) == pairs.counters(192, 132) == 0
    assert not chosen(device(multiprocessors=131), batch=190).pairs
    assert not chosen(device(), batch=192, topk=33).pairs
    stored = chosen(device(), batch=192, topk=33)
    assert stored.cluster == 1 and stored.counters(192, 132) == 60 * 4


def test_more_items_than_four_for_each_multiprocessor():
    """One more that the slots of a CTA share; eight side by side, or slots that go on by themselves where a
    round of CTAs would not be full.
    """

    def chosen(items, **sizes):
        c = choose_configuration(problem(batch=items, hkv=1, **sizes), device())
        if c.last_splits > 1:
            return "split"
        return "goes on" if c.many_items else "shared" if c.shared_item else c.item_slots

    assert [chosen(items) for items in (528, 529, 660, 661, 792, 793)] == [
        4, "shared", "shared", 8, 8, "split",
    ]
    assert [chosen(items) for items in (924, 925, 1024, 1056, 1057, 1188, 1189, 1980, 1981, 2112, 2113)] == [
        "split", 8, 8, 8, "shared", "shared", "split", "goes on", 8, 8, "shared",
    ]
    # A shared item has more than a page for each slot; eight items have no room for more than 32 ids each.
    assert [chosen(600, max_pages=pages) for pages in (4, 5)] == [1, "shared"]
    assert [chosen(1100, max_pages=pages) for pages in (4, 5)] == ["goes on", "shared"]
    assert [chosen(items, topk=33) for items in (528, 529, 660, 661, 924, 925, 1056, 1057, 1189)] == [
        4, "shared", "shared", "goes on", "split", 4, 4, "shared", "split",
    ]

    def ctas(items):
        return choose_configuration(problem(batch=items, hkv=1), device()).ctas(items, 132)

    assert [ctas(items) for items in (528, 529, 768, 850, 1024, 2000)] == [132, 132, 132, 132, 132, 250]
    assert [ctas(items) for items in (1057, 1188, 2113)] == [264, 264, 528]
    # A row has the same bits in every batch: the configuration depends on nothing else.
    for items in (768, 850):
        assert choose_configuration(problem(batch=items, hkv=1), device(), 1).item_slots == 4
        assert choose_configuration(problem(batch=items, hkv=1), device((10, 0), 148)).item_slots == 1


def test_the_last_item_slots_have_splits_where_few_multiprocessors_would_have_items_for_them():
    def chosen(items, **sizes):
        c = choose_configuration(problem(batch=items, hkv=1, **sizes), device())
        return c.item_slots, c.last_splits

    assert [chosen(items) for items in (331, 396, 397, 412, 413, 429, 430, 462, 463, 528)] == [
        (4, 1), (4, 1), (4, 8), (4, 8), (4, 4), (4, 4), (4, 2), (4, 2), (4, 1), (4, 1),
    ]
    assert [chosen(items) for items in (792, 793, 825, 826, 858, 859, 924, 925)] == [
        (8, 1), (8, 8), (8, 8), (8, 4), (8, 4), (8, 2), (8, 2), (8, 1),
    ]
    assert [chosen(397, max_pages=pages) for pages in (1, 3, 4, 7, 8)] == [
        (1, 1), (4, 2), (4, 4), (4, 4), (4, 8),
    ]
    # In rounds of CTAs; eight items have no room for more than 32 ids each.
    assert [chosen(items) for items in (1188, 1189, 1238, 1287, 1386, 1387)] == [
        (4, 1), (4, 8), (4, 4), (4, 4), (4, 2), (4, 1),
    ]
    assert [chosen(items) for items in (1584, 1585, 1650, 1716, 1848, 1849)] == [
        (4, 1), (8, 8), (8, 8), (8, 4), (8, 2), (4, 1),
    ]
    assert [chosen(items, topk=33) for items in (440, 800, 1585, 1849)] == [(4, 2), (4, 8), (4, 8), (4, 1)]
    c = choose_configuration(problem(batch=440, hkv=1), device())
    assert c.ctas(440, 132) == 132 and c.leftovers(440, 132) == 44
    assert c.counters(440, 132) == 44 * 4
    assert c.workspace_bytes(problem(batch=440, hkv=1), 132) == 44 * 2 * 16 * (128 + 2) * 4


def clusters_that_fit(configuration: Configuration) -> int:
    """On an H200, whose GPCs have 18 multiprocessors, 16 and 8. Registers let 12 or 16 warps be resident."""
    registers = {4: 3, 8: 2, 16: 1}[configuration.block // 32]
    shared = device().shared_bytes_per_multiprocessor // (configuration.shared_bytes + 1024)
    resident = min(registers, shared)
    return sum(gpc * resident // configuration.cluster for gpc in [18] * 6 + [16, 8])


def test_small_batches_cooperate_in_clusters_that_fit():
    """An H200's 132 SMs have room for 15 clusters of eight and 30 of four with one CTA an SM, for 45 and 92 with
    three. One more than fit would wait.
    """

    def chosen(items, **sizes):
        c = choose_configuration(problem(batch=items, hkv=1, **sizes), device())
        return c.splits, c.page_slots, c.warps_per_page, c.cooperative

    assert [chosen(items) for items in (1, 8)] == [(16, 1, 8, True)] * 2
    assert [chosen(items) for items in (9, 15)] == [(8, 1, 8, True)] * 2
    assert chosen(16) == (8, 2, 4, True)
    assert [chosen(items) for items in (17, 30)] == [(4, 4, 4, True)] * 2
    assert [chosen(items) for items in (31, 33)] == [(4, 2, 4, True)] * 2
    assert [chosen(items) for items in (34, 44)] == [(8, 1, 4, True)] * 2
    assert [chosen(items) for items in (45, 64, 66)] == [(2, 4, 4, True)] * 3
    assert [chosen(items) for items in (67, 88)] == [(4, 1, 4, True)] * 2
    assert [chosen(items) for items in (89, 132)] == [(1, 4, 4, False)] * 2
    for items, pages in itertools.product(range(1, 133), (1, 2, 3, 4, 5, 8, 9, 16)):
        c = choose_configuration(problem(batch=items, hkv=1, max_pages=pages), device())
        workspace = (items == 16 and pages > 8) or (items in (31, 32, 33) and pages > 4)
        assert c.cluster_merge == (c.splits > 1 and not workspace)
        assert not workspace or items * c.splits <= 132
        # Two clusters of 16 with eight warps a CTA find room where one of their CTAs has an SM to itself.
        assert not c.cluster_merge or items <= clusters_that_fit(c)


def test_few_pages_are_cooperated_on():
    """Up to two pages, four, and eight, by the number of items."""

    def chosen(items, pages):
        c = choose_configuration(problem(batch=items, hkv=1, max_pages=pages), device())
        return c.splits, c.page_slots, c.warps_per_page, c.cooperative

    assert [chosen(items, 1) for items in (1, 66, 67, 132, 133, 660)] == [
        (1, 1, 8, True), (1, 1, 8, True), (1, 1, 4, True), (1, 1, 4, True), (1, 1, 4, True), (1, 1, 4, True),
    ]
    assert [chosen(items, 2) for items in (1, 66, 67, 132, 133, 660)] == [
        (2, 1, 8, True), (2, 1, 8, True), (1, 2, 4, True), (1, 2, 4, True), (1, 1, 4, True), (1, 1, 4, True),
    ]
    for pages in (3, 4):
        assert [chosen(items, pages) for items in (1, 30, 31, 66, 67, 132)] == [
            (4, 1, 8, True), (4, 1, 8, True), (2, 2, 4, True), (2, 2, 4, True), (1, 4, 4, True), (1, 4, 4, True),
        ]
        assert [chosen(items, pages) for items in (133, 198, 199, 396, 397, 528, 529, 660)] == [
            (2, 1, 4, True), (2, 1, 4, True), (1, 1, 4, True), (1, 1, 4, True), (1, 1, 4, False),
            (1, 1, 4, False), (1, 1, 4, True), (1, 1, 4, True),
        ]
    for pages in (5, 8):
        assert [chosen(items, pages) for items in (1, 30, 31, 33, 34, 44, 45, 66, 67, 88, 89, 132)] == [
            (8, 1, 8, True), (8, 1, 8, True), (4, 2, 4, True), (4, 2, 4, True), (8, 1, 4, True), (8, 1, 4, True),
            (2, 4, 4, True), (2, 4, 4, True), (4, 1, 4, True), (4, 1, 4, True), (1, 4, 4, True), (1, 4, 4, True),
        ]
    # The five CTAs that fit an SM.
    five = choose_configuration(problem(batch=660, hkv=1, max_pages=2), device())
    assert five.ctas(660, 132) == 660 and 5 * (five.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "splits"),
    [
        ((9, 0), 132, 16), ((9, 0), 128, 16), ((9, 0), 114, 8), ((9, 0), 60, 8), ((10, 0), 148, 8),
        ((8, 0), 108, 8),
    ],
)
def test_a_cluster_of_16_is_for_parts_that_must_have_room_for_it(capability, multiprocessors, splits):
    assert choose_configuration(problem(batch=1, hkv=1), device(capability, multiprocessors)).splits == splits


def test_a_split_never_exceeds_the_pages_there_are():
    assert choose_configuration(problem(max_pages=1), device()).splits == 1
    assert choose_configuration(problem(max_pages=0), device()).splits == 1


def test_workspace_is_for_partials_that_no_cluster_merges():
    program, sizes = PortableProgram(), problem(batch=2)
    assert program.plan(sizes, device((9, 0)), 4).workspace_bytes == 0
    assert program.plan(sizes, device((8, 0)), 4).workspace_bytes == sizes.items * 4 * 16 * (128 + 2) * 4
    assert program.plan(sizes, device((8, 0)), 1).workspace_bytes == 0
    leftovers = problem(batch=150, hkv=1)
    assert program.plan(leftovers, device(), None).workspace_bytes == 18 * 4 * 16 * (128 + 2) * 4
    # Shared items meet there, too, but in a CTA of their own, which needs no counters in memory.
    shared = problem(batch=150)
    assert program.plan(shared, device(), None).workspace_bytes == 72 * 4 * 16 * (128 + 2) * 4
    assert choose_configuration(shared, device()).counters(shared.items, 132) == 0


@given(
    batch=st.integers(0, 70_000), seqlen_q=st.integers(1, 32), hkv=st.integers(1, 8),
    group=st.integers(1, 16),
    topk=st.integers(1, 64), max_pages=st.integers(0, 20_000), splits=st.sampled_from((None, *SPLITS)),
    capability=st.sampled_from(((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))),
    multiprocessors=st.integers(1, 200),
)
def test_every_configuration_fits_its_device(
    batch, seqlen_q, hkv, group, topk, max_pages, splits, capability, multiprocessors
):
    facts = device(capability, multiprocessors)
    chosen = choose_configuration(problem(batch, seqlen_q, hkv, group, topk, max_pages), facts, splits)
    assert chosen.shared_bytes <= facts.shared_bytes_per_block
    assert chosen.splits in (*SPLITS, 16) and (splits is None or chosen.splits == splits)
    assert chosen.splits < 16 or facts.clusters
    assert 32 * chosen.ids_per_lane >= topk
    assert not chosen.cluster_merge or (chosen.splits > 1 and facts.clusters)
    assert chosen.block <= 512
    items = batch * seqlen_q * hkv
    ctas = chosen.ctas(items, multiprocessors)
    # Item slot s of CTA c takes item c + s * ctas: every item is taken, and no CTA is without one. Leftovers
    # are the items beyond, and each of their pieces finds a page slot.
    leftovers = chosen.leftovers(items, multiprocessors)
    assert chosen.many_items or ctas * chosen.item_slots >= (items - leftovers) * chosen.splits
    assert ctas <= items * chosen.splits
    assert leftovers * chosen.pieces <= ctas * chosen.item_slots * chosen.piece_slots
    assert (leftovers > 0) == (chosen.pieces > 0 or chosen.shared_item or chosen.last_splits > 1)
    last_slots = ctas * (chosen.item_slots - chosen.whole_slots)
    assert chosen.last_splits == 1 or leftovers * chosen.last_splits <= last_slots
    assert not chosen.shared_item or leftovers <= ctas


@given(batch=st.integers(1, 300), other=st.integers(1, 300), splits=st.sampled_from(SPLITS))
def test_a_fixed_split_fixes_the_configuration(batch, other, splits):
    mine, others = (choose_configuration(problem(size), device(), splits) for size in (batch, other))
    assert mine == others


@given(batch=st.integers(1, 300), max_pages=st.integers(0, 100), splits=st.sampled_from(SPLITS))
def test_a_fixed_split_has_one_page_slot(batch, max_pages, splits):
    """So that a row's sums are taken in the same order whatever the width of the page table."""
    assert choose_configuration(problem(batch, max_pages=max_pages), device(), splits).page_slots == 1


def test_kernel_arguments_are_what_they_are_called(rng):
    """Pointers, byte strides, sizes, scales, workspace and counters by name."""
    case = random_case(
        rng, layout="separate", group=3, num_kv_heads=2, batch=3, seqlen_q=2, topk=5, strided_inputs=True
    )
    out, lse = np.zeros((6, 9, 128), case.q.dtype)[:, 1:7], np.zeros((6, 8), np.float32)[:, :6]
    call = validate(**case.arguments(), out=out, lse=lse, bf16_as_uint16=False)
    axes = {
        "q": (case.q, "row", "head"), "k": (case.k, "page", "head"), "v": (case.v, "page", "head"),
        "k_scale": (case.k_scale, "page", "head"), "v_scale": (case.v_scale, "page", "head"),
        "q2k": (case.q2k_indices, "head", "row", "j"), "page_table": (case.page_table, "row", "j"),
        "seqused_k": (case.seqused_k, "stride"), "out": (out, "row", "head"), "lse": (lse, "row", "head"),
    }
    expected = {"workspace": np.uint64(77), "arrivals": np.uint64(78)}
    expected["v_global_scale"] = np.float32(case.v_global_scale)
    for name, (array, *strides) in axes.items():
        expected[name] = np.uint64(array.ctypes.data)
        for axis, size, stride in zip(strides, array.shape, array.strides):
            expected[f"{name}_{axis}"] = np.int64(0 if size == 1 else stride)
    sizes = {"batch": 3, "seqlen_q": 2, "num_kv_heads": 2, "group": 3, "topk": 5}
    sizes |= {"max_pages": case.page_table.shape[1], "num_pages": case.k.shape[0]}
    expected |= {name: np.int32(size) for name, size in sizes.items()}
    given = kernel_arguments(call, 77, 78)
    softmax_scale = 128**-0.5 if case.softmax_scale is None else case.softmax_scale
    score_scale = given.pop("score_scale")
    assert type(score_scale) is np.float32
    np.testing.assert_allclose(score_scale, softmax_scale * case.k_global_scale * np.log2(np.e), rtol=1e-6)
    assert given == expected
    assert all(type(value) is type(expected[name]) for name, value in given.items())


def test_kernel_arguments_stand_in_the_order_of_the_parameters(rng):
    """The entry of kernels/portable.cu, and the structure that takes them, have them in this order."""
    call = validate(**random_case(rng).arguments(), out=None, lse=None, bf16_as_uint16=False)
    types = {np.uint64: "u8*", np.int64: "i64", np.int32: "i32", np.float32: "float"}
    expected = [(types[type(value)], name) for name, value in kernel_arguments(call, 0).items()]
    text = source(Configuration(1, 1, False, 1))
    signature = re.search(rf" {ENTRY}\((.*?)\)", text, re.DOTALL)[1]
    assert re.findall(r"(?:const )?(\S+) (\w+)(?:,|$)", signature) == expected
    body = re.search(r"struct Arguments {(.*?)};", text, re.DOTALL)[1]
    members = re.findall(r"(?:const )?(\S+) ([\w, ]+);", body)
    assert [(kind, name) for kind, names in members for name in names.split(", ")] == expected
    # Initialisers, too.
    names = re.search(r"\(\{\s*(num_kv_heads.*?)\}\)", text, re.DOTALL)[1]
    assert re.split(r",\s*", names) == [name for _, name in expected]


@pytest.mark.parametrize("splits", [3, 5, 16, 64])
def test_factor_that_is_not_served_is_refused(splits):
    with pytest.raises(ValueError, match=f"splits is {splits}; backend 'portable' accepts 1, 2, 4, 8"):
        choose_configuration(problem(), device(), splits)


def test_more_ctas_than_a_grid_holds_are_refused():
    with pytest.raises(ValueError, match="work items of 8 CTAs; accepted are at most 2147483647"):
        PortableProgram().plan(problem(batch=2**24, seqlen_q=16), device(), 8)


def test_old_devices_are_refused_with_the_reason():
    refusal = PortableProgram().refusal(device((7, 5)))
    assert "needs compute capability 8.0 or later, this device has 7.5" in refusal
    assert PortableProgram().refusal(device((8, 0))) is None


def test_exact_architectures():
    assert [exact_arch(c) for c in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 0))] == [
        "sm_80", "sm_89", "sm_90a", "sm_103a", "sm_120a",
    ]


# The workspace size that callers ask for


@pytest.fixture
def ampere(monkeypatch):
    """A device without clusters, whose splits merge through the workspace; records the ordinals asked for."""
    asked = []

    def facts(ordinal):
        asked.append(ordinal)
        return device((8, 0), 108)

    monkeypatch.setattr(device_module, "facts", facts)
    return asked


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("splits", [None, *SPLITS])
def test_the_stated_workspace_size_is_the_largest_need(ampere, batch, splits):
    for seqlen_q, group, topk in ((1, 16, 16), (3, 5, 64), (2, 1, 1)):
        sizes = [
            problem(smaller, seqlen_q, 2, group, topk, pages)
            for smaller in range(batch + 1)
            for pages in range(100)
        ]
        plans = [PortableProgram().plan(each, device((8, 0), 108), splits) for each in sizes]
        needs = [plan.workspace_bytes for plan in plans]
        size = msa_nvfp4_decode_workspace_size(
            batch, 2, "cuda", seqlen_q=seqlen_q, topk=topk, group=group, splits=splits
        )
        assert size == max(needs)
    assert batch == 0 or splits in (None, 1) or size > 0


@pytest.mark.parametrize(
    "items",
    [
        1, 15, 16, 32, 66, 133, 148, 149, 198, 199, 265, 298, 330, 331, 397, 463, 529, 660, 768, 1000, 1400, 10**6,
    ],
)
def test_the_stated_workspace_size_serves_smaller_batches_too(monkeypatch, items):
    """Sixteen items merge through a workspace where 66 and 768 do not."""
    hopper = device()
    monkeypatch.setattr(device_module, "facts", lambda ordinal: hopper)
    for group, topk in ((16, 16), (5, 64), (1, 4), (16, 3)):
        sizes = [
            *((items, pages) for pages in range(100)),
            *itertools.product(
                (*range(1, min(items, 768)), *(n for n in range(768, min(items, 2800)) if n % 33 < 2)),
                (1, 2, 3, 4, 5, 8, 9, 16, 64),
            ),
        ]
        needs = [
            PortableProgram().plan(problem(batch, 1, 1, group, topk, pages), hopper, None).workspace_bytes
            for batch, pages in sizes
        ]
        size = msa_nvfp4_decode_workspace_size(items, 1, "cuda", topk=topk, group=group)
        assert size == max(needs)
        assert (size > 0) == (items >= (16 if topk > 8 else 397))


@pytest.mark.parametrize(("kv_heads", "seqlen_q"), [(7, 1), (4, 8)])
def test_the_stated_workspace_size_serves_shared_items_of_any_smaller_batch(monkeypatch, kv_heads, seqlen_q):
    """How many items are shared goes up and down with the batch."""
    monkeypatch.setattr(device_module, "facts", lambda ordinal: device())
    size = msa_nvfp4_decode_workspace_size(700, kv_heads, "cuda", seqlen_q=seqlen_q)
    needs = [
        PortableProgram().plan(problem(batch, seqlen_q, kv_heads), device(), None).workspace_bytes
        for batch in range(1, 701)
    ]
    assert max(needs[: 660 // (kv_heads * seqlen_q)]) < max(needs) <= size == 132 * 6 * 16 * (128 + 2) * 4


@pytest.mark.parametrize(
    ("given", "ordinal"),
    [
        (0, 0), (3, 3), (np.int64(2), 2), ("cuda", 0), ("cuda:5", 5),
        # torch.device
        (SimpleNamespace(type="cuda", index=4), 4), (SimpleNamespace(type="cuda", index=None), 0),
        (SimpleNamespace(id=6), 6),  # cupy.cuda.Device
        (SimpleNamespace(device_id=7), 7),  # cuda.core.Device
    ],
)
def test_a_device_may_be_named_in_many_ways(ampere, given, ordinal):
    assert msa_nvfp4_decode_workspace_size(1, 1, given) > 0 and ampere == [ordinal]


@pytest.mark.parametrize("given", ["cuda", SimpleNamespace(type="cuda", index=None)])
@pytest.mark.parametrize(
    ("status", "current", "ordinal"),
    [("CUDA_SUCCESS", 3, 3), ("CUDA_ERROR_INVALID_CONTEXT", None, 0), ("CUDA_ERROR_NOT_INITIALIZED", None, 0)],
)
def test_a_device_without_an_ordinal_is_the_current_one(ampere, monkeypatch, given, status, current, ordinal):
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (getattr(driver.CUresult, status), current))
    assert msa_nvfp4_decode_workspace_size(1, 1, given) > 0 and ampere == [ordinal]


@pytest.mark.parametrize(
    "given", [-4, SimpleNamespace(id=-4), SimpleNamespace(device_id=2**31), SimpleNamespace(type="cuda", index=-1)]
)
def test_an_ordinal_out_of_range_is_refused(ampere, given):
    with pytest.raises(ValueError, match="^device is .*; accepted are integers from 0 to 2147483647"):
        msa_nvfp4_decode_workspace_size(1, 1, given)
    assert not ampere


@pytest.mark.parametrize("given", ["cpu", "cpu:0", SimpleNamespace(type="cpu", index=None)])
def test_the_host_needs_no_workspace(ampere, given):
    assert msa_nvfp4_decode_workspace_size(1, 1, given) == 0 and not ampere


@pytest.mark.parametrize(
    "given",
    [
        None, True, 1.0, "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:" + "9" * 5000,
        SimpleNamespace(type="meta", index=0), object(),
    ],
)
def test_what_is_no_device_is_refused(ampere, given):
    with pytest.raises(TypeError, match="^device is .*accepted are an ordinal"):
        msa_nvfp4_decode_workspace_size(1, 1, given)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(batch=-1), ValueError), (dict(batch=1.0), TypeError), (dict(num_kv_heads=0), ValueError),
        (dict(seqlen_q=33), ValueError), (dict(topk=0), ValueError), (dict(group=17), ValueError),
        (dict(splits=0), ValueError), (dict(device=-1), ValueError),
    ],
)
def test_sizes_outside_the_contract_are_refused_by_name(ampere, change, error):
    with pytest.raises(error, match=f"^{next(iter(change))} is "):
        msa_nvfp4_decode_workspace_size(**(dict(batch=1, num_kv_heads=1, device=0) | change))
