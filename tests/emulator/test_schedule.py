"""When asynchronous work completes, and that kernels which poll, spin on other CTAs or wait are served."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from msa_cudacore.ptx import emulator
from msa_cudacore.ptx.emulator.machine import Machine

from .snippet import kernel

COPY = """
.reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<4>; .shared .align 128 .b8 data[128];
.shared .align 8 .b64 bar;
ld.param.u64 %d0, [x]; ld.param.u64 %d1, [out]; mov.u32 %r0, data; mov.u32 %r1, bar;
mbarrier.init.shared::cta.b64 [%r1], 1; fence.proxy.async.shared::cta;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], 128, [%r1];
WAIT
ld.shared.b32 %r2, [%r0+64]; st.global.b32 [%d1], %r2;
"""
WAITS = {
    "test_wait": "POLL: mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra POLL;",
    "try_wait": "POLL: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra POLL;",
    "missing": "",
}


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_copy_is_waited_for_in_every_schedule(schedule, wait):
    module = emulator.load(kernel(COPY.replace("WAIT", WAITS[wait]), ".param .u64 x, .param .u64 out"))
    x = np.arange(32, dtype=np.uint32)
    for seed in range(5):
        out = np.zeros(1, np.uint32)
        if wait == "missing":
            with pytest.raises(emulator.Fault) as caught:
                module.launch("k", (1,), (1,), [x, out], schedule=schedule, seed=seed)
            assert caught.value.kind in ("race", "uninitialised", "cluster-exit")
        else:
            module.launch("k", (1,), (1,), [x, out], schedule=schedule, seed=seed)
            assert out[0] == 16


RING = """
.reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<4>;
ld.param.u64 %d0, [flags]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %nctaid.x; add.u32 %r2, %r0, 1;
sub.u32 %r3, %r1, 1;
mad.wide.u32 %d1, %r0, 4, %d0;
setp.eq.u32 %p1, %r0, %r3; @%p1 bra SET;
SPIN: ld.acquire.gpu.global.b32 %r4, [%d1+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;
SET: st.release.gpu.global.b32 [%d1], %r2;
"""


def test_ctas_that_wait_for_each_other_need_to_be_resident():
    module = emulator.load(kernel(RING, ".param .u64 flags"))
    for seed in range(4):
        flags = np.zeros(5, np.uint32)
        module.launch("k", (5,), (1,), [flags], concurrent_clusters=5, seed=seed)
        assert flags.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(emulator.Fault) as caught:
        module.launch("k", (5,), (1,), [np.zeros(5, np.uint32)], schedule="eager", instruction_limit=100_000)
    assert caught.value.kind == "livelock" and "concurrent_clusters" in str(caught.value)


def test_a_launch_leaves_nothing_behind_for_the_next():
    """Clocks run on across launches: what one launch did to memory is no race in the next."""
    module = emulator.load(kernel("""
    .reg .b32 %r<4>; .reg .b64 %d<3>; .shared .align 4 .b8 s[256];
    ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %d1, %r0, 4, %d0; mov.u32 %r1, s;
    mad.lo.u32 %r1, %r0, 4, %r1; st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r2, [%r1];
    ld.global.b32 %r3, [%d1]; add.u32 %r2, %r2, %r3; st.global.b32 [%d1], %r2;""", ".param .u64 out"))
    out, memory = np.zeros(64, np.uint32), emulator.Memory()
    for block in (64, 32, 64, 48, 64):
        before = out.copy()
        module.launch("k", (1,), (block,), [out], memory=memory)
        assert (out[:block] == before[:block] + np.arange(block)).all()


def test_nothing_of_a_launch_outlives_it():
    def machines():
        gc.collect()
        # Not isinstance, which asks a weak proxy that another test left for the class of what is gone.
        return {id(each) for each in gc.get_objects() if type(each) is Machine}

    module = emulator.load(kernel(COPY.replace("WAIT", WAITS["try_wait"]), ".param .u64 x, .param .u64 out"))
    before = machines()
    module.launch("k", (1,), (1,), [np.arange(32, dtype=np.uint32), np.zeros(1, np.uint32)])
    assert machines() <= before
