"""Single PTX instructions as data: for each form, a kernel that applies it lane by lane to given words.

`FORMS` is the list, `inputs(form, rng)` draws operand words (special values first, then random ones), `module_text(forms)`
is a PTX module with one entry for each form: `entry(a, b, c, out)`, 64-bit words in and out, one thread a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

LANES = 48

# Operand kinds: register class, and how words are drawn.
_CLASSES = {
    "f32": "r", "f64": "d", "f16": "h", "bf16": "h", "f16x2": "r", "bf16x2": "r", "e4m3x2": "h", "e5m2x2": "h",
    "s16": "h", "u16": "h", "s32": "r", "u32": "r", "s64": "d", "u64": "d", "b16": "h", "b32": "r", "b64": "d",
    "shift": "r", "position": "r", "s8": "r", "u8": "r", "f32x2": "d",
}
_BITS = {"h": 16, "r": 32, "d": 64}


@dataclass(frozen=True)
class Form:
    """`text` with {d}, {a}, {b}, {c} for operands; kinds of the result and of the sources; `error` is None where the
    result is exact, else the relative error (against the hardware's word) that the manual's bound allows."""

    text: str
    result: str
    sources: tuple[str, ...]
    error: float | None = None

    @property
    def result_bits(self) -> int:
        return 32 if self.result == "pred" else _BITS[_CLASSES[self.result]]


def _f(text, result, *sources, error=None):
    return Form(text, result, sources, error)


def _holds(target: str, source: str) -> bool:
    """Whether the target type has every value of the source type, in which case .sat is refused."""
    to, of = int(target[1:]), int(source[1:])
    return to >= of if target[0] == source[0] else target[0] == "s" and to > of


def _forms():
    integers = ("s16", "u16", "s32", "u32", "s64", "u64")
    wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
    for t in integers:
        yield from (_f(f"{op}.{t} {{d}}, {{a}}, {{b}}", t, t, t) for op in ("add", "sub", "min", "max", "mul.lo", "mul.hi"))
        yield _f(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t)
        yield _f(f"mad.hi.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t)
        yield _f(f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t)
        if t in wide:
            yield _f(f"mul.wide.{t} {{d}}, {{a}}, {{b}}", wide[t], t, t)
            yield _f(f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}}", wide[t], t, t, wide[t])
        for op in ("div", "rem"):
            # The or keeps the divisor from zero.
            yield _f(f"or.b{t[1:]} {{b}}, {{b}}, 3; {op}.{t} {{d}}, {{a}}, {{b}}", t, t, t)
        yield _f(f"shr.{t} {{d}}, {{a}}, {{b}}", t, t, "shift")
    for t in ("s16", "s32", "s64"):
        yield _f(f"abs.{t} {{d}}, {{a}}", t, t)
        yield _f(f"neg.{t} {{d}}, {{a}}", t, t)
    for t in ("u16", "u32", "u64", "s16", "s32", "s64"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield _f(f"setp.{op}.{t} p, {{a}}, {{b}}", "pred", t, t)
    for op in ("lo", "ls", "hi", "hs"):
        yield _f(f"setp.{op}.u32 p, {{a}}, {{b}}", "pred", "u32", "u32")
    yield _f("add.sat.s32 {d}, {a}, {b}", "s32", "s32", "s32")
    yield _f("sub.sat.s32 {d}, {a}, {b}", "s32", "s32", "s32")
    yield _f("mad.hi.sat.s32 {d}, {a}, {b}, {c}", "s32", "s32", "s32", "s32")
    for t in ("s32", "u32"):
        yield from (_f(f"mul24.{m}.{t} {{d}}, {{a}}, {{b}}", t, t, t) for m in ("lo", "hi"))
        yield from (_f(f"mad24.{m}.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t) for m in ("lo", "hi"))
    yield _f("add.cc.u32 {d}, {a}, {b}; addc.u32 {d}, {a}, {c}", "u32", "u32", "u32", "u32")
    yield _f("sub.cc.u32 {d}, {a}, {b}; subc.u32 {d}, {a}, {c}", "u32", "u32", "u32", "u32")
    yield _f("mad.lo.cc.u32 {d}, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, {c}", "u32", "u32", "u32", "u32")
    yield _f("add.cc.u64 {d}, {a}, {b}; addc.u64 {d}, {a}, {c}", "u64", "u64", "u64", "u64")
    for n in ("32", "64"):
        yield from (_f(f"{op}.b{n} {{d}}, {{a}}", "u32", f"b{n}") for op in ("popc", "clz"))
        yield _f(f"brev.b{n} {{d}}, {{a}}", f"b{n}", f"b{n}")
        for s in "us":
            yield _f(f"bfind.{s}{n} {{d}}, {{a}}", "u32", f"{s}{n}")
            yield _f(f"bfind.shiftamt.{s}{n} {{d}}, {{a}}", "u32", f"{s}{n}")
            yield _f(f"bfe.{s}{n} {{d}}, {{a}}, {{b}}, {{c}}", f"{s}{n}", f"{s}{n}", "position", "position")
        yield _f(f"bfi.b{n} {{d}}, {{a}}, {{b}}, {{c}}, 11", f"b{n}", f"b{n}", f"b{n}", "position")
        yield _f(f"bfi.b{n} {{d}}, {{a}}, {{b}}, 5, {{c}}", f"b{n}", f"b{n}", f"b{n}", "position")
    for n in ("16", "32", "64"):
        yield _f(f"shl.b{n} {{d}}, {{a}}, {{b}}", f"b{n}", f"b{n}", "shift")
        yield from (_f(f"{op}.b{n} {{d}}, {{a}}, {{b}}", f"b{n}", f"b{n}", f"b{n}") for op in ("and", "or", "xor"))
        yield from (_f(f"{op}.b{n} {{d}}, {{a}}", f"b{n}", f"b{n}") for op in ("not", "cnot"))
    yield _f("and.b32 {b}, {b}, 31; fns.b32 {d}, {a}, {b}, {c}", "u32", "b32", "position", "position")
    for mode in ("clamp", "wrap"):
        yield _f(f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}}", "b32", "shift", "shift")
        yield from (_f(f"szext.{mode}.{t} {{d}}, {{a}}, {{b}}", t, t, "shift") for t in ("s32", "u32"))
        yield from (_f(f"shf.{s}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}}", "b32", "b32", "b32", "shift") for s in "lr")
    for lut in (0x1E, 0x80, 0xCA, 0xF7):
        yield _f(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {lut:#x}", "b32", "b32", "b32", "b32")
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield _f(f"prmt.b32{mode} {{d}}, {{a}}, {{b}}, {{c}}", "b32", "b32", "b32", "b32")
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            result = "s32" if "s32" in (a, b) else "u32"
            yield _f(f"dp4a.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}", result, "b32", "b32", result)
            yield from (_f(f"dp2a.{h}.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}", result, "b32", "b32", result) for h in ("lo", "hi"))
    for t in ("u16x2", "s16x2"):
        yield from (_f(f"{op}.{t} {{d}}, {{a}}, {{b}}", "b32", "b32", "b32") for op in ("add", "min", "max"))
    yield from (_f(f"{op}.relu.{t} {{d}}, {{a}}, {{b}}", "b32", "b32", "b32") for op in ("min", "max") for t in ("s32", "s16x2"))
    yield _f("slct.f32.s32 {d}, {a}, {b}, {c}", "f32", "f32", "f32", "s32")
    yield _f("slct.ftz.b32.f32 {d}, {a}, {b}, {c}", "b32", "b32", "b32", "f32")
    yield _f("set.lt.u32.f32 {d}, {a}, {b}", "u32", "f32", "f32")
    yield _f("set.geu.f32.f32 {d}, {a}, {b}", "f32", "f32", "f32")

    for t in ("f32", "f64"):
        for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            operands = ", ".join(("{a}", "{b}", "{c}")[:n])
            for mode in ("rn", "rz", "rm", "rp"):
                for extra in ("", ".ftz", ".sat", ".ftz.sat") if t == "f32" else ("",):
                    yield _f(f"{op}.{mode}{extra}.{t} {{d}}, {operands}", t, *[t] * n)
        for mode in ("rn", "rz", "rm", "rp"):
            for extra in ("", ".ftz") if t == "f32" else ("",):
                yield _f(f"div.{mode}{extra}.{t} {{d}}, {{a}}, {{b}}", t, t, t)
                yield from (_f(f"{op}.{mode}{extra}.{t} {{d}}, {{a}}", t, t) for op in ("rcp", "sqrt"))
        for op in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            for extra in ("", ".ftz") if t == "f32" else ("",):
                yield _f(f"setp.{op}{extra}.{t} p, {{a}}, {{b}}", "pred", t, t)
        for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            yield _f(f"testp.{kind}.{t} p, {{a}}", "pred", t)
        yield _f(f"copysign.{t} {{d}}, {{a}}, {{b}}", t, t, t)
        yield from (_f(f"{op}.{t} {{d}}, {{a}}", t, t) for op in ("abs", "neg"))
        yield from (_f(f"{op}.{t} {{d}}, {{a}}, {{b}}", t, t, t) for op in ("min", "max"))
    for op in ("min", "max"):
        for extra in (".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            yield _f(f"{op}{extra}.f32 {{d}}, {{a}}, {{b}}", "f32", "f32", "f32")
    yield from (_f(f"{op}.ftz.f32 {{d}}, {{a}}", "f32", "f32") for op in ("abs", "neg"))
    for op, bound in (("rcp", 2**-22), ("sqrt", 2**-22), ("rsqrt", 2**-22), ("ex2", 2**-21), ("tanh", 2**-10)):
        for extra in ("", ".ftz") if op != "tanh" else ("",):
            yield _f(f"{op}.approx{extra}.f32 {{d}}, {{a}}", "f32", "f32", error=bound)
    for op in ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"):
        yield _f(f"{op} {{d}}, {{a}}, {{b}}", "f32", "f32", "f32", error=2**-21)

    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        half = t.startswith("f16")
        extras = ("", ".ftz", ".sat", ".ftz.sat") if half else ("",)
        yield from (_f(f"{op}.rn{e}.{t} {{d}}, {{a}}, {{b}}", t, t, t) for op in ("add", "sub", "mul") for e in extras)
        for e in (*extras, ".relu", ".ftz.relu") if half else ("", ".relu"):
            yield _f(f"fma.rn{e}.{t} {{d}}, {{a}}, {{b}}, {{c}}", t, t, t, t)
        for op in ("min", "max"):
            for e in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs") + ((".ftz",) if half else ()):
                yield _f(f"{op}{e}.{t} {{d}}, {{a}}, {{b}}", t, t, t)
        yield from (_f(f"{op}.{t} {{d}}, {{a}}", t, t) for op in ("abs", "neg"))
    for op in ("eq", "ltu", "ge", "nan"):
        yield from (_f(f"setp.{op}.{t} p, {{a}}, {{b}}", "pred", t, t) for t in ("f16", "bf16"))
        yield _f(f"set.{op}.f16x2.f16x2 {{d}}, {{a}}, {{b}}", "f16x2", "f16x2", "f16x2")

    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        for source in ("f32", "f64", "f16"):
            for mode in ("rni", "rzi", "rmi", "rpi"):
                yield _f(f"cvt.{mode}.{t}.{source} {{d}}, {{a}}", t, source)
        for target in ("f32", "f64", "f16"):
            for mode in ("rn", "rz", "rm", "rp"):
                yield _f(f"cvt.{mode}.{target}.{t} {{d}}, {{a}}", target, t)
        for other in ("s16", "u16", "s32", "u32", "s64", "u64"):
            if other != t:
                yield _f(f"cvt.{t}.{other} {{d}}, {{a}}", t, other)
                if not _holds(t, other):
                    yield _f(f"cvt.sat.{t}.{other} {{d}}, {{a}}", t, other)
        yield from (_f(f"cvt.{t}.{b}8 {{d}}, {{a}}", t, f"{b}8") for b in "su")
    for mode in ("rn", "rz", "rm", "rp"):
        yield from (_f(f"cvt.{mode}{e}.f32.f64 {{d}}, {{a}}", "f32", "f64") for e in ("", ".ftz", ".sat"))
        yield _f(f"cvt.{mode}.f16.f32 {{d}}, {{a}}", "f16", "f32")
        yield _f(f"cvt.{mode}.f16.f64 {{d}}, {{a}}", "f16", "f64")
    for mode in ("rni", "rzi", "rmi", "rpi"):
        yield from (_f(f"cvt.{mode}{e}.f32.f32 {{d}}, {{a}}", "f32", "f32") for e in ("", ".ftz", ".sat"))
        yield _f(f"cvt.{mode}.f64.f64 {{d}}, {{a}}", "f64", "f64")
    yield from (_f(f"cvt.{t}.f16 {{d}}, {{a}}", t, "f16") for t in ("f32", "f64"))
    yield _f("cvt.f64.f32 {d}, {a}", "f64", "f32")
    yield _f("cvt.f32.bf16 {d}, {a}", "f32", "bf16")
    for mode in ("rn", "rz"):
        for e in ("", ".relu", ".satfinite"):
            yield _f(f"cvt.{mode}{e}.bf16.f32 {{d}}, {{a}}", "bf16", "f32")
            yield from (_f(f"cvt.{mode}{e}.{t}.f32 {{d}}, {{a}}, {{b}}", t, "f32", "f32") for t in ("f16x2", "bf16x2"))
    yield _f("cvt.rna.tf32.f32 {d}, {a}", "b32", "f32")
    yield from (_f(f"cvt.{m}{e}.tf32.f32 {{d}}, {{a}}", "b32", "f32") for m in ("rn", "rz") for e in ("", ".relu"))
    for t in ("e4m3x2", "e5m2x2"):
        for e in ("", ".relu"):
            yield _f(f"cvt.rn.satfinite{e}.{t}.f32 {{d}}, {{a}}, {{b}}", t, "f32", "f32")
            yield _f(f"cvt.rn.satfinite{e}.{t}.f16x2 {{d}}, {{a}}", t, "f16x2")
            yield _f(f"cvt.rn{e}.f16x2.{t} {{d}}, {{a}}", "f16x2", t)


FORMS = tuple(_forms())

_SPECIAL_F = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, -1.5, 2.5, 3.0, 127.5, -128.5, 255.5, 32767.5, 65504.0,
     65519.9, 65520.0, 448.0, 464.0, 480.0, 57344.0, 61440.0, 2147483520.0, 2147483648.0, -2147483648.0, 4294967040.0, 1e38,
     3.4028235e38, 1.1754944e-38, 1.1754942e-38, 1.4e-45, -1.4e-45, 6.1e-5, 5.96e-8, 2.98e-8, 2.0**-10, 2.0**-9, 9.2e18,
     1.8e19, -9.3e18])


def _floats(kind: str, rng, count: int) -> np.ndarray:
    """Bit patterns of a floating-point type: specials, mid-range numbers, and raw random patterns."""
    types = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
             "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    dtype = np.dtype(types[kind])
    unsigned = np.dtype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        special = rng.permutation(_SPECIAL_F)[: count // 4].astype(dtype).view(unsigned)
        middle = (rng.normal(size=count // 2) * 2.0 ** rng.integers(-8, 8, count // 2)).astype(dtype).view(unsigned)
    rest = count - len(special) - len(middle)
    raw = rng.integers(0, 1 << 8 * dtype.itemsize, rest, np.uint64).astype(unsigned)
    return rng.permutation(np.concatenate([special, middle, raw])).astype(np.uint64)


def _words(kind: str, rng) -> np.ndarray:
    if kind in ("f32", "f64", "f16", "bf16"):
        return _floats(kind, rng, LANES)
    if kind in ("f16x2", "bf16x2"):
        return _floats(kind[:-2], rng, LANES) | _floats(kind[:-2], rng, LANES) << np.uint64(16)
    if kind in ("e4m3x2", "e5m2x2"):
        return _floats(kind[:-2], rng, LANES) | _floats(kind[:-2], rng, LANES) << np.uint64(8)
    if kind == "position":
        return rng.choice([0, 1, 5, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 255], LANES).astype(np.uint64)
    if kind == "shift":
        return rng.choice([0, 1, 5, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 255, 300, 2**31], LANES).astype(np.uint64)
    bits = {"s8": 8, "u8": 8}.get(kind) or _BITS[_CLASSES[kind]]
    raw = rng.integers(0, 1 << bits, LANES, np.uint64) if bits < 64 else rng.integers(0, 2**64 - 1, LANES, np.uint64)
    edges = np.array([0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1, (1 << bits) - 2, 255, 100], np.uint64)
    near = rng.integers(0, 300, LANES, np.uint64)
    mask = np.uint64((1 << bits) - 1)
    return np.where(rng.random(LANES) < 0.25, rng.choice(edges, LANES), np.where(rng.random(LANES) < 0.3, near, raw)) & mask


def inputs(form: Form, rng) -> np.ndarray:
    """uint64 [3, LANES]: words of a, b, c (zero where the form has fewer sources)."""
    words = np.zeros((3, LANES), np.uint64)
    for i, kind in enumerate(form.sources):
        words[i] = _words(kind, rng)
    return words


def _entry(index: int, form: Form) -> str:
    lines = []
    names = {}
    for letter, kind in zip("abc", form.sources, strict=False):
        register = _CLASSES[kind]
        names[letter] = f"%{register}{letter}"
        lines.append(f"ld.global.b64 %w, [%p{letter}];")
        move = {"h": "cvt.u16.u64", "r": "cvt.u32.u64", "d": "mov.b64"}[register]
        lines.append(f"{move} {names[letter]}, %w;")
    names["d"] = "%rd" if form.result == "pred" else f"%{_CLASSES[form.result]}d"
    lines += [f"{part.strip()};" for part in form.text.format(**names).replace(" p,", " %q,").split(";")]
    if form.result == "pred":
        lines.append("selp.u32 %rd, 1, 0, %q;")
    widen = {"%hd": "cvt.u64.u16", "%rd": "cvt.u64.u32", "%dd": "mov.b64"}[names["d"]]
    lines += [f"{widen} %w, {names['d']};", "st.global.b64 [%pd], %w;", "ret;"]
    pointers = "\n".join(
        f"  ld.param.u64 %p{x}, [f{index}_{i}]; add.u64 %p{x}, %p{x}, %offset;" for i, x in enumerate("abcd")
    )
    parameters = ", ".join(f".param .u64 f{index}_{i}" for i in range(4))
    body = "\n".join(f"  {line}" for line in lines)
    return f"""
.visible .entry f{index}({parameters})
{{
  .reg .pred %q;
  .reg .b16 %ha, %hb, %hc, %hd;
  .reg .b32 %ra, %rb, %rc, %rd, %thread;
  .reg .b64 %da, %db, %dc, %dd, %w, %offset, %pa, %pb, %pc, %pd;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %offset, %thread, 8;
{pointers}
{body}
}}
"""


def module_text(forms=FORMS, target: str = "sm_90a", version: str = "8.6") -> str:
    """One PTX module; entry `f<i>` applies form i."""
    return f".version {version}\n.target {target}\n.address_size 64\n" + "".join(_entry(i, f) for i, f in enumerate(forms))
