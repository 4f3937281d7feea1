"""Decode rows: integer arithmetic, bit operations, moves, selection."""

from __future__ import annotations

from . import layout as L
from . import opcodes as O
from .builder import WIDTHS
from .forms import row
from .model import Immediate, Sink, Symbol, Vector

_INTEGERS = "u16|u32|u64|s16|s32|s64"


def kind_of(ins) -> str:
    return ins.modifiers[-1]


def is_signed(kind: str) -> bool:
    return kind[0] == "s"


@row("add sub", f"sat? {_INTEGERS}", "d, a, b")
def add(b, ins):
    kind = kind_of(ins)
    d, x, y = (b.dest(ins.operands[0]), *(b.value(o, kind) for o in ins.operands[1:]))
    if ins.has("sat"):
        if kind != "s32":
            raise b.error(".sat needs type .s32")
        b.integer(O.ADD_SAT if ins.name == "add" else O.SUB_SAT, 32, d, x, y)
        return
    b.integer(O.ADD if ins.name == "add" else O.SUB, WIDTHS[kind], d, x, y)


@row("add", "u16x2|s16x2", "d, a, b")
def add_pairs(b, ins):
    b.integer(O.ADDX2, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]))


@row("add.cc addc addc.cc sub.cc subc subc.cc", "u32|s32|u64|s64", "d, a, b")
def add_carry(b, ins):
    kind = kind_of(ins)
    carry = b.register("%cc")
    flags = (1 if ins.name[3:4] == "c" else 0) | (2 if ins.name.endswith(".cc") else 0)
    code = b.emit(O.ADD_CC if ins.name.startswith("add") else O.SUB_CC, d=b.dest(ins.operands[0]),
                  a=b.value(ins.operands[1], kind), b=b.value(ins.operands[2], kind), e=carry, x=flags,
                  w=(1 << WIDTHS[kind]) - 1, s=64 - WIDTHS[kind], defs="de")
    code.uses.append(("f", L.P_E))
    code.killing = False


@row("mad.lo.cc mad.hi.cc madc.lo madc.hi madc.lo.cc madc.hi.cc", "u32|s32|u64|s64", "d, a, b, c")
def mad_carry(b, ins):
    kind = kind_of(ins)
    flags = (1 if ins.name.startswith("madc") else 0) | (2 if ins.name.endswith(".cc") else 0)
    flags |= (4 if ".hi" in ins.name else 0) | (8 if is_signed(kind) else 0)
    code = b.emit(
        O.MAD_CC,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], kind),
        b=b.value(ins.operands[2], kind),
        c=b.value(ins.operands[3], kind),
        e=b.register("%cc"),
        x=flags,
        w=(1 << WIDTHS[kind]) - 1,
        s=64 - WIDTHS[kind],
        defs="de",
    )
    code.uses.append(("f", L.P_E))
    code.killing = False


@row("mul mad", f"lo|hi|wide sat? {_INTEGERS}", "d, a, b, c?")
def multiply(b, ins):
    kind = kind_of(ins)
    width, mad = WIDTHS[kind], ins.name == "mad"
    if len(ins.operands) != 3 + mad:
        raise b.error(f"{ins.name} takes {3 + mad} operands")
    d = b.dest(ins.operands[0])
    x, y = b.value(ins.operands[1], kind), b.value(ins.operands[2], kind)
    wide = ins.has("wide")
    if wide and width == 64:
        raise b.error(".wide needs 16- or 32-bit operands")
    third = b.value(ins.operands[3], f"{kind[0]}{2 * width}" if wide else kind) if mad else None
    if wide:
        op = {(False, False): O.MUL_WIDE_U, (False, True): O.MUL_WIDE_S, (True, False): O.MAD_WIDE_U,
              (True, True): O.MAD_WIDE_S}[mad, is_signed(kind)]
        b.emit(op, d=d, a=x, b=y, c=third, w=(1 << 2 * width) - 1, s=64 - width)
    elif ins.has("lo"):
        b.integer(O.MAD_LO if mad else O.MUL_LO, width, d, x, y, third)
    elif ins.has("sat"):
        if not mad or kind != "s32":
            raise b.error(".sat is only known for mad.hi.sat.s32")
        b.integer(O.MAD_HI_SAT, width, d, x, y, third, y=1)
    else:
        b.integer(O.MAD_HI if mad else O.MUL_HI, width, d, x, y, third, y=int(is_signed(kind)))


