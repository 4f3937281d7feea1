"""cp.async, bulk copies and reductions, st.async and red.async: data, groups, completion, and what is
reported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Fault

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

every_schedule = pytest.mark.parametrize("schedule, seed", SCHEDULES)
STORE = "mul.wide.u32 %rd9, %tid, 4; add.u64 %rd9, %rd9, %a1; st.global.b32 [%rd9], %r9;"
INIT = """
    setp.eq.u32 %p0, %tid, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%base], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;"


def words(*shape):
    return np.random.default_rng().integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)


@every_schedule
@pytest.mark.parametrize("size, count", [(4, 4), (8, 8), (16, 16), (16, 4), (8, 0)])
def test_cp_async_copies_and_fills_with_zeros(schedule, seed, size, count):
    source, out = words(128), filled(128)
    launch(
        f"""
        mul.lo.u32 %r1, %tid, {size}; add.u32 %r2, %r1, %base; cvt.u64.u32 %rd1, %r1; add.u64 %rd2, %a0, %rd1;
        cp.async.ca.shared::cta.global [%r2], [%rd2], {size}, {count};
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.warp.sync -1;
        mov.u32 %r3, 0;
        L: shl.b32 %r4, %r3, 7; mad.lo.u32 %r4, %tid, 4, %r4; add.u32 %r5, %r4, %base;
        setp.ge.u32 %p1, %r4, {32 * size};
        @%p1 bra D;
        ld.shared.b32 %r9, [%r5]; cvt.u64.u32 %rd3, %r4; add.u64 %rd3, %rd3, %a1; st.global.b32 [%rd3], %r9;
        add.u32 %r3, %r3, 1;
        bra L;
        D:
    """,
        source,
        out,
        schedule=schedule,
        seed=seed,
    )
    expected = source.view(np.uint8)[: 32 * size].reshape(32, size).copy()
    expected[:, count:] = 0
    np.testing.assert_array_equal(out.view(np.uint8)[: 32 * size].reshape(32, size), expected)


@every_schedule
@pytest.mark.parametrize("ignored, negated", [(0, ""), (7, ""), (0xFFFF0000, ""), (7, "!")])
def test_cp_async_fills_with_zeros_where_the_source_is_ignored(schedule, seed, ignored, negated):
    source, out = words(32), filled(32)
    launch(
        f"""
        mul.wide.u32 %rd1, %tid, 4; add.u64 %rd1, %rd1, %a0; mad.lo.u32 %r1, %tid, 4, %base;
        shr.u32 %r2, {ignored}, %tid; and.b32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 1;
        cp.async.ca.shared.global [%r1], [%rd1], 4, {negated}%p2;
        cp.async.wait_all;
        ld.shared.b32 %r9, [%r1];
    """
        + STORE,
        source,
        out,
        schedule=schedule,
        seed=seed,
    )
    keep = (ignored >> np.arange(32) & 1 == 1) == bool(negated)
    np.testing.assert_array_equal(out, np.where(keep, source, 0))


@every_schedule
@pytest.mark.parametrize("mask", [0xFFFF, 0x00F0, 0x8001, 0])
def test_a_bulk_store_writes_the_bytes_of_its_mask(schedule, seed, mask):
    out = filled(32)
    launch(
        f"""
        mad.lo.u32 %r1, %tid, 4, %base; st.shared.b32 [%r1], 0x12345678;
        fence.proxy.async; bar.warp.sync -1;
        setp.eq.u32 %p0, %tid, 0; @!%p0 bra DONE;
        mov.b16 %h1, {mask};
        cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%a0], [%base], 128, %h1;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        DONE:
    """,
        out,
        schedule=schedule,
        seed=seed,
    )
    expected = filled(32).view(np.uint8)
    stored = np.full(32, 0x12345678, np.uint32).view(np.uint8)
    written = np.resize(mask >> np.arange(16) & 1, 128) == 1
    np.testing.assert_array_equal(out.view(np.uint8), np.where(written, stored, expected))


