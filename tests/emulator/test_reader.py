"""Parsing and decoding: what is known, and that anything else is refused with its line and text."""

from __future__ import annotations

import re

import numpy as np
import pytest

from msa_cudacore.ptx import emulator
from msa_cudacore.ptx.emulator.control_flow import postdominators
from msa_cudacore.ptx.emulator.forms import find
from msa_cudacore.ptx.emulator.model import Address, Immediate, Instruction, Register, Symbol
from msa_cudacore.ptx.emulator.reader import read

from .snippet import HEADER, kernel


@pytest.mark.parametrize(
    "line,message",
    [
        ("frobnicate.u32 %r1, %r2;", "unknown instruction 'frobnicate.u32'"),
        ("add.rn.u32 %r1, %r2, %r3;", "unknown modifiers of 'add.rn.u32'"),
        ("add.u32 %r1, %r2;", "operands of 'add.u32' do not fit"),
        ("add.u32 %r1, %r2, %r99;", "unknown special register '%r99'"),
        ("add.u32 %r1, %r2, nowhere;", "unknown name 'nowhere'"),
        ("bra NOWHERE;", "unknown label 'NOWHERE'"),
        ("mov.u32 %r1, %tid.w;", "unknown special register"),
        ("@%r1 add.u32 %r1, %r2, %r3;", "guard '%r1' is not a predicate"),
        ("setp.lo.s32 %p1, %r1, %r2;", "needs an unsigned type"),
        ("atom.global.inc.s32 %r1, [%d1], 3;", "not defined for .s32"),
        ("setmaxnreg.inc.sync.aligned.u32 20;", "multiple of 8 between 24 and 256"),
        ("cvt.rs.bf16x2.f32 %r1, %f1, %f2, %r3;", "stochastic rounding"),
        ("ld.global.v4.b32 {%r1, %r2}, [%d1];", "2 registers for a v4 access"),
        ("call.uni missing, ();", "unknown function 'missing'"),
        ("add.u32 %r1, %r2 %r3;", "expected ',' or ';'"),
        ("add.u32 %r1, ?, %r3;", "expected an operand, found '?'"),
        ("add.u32 %r1, #, %r3;", "unexpected character '#'"),
    ],
)
def test_unknown_text_is_refused_with_its_line(line, message):
    text = (
        HEADER
        + ".visible .entry k() {\n.reg .b32 %r<9>; .reg .b64 %d<3>; .reg .f32 %f<3>;"
        + f" .reg .pred %p<3>;\n{line}\nret; }}"
    )
    with pytest.raises(emulator.PtxSyntaxError) as caught:
        emulator.load(text)
    assert message in str(caught.value)
    assert caught.value.line == 6 and line.split()[0].strip("@%r1 ").split(".")[0] in str(caught.value)


def test_modifiers_are_a_set():
    for opcode in ("ld.relaxed.gpu.global.v2.b32", "ld.global.relaxed.v2.gpu.b32"):
        instruction = Instruction(
            opcode, (Register("%r1"), Address(Register("%rd1", "b64"))), None, 1, opcode
        )
        assert find(instruction).name == "ld" and instruction.has("relaxed")


def test_every_part_of_a_module_is_read():
    program = read(HEADER + """
    .file 1 "kernel.cu"
    .extern .shared .align 128 .b8 dynamic[];
    .const .align 8 .f64 table[2][2] = {{1.0, 2.0}, {0d4008000000000000, 4.0}};
    .global .align 8 .u64 pointer[2] = {generic(table), table+8};
    .global .align 1 .b8 text[4] = {104, 105, 0x21, 0};
    .global .align 4 .u32 folded = (3 << 4) | ~0 & 7;
    .visible .func (.param .b32 r) helper (.param .align 8 .b8 s[16], .param .b32 x) ;
    .visible .entry k(.param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128])
    .maxntid 128, 1, 1 .minnctapersm 2 .reqnctapercluster 2, 1, 1
    {
      .reg .pred %p; .reg .b16 %h<3>, %k; .local .align 16 .b8 depot[32];
      .loc 1 7 3
      mov.b32 %f, {%h1, %h2};
      ret;
    }
    .section .debug_str { info: .b8 1, 2 }
    """.replace("%f", "%q").replace(".reg .pred %p;", ".reg .pred %p; .reg .b32 %q;"))
    entry = program.functions["k"]
    assert entry.directives["reqnctapercluster"] == (2, 1, 1) and entry.directives["maxntid"] == (128, 1, 1)
    assert [v.bytes for v in entry.parameters] == [8, 128] and entry.parameters[1].align == 64
    assert program.variables["folded"].initial == 3 << 4 | ~0 & 7
    assert program.variables["dynamic"].external and program.variables["dynamic"].shape == (0,)
    assert entry.body[0].source.file == "kernel.cu" and entry.body[0].source.line == 7
    assert entry.registers["%k"] == "b16"


