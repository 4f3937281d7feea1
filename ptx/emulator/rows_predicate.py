"""Decode rows: setp, set, predicate logic, testp, isspacep, copysign."""

from __future__ import annotations

from . import opcodes as O
from .builder import WIDTHS
from .forms import row
from .lanes_predicate import (
    BOOL_AND, BOOL_NONE, BOOL_OR, BOOL_XOR, COMPARISONS, SPACE_KINDS, TESTP_KINDS, Y_BF16, Y_F64, Y_FTZ,
    Y_NOT_C, Y_SIGNED, Y_TWO,
)
from .layout import NONE
from .model import Pair

_BOOLEANS = {"and": BOOL_AND, "or": BOOL_OR, "xor": BOOL_XOR}
_INTEGER_CMP = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs"
_FLOAT_CMP = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"
_INTEGER_TYPES = "b16|b32|b64|u16|u32|u64|s16|s32|s64"
_BOOL = "and|or|xor?"


def _common(b, ins):
    """comparison | boolean << 8, the predicate operand's row and the y flags."""
    comparison = next(m for m in ins.modifiers if m in COMPARISONS)
    boolean = next((m for m in ins.modifiers if m in _BOOLEANS), None)
    if (len(ins.operands) == 4) != (boolean is not None):
        raise b.error("a boolean operator and a predicate operand go together")
    c, negated = b.predicate(ins.operands[3]) if boolean else (None, 0)
    x = COMPARISONS[comparison] | (_BOOLEANS[boolean] if boolean else BOOL_NONE) << 8
    return x, c, Y_NOT_C if negated else 0


def _targets(b, ins):
    first = ins.operands[0]
    if isinstance(first, Pair):
        return b.dest(first.first), b.dest(first.second)
    return b.dest(first), None


def _flags(ins, kind):
    """The y flags of the operands' type."""
    return (
        (Y_SIGNED if kind[0] == "s" else 0)
        | (Y_F64 if kind == "f64" else 0)
        | (Y_BF16 if kind.startswith("bf16") else 0)
        | (Y_TWO if kind.endswith("x2") else 0)
        | (Y_FTZ if ins.has("ftz") else 0)
    )


def _setp(b, ins, operation, s=0):
    """e carries a second destination here, so its absence must not look like a constant row."""
    x, c, y = _common(b, ins)
    kind = ins.modifiers[-1]
    p, q = _targets(b, ins)
    b.emit(operation, d=p, a=b.value(ins.operands[1], kind), b=b.value(ins.operands[2], kind), c=c,
           e=NONE if q is None else q, x=x, y=y | _flags(ins, kind), s=s, defs="de", uses="abc")


def _set(b, ins, operation, bits, s=0):
    """`bits`: what stands for true in the destination."""
    x, c, y = _common(b, ins)
    kind = ins.modifiers[-1]
    b.emit(operation, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], kind),
           b=b.value(ins.operands[2], kind), c=c, x=x, y=y | _flags(ins, kind), z=bits, s=s)


@row("setp", f"{_INTEGER_CMP} {_BOOL} {_INTEGER_TYPES}", "p|q, a, b, c?")
def setp_integer(b, ins):
    comparison, kind = ins.modifiers[0], ins.modifiers[-1]
    if kind[0] == "b" and comparison not in ("eq", "ne"):
        raise b.error(f"{comparison} needs a signed or unsigned type")
    if kind[0] == "s" and comparison in ("lo", "ls", "hi", "hs"):
        raise b.error(f"{comparison} needs an unsigned type")
    _setp(b, ins, O.SETP_INT, 64 - WIDTHS[kind])


@row("setp", f"{_FLOAT_CMP} {_BOOL} ftz? f32|f64", "p|q, a, b, c?")
def setp_float(b, ins):
    _setp(b, ins, O.SETP_F)


@row("setp", f"{_FLOAT_CMP} {_BOOL} ftz? f16|f16x2|bf16|bf16x2", "p|q, a, b, c?")
def setp_half(b, ins):
    _setp(b, ins, O.SETP_HALF)


def _true_bits(kind: str) -> int:
    return {
        "f32": 0x3F800000,
        "f16": 0x3C00,
        "f16x2": 0x3C00,
        "bf16": 0x3F80,
        "bf16x2": 0x3F80,
        "u16": 0xFFFF,
        "s16": 0xFFFF,
        "b16": 0xFFFF,
    }.get(kind, 0xFFFFFFFF)


@row("set", f"{_INTEGER_CMP} {_BOOL} u32|s32|f32 {_INTEGER_TYPES}", "d, a, b, c?")
def set_integer(b, ins):
    _set(b, ins, O.SET_INT, _true_bits(ins.modifiers[-2]), 64 - WIDTHS[ins.modifiers[-1]])


@row("set", f"{_FLOAT_CMP} {_BOOL} ftz? u32|s32|f32 f32|f64", "d, a, b, c?")
def set_float(b, ins):
    _set(b, ins, O.SET_F, _true_bits(ins.modifiers[-2]))


@row(
    "set",
    f"{_FLOAT_CMP} {_BOOL} ftz? f16|bf16|u16|s16|u32|s32|f16x2|bf16x2 f16|bf16|f16x2|bf16x2",
    "d, a, b, c?",
)
def set_half(b, ins):
    target, packed = ins.modifiers[-2], ins.modifiers[-1].endswith("x2")
    _set(b, ins, O.SET_HALF, 0xFFFF if packed and target in ("u32", "s32") else _true_bits(target))


@row("and or xor", "pred", "p, p, p")
def predicate_logic(b, ins):
    a, not_a = b.predicate(ins.operands[1])
    c, not_c = b.predicate(ins.operands[2])
    b.emit(O.PRED_LOGIC, d=b.dest(ins.operands[0]), a=a, b=c, x=("and", "or", "xor").index(ins.name),
           y=not_a | not_c << 1)


@row("not mov", "pred", "p, a")
def predicate_move(b, ins):
    a, negated = b.predicate(ins.operands[1])
    b.emit(O.PRED_LOGIC, d=b.dest(ins.operands[0]), a=a, x=3 if ins.name == "not" else 4, y=negated)


@row("testp", "finite|infinite|number|notanumber|normal|subnormal f32|f64", "p, a")
def test_property(b, ins):
    kind = ins.modifiers[-1]
    prop = next(m for m in ins.modifiers if m in TESTP_KINDS)
    b.emit(O.TESTP, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], kind), x=TESTP_KINDS[prop],
           y=Y_F64 if kind == "f64" else 0)


@row(
    "isspacep", "global|shared|shared::cta|shared::cluster|local|const|param|param::entry|param::func", "p, a"
)
def is_space(b, ins):
    b.emit(O.ISSPACEP, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], "b64"),
           b=b.special("%cluster_ctarank"), x=SPACE_KINDS[ins.modifiers[0]])


@row("copysign", "f32|f64", "d, a, b")
def copy_sign(b, ins):
    width = WIDTHS[ins.modifiers[0]]
    sign, value = b.temporary(), b.temporary()
    b.integer(O.AND, width, sign, b.value(ins.operands[1], ins.modifiers[0]), b.constant(1 << (width - 1)))
    b.integer(
        O.AND, width, value, b.value(ins.operands[2], ins.modifiers[0]), b.constant((1 << (width - 1)) - 1)
    )
    b.integer(O.OR, width, b.dest(ins.operands[0]), sign, value)
