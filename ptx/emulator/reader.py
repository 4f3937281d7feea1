"""Reads PTX text into a `Program`: directives, declarations, scopes, initialisers, instructions, line
marks."""

from __future__ import annotations

import re

from .cursor import Cursor
from .model import (
    TYPE_BYTES, Address, Function, Group, Immediate, Instruction, Label, Pair, Program, Register, Sink,
    Source, Symbol, Variable, Vector,
)

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SPACES = {
    ".global": "global",
    ".const": "const",
    ".shared": "shared",
    ".shared::cta": "shared",
    ".local": "local",
    ".param": "param",
}
#: Performance and ABI directives whose numbers are kept for whoever asks (`reqntid` is enforced at launch).
_FUNCTION_DIRECTIVES = {
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".maxnreg",
    ".maxnctapersm",
    ".noreturn",
    ".pragma",
    ".reqnctapercluster",
    ".explicitcluster",
    ".maxclusterrank",
    ".abi_preserve",
    ".unified",
    ".blocksareclusters",
    ".abi_preserve_control",
    ".attribute",
    ".language",
    ".ptr",
}


class _Reader(Cursor):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.version, self.target = (0, 0), ""
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.files: dict[int, str] = {}
        self.function: Function | None = None
        self.scopes: list[dict[str, str]] = []
        self.labels: list[dict[str, str]] = []
        self.scope_count = 0
        self.source: Source | None = None
        self.call_sites: dict[str, tuple] = {}
        # `.file` directives stand at the end of the text while `.loc` marks use them from the start.
        for first, second, third in zip(self.tokens, self.tokens[1:], self.tokens[2:]):
            if first.text == ".file" and second.text.isdigit():
                self.files[int(second.text)] = third.text

    # ---- module level
    def read(self) -> Program:
        while self.tokens[self.at].kind != "end":
            token = self.tokens[self.at]
            word = token.text
            if word == ".version":
                self.next()
                number = self.next()
                if not re.fullmatch(r"\d+(\.\d*)?", number.text):
                    raise self.error(f"expected a version such as 8.6, found {number.text!r}", number)
                major, _, minor = number.text.partition(".")
                self.version = (int(major), int(minor or 0))
            elif word == ".target":
                self.next()
                self.target = self.next().text
                while self.accept(","):
                    self.next()
            elif word == ".address_size":
                self.next()
                size = self.next()
                if size.text != "64":
                    raise self.error(f"address size {size.text}: only 64-bit PTX is supported", size)
            elif word == ".file":
                self.read_file()
            elif word == ".loc":
                self.read_loc()
            elif word == ".section":
                self.skip_section()
            elif word == ".pragma":
                while self.next().text != ";":
                    pass
            elif word == ".alias":
                self.read_alias()
            elif (
                word in _LINKAGE
                or word in _SPACES
                or word in (".entry", ".func")
                or word.startswith(".shared")
            ):
                self.read_top()
            else:
                raise self.error(f"unknown module-level text {word!r}", token)
        return Program(self.version, self.target, self.functions, self.variables, self.files, self.text)

    def read_alias(self) -> None:
        self.next()
        name = self.next().text
        self.expect(",")
        target = self.next()
        self.expect(";")
        if target.text not in self.functions:
            raise self.error(f".alias of an unknown function {target.text!r}", target)
        self.functions[name] = self.functions[target.text]

    def read_file(self) -> None:
        self.next()
        index = self.number()
        self.files[index] = self.next().text
        while self.accept(","):
            self.next()

    def read_loc(self) -> None:
        """`.loc file line column [, function_name label[+offset], inlined_at file line column]`."""
        start = self.next()
        file, line = self.number(), self.number()
        if self.tokens[self.at].kind == "number" and self.tokens[self.at].line == start.line:
            self.next()
        outer = None
        while self.accept(","):
            word = self.next().text
            if word == "function_name":
                self.next()
                if self.accept("+"):
                    self.next()
            elif word == "inlined_at":
                outer = (self.number(), self.number())
                self.number()
            else:
                raise self.error(f"unknown .loc attribute {word!r}")
        self.source = self.make_source(file, line, outer)

    def make_source(self, file: int, line: int, outer: tuple | None) -> Source:
        name = self.files.get(file, f"file {file}")
        chain: tuple = ()
        if outer is not None:
            # The call site's own inlining chain is that of the last mark seen there.
            place = f"{self.files.get(outer[0], f'file {outer[0]}')}:{outer[1]}"
            chain = (place, *self.call_sites.get(place, ()))
        source = Source(name, line, chain)
        self.call_sites[f"{name}:{line}"] = chain
        return source

    def skip_section(self) -> None:
        self.next()
        self.next()
        depth = 0
        while True:
            token = self.next()
            depth += (token.text == "{") - (token.text == "}")
            if token.text == "}" and depth == 0:
                return

    def read_top(self) -> None:
        external = False
        while self.peek() in _LINKAGE:
            external |= self.next().text == ".extern"
        if self.peek() in (".entry", ".func"):
            self.read_function()
        else:
            for variable in self.read_variables(external):
                self.variables[variable.name] = variable

    # ---- declarations
    def read_type(self) -> tuple[int, str]:
        vector = 1
        token = self.next()
        if token.text in (".v2", ".v4", ".v8"):
            vector = int(token.text[2:])
            token = self.next()
        name = token.text[1:]
        if not token.text.startswith(".") or name not in TYPE_BYTES:
            raise self.error(f"unknown type {token.text!r}", token)
        return vector, name

    def read_variables(self, external: bool = False) -> list[Variable]:
        """`.space [.align n] [.attribute(...)] [.vN] .type name[dims] [= initial] {, name...} ;`"""
        token = self.next()
        if token.text not in _SPACES:
            raise self.error(f"unknown state space {token.text!r}", token)
        space = _SPACES[token.text]
        align = 0
        while self.peek() in (".align", ".attribute", ".unified"):
            word = self.next().text
            if word == ".align":
                align = self.number()
            elif word == ".attribute":
                self.expect("(")
                while self.next().text != ")":
                    pass
        vector, kind = self.read_type()
        found = []
        while True:
            found.append(self.read_declarator(space, kind, vector, align, external))
            if self.accept(","):
                continue
            self.expect(";")
            return found

    def read_declarator(self, space: str, kind: str, vector: int, align: int, external: bool) -> Variable:
        token = self.next()
        if token.kind != "word":
            raise self.error(f"expected a variable name, found {token.text!r}", token)
        name, shape, initial = token.text, [], None
        if self.accept("<"):
            raise self.error("parameterised names are only known for registers", token)
        while self.accept("["):
            if self.accept("]"):
                shape.append(0)
            else:
                shape.append(self.constant_expression())
                self.expect("]")
        if self.accept("="):
            initial = self.read_initial()
            if shape and shape[0] == 0 and isinstance(initial, list):
                shape[0] = len(initial)
        natural = max(TYPE_BYTES[kind], 1) * vector
        return Variable(
            space, kind, name, align or natural, tuple(shape), vector, initial, external, token.line
        )

    def read_initial(self):
        if self.accept("{"):
            items = []
            while not self.accept("}"):
                items.append(self.read_initial())
                self.accept(",")
            return items
        token = self.tokens[self.at]
        if token.kind == "word":
            self.next()
            if token.text in ("generic",):
                self.expect("(")
                inner = self.read_initial()
                self.expect(")")
                return ("generic", inner)
            offset = 0
            while self.peek() in ("+", "-"):
                sign = 1 if self.next().text == "+" else -1
                offset += sign * self.number()
            return Symbol(token.text, offset)
        if token.kind == "number" and token.text[:2].lower() in ("0f", "0d"):
            return self.read_immediate()
        if token.kind == "number" and re.search(r"[.eE]", token.text) and not token.text.startswith("0x"):
            self.next()
            return float(token.text)
        # mask(symbol) initialisers such as 0xFF(foo) name one byte of an address
        if token.kind == "number" and self.peek(1) == "(":
            mask = self.number()
            self.expect("(")
            inner = self.read_initial()
            self.expect(")")
            return ("mask", mask, inner)
        return self.constant_expression()

    # ---- functions
    def read_parameters(self) -> list[Variable]:
        self.expect("(")
        found = []
        while not self.accept(")"):
            found.append(self.read_parameter())
            self.accept(",")
        return found

    def read_parameter(self) -> Variable:
        token = self.next()
        if token.text not in (".param", ".reg"):
            raise self.error(f"expected .param or .reg, found {token.text!r}", token)
        align, pointer_align = 0, 0
        if self.accept(".align"):
            align = self.number()
        vector, kind = self.read_type()
        while self.peek().startswith(".ptr") or self.peek() in (
            ".align",
            ".global",
            ".shared",
            ".const",
            ".local",
            ".noalias",
        ):
            if self.next().text == ".align":
                pointer_align = self.number()
        name = self.next()
        shape = []
        while self.accept("["):
            if self.accept("]"):
                shape.append(0)
                continue
            shape.append(self.constant_expression())
            self.expect("]")
        natural = max(TYPE_BYTES[kind], 1) * vector
        space = "reg" if token.text == ".reg" else "param"
        return Variable(
            space,
            kind,
            name.text,
            align or natural,
            tuple(shape),
            vector,
            None,
            False,
            name.line,
            pointer_align,
        )

    def read_function(self) -> None:
        entry = self.next().text == ".entry"
        returns = []
        while self.peek() in (".attribute",):
            self.skip_parenthesised()
        if not entry and self.peek() == "(":
            returns = self.read_parameters()
        name = self.next()
        parameters = self.read_parameters() if self.peek() == "(" else []
        function = Function(name.text, entry, parameters, returns, name.line)
        while self.peek() in _FUNCTION_DIRECTIVES:
            directive = self.next().text
            values = []
            while self.tokens[self.at].kind in ("number", "string") or self.peek() in (",", "("):
                if self.peek() == "(":
                    self.skip_group()
                    continue
                token = self.next()
                if token.kind == "number":
                    self.at -= 1
                    values.append(self.number())
            function.directives[directive[1:]] = tuple(values)
            if directive == ".pragma":
                self.accept(";")
        previous = self.functions.get(name.text)
        if self.accept(";"):
            if previous is None:
                self.functions[name.text] = function
            return
        if previous is not None and previous.defined:
            raise self.error(f"function {name.text!r} is defined twice", name)
        self.functions[name.text] = function
        function.defined = True
        self.function, self.scopes, self.source = function, [], None
        for variable in (*parameters, *returns):
            if variable.space == "reg":
                function.registers[variable.name] = variable.type
        self.read_block()
        self.function = None

    def skip_parenthesised(self) -> None:
        self.next()
        self.skip_group()

    def skip_group(self) -> None:
        self.expect("(")
        while self.next().text != ")":
            pass

    def read_block(self) -> None:
        function = self.function
        self.expect("{")
        self.scopes.append({})
        self.labels.append({})
        start = len(function.body)
        self.scope_count += 1
        scope = self.scope_count
        while not self.accept("}"):
            token = self.tokens[self.at]
            word = token.text
            if token.kind == "end":
                self.next()
            if word == "{":
                self.read_block()
            elif word == ".reg":
                self.read_registers(scope)
            elif word in _SPACES:
                for variable in self.read_variables():
                    unique = variable.name
                    if unique in function.variables or unique in self.variables:
                        unique = f"{variable.name}@{scope}"
                    self.scopes[-1][variable.name] = unique
                    variable.name = unique
                    function.variables[unique] = variable
            elif word == ".loc":
                self.read_loc()
            elif word == ".pragma":
                while self.next().text != ";":
                    pass
            elif word in (".branchtargets", ".calltargets", ".callprototype"):
                raise self.error(f"{word} needs a label", token)
            elif word.startswith("."):
                raise self.error(f"unknown directive {word!r}", token)
            elif token.kind == "word" and self.peek(1) == ":":
                self.read_label()
            else:
                function.body.append(self.read_instruction())
        self.close_labels(start)
        self.scopes.pop()

    def read_label(self) -> None:
        function = self.function
        name = self.next().text
        self.expect(":")
        if self.peek() in (".branchtargets", ".calltargets"):
            self.next()
            targets = [self.next().text]
            while self.accept(","):
                targets.append(self.next().text)
            self.expect(";")
            function.tables[name] = targets
        elif self.peek() == ".callprototype":
            self.next()
            returns = self.read_parameters() if self.peek() == "(" and self.peek(1) != "_" else []
            if not returns and self.accept("("):
                while not self.accept(")"):
                    self.next()
            self.next()
            parameters = self.read_parameters() if self.peek() == "(" else []
            while not self.accept(";"):
                self.next()
            self.function.prototypes[name] = (returns, parameters)
        else:
            # A nested scope may repeat a label of its sibling (inline assembly does), and a branch may stand
            # before its label: nested labels get a unique name, and the branches follow when the scope
            # closes.
            unique = name if len(self.scopes) == 1 else f"{name}@{len(function.body)}"
            if unique in (item.name for item in function.body[-1:] if isinstance(item, Label)):
                raise self.error(f"label {name!r} is defined twice")
            self.labels[-1][name] = unique
            function.body.append(Label(unique))

    def close_labels(self, start: int) -> None:
        """Point the branches of the scope that began at body index `start` to its own labels."""
        labels = self.labels.pop()
        renamed = {name: unique for name, unique in labels.items() if name != unique}
        if not renamed:
            return
        for item in self.function.body[start:]:
            if isinstance(item, Instruction):
                item.operands = tuple(
                    Symbol(renamed[o.name], o.offset) if isinstance(o, Symbol) and o.name in renamed else o
                    for o in item.operands)
        for name, targets in self.function.tables.items():
            self.function.tables[name] = [renamed.get(target, target) for target in targets]

    def read_registers(self, scope: int) -> None:
        self.next()
        vector, kind = self.read_type()
        if vector != 1:
            raise self.error("vector registers (.reg .vN) are not supported: use scalar registers and { }")
        while True:
            token = self.next()
            names = [token.text]
            if self.accept("<"):
                count = self.number()
                self.expect(">")
                names = [f"{token.text}{i}" for i in range(count)]
            for name in names:
                unique = name if len(self.scopes) == 1 else f"{name}@{scope}"
                self.scopes[-1][name] = unique
                self.function.registers[unique] = kind
            if self.accept(","):
                continue
            self.expect(";")
            return

    # ---- instructions
    def read_instruction(self) -> Instruction:
        first = self.tokens[self.at]
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            name = self.resolve_name(self.next().text)
            if self.function.registers.get(name) != "pred":
                raise self.error(f"guard {name!r} is not a predicate register", first)
            guard = Register(name, "pred", negated)
        opcode = self.next()
        if opcode.kind != "word":
            raise self.error(f"expected an instruction, found {opcode.text!r}", opcode)
        operands = []
        while not self.accept(";"):
            operands.append(self.read_operand())
            if not self.accept(",") and self.peek() != ";":
                raise self.error(f"expected ',' or ';' after an operand, found {self.peek()!r}")
        text = " ".join(self.text[first.start : self.tokens[self.at - 1].end].split())
        return Instruction(opcode.text, tuple(operands), guard, opcode.line, text, self.source)

    def read_operand(self):
        item = self.read_simple()
        if self.accept("|"):
            return Pair(item, self.read_simple())
        return item

    def read_simple(self):
        token = self.tokens[self.at]
        if token.text == "{":
            self.next()
            items = []
            while not self.accept("}"):
                items.append(self.read_operand())
                self.accept(",")
            return Vector(tuple(items))
        if token.text == "(":
            self.next()
            items = []
            while not self.accept(")"):
                items.append(self.read_operand())
                self.accept(",")
            return Group(tuple(items))
        if token.text == "[":
            return self.read_address()
        if token.text == "!":
            self.next()
            name = self.resolve_name(self.next().text)
            return Register(name, self.function.registers.get(name, "pred"), True)
        if token.kind == "number" or token.text in ("-", "+", "~"):
            return self.read_immediate()
        if token.kind != "word":
            raise self.error(f"expected an operand, found {token.text!r}", token)
        self.next()
        if token.text == "_":
            return Sink()
        if token.text == "WARP_SZ":
            return Immediate(32)
        name = self.resolve_name(token.text)
        if name in self.function.registers:
            return Register(name, self.function.registers[name])
        if token.text.startswith("%"):
            return Register(token.text, "special")
        offset = 0
        if self.peek() in ("+", "-") and self.tokens[self.at + 1].kind == "number":
            sign = 1 if self.next().text == "+" else -1
            offset = sign * self.number()
        return Symbol(name, offset)

    def read_address(self) -> Address:
        self.expect("[")
        if self.tokens[self.at].kind == "number" or self.peek() == "-":
            base, offset = Immediate(self.constant_expression()), 0
        else:
            base = self.read_simple()
            offset = 0
            if isinstance(base, Symbol):
                base, offset = Symbol(base.name), base.offset
            while self.peek() in ("+", "-"):
                sign = 1 if self.next().text == "+" else -1
                negative = self.accept("-")
                offset += sign * (-1 if negative else 1) * self.number()
        extra = []
        while self.accept(","):
            extra.append(self.read_operand())
        self.expect("]")
        return Address(base, offset, tuple(extra))

    def resolve_name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name


def read(text: str) -> Program:
    """Parse PTX text. Raises PtxSyntaxError (a ValueError) with the line for anything unknown."""
    return _Reader(text).read()