def test_initialisers_reach_memory():
    declarations = """.const .align 8 .f64 table[2][2] = {{1.0, 2.0}, {0d4008000000000000}};
    .global .align 8 .u64 pointers[2] = {generic(table), table+8};
    .global .align 1 .b8 text[4] = {104, 105};"""
    body = """.reg .b64 %d<9>; .reg .f64 %g<9>; .reg .b32 %r<3>;
    ld.param.u64 %d0, [out]; ld.const.f64 %g0, [table+16]; ld.global.u64 %d1, [pointers+8]; ld.f64 %g1, [%d1];
    ld.global.u64 %d2, [pointers]; ld.f64 %g2, [%d2]; ld.const.f64 %g3, [table+24];
    ld.global.u8 %r1, [text+1];
    cvt.rn.f64.u32 %g4, %r1;
    st.global.f64 [%d0], %g0; st.global.f64 [%d0+8], %g1; st.global.f64 [%d0+16], %g2;
    st.global.f64 [%d0+24], %g3;
    st.global.f64 [%d0+32], %g4;"""
    out = np.zeros(5)
    emulator.load(kernel(body, ".param .u64 out", declarations)).launch("k", (1,), (1,), [out])
    assert out.tolist() == [3.0, 2.0, 1.0, 0.0, 105.0]


def test_inlined_calls_are_named_with_their_call_site():
    source = """
    __device__ __noinline__ int outer(int* p);
    __device__ __forceinline__ void store(int* p, int v) { p[4096] = v; }
    extern "C" __global__ void k(int* p) {
      store(p, 3);
    }"""
    module = emulator.compile(source, "sm_90a", name="mine.cu")
    with pytest.raises(emulator.Fault) as caught:
        module.launch("k", (1,), (1,), [np.zeros(4, np.int32)])
    assert (
        "mine.cu:3" in str(caught.value)
        and "inlined at" in str(caught.value)
        and "mine.cu:5" in str(caught.value)
    )


def test_postdominators_of_a_loop_with_two_exits():
    #        0: branch 1 | 4    1: body    2: branch 5 | 3    3: back to 0    4: -> 5    5: end
    meet = postdominators([(1, 4), (2,), (3, 5), (0,), (5,), ()])
    assert meet == [5, 2, 5, 0, 5, -1]


def test_a_path_without_end_has_no_meeting_point():
    assert postdominators([(1, 2), (1,), ()])[1] == -1


def test_damaged_text_is_a_syntax_error_and_nothing_else():
    rng = np.random.default_rng()
    text = kernel(
        """.reg .b32 %r<9>; .reg .b64 %d<3>; .reg .pred %p<3>; .shared .align 16 .b8 s[64];
    .loc 1 2 3
    ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 5; @%p1 bra END;
    { .reg .b32 x; LOOP: add.u32 x, %r1, -7; @!%p1 bra LOOP; }
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1+16]; mov.b64 %d2, {%r1, %r2}; st.shared.b32 [s+4], %r1;
    END: bar.sync 0;""",
        ".param .u64 .ptr .global .align 16 out",
        ".const .align 4 .b32 t[2] = {1, (2 << 3) | 1};",
    )
    parts = re.split(r"(\s+|[,;\[\]{}()@|])", text)
    spare = "{ } ( ) [ ] , ; : @ ! | + - < > 0x 12 1.5 0f3f800000 %r1 %p1 .reg .b32 add.u32 _ bra".split()
    for _ in range(150):
        damaged = list(parts)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(damaged)))
            damaged[at] = str(rng.choice(["", *spare, parts[int(rng.integers(len(parts)))]]))
        broken = "".join(damaged)[: int(rng.choice([len(text), int(rng.integers(len(text)))]))]
        try:
            emulator.load(broken)
        except emulator.PtxSyntaxError as error:
            assert error.line >= 1


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(name="other"), "name='other'"),
        (dict(grid=(0,)), "grid=(0,)"),
        (dict(block=(2048,)), "at most 1024"),
        (dict(cluster=(3,)), "is not a multiple of the cluster's 3"),
        (dict(schedule="fast"), "schedule='fast'"),
        (dict(shared_bytes=1 << 20), "shared_bytes=1048576"),
        (dict(concurrent_clusters=0), "concurrent_clusters=0"),
        (dict(grid=(1, 1, 1, 1)), "1 to 3 positive integers"),
    ],
)
def test_launch_arguments_are_checked_by_name(arguments, message):
    module = emulator.load(kernel("ret;"))
    given = dict(name="k", grid=(4,), block=(32,)) | arguments
    with pytest.raises(ValueError) as caught:
        module.launch(given.pop("name"), given.pop("grid"), given.pop("block"), [], **given)
    assert message in str(caught.value)


def test_arguments_that_do_not_fit_are_named():
    module = emulator.load(kernel("ret;", ".param .u64 p, .param .u32 n, .param .f32 x"))
    array = np.zeros(4)
    module.launch("k", (1,), (1,), [array, 3, 0.5])
    module.launch("k", (1,), (1,), [None, np.uint32(3), np.float32(0.5)])
    for arguments, message in (
        ([array, 1 << 33, 0.5], "args[1]"),
        ([array, array, 0.5], "args[1]"),
        ([array, 3, "x"], "str is not accepted"),
        ([3.5, 3, 0.5], "float is not accepted"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            module.launch("k", (1,), (1,), arguments)
        assert message in str(caught.value)


def test_operands_of_the_model_are_plain_data():
    body = (
        read(
            kernel(
                ".reg .b32 %r<3>; .reg .b64 %d; .reg .pred %p; ld.b32 %r1, [%d+-8]; add.u32 %r1, %r2, -1;"
                "@!%p mov.b32 %r1, 0f3F800000;"
            )
        )
        .functions["k"]
        .body
    )
    assert body[0].operands[1] == Address(Register("%d", "b64"), -8)
    assert body[1].operands[2] == Immediate(-1)
    assert body[2].guard.negated and body[2].operands[1] == Immediate(0x3F800000, "f32")
    assert isinstance(Symbol("x"), Symbol)