@row("mul24 mad24", "lo|hi sat? u32|s32", "d, a, b, c?")
def multiply_24(b, ins):
    kind = kind_of(ins)
    values = [b.value(o, kind) for o in ins.operands[1:]]
    flags = (1 if ins.has("hi") else 0) | (2 if ins.has("sat") else 0)
    b.integer(O.MUL24 if ins.name == "mul24" else O.MAD24, 32, b.dest(ins.operands[0]), *values, x=flags,
              y=int(is_signed(kind)))


@row("div rem", _INTEGERS, "d, a, b")
@row("sad", _INTEGERS, "d, a, b, c")
def divide(b, ins):
    kind = kind_of(ins)
    op = {"div": O.DIV, "rem": O.REM, "sad": O.SAD}[ins.name]
    b.integer(op, WIDTHS[kind], b.dest(ins.operands[0]), *(b.value(o, kind) for o in ins.operands[1:]),
              y=int(is_signed(kind)))


@row("min max", f"relu? {_INTEGERS}", "d, a, b")
def minimum(b, ins):
    kind = kind_of(ins)
    op = {("min", True): O.MIN_S, ("min", False): O.MIN_U, ("max", True): O.MAX_S,
          ("max", False): O.MAX_U}[ins.name, is_signed(kind)]
    d = b.dest(ins.operands[0])
    b.integer(op, WIDTHS[kind], d, *(b.value(o, kind) for o in ins.operands[1:]))
    if ins.has("relu"):
        if kind != "s32":
            raise b.error(".relu needs type .s32 or .s16x2")
        b.integer(O.MAX_S, 32, d, d, b.constant(0))


@row("min max", "u16x2", "d, a, b")
@row("min max", "relu? s16x2", "d, a, b")
def minimum_pairs(b, ins):
    d = b.dest(ins.operands[0])
    b.integer(
        O.MINX2 if ins.name == "min" else O.MAXX2,
        32,
        d,
        *(b.value(o, "b32") for o in ins.operands[1:]),
        y=int(is_signed(kind_of(ins))),
    )
    if ins.has("relu"):
        b.integer(O.MAXX2, 32, d, d, b.constant(0), y=1)


@row("neg abs", "s16|s32|s64", "d, a")
def negate(b, ins):
    kind = kind_of(ins)
    b.integer(O.NEG if ins.name == "neg" else O.ABS, WIDTHS[kind], b.dest(ins.operands[0]),
              b.value(ins.operands[1], kind))


@row("and or xor", "b16|b32|b64", "d, a, b")
def logic(b, ins):
    kind = kind_of(ins)
    op = {"and": O.AND, "or": O.OR, "xor": O.XOR}[ins.name]
    b.integer(op, WIDTHS[kind], b.dest(ins.operands[0]), *(b.value(o, kind) for o in ins.operands[1:]))


@row("not", "b16|b32|b64", "d, a")
@row("cnot", "b16|b32|b64", "d, a")
@row("brev", "b32|b64", "d, a")
def unary_bits(b, ins):
    kind = kind_of(ins)
    op = {"not": O.NOT, "cnot": O.CNOT, "brev": O.BREV}[ins.name]
    b.integer(op, WIDTHS[kind], b.dest(ins.operands[0]), b.value(ins.operands[1], kind))


@row("popc clz", "b32|b64", "d, a")
def count_bits(b, ins):
    kind = kind_of(ins)
    b.integer(O.POPC if ins.name == "popc" else O.CLZ, WIDTHS[kind], b.dest(ins.operands[0]),
              b.value(ins.operands[1], kind))


@row("bfind", "shiftamt? u32|u64|s32|s64", "d, a")
def find_bit(b, ins):
    kind = kind_of(ins)
    b.emit(O.BFIND, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], kind), x=int(ins.has("shiftamt")),
           y=int(is_signed(kind)), w=0xFFFFFFFF, s=64 - WIDTHS[kind])


@row("shl", "b16|b32|b64", "d, a, b")
@row("shr", "b16|b32|b64|u16|u32|u64|s16|s32|s64", "d, a, b")
def shift(b, ins):
    kind = kind_of(ins)
    op = O.SHL if ins.name == "shl" else (O.SHR_S if is_signed(kind) else O.SHR_U)
    b.integer(op, WIDTHS[kind], b.dest(ins.operands[0]), b.value(ins.operands[1], kind),
              b.value(ins.operands[2], "b32"))


