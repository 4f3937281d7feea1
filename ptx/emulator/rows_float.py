"""Decode rows: f32, f64, f16, bf16 and packed arithmetic, and conversions."""

from __future__ import annotations

from . import opcodes as O
from .builder import WIDTHS
from .forms import row
from .lanes_convert import C_FTZ, C_RELU, C_SAT, C_SATFINITE, C_SIGNED, FORMATS, T_F32, X_INTEGRAL
from .lanes_float import F_ABS, F_DOUBLE, F_FTZ, F_NAN, F_RELU, F_SAT, F_SUBTRACT, F_XORSIGN
from .lanes_half import H_ABS, H_BF16, H_FTZ, H_NAN, H_OOB, H_PACKED, H_RELU, H_SAT, H_XORSIGN
from .numerics import RM, RN, RNA, RP, RZ

_ROUND = "rn|rz|rm|rp?"
_MODES = {"rn": RN, "rz": RZ, "rm": RM, "rp": RP, "rna": RNA, "rni": RN, "rzi": RZ, "rmi": RM, "rpi": RP}


def rounding(ins) -> int:
    return next((_MODES[m] for m in ins.modifiers if m in ("rn", "rz", "rm", "rp", "rna")), RN)


def float_flags(ins) -> int:
    y = F_DOUBLE if "f64" in ins.modifiers else 0
    for name, bit in (("ftz", F_FTZ), ("sat", F_SAT), ("NaN", F_NAN), ("xorsign", F_XORSIGN), ("abs", F_ABS),
                      ("relu", F_RELU)):
        if ins.has(name):
            y |= bit
    return y


def values(b, ins, kind):
    return [b.value(o, kind) for o in ins.operands[1:]]


@row("add sub mul", f"{_ROUND} ftz? sat? f32", "d, a, b")
@row("add sub mul", f"{_ROUND} f64", "d, a, b")
def arithmetic(b, ins):
    op = O.FMUL if ins.name == "mul" else O.FADD
    y = float_flags(ins) | (F_SUBTRACT if ins.name == "sub" else 0)
    a = values(b, ins, ins.modifiers[-1])
    b.emit(op, d=b.dest(ins.operands[0]), a=a[0], b=a[1], x=rounding(ins), y=y)


@row("fma mad", f"{_ROUND} ftz? sat? relu? f32|f64", "d, a, b, c")
def fused(b, ins):
    a = values(b, ins, ins.modifiers[-1])
    b.emit(O.FFMA, d=b.dest(ins.operands[0]), a=a[0], b=a[1], c=a[2], x=rounding(ins), y=float_flags(ins))


@row("min max", "ftz? NaN? xorsign? abs? f32", "d, a, b, c?")
@row("min max", "f64", "d, a, b")
def extremum(b, ins):
    a = values(b, ins, ins.modifiers[-1])
    op = O.FMIN if ins.name == "min" else O.FMAX
    if len(a) == 3:
        op = O.FMIN3 if ins.name == "min" else O.FMAX3
    b.emit(op, d=b.dest(ins.operands[0]), a=a[0], b=a[1], c=a[2] if len(a) == 3 else None, y=float_flags(ins))


@row("neg abs", "ftz? f32|f64", "d, a")
def sign(b, ins):
    y = float_flags(ins) & ~F_ABS
    b.emit(O.FNEG if ins.name == "neg" else O.FABS, d=b.dest(ins.operands[0]),
           a=b.value(ins.operands[1], ins.modifiers[-1]), y=y)


@row("div", "rn|rz|rm|rp ftz? f32|f64", "d, a, b")
def divide(b, ins):
    a = values(b, ins, ins.modifiers[-1])
    b.emit(O.FDIV, d=b.dest(ins.operands[0]), a=a[0], b=a[1], x=rounding(ins), y=float_flags(ins))


@row("div", "approx|full ftz? f32", "d, a, b")
def divide_approximately(b, ins):
    a = values(b, ins, "f32")
    b.emit(O.FDIV_APPROX, d=b.dest(ins.operands[0]), a=a[0], b=a[1],
           y=float_flags(ins) | (F_NAN if ins.has("full") else 0))


