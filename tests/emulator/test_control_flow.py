"""Divergence, reconvergence, calls, warp-wide instructions and barriers, under several schedules."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore.ptx import emulator

from .snippet import HEADER, kernel

SEEDS = range(6)


def run(
    body: str,
    out: np.ndarray,
    *args,
    block=(32,),
    grid=(1,),
    parameters=".param .u64 out",
    declarations="",
    **more,
):
    module = emulator.load(kernel(body, parameters, declarations))
    return module.launch("k", grid, block, [out, *args], **more)


PROLOGUE = """
.reg .b32 %r<30>; .reg .b64 %d<10>; .reg .pred %p<10>;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r0, 4, %d0;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_sides_of_a_branch_meet_before_a_shuffle(seed):
    body = PROLOGUE + """
    setp.lt.u32 %p1, %r0, 11;
    @%p1 bra LOW;
    mul.lo.u32 %r1, %r0, 100; bra.uni JOIN;
    LOW: mul.lo.u32 %r1, %r0, 1000;
    JOIN: shfl.sync.bfly.b32 %r2, %r1, 31, 31, -1;
    st.global.b32 [%d0], %r2;
    """
    out = np.zeros(32, np.uint32)
    run(body, out, seed=seed)
    mine = np.where(np.arange(32) < 11, np.arange(32) * 1000, np.arange(32) * 100)
    assert (out == mine[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_nested_loops_of_different_length(seed):
    body = PROLOGUE + """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    OUTER: setp.ge.u32 %p1, %r2, %r0; @%p1 bra DONE;
      mov.u32 %r3, 0; and.b32 %r4, %r0, 3;
      INNER: setp.ge.u32 %p2, %r3, %r4; @%p2 bra NEXT;
        add.u32 %r1, %r1, 1; add.u32 %r3, %r3, 1; bra.uni INNER;
      NEXT: add.u32 %r2, %r2, 1; bra.uni OUTER;
    DONE: activemask.b32 %r5; setp.eq.u32 %p3, %r5, -1; @!%p3 trap;
    st.global.b32 [%d0], %r1;
    """
    out = np.zeros(32, np.uint32)
    run(body, out, seed=seed)
    assert (out == np.arange(32) * (np.arange(32) & 3)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_may_wait_for_what_another_lane_of_its_warp_does_later(seed):
    """Independent thread scheduling: lane 0 spins before the join on a flag that lane 1 sets behind it."""
    body = PROLOGUE + """
    ld.param.u64 %d1, [out];
    setp.ne.u32 %p1, %r0, 0; @%p1 bra AFTER;
    SPIN: ld.relaxed.gpu.global.b32 %r1, [%d1+128]; setp.eq.u32 %p2, %r1, 0; @%p2 bra SPIN;
    AFTER: setp.ne.u32 %p3, %r0, 1; @%p3 bra END;
    mov.u32 %r2, 1; st.relaxed.gpu.global.b32 [%d1+128], %r2;
    END: st.global.b32 [%d0], %r0;
    """
    out = np.zeros(33, np.uint32)
    run(body, out, seed=seed)
    assert (out[:32] == np.arange(32)).all() and out[32] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spin_lock_taken_lane_by_lane(seed):
    body = PROLOGUE + """
    ld.param.u64 %d1, [out];
    AGAIN: atom.acquire.gpu.global.cas.b32 %r1, [%d1+4], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra AGAIN;
    ld.global.b32 %r2, [%d1]; add.u32 %r2, %r2, 1; st.global.b32 [%d1], %r2;
    atom.release.gpu.global.exch.b32 %r1, [%d1+4], 0;
    """
    out = np.zeros(2, np.uint32)
    run(body, out, block=(64,), seed=seed)
    assert out.tolist() == [64, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_indexed_branch(seed):
    body = PROLOGUE + """
    rem.u32 %r1, %r0, 3;
    TABLE: .branchtargets A, B, C;
    brx.idx %r1, TABLE;
    A: mov.u32 %r2, 10; bra END;
    B: mov.u32 %r2, 20; bra END;
    C: mov.u32 %r2, 30;
    END: activemask.b32 %r5; setp.eq.u32 %p3, %r5, -1; @!%p3 trap;
    st.global.b32 [%d0], %r2;
    """
    out = np.zeros(32, np.uint32)
    run(body, out, seed=seed)
    assert (out == np.arange(32) % 3 * 10 + 10).all()


def test_indexed_branch_outside_its_table_is_reported():
    body = PROLOGUE + "T: .branchtargets A, B; brx.idx %r0, T; A: B: st.global.b32 [%d0], %r0;"
    with pytest.raises(emulator.Fault, match="brx.idx index 2, the table has 2"):
        run(body, np.zeros(32, np.uint32), seed=0)


FACTORIAL = """
.func (.param .b32 result) factorial (.param .b32 n)
{
  .reg .b32 %r<9>; .reg .pred %p<3>;
  ld.param.u32 %r1, [n];
  setp.gt.u32 %p1, %r1, 1; @%p1 bra MORE;
  mov.u32 %r2, 1; st.param.b32 [result], %r2; ret;
  MORE: sub.u32 %r3, %r1, 1;
  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r3; call.uni (b), factorial, (a);
  ld.param.b32 %r4, [b]; }
  mul.lo.u32 %r5, %r4, %r1; st.param.b32 [result], %r5; ret;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_recursion_with_a_depth_of_its_own_in_every_lane(seed):
    body = (
        PROLOGUE
        + """
    rem.u32 %r1, %r0, 11;
    { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call.uni (y), factorial, (x);
    ld.param.b32 %r2, [y]; }
    activemask.b32 %r5; setp.eq.u32 %p3, %r5, -1; @!%p3 trap;
    st.global.b32 [%d0], %r2;
    """
    )
    out = np.zeros(32, np.uint32)
    run(body, out, declarations=FACTORIAL, seed=seed)
    expected = [int(np.prod(np.arange(1, i % 11 + 1))) for i in range(32)]
    assert out.tolist() == expected


def test_endless_recursion_overflows_the_stack_with_a_report():
    loop = """.func f (.param .b32 n) { .reg .b32 %r<3>; ld.param.u32 %r1, [n];
    { .param .b32 a; st.param.b32 [a], %r1; call.uni f, (a); } ret; }"""
    body = PROLOGUE + "{ .param .b32 x; st.param.b32 [x], %r0; call.uni f, (x); }"
    with pytest.raises(emulator.Fault, match="call stack deeper"):
        run(body, np.zeros(32, np.uint32), declarations=loop)


@pytest.mark.parametrize("seed", SEEDS)
def test_indirect_calls_to_different_functions(seed):
    functions = "".join(
        f""".func (.param .b32 r) f{k} (.param .b32 n) {{ .reg .b32 %r<3>; ld.param.u32 %r1, [n];
        mad.lo.u32 %r1, %r1, {10 ** k}, {k}; st.param.b32 [r], %r1; ret; }}\n""" for k in range(3))
    body = PROLOGUE + """
    PROTO: .callprototype (.param .b32 _) _ (.param .b32 _);
    rem.u32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
    mov.u64 %d1, f0; mov.u64 %d2, f1; mov.u64 %d3, f2;
    selp.b64 %d4, %d2, %d3, %p2; selp.b64 %d4, %d1, %d4, %p1;
    { .param .b32 x; .param .b32 y; st.param.b32 [x], %r0; call (y), %d4, (x), PROTO; ld.param.b32 %r2, [y]; }
    activemask.b32 %r5; setp.eq.u32 %p3, %r5, -1; @!%p3 trap;
    st.global.b32 [%d0], %r2;
    """
    out = np.zeros(32, np.uint32)
    run(body, out, declarations=functions, seed=seed)
    i = np.arange(32)
    assert (out == i * 10 ** (i % 3) + i % 3).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_vote_match_reduce_and_elect_use_their_member_mask(seed):
    body = (
        PROLOGUE
        + """
    setp.lt.u32 %p1, %r0, 16; selp.b32 %r1, 0xFFFF, 0xFFFF0000, %p1;
    and.b32 %r2, %r0, 5; setp.eq.u32 %p2, %r2, 5;
    vote.sync.ballot.b32 %r3, %p2, %r1;
    match.any.sync.b32 %r4, %r2, %r1;
    redux.sync.add.u32 %r6, %r0, %r1;
    elect.sync %r7|%p4, %r1; selp.b32 %r8, 1, 0, %p4;
    mad.wide.u32 %d0, %r0, 12, %d0;
    st.global.b32 [%d0], %r3; st.global.b32 [%d0+4], %r4; st.global.b32 [%d0+8], %r6;
    st.global.b32 [%d0+12], %r8;
    """
    )
    out = np.zeros((32, 4), np.uint32)
    run(body, out, seed=seed)
    for lane in range(32):
        group = range(16) if lane < 16 else range(16, 32)
        assert out[lane, 0] == sum(1 << i for i in group if i & 5 == 5)
        assert out[lane, 1] == sum(1 << i for i in group if i & 5 == lane & 5)
        assert out[lane, 2] == sum(group)
        assert out[lane, 3] == (lane in (0, 16))


def test_shuffles_agree_with_their_definition():
    rng = np.random.default_rng()
    for mode in ("up", "down", "bfly", "idx"):
        lane_b, c = int(rng.integers(0, 32)), int(rng.choice([0x1F, 0x0F, 0x181F, 0x1C1F, 0x0000, 0x1807]))
        body = PROLOGUE + f"""
        add.u32 %r1, %r0, 100; shfl.sync.{mode}.b32 %r2|%p1, %r1, {lane_b}, {c}, -1; selp.b32 %r3, 1, 0, %p1;
        shl.b32 %r3, %r3, 16; or.b32 %r2, %r2, %r3; st.global.b32 [%d0], %r2;"""
        out = np.zeros(32, np.uint32)
        run(body, out)
        clamp, segment = c & 31, c >> 8 & 31
        for lane in range(32):
            low = lane & segment
            limit = low | clamp & ~segment
            j = {"up": lane - lane_b, "down": lane + lane_b, "bfly": lane ^ lane_b,
                 "idx": low | lane_b & ~segment}[mode]
            inside = j >= limit if mode == "up" else j <= limit
            assert out[lane] == (j if inside else lane) + 100 | inside << 16, (mode, lane_b, hex(c), lane)


def test_member_mask_without_the_executing_lane_is_reported():
    body = PROLOGUE + "shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xFFFF; st.global.b32 [%d0], %r1;"
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(32, np.uint32))
    assert caught.value.kind == "divergence" and caught.value.lane == 16


def test_a_shuffle_from_an_absent_lane_is_reported():
    body = PROLOGUE + "setp.ge.u32 %p1, %r0, 20; @%p1 exit; shfl.sync.down.b32 %r1, %r0, 3, 31, -1;"
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(32, np.uint32))
    assert (
        caught.value.kind == "divergence" and caught.value.lane == 17 and "reads lane 20" in str(caught.value)
    )


def test_divergence_at_an_aligned_barrier_is_reported():
    body = PROLOGUE + "setp.lt.u32 %p1, %r0, 7; @%p1 bra X; bar.sync 0; X: st.global.b32 [%d0], %r0;"
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(32, np.uint32))
    assert caught.value.kind == "divergence" and "0xffffff80" in str(caught.value)
    guarded = PROLOGUE + "setp.lt.u32 %p1, %r0, 7; @%p1 bar.sync 0; st.global.b32 [%d0], %r0;"
    with pytest.raises(emulator.Fault, match="guard of an .aligned"):
        run(guarded, np.zeros(32, np.uint32))


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_with_counts_and_reductions(seed):
    body = PROLOGUE + """
    shr.u32 %r9, %r0, 5; setp.eq.u32 %p9, %r9, 3; @%p9 bra CONSUMER;
    bar.arrive 1, 128; bra.uni ALL;
    CONSUMER: bar.sync 1, 128;
    ALL: and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0;
    barrier.cta.red.popc.aligned.u32 %r2, 0, %p1;
    bar.red.and.pred %p2, 2, %p1; bar.red.or.pred %p3, 2, %p1;
    selp.b32 %r3, 1000, 0, %p2; selp.b32 %r4, 2000, 0, %p3; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4;
    st.global.b32 [%d0], %r2;
    """
    out = np.zeros(128, np.uint32)
    run(body, out, block=(128,), seed=seed)
    assert (out == 2064).all()


def test_warps_that_end_do_not_hold_up_a_barrier():
    body = PROLOGUE + "setp.ge.u32 %p1, %r0, 64; @%p1 exit; bar.sync 0; st.global.b32 [%d0], %r0;"
    out = np.zeros(128, np.uint32)
    run(body, out, block=(128,))
    assert (out[:64] == np.arange(64)).all() and not out[64:].any()


def test_deadlock_names_every_waiting_warp_and_the_state_of_the_barrier():
    body = PROLOGUE + """shr.u32 %r1, %r0, 5; setp.eq.u32 %p1, %r1, 0; @%p1 bra A; bar.sync 1, 96; bra.uni B;
    A: bar.sync 2, 64; B: st.global.b32 [%d0], %r0;"""
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(64, np.uint32), block=(64,))
    text = str(caught.value)
    assert caught.value.kind == "deadlock"
    assert "barrier 2, 32 of 64 threads arrived" in text and "barrier 1, 32 of 96 threads arrived" in text
    assert "warp 0" in text and "warp 1" in text


def test_barrier_arrivals_must_agree_on_the_count():
    body = (
        PROLOGUE
        + """shr.u32 %r1, %r0, 5; mad.lo.u32 %r2, %r1, 32, 64; bar.sync 1, %r2; st.global.b32 [%d0], %r0;"""
    )
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(96, np.uint32), block=(96,))
    assert caught.value.kind == "barrier"


def test_a_spin_without_end_is_a_livelock():
    body = PROLOGUE + "SPIN: ld.volatile.global.b32 %r1, [%d0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;"
    with pytest.raises(emulator.Fault) as caught:
        run(body, np.zeros(32, np.uint32), instruction_limit=20_000)
    assert caught.value.kind == "livelock" and "running at PTX line" in str(caught.value)


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
def test_partial_warps_and_all_thread_numbers(schedule):
    body = """
    .reg .b32 %r<30>; .reg .b64 %d<10>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y;
    mad.lo.u32 %r5, %r2, %r4, %r1; mad.lo.u32 %r5, %r5, %r3, %r0;
    mov.u32 %r6, %ctaid.y; mad.lo.u32 %r6, %r6, 2, 0; mov.u32 %r7, %ctaid.x; add.u32 %r6, %r6, %r7;
    mad.lo.u32 %r8, %r6, 42, %r5; ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r8, 8, %d0;
    mov.u32 %r9, %laneid; mov.u32 %r10, %warpid; st.global.v2.b32 [%d0], {%r9, %r10};
    """
    out = np.full((6, 42, 2), 99, np.uint32)
    run(body, out, block=(7, 3, 2), grid=(2, 3), schedule=schedule)
    assert (out[..., 0] == np.arange(42) % 32).all() and (out[..., 1] == np.arange(42) // 32).all()


def test_the_reader_knows_scopes_and_repeated_labels():
    text = (
        HEADER
        + """
    .visible .entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %d<2>; .reg .pred %p<3>;
      mov.u32 %r1, 0;
      { .reg .b32 %r<4>; .reg .b32 x; mov.u32 %r1, 5; mov.u32 x, 0;
        LOOP: add.u32 x, x, 1; setp.lt.u32 %p1, x, 3; @%p1 bra LOOP; }
      { .reg .b32 x; mov.u32 x, 0; LOOP: add.u32 x, x, 1; setp.lt.u32 %p1, x, 4; @%p1 bra LOOP;
      add.u32 %r1, %r1, x; }
      ld.param.u64 %d0, [out]; st.global.b32 [%d0], %r1; ret; }"""
    )
    out = np.zeros(1, np.uint32)
    emulator.load(text).launch("k", (1,), (1,), [out])
    assert out[0] == 4
