"""Turns one function into program rows (see layout.py for their columns); decode.py joins functions to a program.

Row codes: a value >= 0 is a register of the present frame, a negative one is ~k for constant row k.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import layout as L
from . import opcodes as O
from .forms import find
from .model import (
    TYPE_BYTES, Address, Function, Group, Immediate, Instruction, Label, Pair, Register, Sink, Symbol, Variable, Vector,
)
from .text import PtxSyntaxError

if TYPE_CHECKING:
    from .decode import Decoder

#: special registers that are constant for a thread, filled in when its CTA starts
THREAD_SPECIALS = {
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%clusterid.x",
    "%clusterid.y",
    "%clusterid.z",
    "%nclusterid.x",
    "%nclusterid.y",
    "%nclusterid.z",
    "%cluster_ctaid.x",
    "%cluster_ctaid.y",
    "%cluster_ctaid.z",
    "%cluster_nctaid.x",
    "%cluster_nctaid.y",
    "%cluster_nctaid.z",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
    "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap",
    "%is_explicit_cluster",
}
CLOCK_SPECIALS = {"%clock": 0, "%clock_hi": 2, "%clock64": 1, "%globaltimer": 1, "%globaltimer_lo": 0,
                  "%globaltimer_hi": 2}
WIDTHS = {name: 8 * size for name, size in TYPE_BYTES.items()} | {"pred": 1}


@dataclass
class Code:
    """One program row in the making. `defs`/`uses` list (kind, position): ("f", column) or ("v", index in
    V)."""

    row: list
    instruction: Instruction | None
    defs: list = field(default_factory=list)
    uses: list = field(default_factory=list)
    killing: bool = True
    label: str | None = None
    targets: list = field(default_factory=list)


class Builder:
    """Decodes one function. Rows call `value`, `dest`, `emit`, ... on it."""

    def __init__(self, decoder: Decoder, function: Function) -> None:
        self.decoder, self.function = decoder, function
        self.codes: list[Code] = []
        self.registers: dict[str, int] = {}
        self.specials: dict[object, int] = {}
        self.labels: dict[str, int] = {}
        self.frame: dict[str, int] = {}
        self.frame_bytes = 0
        self.current: Instruction | None = None
        self.guard: tuple[int, int] = (L.NONE, 0)
        for variable in (*function.parameters, *function.returns):
            if not function.entry:
                if variable.space == "reg":
                    raise PtxSyntaxError(
                        ".reg parameters of functions are not supported: use .param", variable.line
                    )
                self.place(variable)
        for variable in function.variables.values():
            if variable.space in ("local", "param"):
                self.place(variable)

    # ---- errors and small facts
    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(message, self.current.line, self.current.text)

    def place(self, variable: Variable) -> None:
        align = max(variable.align, 1)
        self.frame_bytes = -(-self.frame_bytes // align) * align
        self.frame[variable.name] = self.frame_bytes
        self.frame_bytes += variable.bytes

    # ---- operands
    def register(self, name: str) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def temporary(self) -> int:
        return self.register(f"%temporary{len(self.registers)}")

    def constant(self, bits: int) -> int:
        return self.decoder.constant(bits & 0xFFFFFFFFFFFFFFFF)

    def constant_key(self, key: tuple) -> int:
        """Row code of a constant that is only known at launch (a parameter, the address of a variable)."""
        return self.decoder.constant(key)

    def immediate(self, operand: Immediate, kind: str) -> int:
        """Bits of an immediate used as type `kind`."""
        bits, width = operand.value, WIDTHS.get(kind, 64)
        if operand.kind == "f32" and kind == "f64":
            bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
        elif operand.kind == "f64" and kind in ("f32", "tf32"):
            bits = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
        elif operand.kind == "f64" and kind in ("f16", "bf16"):
            raise self.error(f"a decimal constant is no operand of type .{kind}")
        elif operand.kind == "int" and kind in ("f32", "f64") and self.current.opcode.split(".")[0] != "mov":
            bits = struct.unpack("<I", struct.pack("<f", float(bits)))[0] if kind == "f32" else struct.unpack(
                "<Q", struct.pack("<d", float(bits)))[0]
        return bits & ((1 << min(width, 64)) - 1)

    def value(self, operand, kind: str = "b64") -> int:
        """Row code of a source operand read as type `kind`."""
        if isinstance(operand, Register):
            if operand.type == "special":
                return self.special(operand.name)
            if operand.negated:
                raise self.error(f"!{operand.name} is only possible for predicates in predicate operands")
            if operand.type == "pred":
                raise self.error(f"predicate {operand.name} where a value of type .{kind} is needed")
            return self.register(operand.name)
        if isinstance(operand, Immediate):
            return self.constant(self.immediate(operand, kind))
        if isinstance(operand, Symbol):
            return self.address_of(operand)
        raise self.error(f"unexpected operand {operand}")

    def predicate(self, operand) -> tuple[int, int]:
        """(row code, negated) of a predicate source."""
        if isinstance(operand, Register) and operand.type == "pred":
            return self.register(operand.name), int(operand.negated)
        if isinstance(operand, Immediate):
            return self.constant(0xFFFFFFFF if operand.value else 0), 0
        if isinstance(operand, Register) and operand.name == "%is_explicit_cluster":
            return self.special(operand.name), 0
        raise self.error(f"expected a predicate, found {operand}")

    def dest(self, operand) -> int:
        """Row of a destination register, NONE for a sink."""
        if isinstance(operand, Sink):
            return L.NONE
        if isinstance(operand, Register) and operand.type != "special":
            return self.register(operand.name)
        raise self.error(f"{operand} cannot be written")

    def width(self, operand, default: int = 64) -> int:
        """Width in bits of a destination register."""
        return WIDTHS.get(operand.type, default) if isinstance(operand, Register) else default

    def special(self, name) -> int:
        if isinstance(name, str) and name in CLOCK_SPECIALS:
            row = self.temporary()
            self.emit(O.CLOCK, d=row, x=CLOCK_SPECIALS[name])
            return row
        if isinstance(name, str) and name not in THREAD_SPECIALS:
            raise self.error(f"unknown special register {name!r}")
        if name not in self.specials:
            self.specials[name] = self.register(f"%special{name}")
            self.decoder.special_index(name)
        return self.specials[name]

    def lookup(self, name: str) -> Variable | None:
        return self.function.variables.get(name) or self.decoder.program.variables.get(name)

    def address_of(self, symbol: Symbol) -> int:
        """Row code of a variable's address in its own space (kernel parameters and const in their
        windows)."""
        name = symbol.name
        if name in self.frame:
            row = self.temporary()
            self.emit(O.MOV_LOCAL, d=row, x=self.frame[name] + symbol.offset)
            return row
        entry_parameter = self.decoder.parameter_offset(name)
        if entry_parameter is not None:
            return self.constant(L.PARAMETER_WINDOW + entry_parameter[0] + symbol.offset)
        variable = self.lookup(name)
        if variable is None:
            if name in self.decoder.program.functions:
                return self.constant(self.decoder.code_address(name) + symbol.offset)
            raise self.error(f"unknown name {name!r}")
        if variable.space == "shared":
            offset = self.decoder.shared_offset(variable)
            row = self.special(("shared", offset))
            if symbol.offset:
                total = self.temporary()
                self.emit(O.ADD, d=total, a=row, b=self.constant(symbol.offset), w=(1 << 64) - 1)
                return total
            return row
        return self.decoder.variable_constant(variable, symbol.offset)

    def address(self, operand) -> tuple[int, int, bool]:
        """(row code, offset, whether it is relative to the frame's local memory) of an address operand."""
        base, offset = operand.base, operand.offset
        if isinstance(base, Register):
            return self.value(base), offset, False
        if isinstance(base, Immediate):
            return self.constant(base.value), offset, False
        if base.name in self.frame:
            return self.constant(self.frame[base.name]), offset + base.offset, True
        return self.address_of(base), offset, False

    def row_list(self, rows) -> int:
        """Put row codes into V; returns where they start."""
        start = len(self.decoder.lists)
        self.decoder.lists.extend(rows)
        return start

    # ---- emission
    def emit(
        self,
        op: int,
        *,
        d=L.NONE,
        a=None,
        b=None,
        c=None,
        e=None,
        x=0,
        y=0,
        z=0,
        w=0,
        s=0,
        sync=L.SYNC_NONE,
        target: str | None = None,
        defs="d",
        uses="abce",
        def_list=None,
        use_list=None,
        guarded=True,
    ) -> Code:
        zero = self.decoder.zero
        row = [0] * L.P_COLUMNS
        row[L.P_OP] = op
        row[L.P_GUARD], row[L.P_GUARD_NOT] = self.guard if guarded else (L.NONE, 0)
        values = {"d": d, "a": zero if a is None else a, "b": zero if b is None else b,
                  "c": zero if c is None else c, "e": zero if e is None else e, "z": z}
        columns = {"d": L.P_D, "a": L.P_A, "b": L.P_B, "c": L.P_C, "e": L.P_E, "z": L.P_Z}
        for name, column in columns.items():
            row[column] = values[name]
        row[L.P_X], row[L.P_Y], row[L.P_W], row[L.P_S], row[L.P_SYNC] = x, y, w, s, sync
        row[L.P_TARGET], row[L.P_RECONVERGE] = -1, -1
        code = Code(row, self.current, killing=row[L.P_GUARD] == L.NONE)
        code.defs = [("f", columns[name]) for name in defs if values[name] is not None and values[name] >= 0]
        code.uses = [("f", columns[name]) for name in uses if name not in defs and values[name] >= 0]
        if row[L.P_GUARD] != L.NONE:
            code.uses.append(("f", L.P_GUARD))
        for source, listed in ((code.defs, def_list), (code.uses, use_list)):
            if listed is not None:
                start, count = listed
                source.extend(("v", start + k) for k in range(count) if self.decoder.lists[start + k] >= 0)
        code.label = target
        self.codes.append(code)
        return code

    def integer(self, op: int, width: int, d, a=None, b=None, c=None, **more) -> None:
        """An operation on `width`-bit values."""
        self.emit(op, d=d, a=a, b=b, c=c, w=(1 << width) - 1, s=64 - width, **more)

    # ---- the function as a whole
    def build(self) -> None:
        for item in self.function.body:
            if isinstance(item, Label):
                self.labels[item.name] = len(self.codes)
                continue
            self.current = item
            self.guard = (L.NONE, 0)
            form = find(item)
            if item.guard is not None:
                self.guard = (self.register(item.guard.name), int(item.guard.negated))
            if form.run is not None:
                self.python(item, form)
            else:
                form.emit(self, item)
        self.finish()

    def python(self, item: Instruction, form) -> None:
        """An operation that leaves for Python: all its registers count as read and, without killing, as
        written."""
        self.decoder.resolve(self, item)
        code = self.emit(
            O.PYTHON, sync=L.SYNC_ALIGNED if "aligned" in item.modifiers else L.SYNC_NONE, defs="", uses=""
        )
        code.killing = False
        names = []
        collect_registers(item.operands, names)
        rows = []
        for register in names:
            if register.type == "special":
                self.special(register.name)
                rows.append(self.register(f"%special{register.name}"))
            else:
                rows.append(self.register(register.name))
        start = self.row_list(rows)
        both = [("v", start + k) for k in range(len(rows))]
        code.uses, code.defs = code.uses + both, list(both)
        if code.row[L.P_GUARD] != L.NONE:
            code.uses.append(("f", L.P_GUARD))
        self.decoder.python_forms[id(item)] = form

    def finish(self) -> None:
        """Prologue for special registers, one ret at the end of a called function."""
        self.current, self.guard = None, (L.NONE, 0)
        body, self.codes = self.codes, []
        for name, row in self.specials.items():
            self.emit(O.MOV_SPECIAL, d=row, a=self.decoder.special_index(name), uses="")
        prologue = len(self.codes)
        self.codes += body
        self.labels = {name: at + prologue for name, at in self.labels.items()}
        last = len(self.codes)
        self.emit(O.EXIT if self.function.entry else O.RET)
        self.codes[-1].instruction = body[-1].instruction if body else None
        if not self.function.entry:
            # Early returns become branches to one ret, so that its post-dominator lets lanes meet before
            # returning.
            self.labels["%return"] = last
            for code in self.codes[:-1]:
                if code.row[L.P_OP] == O.RET:
                    code.row[L.P_OP] = O.BRA
                    code.label = "%return"


def collect_registers(operands, found: list) -> None:
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand)
        elif isinstance(operand, (Vector, Group)):
            collect_registers(operand.items, found)
        elif isinstance(operand, Address):
            collect_registers((operand.base, *operand.extra), found)
        elif isinstance(operand, Pair):
            collect_registers((operand.first, operand.second), found)
