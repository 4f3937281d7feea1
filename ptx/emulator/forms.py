"""Instruction forms in the manual's notation, and the register of everything that can be decoded.

A form is a name, a list of modifier items and an operand pattern:

    row("add", "rn|rz|rm|rp? ftz? sat? f32", "d, a, b")

`x|y` is one of, a trailing `?` is optional. Modifiers are matched as a set, since hand-written assembly
permutes them; a modifier that no item takes makes the form unfit, and an instruction that fits no form is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .model import Address, Group, Immediate, Instruction, Pair, Register, Sink, Symbol, Vector
from .text import PtxSyntaxError


@dataclass(frozen=True)
class Form:
    name: str
    items: tuple[tuple[tuple[str, ...], bool], ...]
    operands: tuple[tuple[str, bool], ...] | None
    emit: Callable | None
    run: Callable | None
    pattern: str

    def match(self, modifiers: tuple[str, ...]) -> bool:
        """True when every modifier is taken by an item of its own and every required item is filled."""
        left = list(modifiers)
        for choices, optional in self.items:
            found = next((m for m in left if m in choices), None)
            if found is not None:
                left.remove(found)
            elif not optional:
                return False
        return not left


_forms: dict[str, list[Form]] = {}


def _parse_items(pattern: str) -> tuple:
    items = []
    for word in pattern.split():
        optional = word.endswith("?")
        items.append((tuple(word.rstrip("?").split("|")), optional))
    return tuple(items)


def _parse_operands(pattern: str | None) -> tuple | None:
    if pattern is None:
        return None
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    return tuple((word.rstrip("?"), word.endswith("?")) for word in words)


def _register(name: str, modifiers: str, operands: str | None, emit, run) -> None:
    form = Form(name, _parse_items(modifiers), _parse_operands(operands), emit, run, modifiers)
    others = _forms.setdefault(name, [])
    if any(other.pattern == modifiers and other.operands == form.operands for other in others):
        raise ValueError(f"form {name!r} with modifiers {modifiers!r} is registered twice")
    others.append(form)


def row(names: str, modifiers: str = "", operands: str | None = None):
    """Register a decoder function `emit(builder, instruction)` for one or more names (space separated)."""

    def decorate(function):
        for name in names.split():
            _register(name, modifiers, operands, function, None)
        return function

    return decorate


def operation(name: str, modifiers: str = "", operands: str | None = None):
    """Register a Python function `run(warp, instruction)` that executes the form (see machine.WarpContext).

    It returns None when done, or a `Wait`: the warp then sleeps until the wait's key is woken and runs it
    again.
    """

    def decorate(function):
        _register(name, modifiers, operands, None, function)
        return function

    return decorate


def forms() -> dict[str, list[Form]]:
    """All registered forms by name."""
    return {name: list(entries) for name, entries in _forms.items()}


def _fits(kind: str, operand) -> bool:
    if kind.startswith("["):
        return isinstance(operand, Address)
    if kind.startswith("{"):
        return isinstance(operand, Vector)
    if kind.startswith("("):
        return isinstance(operand, Group)
    if kind == "p":
        return isinstance(operand, Sink) or isinstance(operand, Register) and operand.type == "pred"
    if "|" in kind:
        return isinstance(operand, (Pair, Register, Sink))
    return isinstance(operand, (Register, Immediate, Vector, Symbol, Sink, Pair))


def _operands_fit(form: Form, operands: tuple) -> bool:
    if form.operands is None:
        return True
    required = sum(not optional for _, optional in form.operands)
    if not required <= len(operands) <= len(form.operands):
        return False
    return all(_fits(kind, operand) for (kind, _), operand in zip(form.operands, operands))


def find(instruction: Instruction) -> Form:
    """The form of an instruction; sets its `name` and `modifiers`. Raises PtxSyntaxError with line and
    text."""
    parts = instruction.opcode.split(".")
    known = False
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        candidates = _forms.get(name)
        if candidates is None:
            continue
        known = True
        modifiers = tuple(parts[length:])
        fitting = [form for form in candidates if form.match(modifiers)]
        for form in fitting:
            if _operands_fit(form, instruction.operands):
                instruction.name, instruction.modifiers = name, modifiers
                return form
        if fitting:
            raise PtxSyntaxError(f"operands of {instruction.opcode!r} do not fit: expected "
                                 f"{', '.join(k + ('?' if o else '') for k, o in fitting[0].operands or ())}",
                                 instruction.line, instruction.text)
    what = "modifiers of" if known else "instruction"
    raise PtxSyntaxError(f"unknown {what} {instruction.opcode!r}", instruction.line, instruction.text)
