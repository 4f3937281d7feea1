"""Loads, stores, atomics and address spaces, and the checkers that watch them."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore.ptx import emulator

from .snippet import kernel

PROLOGUE = """
.reg .b32 %r<30>; .reg .b64 %d<12>; .reg .pred %p<10>; .reg .f32 %f<12>; .reg .b16 %h<8>;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [out]; mad.wide.u32 %d1, %r0, 4, %d0;
"""


def run(body: str, out, *args, block=(32,), grid=(1,), parameters=".param .u64 out", declarations="", **more):
    return emulator.load(kernel(PROLOGUE + body, parameters, declarations)).launch(
        "k", grid, block, [out, *args], **more
    )


def fault(kind: str, body: str, *args, **more) -> emulator.Fault:
    with pytest.raises(emulator.Fault) as caught:
        run(body, *args, **more)
    assert caught.value.kind == kind, caught.value
    return caught.value


def test_global_bounds_name_allocation_lane_and_line():
    found = fault("out-of-bounds", "\nst.global.b32 [%d1+4], %r0;", np.zeros(32, np.uint32))
    assert found.lane == 31 and "0 bytes past the end of args[0] (128 bytes)" in found.message
    assert found.text == "st.global.b32 [%d1+4], %r0;"
    assert fault("out-of-bounds", "ld.global.b32 %r1, [%d1+-4];", np.zeros(32, np.uint32)).lane == 0
    assert fault("out-of-bounds", "mov.u64 %d2, 64; ld.global.b32 %r1, [%d2];", np.zeros(32, np.uint32))
    run("st.global.b32 [%d1], %r0;", np.zeros(32, np.uint32))


def test_two_arrays_never_touch():
    """An access past one array must not land in another, however the host laid them out."""
    pool = np.zeros((2, 32), np.uint32)
    first, second = pool[0].copy(), pool[1].copy()
    body = "st.global.b32 [%d1+128], %r0;"
    fault("out-of-bounds", body, first, second, parameters=".param .u64 out, .param .u64 other")
    assert not second.any()


def test_views_of_one_buffer_share_an_allocation():
    pool = np.zeros(96, np.uint32)
    run(
        "ld.param.u64 %d3, [other]; ld.global.b32 %r1, [%d3]; st.global.b32 [%d1+128], %r0;",
        pool[:32],
        pool[64:],
        parameters=".param .u64 out, .param .u64 other",
    )
    assert (pool[32:64] == np.arange(32)).all()


def test_misalignment():
    assert fault("misaligned", "ld.global.b64 %d2, [%d1];", np.zeros(64, np.uint32)).lane == 1
    fault("misaligned", ".shared .align 16 .b8 s[256]; mov.u32 %r1, s; st.shared.b32 [%r1+2], %r0;",
          np.zeros(32, np.uint32))
    fault("misaligned", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0+8];", np.zeros(64, np.uint32))


def test_shared_bounds_and_poison():
    declare = ".shared .align 16 .b8 s[128]; mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;"
    fault("uninitialised", declare + "ld.shared.b32 %r4, [%r3];", np.zeros(32, np.uint32))
    fault("out-of-bounds", declare + "st.shared.b32 [%r3+4], %r0;", np.zeros(32, np.uint32))
    half = declare + "st.shared.b16 [%r3], %h0; ld.shared.b32 %r4, [%r3];"
    fault("uninitialised", half, np.zeros(32, np.uint32))
    out = np.zeros(32, np.uint32)
    run(declare + "st.shared.b32 [%r3], %r0; ld.shared.b32 %r4, [%r3]; st.global.b32 [%d1], %r4;", out)
    assert (out == np.arange(32)).all()


def test_shared_memory_does_not_survive_from_cta_to_cta():
    body = """.shared .align 4 .b8 s[4]; mov.u32 %r1, s; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0;
    @!%p1 st.shared.b32 [%r1], %r2; @%p1 ld.shared.b32 %r3, [%r1];"""
    for seed in range(4):
        fault("uninitialised", body, np.zeros(32, np.uint32), grid=(2,), block=(1,), seed=seed)


def test_local_memory_is_private_and_poisoned():
    declare = ".local .align 8 .b8 depot[16]; mov.u64 %d3, depot; cvta.local.u64 %d4, %d3;"
    out = np.zeros(32, np.uint32)
    run(declare + "st.local.b32 [%d3+8], %r0; ld.b32 %r1, [%d4+8]; st.global.b32 [%d1], %r1;", out)
    assert (out == np.arange(32)).all()
    fault("uninitialised", declare + "ld.local.b32 %r1, [%d3];", out)
    fault("out-of-bounds", declare + "st.local.b32 [%d3+16], %r0;", out)


def test_generic_addresses_reach_every_space():
    declarations = ".const .align 4 .b32 table[4] = {10, 20, 30, 40};\n.global .align 4 .b32 counter = 7;"
    body = """.shared .align 4 .b8 s[128];
    mov.u32 %r1, s; cvt.u64.u32 %d3, %r1; cvta.shared.u64 %d3, %d3; mad.wide.u32 %d3, %r0, 4, %d3;
    st.b32 [%d3], %r0;
    ld.b32 %r2, [%d3];
    mov.u64 %d4, table; cvta.const.u64 %d4, %d4; ld.b32 %r3, [%d4+8]; ld.const.b32 %r4, [table+4];
    mov.u64 %d5, counter; cvta.global.u64 %d5, %d5; ld.b32 %r5, [%d5];
    isspacep.shared %p1, %d3; isspacep.global %p2, %d5; isspacep.shared %p3, %d5;
    selp.b32 %r6, 1, 0, %p1; selp.b32 %r7, 10, 0, %p2; selp.b32 %r8, 100, 0, %p3;
    add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r6;
    add.u32 %r2, %r2, %r7;
    add.u32 %r2, %r2, %r8; st.global.b32 [%d1], %r2;"""
    out = np.zeros(32, np.uint32)
    run(body, out, declarations=declarations)
    assert (out == np.arange(32) + 30 + 20 + 7 + 11).all()


def test_module_variables_keep_their_values_between_launches():
    module = emulator.load(kernel("""
    .reg .b32 %r<3>; .reg .b64 %d<3>; ld.param.u64 %d0, [out]; mov.u64 %d1, counter;
    atom.global.add.u32 %r1, [%d1], 1; st.global.b32 [%d0], %r1;""", ".param .u64 out",
                                  ".global .align 4 .u32 counter = 5;"))
    out = np.zeros(1, np.uint32)
    for expected in (5, 6, 7):
        module.launch("k", (1,), (1,), [out])
        assert out[0] == expected


def test_vectors_of_every_width():
    body = """ld.global.v2.b16 {%h1, %h2}, [%d0+4]; ld.global.v4.b8 {%h3, %h4, %h5, %h6}, [%d0+8];
    ld.global.v2.b64 {%d3, %d4}, [%d0+16];
    ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d0+32];
    st.global.v2.b16 [%d0+68], {%h1, %h2}; st.global.v4.b8 [%d0+72], {%h3, %h4, %h5, %h6};
    st.global.v2.b64 [%d0+80], {%d3, %d4};
    st.global.v8.b32 [%d0+96], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};"""
    out = np.random.default_rng().integers(0, 256, 128).astype(np.uint8)
    run(body, out, block=(1,))
    assert (out[68:76] == out[4:12]).all() and (out[80:128] == out[16:64]).all()


def test_signed_loads_extend():
    out = np.array([0x80FF7F01, 0, 0, 0], np.uint32)
    run("""ld.global.s8 %r1, [%d0+2]; ld.global.u8 %r2, [%d0+2]; ld.global.s16 %r3, [%d0+2];
    st.global.b32 [%d0+4], %r1; st.global.b32 [%d0+8], %r2; st.global.b32 [%d0+12], %r3;""", out, block=(1,))
    assert out[1:].tolist() == [0xFFFFFFFF, 0xFF, 0xFFFF80FF]


ATOMICS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}
KINDS = {"add": "u32 s32 u64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64", "inc": "u32", "dec": "u32"}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    "name, kind", [(name, kind) for name in ATOMICS for kind in KINDS.get(name, "b32 b64").split()]
)
def test_integer_atomics(name, kind, space):
    """Pairs of the limits of the type, their neighbours and random values: what is left, what is returned."""
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    top = 1 << (bits - 1)
    some = np.random.default_rng().integers(3, top - 2, 2).tolist()
    edges = [0, 1, 2, top - 1, top, top + 1, 2 * top - 1, *some]
    pairs = [(a, b) for a in edges for b in edges]
    word = np.uint32 if bits == 32 else np.uint64
    memory, operands = (np.array(column, word) for column in zip(*pairs))
    returned = np.zeros_like(memory)
    size, body = bits // 8, f"""
        ld.param.u64 %d1, [operands]; ld.param.u64 %d2, [returned];
        mov.u32 %r1, %tid.x; mul.wide.u32 %d5, %r1, {bits // 8};
        add.u64 %d0, %d0, %d5; add.u64 %d1, %d1, %d5; add.u64 %d2, %d2, %d5;
        ld.global.b{bits} %{"r" if bits == 32 else "d"}6, [%d1];
    """
    value, old = ("%r6", "%r7") if bits == 32 else ("%d6", "%d7")
    if space == "global":
        body += f"atom.global.{name}.{kind} {old}, [%d0], {value};"
    else:
        body += f"""mov.u32 %r2, words; mad.lo.u32 %r2, %r1, {size}, %r2; ld.global.b{bits} {old}, [%d0];
            st.shared.b{bits} [%r2], {old}; atom.shared.{name}.{kind} {old}, [%r2], {value};
            {"mov.b32 %r6" if bits == 32 else "mov.b64 %d6"}, 0;
            ld.shared.b{bits} {value}, [%r2]; st.global.b{bits} [%d0], {value};"""
    body = f".shared .align 8 .b8 words[{size * len(pairs)}];" + body + f"st.global.b{bits} [%d2], {old};"

    def number(x):
        return x - 2 * top if is_signed and x >= top else x

    expected = [ATOMICS[name](number(a), number(b)) & (2 * top - 1) for a, b in pairs]
    parameters = ".param .u64 out, .param .u64 operands, .param .u64 returned"
    run(body, memory, operands, returned, block=(len(pairs),), parameters=parameters)
    assert memory.tolist() == expected and returned.tolist() == [a for a, _ in pairs]


@pytest.mark.parametrize(("space", "sum_of_halves"), [("global", 0), ("shared", 0x00800000)])
def test_float_atomics_flush_subnormals_in_global_memory_alone(space, sum_of_halves):
    half = 0x00400000  # half the least normal number
    out = np.array([half, 0x3F800000], np.uint32)
    if space == "global":
        body = f"mov.b32 %r1, {half:#x}; red.global.add.f32 [%d0], %r1;"
    else:
        body = f""".shared .b32 word; mov.b32 %r1, {half:#x}; st.shared.b32 [word], %r1;
            red.shared.add.f32 [word], %r1; ld.shared.b32 %r2, [word]; st.global.b32 [%d0], %r2;"""
    run(body, out, block=(1,))
    assert out.tolist() == [sum_of_halves, 0x3F800000]


def test_packed_and_vector_float_atomics():
    out = np.array([1.5, 2.5, 3.5, 4.5], np.float32)
    run(
        "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000;"
        "red.global.add.v4.f32 [%d0], {%f1, %f2, %f1, %f2};",
        out,
        block=(1,),
    )
    assert out.tolist() == [2.5, 4.5, 4.5, 6.5]
    halves = np.array([1.0, -2.0], np.float16)
    run("mov.b32 %r1, 0x3C003C00; red.global.add.noftz.f16x2 [%d0], %r1;", halves, block=(8,))
    assert halves.tolist() == [9.0, 6.0]


def test_compare_and_swap_returns_the_old_value():
    out = np.array([7, 0, 0], np.uint32)
    run("""atom.global.cas.b32 %r1, [%d0], 7, 9; atom.global.cas.b32 %r2, [%d0], 7, 11;
    st.global.b32 [%d0+4], %r1; st.global.b32 [%d0+8], %r2;""", out, block=(1,))
    assert out.tolist() == [9, 7, 9]


def test_parameters_by_value_and_their_limits():
    body = """ld.param.v2.b32 {%r1, %r2}, [s+8]; ld.param.s8 %r3, [c]; add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %r3;
    st.global.b32 [%d0], %r1;"""
    parameters = ".param .u64 out, .param .align 8 .b8 s[16], .param .s8 c"
    out = np.zeros(1, np.int32)
    struct = emulator.Bytes(np.array([1, 2, 30, 40], np.int32).tobytes())
    run(body, out, struct, np.int8(-5), block=(1,), parameters=parameters)
    assert out[0] == 65
    with pytest.raises(ValueError, match="12 bytes given"):
        run(body, out, emulator.Bytes(12), np.int8(0), parameters=parameters)
    with pytest.raises(TypeError, match="int16 has 2 bytes"):
        run(body, out, struct, np.int16(0), parameters=parameters)
    with pytest.raises(ValueError, match="2 given, the kernel takes 3"):
        run(body, out, struct, parameters=parameters)
    with pytest.raises(emulator.PtxSyntaxError, match="parameter 's', which has 16"):
        run("ld.param.b64 %d2, [s+16];", out, struct, np.int8(0), parameters=parameters)


def test_pointers_inside_arrays():
    memory = emulator.Memory()
    rows = [np.full(4, k + 1, np.uint32) for k in range(3)]
    table = np.array([memory.address(row) for row in rows], np.uint64)
    out = np.zeros(3, np.uint32)
    run("""ld.param.u64 %d3, [table]; mad.wide.u32 %d3, %r0, 8, %d3; ld.global.b64 %d4, [%d3];
    ld.global.b32 %r1, [%d4+12]; st.global.b32 [%d1], %r1;""", out, table, block=(3,), memory=memory,
        parameters=".param .u64 out, .param .u64 table")
    assert out.tolist() == [1, 2, 3]


def test_writes_to_constant_memory_are_refused():
    declarations = ".const .align 4 .b32 table[4];"
    with pytest.raises(emulator.PtxSyntaxError, match="cannot be written"):
        run("st.const.b32 [table], %r0;", np.zeros(1, np.uint32), declarations=declarations)
    fault(
        "read-only",
        "mov.u64 %d3, table; cvta.const.u64 %d3, %d3; st.b32 [%d3], %r0;",
        np.zeros(1, np.uint32),
        declarations=declarations,
        block=(1,),
    )


def test_bank_conflicts_are_counted():
    for stride, expected in ((4, 1), (8, 2), (128, 32), (132, 1)):
        body = f""".shared .align 16 .b8 s[{32 * 132}]; mov.u32 %r1, s; mad.lo.u32 %r2, %r0, {stride}, %r1;
        st.shared.b32 [%r2], %r0;"""
        assert run(body, np.zeros(1, np.uint32)).shared_wavefronts == expected
    broadcast = ".shared .align 4 .b8 s[4]; st.shared.b32 [s], 5; bar.warp.sync -1; ld.shared.b32 %r1, [s];"
    assert run(broadcast, np.zeros(1, np.uint32)).shared_wavefronts == 2
    wide = """.shared .align 16 .b8 s[512]; mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 16, %r1;
    st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0};"""
    assert run(wide, np.zeros(1, np.uint32)).shared_wavefronts == 4
