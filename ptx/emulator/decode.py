"""Turns the functions an entry needs into flat program arrays (see layout.py for the columns): builder.py makes the
rows of each function, and here they are linked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import layout as L
from . import opcodes as O
from .allocation import compact
from .builder import Builder, Code
from .control_flow import postdominators
from .model import Address, Function, Instruction, Pair, Program, Register, Symbol, Variable, Vector
from .text import PtxSyntaxError


@dataclass
class Decoded:
    """An entry ready to run: program P, operand lists V, constants, variables, per-row instructions."""

    entry: Function
    program: np.ndarray
    lists: np.ndarray
    constants: list
    specials: list
    frame_rows: int
    max_depth: int
    local_bytes: int
    shared_static: int
    shared_dynamic: int
    shared_align: int
    instructions: list
    registers: dict
    handlers: dict
    parameters: list
    parameter_bytes: int
    synthetic: np.ndarray
    variables: list
    recursive: bool


class Decoder:
    """Decodes an entry with every function it can reach."""

    def __init__(self, program: Program, entry: Function) -> None:
        self.program, self.entry = program, entry
        self.constants: list = [0]
        self.constant_rows: dict = {0: 0}
        self.zero = ~0
        self.lists: list[int] = []
        self.special_rows: dict = {}
        self.shared: dict[str, int] = {}
        self.shared_static = L.SHARED_RESERVED
        self.shared_align = 16
        self.dynamic: list[Variable] = []
        self.variables: list[Variable] = []
        self.python_forms: dict[int, object] = {}
        self.builders: dict[str, Builder] = {}
        self.pending: list[str] = []
        self.callers: dict[str, set[str]] = {}
        self.symbols: dict = {}
        self.call_tables: list[tuple[int, str]] = []
        self.parameters: dict[str, tuple[int, Variable]] = {}
        offset = 0
        for variable in entry.parameters:
            align = max(variable.align, 1)
            offset = -(-offset // align) * align
            self.parameters[variable.name] = (offset, variable)
            offset += variable.bytes
        self.parameter_bytes = offset

    # ---- shared tables
    def constant(self, key) -> int:
        if key not in self.constant_rows:
            self.constant_rows[key] = len(self.constants)
            self.constants.append(key)
        return ~self.constant_rows[key]

    def variable_constant(self, variable: Variable, offset: int) -> int:
        if variable.name not in {v.name for v in self.variables}:
            self.variables.append(variable)
        return self.constant(("variable", variable.name, offset))

    def special_index(self, name) -> int:
        return self.special_rows.setdefault(name, len(self.special_rows))

    def parameter_offset(self, name: str):
        return self.parameters.get(name)

    def shared_offset(self, variable: Variable):
        if variable.name not in self.shared:
            if variable.external or 0 in variable.shape:
                self.shared[variable.name] = "dynamic"
                self.dynamic.append(variable)
                self.shared_align = max(self.shared_align, variable.align)
            else:
                start = -(-self.shared_static // variable.align) * variable.align
                self.shared[variable.name] = start
                self.shared_static = start + variable.bytes
        return self.shared[variable.name]

    def code_address(self, name: str) -> int:
        self.need(name)
        return L.CODE_WINDOW + 16 * list(self.program.functions).index(name)

    def need(self, name: str) -> None:
        if name not in self.builders and name not in self.pending:
            self.pending.append(name)

    def resolve(self, builder: Builder, item: Instruction) -> None:
        """Give the symbols of a Python operation a register or constant row, by name."""

        def visit(operand):
            if isinstance(operand, Symbol):
                row = builder.address_of(Symbol(operand.name))
                self.symbols[(id(item), operand.name)] = row
                if row >= 0:
                    return Register(next(n for n, r in builder.registers.items() if r == row), "b64")
                return operand
            if isinstance(operand, Address):
                base = visit(operand.base)
                extra_offset = operand.base.offset if isinstance(operand.base, Symbol) else 0
                return Address(base, operand.offset + extra_offset, tuple(visit(o) for o in operand.extra))
            if isinstance(operand, Vector):
                return Vector(tuple(visit(o) for o in operand.items))
            if isinstance(operand, Pair):
                return Pair(visit(operand.first), visit(operand.second))
            if isinstance(operand, Register) and operand.type == "special":
                row = builder.special(operand.name)
                return Register(next(n for n, r in builder.registers.items() if r == row), "b32")
            return operand

        item.operands = tuple(visit(operand) for operand in item.operands)

    # ---- the whole program
    def decode(self) -> Decoded:
        self.pending.append(self.entry.name)
        while self.pending:
            name = self.pending.pop(0)
            function = self.program.functions.get(name)
            if function is None or not function.defined:
                raise PtxSyntaxError(f"function {name!r} has no body in this module", self.entry.line)
            builder = Builder(self, function)
            self.builders[name] = builder
            builder.build()
        return self.link()

    def link(self) -> Decoded:
        start, at = {}, 0
        for name, builder in self.builders.items():
            start[name] = at
            at += len(builder.codes)
        if at >= 1 << 19:
            raise PtxSyntaxError(
                f"entry {self.entry.name!r} decodes to {at} operations; at most {(1 << 19) - 1}",
                self.entry.line,
            )
        program = np.zeros((at, L.P_COLUMNS), np.int64)
        instructions, functions = [], []
        registers: dict[str, dict] = {}
        frames: dict[str, int] = {}
        for name, builder in self.builders.items():
            successors = self.successors(builder)
            meet = postdominators(successors)
            rows, frames[name] = compact(builder, successors, self.lists)
            registers[name] = {register: rows.get(row, 0) for register, row in builder.registers.items()}
            for k, code in enumerate(builder.codes):
                row = code.row
                if code.label is not None:
                    row[L.P_TARGET] = start[name] + self.label_at(builder, code, code.label)
                if len(successors[k]) > 1 and meet[k] >= 0:
                    row[L.P_RECONVERGE] = start[name] + meet[k]
                for position, label in code.targets:
                    self.lists[position] = start[name] + self.label_at(builder, code, label)
                instructions.append(code.instruction)
                functions.append(name)
                program[start[name] + k] = [((n + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63) for n in row]
        self.link_calls(program, start, frames, functions)
        depth, recursive = self.depth()
        local = max(builder.frame_bytes for builder in self.builders.values())
        local = -(-max(local, 16) // 16) * 16
        handlers = {}
        for pc, instruction in enumerate(instructions):
            if program[pc, L.P_OP] == O.PYTHON:
                instruction.pc = pc
                handlers[pc] = (self.python_forms[id(instruction)].run, instruction, registers[functions[pc]])
        synthetic = np.array([i is None for i in instructions])
        dynamic = -(-self.shared_static // self.shared_align) * self.shared_align
        return Decoded(
            self.entry,
            program,
            np.array(self.lists or [0], np.int64),
            self.constants,
            list(self.special_rows),
            max(frames.values()),
            depth,
            local,
            self.shared_static,
            dynamic,
            self.shared_align,
            instructions,
            registers,
            handlers,
            [(offset, variable) for offset, variable in self.parameters.values()],
            self.parameter_bytes,
            synthetic,
            self.variables,
            recursive,
        )

    def label_at(self, builder: Builder, code: Code, label: str) -> int:
        if label not in builder.labels:
            builder.current = code.instruction
            raise builder.error(f"unknown label {label!r}")
        return builder.labels[label]

    def successors(self, builder: Builder) -> list[tuple]:
        """Next program rows of each row within its function (empty: leaves the function)."""
        result = []
        for k, code in enumerate(builder.codes):
            op = code.row[L.P_OP]
            always = code.row[L.P_GUARD] == L.NONE
            if op == O.BRA:
                target = self.label_at(builder, code, code.label)
                result.append((target,) if always or target == k + 1 else (k + 1, target))
            elif op == O.BRX:
                targets = {self.label_at(builder, code, label) for _, label in code.targets}
                result.append(tuple(sorted(targets | (set() if always else {k + 1}))))
            elif op in (O.EXIT, O.RET, O.TRAP):
                result.append(() if always or k + 1 == len(builder.codes) else (k + 1,))
            else:
                result.append((k + 1,) if k + 1 < len(builder.codes) else ())
        return result

    def link_calls(self, program, start, frames, functions) -> None:
        """Calls: entry point, frame sizes; a `ret` copies results by the list of its call."""
        for pc in range(len(program)):
            if program[pc, L.P_OP] in (O.CALL, O.CALL_INDIRECT):
                caller = functions[pc]
                program[pc, L.P_X] = frames[caller]
                program[pc, L.P_Y] = -(-self.builders[caller].frame_bytes // 16) * 16
            if program[pc, L.P_OP] == O.CALL:
                names = list(self.program.functions)
                program[pc, L.P_TARGET] = start[names[program[pc, L.P_Z]]]
        for position, name in self.call_tables:
            self.lists[position] = start[name]

    def depth(self) -> tuple[int, bool]:
        """Greatest number of nested calls; recursion gets a fixed stack of 64 frames."""
        memo: dict[str, int] = {}

        def visit(name: str, path: tuple) -> int:
            if name in path:
                return -1
            if name not in memo:
                inner = [visit(callee, (*path, name)) for callee in self.callers.get(name, ())]
                if -1 in inner:
                    return -1
                memo[name] = 1 + max(inner, default=0)
            return memo[name]

        depth = visit(self.entry.name, ())
        return (64, True) if depth < 0 else (depth, False)


def decode(program: Program, entry: Function) -> Decoded:
    """Decode an entry. Raises PtxSyntaxError for anything this emulator does not know."""
    return Decoder(program, entry).decode()