@every_schedule
def test_wait_group_leaves_the_newest_groups_running(schedule, seed):
    source, out = words(96), filled(32)
    body = (
        """
        mul.wide.u32 %rd1, %tid, 4; add.u64 %rd1, %rd1, %a0; mad.lo.u32 %r1, %tid, 4, %base;
        cp.async.ca.shared.global [%r1], [%rd1], 4;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r1 + 128], [%rd1 + 128], 4;
        cp.async.commit_group;
        cp.async.wait_group {keep};
        ld.shared.b32 %r9, [%r1 + {offset}];
        cp.async.wait_all;
    """
        + STORE
    )
    launch(body.format(keep=1, offset=0), source, out, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, source[:32])
    with pytest.raises(Fault) as caught:
        launch(body.format(keep=1, offset=128), source, out, schedule=schedule, seed=seed)
    assert caught.value.kind in ("race", "uninitialised")


@every_schedule
def test_waiting_for_more_bulk_groups_than_there_are_waits_for_none(schedule, seed):
    body = """
        mad.lo.u32 %r1, %tid, 4, %base;
        st.shared.b32 [%r1], 1; st.shared.b32 [%r1 + 128], 2; st.shared.b32 [%r1 + 256], 3;
        fence.proxy.async; bar.warp.sync -1;
        setp.eq.u32 %p0, %tid, 0; @!%p0 bra DONE;
        add.u32 %r2, %base, 128; add.u32 %r3, %base, 256;
        cp.async.bulk.global.shared::cta.bulk_group [%a0], [%base], 128; cp.async.bulk.commit_group;
        cp.async.bulk.global.shared::cta.bulk_group [%a0 + 128], [%r2], 128; cp.async.bulk.commit_group;
        cp.async.bulk.global.shared::cta.bulk_group [%a0 + 256], [%r3], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read {keep};
        st.shared.b32 [%base], 4;
        cp.async.bulk.wait_group 0;
        DONE:
    """
    out = filled(96)
    launch(body.format(keep=2), out, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, np.repeat([1, 2, 3], 32))
    with pytest.raises(Fault) as caught:
        launch(body.format(keep=4), filled(96), schedule=schedule, seed=seed)
    assert caught.value.kind == "race"


@every_schedule
def test_an_mbarrier_can_count_finished_copies(schedule, seed):
    source, out = words(32), filled(32)
    for suffix, count in ((".noinc", 32), ("", 1)):
        launch(
            f"""
            setp.eq.u32 %p0, %tid, 0;
            @%p0 mbarrier.init.shared::cta.b64 [%base], {count};
            bar.warp.sync -1;
            mul.wide.u32 %rd1, %tid, 4; add.u64 %rd1, %rd1, %a0; mad.lo.u32 %r1, %tid, 4, %base;
            cp.async.ca.shared.global [%r1 + 64], [%rd1], 4;
            cp.async.mbarrier.arrive{suffix}.shared::cta.b64 [%base];
            {"" if suffix else "@%p0 mbarrier.arrive.shared::cta.b64 _, [%base];"}
            W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;
            xor.b32 %r2, %tid, 31; mad.lo.u32 %r2, %r2, 4, %base;
            ld.shared.b32 %r9, [%r2 + 64];
        """
            + STORE,
            source,
            out,
            schedule=schedule,
            seed=seed,
        )
        np.testing.assert_array_equal(out, source[::-1])


@every_schedule
def test_bulk_copies_go_in_and_out(schedule, seed):
    source, out = words(256), filled(256)
    launch(
        INIT
        + """
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 1024;
        add.u32 %r1, %base, 128;
        @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%a0], 512, [%base];
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1 + 512], [%a0 + 512], 512, [%base];
    """
        + WAIT
        + """
        mad.lo.u32 %r2, %tid, 4, %r1;
        ld.shared.b32 %r3, [%r2]; not.b32 %r3, %r3; st.shared.b32 [%r2], %r3;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @!%p0 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r1], 1024;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        END:
    """,
        source,
        out,
        threads=128,
        schedule=schedule,
        seed=seed,
    )
    expected = source.copy()
    expected[:128] = ~expected[:128]
    np.testing.assert_array_equal(out, expected)