@row("shf", "l|r wrap|clamp b32", "d, a, b, c")
def funnel_shift(b, ins):
    b.integer(O.SHF, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]),
              x=int(ins.has("r")), y=int(ins.has("wrap")))


@row("bfe", "u32|u64|s32|s64", "d, a, b, c")
def extract_field(b, ins):
    kind = kind_of(ins)
    b.integer(O.BFE, WIDTHS[kind], b.dest(ins.operands[0]), b.value(ins.operands[1], kind),
              b.value(ins.operands[2], "b32"), b.value(ins.operands[3], "b32"), y=int(is_signed(kind)))


@row("bfi", "b32|b64", "d, a, b, c, e")
def insert_field(b, ins):
    kind = kind_of(ins)
    b.integer(
        O.BFI,
        WIDTHS[kind],
        b.dest(ins.operands[0]),
        b.value(ins.operands[1], kind),
        b.value(ins.operands[2], kind),
        b.value(ins.operands[3], "b32"),
        e=b.value(ins.operands[4], "b32"),
    )


@row("szext", "clamp|wrap u32|s32", "d, a, b")
@row("bmsk", "clamp|wrap b32", "d, a, b")
def extend_field(b, ins):
    b.integer(
        O.SZEXT if ins.name == "szext" else O.BMSK,
        32,
        b.dest(ins.operands[0]),
        *(b.value(o, "b32") for o in ins.operands[1:]),
        x=int(ins.has("wrap")),
        y=int(is_signed(kind_of(ins))),
    )


@row("dp4a", "u32|s32 u32?|s32?", "d, a, b, c")
def dot_four(b, ins):
    kinds = [m for m in ins.modifiers if m in ("u32", "s32")]
    flags = sum(1 << k for k, kind in enumerate(kinds) if kind == "s32")
    b.integer(O.DP4A, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]), x=flags)


@row("dp4a", "u32|s32 u32|s32", "d, a, b, c")
def dot_four_both(b, ins):
    dot_four(b, ins)


@row("dp2a", "lo|hi u32|s32 u32|s32", "d, a, b, c")
def dot_two(b, ins):
    kinds = [m for m in ins.modifiers if m in ("u32", "s32")]
    flags = sum(1 << k for k, kind in enumerate(kinds) if kind == "s32") | (4 if ins.has("hi") else 0)
    b.integer(O.DP2A, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]), x=flags)


@row("fns", "b32", "d, a, b, c")
def find_nth(b, ins):
    b.integer(O.FNS, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]))


@row("lop3", "b32", "d, a, b, c, t")
def logic_three(b, ins):
    table = ins.operands[4]
    if not isinstance(table, Immediate):
        raise b.error("the truth table of lop3 must be an immediate")
    b.emit(
        O.LOP3,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], "b32"),
        b=b.value(ins.operands[2], "b32"),
        c=b.value(ins.operands[3], "b32"),
        x=table.value & 0xFF,
    )


@row("lop3.or lop3.and", "b32", "d|p, a, b, c, t, q")
def logic_three_predicate(b, ins):
    pair = ins.operands[0]
    value = b.temporary() if isinstance(pair.first, Sink) else b.dest(pair.first)
    b.emit(O.LOP3, d=value, a=b.value(ins.operands[1], "b32"), b=b.value(ins.operands[2], "b32"),
           c=b.value(ins.operands[3], "b32"), x=ins.operands[4].value & 0xFF)
    q, negated = b.predicate(ins.operands[5])
    # p = (value != 0) BoolOp q
    b.emit(O.SETP_INT, d=b.dest(pair.second), a=value, b=b.constant(0), c=q,
           x=1 | ((2 if ins.name.endswith("or") else 1) << 8), y=16 if negated else 0, s=32)


@row("prmt", "b32 f4e|b4e|rc8|ecl|ecr|rc16?", "d, a, b, c")
def permute(b, ins):
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = ins.one_of(*modes)
    b.integer(
        O.PRMT_MODE if mode else O.PRMT,
        32,
        b.dest(ins.operands[0]),
        *(b.value(o, "b32") for o in ins.operands[1:]),
        x=1 + modes.index(mode) if mode else 0,
    )