@row("rcp sqrt", "rn|rz|rm|rp ftz? f32|f64", "d, a")
def reciprocal(b, ins):
    b.emit(O.FRCP if ins.name == "rcp" else O.FSQRT, d=b.dest(ins.operands[0]),
           a=b.value(ins.operands[1], ins.modifiers[-1]), x=rounding(ins), y=float_flags(ins))


@row("rcp sqrt rsqrt ex2 lg2 sin cos", "approx ftz? f32", "d, a")
@row("tanh", "approx f32", "d, a")
def approximate(b, ins):
    op = {
        "rcp": O.FRCP_APPROX,
        "sqrt": O.FSQRT_APPROX,
        "rsqrt": O.FRSQRT,
        "ex2": O.EX2,
        "lg2": O.LG2,
        "sin": O.SIN,
        "cos": O.COS,
        "tanh": O.TANH,
    }[ins.name]
    b.emit(op, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], "f32"), y=float_flags(ins))


@row("rcp rsqrt", "approx ftz? f64", "d, a")
def approximate_double(b, ins):
    b.emit(O.RCP64H if ins.name == "rcp" else O.RSQRT64H, d=b.dest(ins.operands[0]),
           a=b.value(ins.operands[1], "f64"), y=F_DOUBLE)


# ---- half precision and packed
def half_flags(ins) -> int:
    kind = ins.modifiers[-1]
    y = (H_BF16 if kind.startswith("bf16") else 0) | (H_PACKED if kind.endswith("x2") else 0)
    for name, bit in (
        ("ftz", H_FTZ),
        ("sat", H_SAT),
        ("relu", H_RELU),
        ("NaN", H_NAN),
        ("xorsign", H_XORSIGN),
        ("abs", H_ABS),
        ("oob", H_OOB),
    ):
        if ins.has(name):
            y |= bit
    return y


_HALVES = "f16|f16x2|bf16|bf16x2"


@row("add sub mul", f"rn? ftz? sat? {_HALVES}", "d, a, b")
@row("fma", f"rn ftz? sat? relu? oob? {_HALVES}", "d, a, b, c")
def half_arithmetic(b, ins):
    op = {"add": O.HADD, "sub": O.HSUB, "mul": O.HMUL, "fma": O.HFMA}[ins.name]
    a = values(b, ins, ins.modifiers[-1])
    b.emit(
        op, d=b.dest(ins.operands[0]), a=a[0], b=a[1], c=a[2] if len(a) > 2 else None, x=RN, y=half_flags(ins)
    )


@row("min max", f"ftz? NaN? xorsign? abs? {_HALVES}", "d, a, b, c?")
def half_extremum(b, ins):
    a = values(b, ins, ins.modifiers[-1])
    op = O.HMIN if ins.name == "min" else O.HMAX
    if len(a) == 3:
        op = O.HMIN3 if ins.name == "min" else O.HMAX3
    b.emit(op, d=b.dest(ins.operands[0]), a=a[0], b=a[1], c=a[2] if len(a) > 2 else None, y=half_flags(ins))


@row("neg abs", f"ftz? {_HALVES}", "d, a")
def half_sign(b, ins):
    b.emit(O.HNEG if ins.name == "neg" else O.HABS, d=b.dest(ins.operands[0]),
           a=b.value(ins.operands[1], ins.modifiers[-1]), y=half_flags(ins) & ~H_ABS)


@row("ex2 tanh", f"approx ftz? {_HALVES}", "d, a")
def half_approximate(b, ins):
    b.emit(O.HEX2 if ins.name == "ex2" else O.HTANH, d=b.dest(ins.operands[0]),
           a=b.value(ins.operands[1], ins.modifiers[-1]), x=RN, y=half_flags(ins))