@every_schedule
@pytest.mark.parametrize(
    "operation, dtype, function",
    [
        ("add.u32", np.uint32, np.add),
        ("min.s32", np.int32, np.minimum),
        ("max.u64", np.uint64, np.maximum),
        ("xor.b32", np.uint32, np.bitwise_xor),
        ("add.f32", np.float32, np.add),
        ("add.noftz.f16", np.float16, np.add),
    ],
)
def test_bulk_reductions_combine_with_memory(schedule, seed, operation, dtype, function):
    rng = np.random.default_rng()
    source, out = (rng.integers(-100, 100, 128 // np.dtype(dtype).itemsize).astype(dtype) for _ in range(2))
    expected = function(out, source)
    launch(
        INIT
        + f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 128;
        add.u32 %r1, %base, 128;
        @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%a0], 128, [%base];
        {WAIT}
        @!%p0 bra END;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%a1], [%r1], 128;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        END:
    """,
        source,
        out,
        schedule=schedule,
        seed=seed,
    )
    np.testing.assert_array_equal(out, expected)


CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@every_schedule
def test_multicast_and_cluster_copies_reach_their_ctas(schedule, seed):
    source, out = words(64), filled(2, 64)
    launch(
        INIT
        + f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 256;
        {CLUSTER}
        add.u32 %r1, %base, 128;
        setp.eq.and.u32 %p2, %rank, 0, %p0;
        mov.b16 %h1, 3;
        @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
                [%r1], [%a0], 128, [%base], %h1;
        xor.b32 %r3, %rank, 1;
        mapa.shared::cluster.u32 %r4, %base, %r3;
        add.u32 %r5, %r4, 256;
        add.u32 %r8, %base, 512; mad.lo.u32 %r6, %tid, 4, %r8;
        add.u32 %r7, %rank, 77; st.shared.b32 [%r6], %r7;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r8], 128, [%r4];
        {WAIT}
        mad.lo.u32 %r6, %tid, 4, %base;
        ld.shared.b32 %r9, [%r6 + 128]; ld.shared.b32 %r10, [%r6 + 256];
        mad.lo.u32 %r11, %rank, 64, %tid; mul.wide.u32 %rd9, %r11, 4; add.u64 %rd9, %rd9, %a1;
        st.global.b32 [%rd9], %r9; st.global.b32 [%rd9 + 128], %r10;
        {CLUSTER}
    """,
        source,
        out,
        ctas=2,
        cluster=2,
        schedule=schedule,
        seed=seed,
    )
    np.testing.assert_array_equal(out[:, :32], np.tile(source[:32], (2, 1)))
    assert (out[0, 32:] == 78).all() and (out[1, 32:] == 77).all()


@every_schedule
def test_st_async_and_red_async_signal_the_peer(schedule, seed):
    out = filled(2, 32)
    launch(
        INIT
        + f"""
        mad.lo.u32 %r1, %tid, 4, %base;
        st.shared.b32 [%r1 + 512], 1000;
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 384;
        {CLUSTER}
        xor.b32 %r2, %rank, 1;
        mapa.shared::cluster.u32 %r3, %base, %r2;
        mad.lo.u32 %r4, %tid, 8, %r3;
        add.u32 %r5, %tid, %rank;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4 + 128], {{%r5, %tid}}, [%r3];
        mad.lo.u32 %r6, %tid, 4, %r3;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6 + 512], %tid, [%r3];
        {WAIT}
        mad.lo.u32 %r4, %tid, 8, %base;
        ld.shared.v2.b32 {{%r7, %r8}}, [%r4 + 128];
        ld.shared.b32 %r9, [%r1 + 512];
        mad.lo.u32 %r9, %r7, 10000, %r9;
        mad.lo.u32 %r11, %rank, 32, %tid; mul.wide.u32 %rd9, %r11, 4; add.u64 %rd9, %rd9, %a0;
        st.global.b32 [%rd9], %r9;
        {CLUSTER}
    """,
        out,
        ctas=2,
        cluster=2,
        schedule=schedule,
        seed=seed,
    )
    lane = np.arange(32)
    np.testing.assert_array_equal(out, [(lane + 1) * 10000 + 1000 + lane, lane * 10000 + 1000 + lane])