@row("selp", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", "d, a, b, p")
def select(b, ins):
    kind = kind_of(ins)
    c, negated = b.predicate(ins.operands[3])
    first, second = b.value(ins.operands[1], kind), b.value(ins.operands[2], kind)
    if negated:
        first, second = second, first
    b.integer(O.SELP, WIDTHS[kind], b.dest(ins.operands[0]), first, second, c)


@row("slct", "ftz? b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64 s32", "d, a, b, c")
@row("slct", "ftz? b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64 f32", "d, a, b, c")
def select_sign(b, ins):
    kinds = [m for m in ins.modifiers if m != "ftz"]
    float_condition = kinds[1] == "f32"
    b.emit(
        O.SLCT_F if float_condition else O.SLCT_S,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], kinds[0]),
        b=b.value(ins.operands[2], kinds[0]),
        c=b.value(ins.operands[3], kinds[1]),
        w=(1 << WIDTHS[kinds[0]]) - 1,
        s=int(ins.has("ftz")),
    )


@row("mov", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|b128", "d, a")
def move(b, ins):
    kind = kind_of(ins)
    target, source = ins.operands
    if kind == "b128":
        raise b.error("128-bit registers are not supported")
    width = WIDTHS[kind]
    if isinstance(target, Vector):
        unpack(b, target, source, width)
    elif isinstance(source, Vector):
        pack(b, target, source, width)
    elif isinstance(source, Symbol) and source.name in b.frame:
        b.emit(O.MOV_LOCAL, d=b.dest(target), x=b.frame[source.name] + source.offset)
    else:
        b.integer(O.MOV, min(width, b.width(target)), b.dest(target), b.value(source, kind))


def pack(b, target, source: Vector, width: int) -> None:
    """d = concatenation of the elements, first in the low bits."""
    part = width // len(source.items)
    if len(source.items) not in (1, 2, 4, 8) or part < 8:
        raise b.error(f"cannot pack {len(source.items)} elements into {width} bits")
    rows = [b.value(item, f"b{part}") for item in source.items]
    if len(rows) == 1:
        b.integer(O.MOV, width, b.dest(target), rows[0])
        return
    total = b.temporary()
    b.integer(O.AND, width, total, rows[0], b.constant((1 << part) - 1))
    for k, element in enumerate(rows[1:], 1):
        moved = b.temporary()
        b.integer(O.SHL, width, moved, element, b.constant(k * part))
        joined = b.temporary() if k + 1 < len(rows) else b.dest(target)
        b.integer(O.OR, width, joined, total, moved)
        total = joined


def unpack(b, target: Vector, source, width: int) -> None:
    part = width // len(target.items)
    if len(target.items) not in (1, 2, 4, 8) or part < 8:
        raise b.error(f"cannot unpack {width} bits into {len(target.items)} elements")
    value = b.value(source, f"b{width}")
    copy = b.temporary()
    b.integer(O.MOV, width, copy, value)
    for k, element in enumerate(target.items):
        if isinstance(element, Sink):
            continue
        shifted = b.temporary()
        b.integer(O.SHR_U, width, shifted, copy, b.constant(k * part))
        b.integer(O.MOV, part, b.dest(element), shifted)


_VIDEO_KINDS = {"vadd": 0, "vsub": 1, "vavrg": 2, "vabsdiff": 3, "vmin": 4, "vmax": 5}


@row("vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4",
     "u32|s32 u32|s32 u32|s32 sat|add?", "d, a, b, c")
def video(b, ins):
    """SIMD video instructions without selectors: d, a, b whole registers, c the merge or accumulate
    operand."""
    kinds = [m for m in ins.modifiers if m in ("u32", "s32")]
    lanes = int(ins.name[-1])
    x = _VIDEO_KINDS[ins.name[:-1]] | lanes << 4 | (kinds[1] == "s32") << 8 | (kinds[2] == "s32") << 9
    x |= (kinds[0] == "s32") << 10 | ins.has("sat") << 11 | ins.has("add") << 12
    b.integer(O.VIDEO, 32, b.dest(ins.operands[0]), *(b.value(o, "b32") for o in ins.operands[1:]), x=x,
              y=(1 << lanes) - 1)


@row("vadd vsub vabsdiff vmin vmax vshl vshr vmad vset", "*", None)
def scalar_video(b, ins):
    raise b.error("scalar video instructions are not supported")
