"""What a PTX module says, as plain frozen data: variables, functions, instructions and their operands."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Size in bytes of every fundamental type (predicates take one register row of their own).
TYPE_BYTES = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
    "texref": 8, "samplerref": 8, "surfref": 8, "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "tf32": 4,
}


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    type: str = "b32"
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """`value` holds the bits; `kind` is "int" (a signed Python integer), "f32" or "f64" (bits of that
    format)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, function or label; `offset` bytes beyond it (initialisers and addresses)."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, extra...]` for tensor maps and similar compound addresses."""

    base: object
    offset: int = 0
    extra: tuple = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a destination with a predicate output beside it."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Group:
    """`( ... )` of a call."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: an output nobody wants."""


@dataclass(frozen=True, slots=True)
class Source:
    """A CUDA source position from `.loc`; `inlined` is the chain of call sites, innermost first."""

    file: str
    line: int
    inlined: tuple = ()

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        for place in self.inlined:
            text += f", inlined at {place}"
        return text


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: tuple
    guard: Register | None
    line: int
    text: str
    source: Source | None = None
    name: str = ""
    modifiers: tuple = ()
    pc: int = -1

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, *choices: str) -> str | None:
        """The first of `choices` among the modifiers, else None."""
        for choice in choices:
            if choice in self.modifiers:
                return choice
        return None


@dataclass(slots=True)
class Variable:
    """A module or function variable. `shape` is its array extents (0 = unsized extern), `initial` nested
    values."""

    space: str
    type: str
    name: str
    align: int
    shape: tuple
    vector: int = 1
    initial: object = None
    external: bool = False
    line: int = 0
    pointer_align: int = 0

    @property
    def bytes(self) -> int:
        count = self.vector
        for extent in self.shape:
            count *= extent
        return count * max(TYPE_BYTES[self.type], 1)


@dataclass(slots=True)
class Label:
    name: str


@dataclass(slots=True)
class Function:
    name: str
    entry: bool
    parameters: list[Variable]
    returns: list[Variable]
    line: int
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    prototypes: dict[str, tuple] = field(default_factory=dict)
    directives: dict[str, tuple] = field(default_factory=dict)
    defined: bool = False


@dataclass(slots=True)
class Program:
    """A parsed module."""

    version: tuple
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str]
    text: str