@row("add mul", f"{_ROUND} ftz? f32x2", "d, a, b")
@row("sub", f"{_ROUND} ftz? f32x2", "d, a, b")
@row("fma", f"{_ROUND} ftz? f32x2", "d, a, b, c")
def pair_arithmetic(b, ins):
    a = values(b, ins, "b64")
    if ins.name == "sub":
        flipped = b.temporary()
        b.integer(O.XOR, 64, flipped, a[1], b.constant(0x8000000080000000))
        a[1] = flipped
    op = {"add": O.F2ADD, "sub": O.F2ADD, "mul": O.F2MUL, "fma": O.F2FMA}[ins.name]
    b.emit(op, d=b.dest(ins.operands[0]), a=a[0], b=a[1], c=a[2] if len(a) > 2 else None, x=rounding(ins),
           y=F_FTZ if ins.has("ftz") else 0)


@row("add sub", f"{_ROUND} sat? f32 f16|bf16", "d, a, c")
@row("fma", f"{_ROUND} sat? f32 f16|bf16", "d, a, b, c")
def mixed_arithmetic(b, ins):
    narrow = ins.modifiers[-1]
    y = (H_BF16 if narrow == "bf16" else 0) | (H_SAT if ins.has("sat") else 0)
    op = {"add": O.HMIXADD, "sub": O.HMIXSUB, "fma": O.HMIXFMA}[ins.name]
    last = b.value(ins.operands[-1], "f32")
    first = b.value(ins.operands[1], narrow)
    second = b.value(ins.operands[2], narrow) if ins.name == "fma" else last
    b.emit(
        op,
        d=b.dest(ins.operands[0]),
        a=first,
        b=second,
        c=last if ins.name == "fma" else None,
        x=rounding(ins),
        y=y,
    )


# ---- conversions
_INTEGERS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
_FLOATS = "f16|bf16|f32|f64"


@row("cvt", "sat? u8|s8|u16|s16|u32|s32|u64|s64 u8|s8|u16|s16|u32|s32|u64|s64", "d, a")
def convert_integer(b, ins):
    target, source = [m for m in ins.modifiers if m != "sat"]
    width = b.width(ins.operands[0])
    bits = WIDTHS[target]
    d = b.dest(ins.operands[0])
    value = d if bits >= width or target[0] == "u" else b.temporary()
    b.emit(O.CVT_INT, d=value, a=b.value(ins.operands[1], source),
           x=(64 - WIDTHS[source]) | (source[0] == "s") << 8 | bits << 16,
           y=int(ins.has("sat")) | (2 if target[0] == "s" else 0), w=(1 << bits) - 1, s=64 - bits)
    if value != d:
        # A signed result narrower than its register is sign-extended into it.
        b.emit(O.SEXT, d=d, a=value, w=(1 << width) - 1, s=64 - bits)


@row("cvt", f"rni|rzi|rmi|rpi ftz? sat? u8|s8|u16|s16|u32|s32|u64|s64 {_FLOATS}", "d, a")
def convert_to_integer(b, ins):
    target, source = ins.modifiers[-2:]
    mode = next(_MODES[m] for m in ins.modifiers if m in ("rni", "rzi", "rmi", "rpi"))
    width = WIDTHS[target]
    y = (C_FTZ if ins.has("ftz") else 0) | (C_SIGNED if target[0] == "s" else 0)
    d = b.dest(ins.operands[0])
    b.emit(O.CVT_FI, d=d, a=b.value(ins.operands[1], source), x=mode, y=y, z=FORMATS[source] | width << 16,
           w=(1 << width) - 1, uses="ab")
    if target[0] == "s" and width < b.width(ins.operands[0]):
        b.emit(O.SEXT, d=d, a=d, w=(1 << b.width(ins.operands[0])) - 1, s=64 - width)


@row("cvt", f"rn|rz|rm|rp sat? {_FLOATS} u8|s8|u16|s16|u32|s32|u64|s64", "d, a")
def convert_from_integer(b, ins):
    target, source = ins.modifiers[-2:]
    y = (C_SIGNED if source[0] == "s" else 0) | (C_SAT if ins.has("sat") else 0)
    b.emit(O.CVT_IF, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], source), x=rounding(ins), y=y,
           z=FORMATS[target] << 8, w=(1 << WIDTHS[target]) - 1, s=64 - WIDTHS[source])


