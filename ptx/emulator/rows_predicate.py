"""Decode rows: setp, set, predicate logic, testp, isspacep, copysign."""

from __future__ import annotations

from . import opcodes as O
from .decode import WIDTHS
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
    return comparison, x, c, Y_NOT_C if negated else 0


def _targets(b, ins):
    first = ins.operands[0]
    if isinstance(first, Pair):
        return b.dest(first.first), b.dest(first.second)
    return b.dest(first), None


def _pair_emit(b, op, p, q, a, second, c, x, y, s=0):
    """e carries a second destination here, so its absence must not look like a constant row."""
    b.emit(op, d=p, a=a, b=second, c=c, e=NONE if q is None else q, x=x, y=y, s=s, defs="de", uses="abc")


@row("setp", f"{_INTEGER_CMP} {_BOOL} {_INTEGER_TYPES}", "p|q, a, b, c?")
def setp_integer(b, ins):
    comparison, x, c, y = _common(b, ins)
    kind = ins.modifiers[-1]
    if kind[0] == "b" and comparison not in ("eq", "ne"):
        raise b.error(f"{comparison} needs a signed or unsigned type")
    if kind[0] == "s" and comparison in ("lo", "ls", "hi", "hs"):
        raise b.error(f"{comparison} needs an unsigned type")
    p, q = _targets(b, ins)
    _pair_emit(b, O.SETP_INT, p, q, b.value(ins.operands[1], kind), b.value(ins.operands[2], kind), c, x,
               y | (Y_SIGNED if kind[0] == "s" else 0), 64 - WIDTHS[kind])


@row("setp", f"{_FLOAT_CMP} {_BOOL} ftz? f32|f64", "p|q, a, b, c?")
def setp_float(b, ins):
    _, x, c, y = _common(b, ins)
    kind = ins.modifiers[-1]
    p, q = _targets(b, ins)
    _pair_emit(b, O.SETP_F, p, q, b.value(ins.operands[1], kind), b.value(ins.operands[2], kind), c, x,
               y | (Y_F64 if kind == "f64" else 0) | (Y_FTZ if ins.has("ftz") else 0))


@row("setp", f"{_FLOAT_CMP} {_BOOL} ftz? f16|f16x2|bf16|bf16x2", "p|q, a, b, c?")
def setp_half(b, ins):
    _, x, c, y = _common(b, ins)
    kind = ins.modifiers[-1]
    p, q = _targets(b, ins)
    _pair_emit(b, O.SETP_HALF, p, q, b.value(ins.operands[1], kind), b.value(ins.operands[2], kind), c, x,
               y | (Y_BF16 if kind.startswith("bf16") else 0) | (Y_TWO if kind.endswith("x2") else 0)
               | (Y_FTZ if ins.has("ftz") else 0))


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
    _, x, c, y = _common(b, ins)
    kind, target = ins.modifiers[-1], ins.modifiers[-2]
    b.emit(
        O.SET_INT,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], kind),
        b=b.value(ins.operands[2], kind),
        c=c,
        x=x,
        y=y | (Y_SIGNED if kind[0] == "s" else 0),
        z=_true_bits(target),
        s=64 - WIDTHS[kind],
    )


@row("set", f"{_FLOAT_CMP} {_BOOL} ftz? u32|s32|f32 f32|f64", "d, a, b, c?")
def set_float(b, ins):
    _, x, c, y = _common(b, ins)
    kind, target = ins.modifiers[-1], ins.modifiers[-2]
    b.emit(
        O.SET_F,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], kind),
        b=b.value(ins.operands[2], kind),
        c=c,
        x=x,
        y=y | (Y_F64 if kind == "f64" else 0) | (Y_FTZ if ins.has("ftz") else 0),
        z=_true_bits(target),
    )


@row(
    "set",
    f"{_FLOAT_CMP} {_BOOL} ftz? f16|bf16|u16|s16|u32|s32|f16x2|bf16x2 f16|bf16|f16x2|bf16x2",
    "d, a, b, c?",
)
def set_half(b, ins):
    _, x, c, y = _common(b, ins)
    kind, target = ins.modifiers[-1], ins.modifiers[-2]
    packed = kind.endswith("x2")
    bits = 0xFFFF if packed and target in ("u32", "s32") else _true_bits(target)
    b.emit(
        O.SET_HALF,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], kind),
        b=b.value(ins.operands[2], kind),
        c=c,
        x=x,
        y=y
        | (Y_BF16 if kind.startswith("bf16") else 0)
        | (Y_TWO if packed else 0)
        | (Y_FTZ if ins.has("ftz") else 0),
        z=bits,
    )


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
