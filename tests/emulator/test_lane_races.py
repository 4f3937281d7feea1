"""Checks(warp_races=True): lanes of one warp that exchange data through shared memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import Checks, Fault

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import SCHEDULES, filled, launch  # noqa: E402

PLACES = """
    mad.lo.u32 %r1, %tid, 4, %base;
    xor.b32 %r2, %tid, 1; mad.lo.u32 %r2, %r2, 4, %base;
    setp.eq.u32 %p1, %tid, 0;
    setp.lt.u32 %p2, %tid, 16;
    mul.wide.u32 %rd2, %tid, 4; add.u64 %rd1, %rd2, %a0; add.u64 %rd2, %rd2, %a1;
"""
SYNC = "bar.warp.sync 0xffffffff;"
STORE, LOAD = "st.shared.b32 [%r1], %tid;", "ld.shared.b32 %r9, [%r2];"
OTHER = "st.shared.b32 [%r1], %r2;"

#: name -> (body, what stands for {sync} in the correct twin, the line that is reported without it)
EXCHANGES = {
    "read what another lane wrote": (STORE + "{sync}" + LOAD, SYNC, LOAD),
    "behind a shuffle": (STORE + "{sync}" + LOAD, "shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", LOAD),
    "behind a block barrier": (STORE + "{sync}" + LOAD, "bar.sync 0;", LOAD),
    "behind a fence": (STORE + "{sync}" + LOAD, "fence.acq_rel.cta;", LOAD),
    "ahead of it a fence": ("fence.acq_rel.cta;" + STORE + "{sync}" + LOAD, SYNC, LOAD),
    "ahead of it an acquire": ("ld.acquire.cta.global.b32 %r5, [%rd1];" + STORE + "{sync}" + LOAD, SYNC, LOAD),
    "overwrite what another lane read": (STORE + SYNC + LOAD + "{sync}" + OTHER, SYNC, OTHER),
    "overwrite what the second of two lanes read": (
        STORE + SYNC + "ld.shared.b32 %r9, [%base];{sync}@%p1 " + OTHER, SYNC, OTHER,
    ),
    "overwrite what another lane wrote": (STORE + "{sync} st.shared.b32 [%r2], %lane;", SYNC, "[%r2], %lane"),
    "the lanes of one half": (
        "@%p2 " + STORE + "@%p2 bar.warp.sync 0xffff; {sync} @%p2 " + LOAD
        + "{sync} @!%p2 ld.shared.b32 %r9, [%base];", SYNC, "[%base]",
    ),
    "a copy of another lane": (
        "cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.wait_all;{sync}" + LOAD, SYNC, LOAD,
    ),
    "a copy onto what another lane read": (
        STORE + SYNC + LOAD + "{sync} cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.wait_all;", SYNC,
        "cp.async.ca",
    ),
    "bytes": ("add.u32 %r3, %base, %tid; st.shared.u8 [%r3], 1;{sync} ld.shared.u16 %h1, [%base];", SYNC,
              "ld.shared.u16"),
    "an mbarrier": (
        "@%p1 mbarrier.init.shared::cta.b64 [%base], 32;{sync}"
        "mbarrier.arrive.shared::cta.b64 _, [%base];", SYNC, "mbarrier.arrive",
    ),
}


def run(body, **options):
    return launch(PLACES + body, np.arange(32, dtype=np.uint32), filled(32), **options)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_without_a_common_instruction_is_reported(name):
    body, sync, place = EXCHANGES[name]
    found = []
    for schedule, seed in SCHEDULES:
        options = dict(schedule=schedule, seed=seed)
        run(body.format(sync=sync), checks=Checks(warp_races=True), **options)
        run(body.format(sync=""), **options)
        try:
            run(body.format(sync=""), checks=Checks(warp_races=True), **options)
        except Fault as fault:
            assert fault.kind == "warp-race" and place.rstrip(";") in fault.text, fault
            assert "earlier CTA" not in str(fault)
            found.append(fault)
    assert found


@pytest.mark.parametrize(
    "body",
    [
        "add.u32 %r3, %base, %tid; st.shared.u8 [%r3], 1; ld.shared.u8 %h1, [%r3]; st.shared.u8 [%r3], 2;",
        STORE + SYNC + "ld.shared.b32 %r9, [%base]; ld.shared.b32 %r9, [%base];",
        "st.shared.b32 [%base], %r2; st.shared.b32 [%base + 4], 0;" + SYNC
        + "red.shared.add.u32 [%base + 4], 1; atom.shared.add.u32 %r3, [%base + 4], 1;",
        "@%p1 st.shared.b32 [%base], 1;" + SYNC + LOAD.replace("%r2", "%base") + SYNC + STORE,
        "@%p2 bra A; bar.warp.sync 0xffff0000; bra B; A: bar.warp.sync 0xffff; B:" + STORE
        + "st.shared.b32 [%r1], 5; ld.shared.b32 %r9, [%r1];",
    ],
    ids=["own bytes of a word", "reads alone", "one instruction", "one writer", "own words in both halves"],
)
def test_what_lanes_do_by_themselves_is_silent(body):
    for schedule, seed in SCHEDULES:
        run(body, checks=Checks(warp_races=True), schedule=schedule, seed=seed)