@row("cvt", f"rn|rz|rm|rp|rna|rni|rzi|rmi|rpi? relu? satfinite? ftz? sat? {_FLOATS}|tf32 {_FLOATS}", "d, a")
def convert_float(b, ins):
    target, source = ins.modifiers[-2:]
    integral = ins.one_of("rni", "rzi", "rmi", "rpi")
    mode = _MODES[integral] | X_INTEGRAL if integral else rounding(ins)
    y = sum(
        bit
        for name, bit in (("ftz", C_FTZ), ("sat", C_SAT), ("relu", C_RELU), ("satfinite", C_SATFINITE))
        if ins.has(name)
    )
    b.emit(O.CVT_FF, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], source), x=mode, y=y,
           z=FORMATS[source] | FORMATS[target] << 8, w=(1 << WIDTHS[target]) - 1)


_NARROW = "e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2|ue8m0x2"


@row("cvt", "rn|rz relu? satfinite? f16x2|bf16x2 f32", "d, a, b")
@row("cvt", f"rn|rz|rp satfinite? relu? {_NARROW} f32", "d, a, b")
def convert_pair(b, ins):
    target = ins.modifiers[-2][:-2]
    y = (C_RELU if ins.has("relu") else 0) | (C_SATFINITE if ins.has("satfinite") else 0)
    bits = 8 if target == "e2m1" else (32 if target.endswith("16") else 16)
    b.emit(
        O.CVT_PACK_F,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], "f32"),
        b=b.value(ins.operands[2], "f32"),
        x=rounding(ins),
        y=y,
        z=T_F32 | FORMATS[target] << 8,
        w=(1 << bits) - 1,
    )


@row("cvt", f"rn|rz|rp satfinite? relu? {_NARROW} f16x2|bf16x2", "d, a")
def convert_halves(b, ins):
    if ins.modifiers[-1] in _NARROW.split("|"):
        # Modifiers are matched as a set, but here their order tells the direction.
        return convert_narrow(b, ins)
    target, source = ins.modifiers[-2][:-2], ins.modifiers[-1][:-2]
    y = (C_RELU if ins.has("relu") else 0) | (C_SATFINITE if ins.has("satfinite") else 0)
    bits = 8 if target == "e2m1" else 16
    b.emit(O.CVT_PACK_F, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], "b32"), x=rounding(ins), y=y,
           z=FORMATS[source] | FORMATS[target] << 8, w=(1 << bits) - 1)


@row("cvt", f"rn relu? f16x2|bf16x2 {_NARROW}", "d, a")
def convert_narrow(b, ins):
    target, source = ins.modifiers[-2][:-2], ins.modifiers[-1][:-2]
    b.emit(O.CVT_UNPACK_F, d=b.dest(ins.operands[0]), a=b.value(ins.operands[1], "b16"), x=RN,
           y=C_RELU if ins.has("relu") else 0, z=FORMATS[source] | FORMATS[target] << 8, w=0xFFFFFFFF)


@row("cvt.pack", "sat u16|s16 s32", "d, a, b")
@row("cvt.pack", "sat u8|s8|u4|s4|u2|s2 s32 b32", "d, a, b, c")
def convert_pack(b, ins):
    kind = ins.modifiers[1]
    a = values(b, ins, "b32")
    b.integer(O.CVT_PACK, 32, b.dest(ins.operands[0]), a[0], a[1], a[2] if len(a) > 2 else b.constant(0),
              x=int(kind[1:]), y=int(kind[0] == "s"))


@row("cvt.rs", "relu? satfinite? f16x2|bf16x2|e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4 f32", None)
def convert_stochastic(b, ins):
    raise b.error(
        "stochastic rounding (cvt.rs) is not modelled: its use of the random bits is not documented "
        "bit by bit"
    )