@every_schedule
@pytest.mark.parametrize("lanes", [1, 2, 31])
@pytest.mark.parametrize("stride", [4, 12, 0])
def test_st_async_of_some_lanes(schedule, seed, lanes, stride):
    """To neighbouring places, to places with holes, and of one value to one place."""
    out = filled(96)
    launch(
        f"""
        mov.u32 %r2, 0xAAAAAAAA; mul.lo.u32 %r1, %tid, 4; add.u32 %r1, %r1, %base;
        st.shared.b32 [%r1 + 128], %r2; st.shared.b32 [%r1 + 256], %r2; st.shared.b32 [%r1 + 384], %r2;
        {INIT}
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], {4 * lanes};
        mul.lo.u32 %r3, %tid, {stride}; add.u32 %r3, %r3, %base;
        mul.lo.u32 %r4, %tid, {min(stride, 1)}; add.u32 %r4, %r4, 5;
        setp.lt.u32 %p2, %tid, {lanes};
        @%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r3 + 128], %r4, [%base];
        {WAIT}
        mul.wide.u32 %rd9, %tid, 4; add.u64 %rd9, %rd9, %a0;
        ld.shared.b32 %r9, [%r1 + 128]; st.global.b32 [%rd9], %r9;
        ld.shared.b32 %r9, [%r1 + 256]; st.global.b32 [%rd9 + 128], %r9;
        ld.shared.b32 %r9, [%r1 + 384]; st.global.b32 [%rd9 + 256], %r9;
    """,
        out,
        schedule=schedule,
        seed=seed,
    )
    expected = np.full(96, 0xAAAAAAAA, np.uint32)
    lane = np.arange(lanes)
    expected[lane * stride // 4] = lane * min(stride, 1) + 5
    np.testing.assert_array_equal(out, expected)


LOAD = "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{d}], [{s}], {n}, [{b}];"


@pytest.mark.parametrize(
    "body, kind, message",
    [
        (
            INIT + "add.u32 %r1, %base, 8;" + LOAD.format(d="%r1", s="%a0", n=64, b="%base"),
            "misaligned",
            "multiple of 16",
        ),
        (
            INIT + "add.u32 %r1, %base, 64;" + LOAD.format(d="%r1", s="%a0", n=24, b="%base"),
            "misaligned",
            "24 bytes",
        ),
        (
            INIT + "add.u32 %r1, %base, 64;" + LOAD.format(d="%r1", s="%a0 + 4", n=16, b="%base"),
            "misaligned",
            "source",
        ),
        (
            INIT + "add.u32 %r1, %base, 64;" + LOAD.format(d="%r1", s="%a0", n=1024, b="%base") + WAIT,
            "out-of-bounds",
            "past the end|1024 bytes",
        ),
        (INIT + LOAD.format(d="%base", s="%a0", n=16, b="%base"), "mbarrier", "overwrite the mbarrier"),
        (
            INIT + "add.u32 %r1, %base, 64;" + LOAD.format(d="%r1", s="%a0", n=16, b="%r1"),
            "mbarrier",
            "no mbarrier",
        ),
        (
            INIT
            + "add.u32 %r1, %base, 64;"
            + LOAD.format(d="%r1", s="%a0", n=16, b="%base")
            + "@%p0 mbarrier.arrive.shared::cta.b64 _, [%base];"
            + WAIT
            + "ld.shared.b32 %r9, [%r1];"
            + STORE,
            ("race", "mbarrier", "uninitialised"),
            ".",
        ),
        ("add.u32 %r1, %base, 4; cp.async.ca.shared.global [%r1], [%a0], 8;", "misaligned", "multiple of 8"),
        ("cp.async.cg.shared.global [%base], [%a0], 8;", "operand", ".cg takes 16"),
    ],
)
def test_wrong_copies_are_reported(body, kind, message):
    for schedule, seed in SCHEDULES:
        with pytest.raises(Fault, match=message) as caught:
            launch(body, words(64), filled(32), schedule=schedule, seed=seed)
        assert caught.value.kind in ((kind,) if isinstance(kind, str) else kind)
