"""mbarrier: the state machine, and the instructions of the family."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Fault
from msa_cudacore.ptx.emulator.mbarrier import Barrier, BarrierError

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402


def test_a_phase_ends_when_arrivals_and_bytes_are_both_in():
    barrier = Barrier(2)
    assert not barrier.arrive()
    barrier.expect(100)
    assert not barrier.arrive()
    assert not barrier.complete(60)
    assert barrier.phase == 0 and barrier.completed_parity(1) and not barrier.completed_parity(0)
    assert barrier.complete(40)
    assert (barrier.phase, barrier.pending, barrier.tx) == (1, 2, 0)
    assert barrier.completed_parity(0) and not barrier.completed_parity(1)


def test_bytes_may_come_before_they_are_expected():
    barrier = Barrier(1)
    assert not barrier.complete(16)
    barrier.expect(16)
    assert barrier.arrive()


def test_dropped_arrivals_are_not_expected_again():
    barrier = Barrier(3)
    barrier.arrive(drop=True)
    assert barrier.arrive(2)
    assert barrier.expected == barrier.pending == 2


def test_tokens_tell_their_phase():
    barrier = Barrier(1)
    token = barrier.token()
    assert not barrier.completed(token)
    barrier.arrive()
    assert barrier.completed(token)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b.arrive(3), "3 arrivals where"),
        (lambda b: b.arrive(0), "arrive count 0"),
        (lambda b: b.expect(1 << 20), "tx-count"),
        (lambda b: b.complete(1 << 20), "tx-count"),
        (lambda b: b.arrive(2, may_complete=False), "noComplete"),
        (lambda b: (b.expect(16), b.arrive(2), b.complete(32)), "16 bytes more"),
    ],
)
def test_misuse_is_an_error(change, message):
    with pytest.raises(BarrierError, match=message):
        change(Barrier(2))


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_counts_outside_the_range_are_refused(count):
    with pytest.raises(BarrierError, match="initialised with count"):
        Barrier(count)


INIT = """
    setp.eq.u32 %p0, %tid, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%base], {count};
    bar.sync 0;
"""
STORE = "mul.wide.u32 %rd9, %tid, 4; add.u64 %rd9, %rd9, %a0; st.global.b32 [%rd9], %r9;"


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
def test_a_wait_hands_over_what_was_written_before_the_arrivals(schedule, seed):
    out = filled(64)
    launch(
        INIT.format(count=64)
        + """
        mad.lo.u32 %r1, %tid, 4, %base;
        mul.lo.u32 %r2, %tid, 7;
        st.shared.b32 [%r1 + 64], %r2;
        mbarrier.arrive.shared::cta.b64 _, [%base];
        W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0;
        @!%p1 bra W;
        sub.u32 %r1, 63, %tid; mad.lo.u32 %r1, %r1, 4, %base;
        ld.shared.b32 %r9, [%r1 + 64];
    """
        + STORE,
        out,
        threads=64,
        schedule=schedule,
        seed=seed,
    )
    assert out.tolist() == [7 * (63 - i) for i in range(64)]


def test_states_counts_and_polling():
    out = filled(32)
    launch(
        INIT.format(count=40)
        + """
        mbarrier.arrive.noComplete.shared::cta.b64 %rd1, [%base], 1;
        mbarrier.pending_count.b64 %r9, %rd1;
        mbarrier.test_wait.shared::cta.b64 %p1, [%base], %rd1;
        @%p1 add.u32 %r9, %r9, 1000;
        bar.sync 0;
        setp.lt.u32 %p2, %tid, 4;
        @%p2 mbarrier.arrive.shared::cta.b64 _, [%base], 2;
        bar.sync 0;
        mbarrier.test_wait.shared::cta.b64 %p1, [%base], %rd1;
        @%p1 add.u32 %r9, %r9, 100;
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%base], 1;
        @%p1 add.u32 %r9, %r9, 1000;
    """
        + STORE,
        out,
    )
    assert sorted(out.tolist()) == [100 + p for p in range(9, 41)]


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
def test_a_remote_arrival_reaches_the_barrier_of_the_peer(schedule, seed):
    out = filled(2, 32)
    launch(
        INIT.format(count=32)
        + """
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
        xor.b32 %r1, %rank, 1;
        mapa.shared::cluster.u32 %r2, %base, %r1;
        mad.lo.u32 %r3, %tid, 4, %r2;
        st.shared::cluster.b32 [%r3 + 256], %rank;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%base], 0;
        @!%p1 bra W;
        mad.lo.u32 %r3, %tid, 4, %base;
        ld.shared.b32 %r9, [%r3 + 256];
        mad.lo.u32 %r4, %rank, 32, %tid; mul.wide.u32 %rd9, %r4, 4; add.u64 %rd9, %rd9, %a0;
        st.global.b32 [%rd9], %r9;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """,
        out,
        ctas=2,
        cluster=2,
        schedule=schedule,
        seed=seed,
    )
    assert (out[0] == 1).all() and (out[1] == 0).all()


@pytest.mark.parametrize(
    "body, kind, message",
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%base];", "mbarrier", "no mbarrier was initialised"),
        (
            INIT.format(count=32) + "@%p0 mbarrier.init.shared::cta.b64 [%base], 1;",
            "mbarrier",
            "again without",
        ),
        (INIT.format(count=31) + "mbarrier.arrive.shared::cta.b64 _, [%base];", "mbarrier", "two phases"),
        (
            INIT.format(count=32)
            + "@%p0 st.shared.b32 [%base + 4], 0; mbarrier.arrive.shared::cta.b64 _, [%base];",
            "mbarrier",
            "was overwritten",
        ),
        (
            INIT.format(count=33) + "mbarrier.arrive.shared::cta.b64 _, [%base];"
            "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;",
            "deadlock",
            "1 of 33 arrivals pending",
        ),
        (
            INIT.format(count=1) + "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%base], 64;"
            "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;",
            "deadlock",
            "64 bytes pending",
        ),
        (
            "add.u32 %r1, %base, 4; @%p0 mbarrier.init.shared::cta.b64 [%r1], 1;".replace("@%p0 ", ""),
            "misaligned",
            "multiple of 8",
        ),
        (
            INIT.format(count=1) + "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%base], 2;",
            "mbarrier",
            "0 or 1",
        ),
        ("mbarrier.init.shared::cta.b64 [%base], 1;", "mbarrier", "32 lanes initialise"),
        (
            INIT.format(count=1) + "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%base], 16; "
            "@%p0 mbarrier.inval.shared::cta.b64 [%base];",
            "mbarrier",
            "inval while 16 bytes",
        ),
    ],
)
def test_misuse_in_a_kernel_is_reported(body, kind, message):
    for schedule, seed in SCHEDULES[2:]:
        with pytest.raises(Fault, match=message) as caught:
            launch(body, schedule=schedule, seed=seed)
        assert caught.value.kind == kind


def test_an_invalidated_barrier_can_be_made_anew():
    out = filled(32)
    launch(
        INIT.format(count=32)
        + """
        mbarrier.arrive.shared::cta.b64 _, [%base];
        W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra W;
        bar.sync 0;
        @%p0 mbarrier.inval.shared::cta.b64 [%base];
        @%p0 mbarrier.init.shared::cta.b64 [%base], 16;
        bar.sync 0;
        setp.lt.u32 %p2, %tid, 16;
        @%p2 mbarrier.arrive.shared::cta.b64 _, [%base];
        V: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%base], 0; @!%p1 bra V;
        mov.u32 %r9, 5;
    """
        + STORE,
        out,
    )
    np.testing.assert_array_equal(out, 5)
