"""barrier.cluster and the lifetime of a cluster's shared memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Fault

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

ARRIVE, WAIT = "barrier.cluster.arrive{};", "barrier.cluster.wait{};"
SHIFT = """
    mad.lo.u32 %r1, %tid, 4, %base;
    mad.lo.u32 %r2, %rank, 100, %tid;
    st.shared.b32 [%r1], %r2;
    {first}
    add.u32 %r3, %rank, 1; and.b32 %r3, %r3, 3;
    mapa.shared::cluster.u32 %r4, %r1, %r3;
    ld.shared::cluster.b32 %r5, [%r4];
    {last}
    mad.lo.u32 %r6, %rank, 64, %tid; mul.wide.u32 %rd1, %r6, 4; add.u64 %rd1, %rd1, %a0;
    st.global.b32 [%rd1], %r5;
"""


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
@pytest.mark.parametrize("aligned", ["", ".aligned"])
def test_what_was_stored_before_the_barrier_is_seen_behind_it(schedule, seed, aligned):
    both = (ARRIVE + WAIT).format(aligned, aligned)
    out = filled(4, 64)
    launch(
        SHIFT.format(first=both, last=both), out, threads=64, ctas=4, cluster=4, schedule=schedule, seed=seed
    )
    np.testing.assert_array_equal(out, (np.arange(4)[:, None] + 1) % 4 * 100 + np.arange(64))


@pytest.mark.parametrize(
    "first, last, kinds",
    [
        ("", ARRIVE.format("") + WAIT.format(""), ("cluster-start",)),
        (ARRIVE.format(""), WAIT.format(""), ("cluster-start",)),
        (ARRIVE.format(".relaxed") + WAIT.format(""), ARRIVE.format("") + WAIT.format(""), ("race",)),
        (ARRIVE.format("") + WAIT.format(""), "", ("cluster-exit", "deadlock")),
        (ARRIVE.format("") + ARRIVE.format(""), "", ("barrier",)),
        (WAIT.format(""), "", ("barrier",)),
        (
            "setp.eq.u32 %p1, %rank, 2; @!%p1 "
            + ARRIVE.format("")
            + "@!%p1 "
            + WAIT.format("")
            + "@%p1 bra.uni STUCK;"
            "bra OVER; STUCK: bar.sync 1, 128; OVER:",
            "",
            ("deadlock",),
        ),
    ],
)
def test_broken_protocols_are_reported(first, last, kinds):
    found = set()
    for schedule, seed in SCHEDULES:
        try:
            launch(
                SHIFT.format(first=first, last=last),
                filled(4, 64),
                threads=64,
                ctas=4,
                cluster=4,
                schedule=schedule,
                seed=seed,
            )
        except Fault as fault:
            found.add(fault.kind)
    assert found and found <= set(kinds)


BOTH = (ARRIVE + WAIT).format("", "")


@pytest.mark.parametrize("arrive", [ARRIVE.format(""), ARRIVE.format(".relaxed")])
def test_whoever_knows_that_a_cta_has_started_may_reach_it(arrive):
    """Behind a cluster barrier, relaxed or not, an access that needs no other order is silent; it is a race
    where it does."""
    body = SHIFT.replace("mad.lo.u32 %r1", arrive + WAIT.format("") + "mad.lo.u32 %r1")
    out = filled(4, 64)
    for schedule, seed in SCHEDULES:
        options = dict(threads=64, ctas=4, cluster=4, schedule=schedule, seed=seed)
        launch(body.format(first=BOTH, last=BOTH), out, **options)
        with pytest.raises(Fault) as caught:
            launch(body.format(first="", last=BOTH), out, **options)
        assert caught.value.kind in ("race", "uninitialised")


REMOTE = {
    "load": "ld.shared::cluster.b32 %r5, [%r4 + 8];",
    "generic load": "cvt.u64.u32 %rd1, %r4; cvta.shared::cluster.u64 %rd1, %rd1; ld.b32 %r5, [%rd1 + 8];",
    "store": "st.shared::cluster.b32 [%r4 + 8], %r5;",
    "atomic": "red.relaxed.cluster.shared::cluster.add.u32 [%r4 + 8], 1;",
    "store with signal": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32"
                         " [%r4 + 8], %r5, [%r4];",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];",
    "bulk copy": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                 " [%r4 + 64], [%base + 128], 16, [%r4];",
    "multicast": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%base + 64], [%a0], 16, [%base], 3;",
}


@pytest.mark.parametrize("access", REMOTE)
def test_a_remote_access_before_the_peer_has_started_is_reported(access):
    """The barrier of each CTA stands; the peer has initialised it or not, this thread cannot know."""
    body = """
        setp.ne.u32 %p0, %tid, 0; @%p0 ret;
        mbarrier.init.shared::cta.b64 [%base], 2;
        st.shared.b32 [%base + 128], %tid; st.shared.b32 [%base + 132], %tid;
        st.shared.b64 [%base + 136], 0; st.shared.b64 [%base + 8], 0; mov.u32 %r5, 7;
        fence.mbarrier_init.release.cluster; fence.proxy.async;
        {sync}
        xor.b32 %r3, %rank, 1; mapa.shared::cluster.u32 %r4, %base, %r3;
        setp.eq.u32 %p1, %rank, 1; @%p1 bra OVER;
        {access}
        OVER: {last}
    """
    code = REMOTE[access]
    source = np.zeros(32, np.uint32)
    options = dict(ctas=2, cluster=2)
    for schedule, seed in SCHEDULES:
        if access in ("load", "generic load", "store", "atomic", "arrival"):
            correct = body.format(sync=BOTH, access=code, last=BOTH)
            launch(correct, source, schedule=schedule, seed=seed, **options)
        for sync, last in (("", BOTH), (ARRIVE.format(""), WAIT.format(""))):
            text = body.format(sync=sync, access=code, last=last)
            with pytest.raises(Fault) as caught:
                launch(text, source, schedule=schedule, seed=seed, **options)
            assert caught.value.kind == "cluster-start", caught.value
            assert caught.value.text in code


def test_a_fence_before_a_relaxed_arrival_publishes_what_it_saw():
    out = filled(4, 64)
    both = "fence.acq_rel.cluster;" + (ARRIVE + WAIT).format(".relaxed", "")
    for schedule, seed in SCHEDULES:
        launch(
            SHIFT.format(first=both, last=both),
            out,
            threads=64,
            ctas=4,
            cluster=4,
            schedule=schedule,
            seed=seed,
        )


def test_a_deadlock_names_those_who_have_not_arrived():
    body = "setp.eq.u32 %p1, %rank, 1; @%p1 bar.sync 1, 128; barrier.cluster.arrive; barrier.cluster.wait;"
    with pytest.raises(Fault, match="not arrived: CTA 1 warp 0, CTA 1 warp 1") as caught:
        launch(body, threads=64, ctas=2, cluster=2)
    assert caught.value.kind == "deadlock"
