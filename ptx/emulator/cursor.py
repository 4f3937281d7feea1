"""Walks over the tokens of PTX text, and reads constants: integers, expressions of them, immediates."""

from __future__ import annotations

import re
import struct

from .model import Immediate
from .text import PtxSyntaxError, Token, integer, line_text, tokenize


class Cursor:
    """A place in the tokens of a text, the last of which is of kind `end`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        last = self.tokens[-1] if self.tokens else Token("end", "", 1, 0, 0)
        self.tokens.append(Token("end", "", last.line, last.end, last.end))
        self.at = 0

    def error(self, message: str, token: Token | None = None) -> PtxSyntaxError:
        token = token or self.tokens[min(self.at, len(self.tokens) - 1)]
        return PtxSyntaxError(message, token.line, line_text(self.text, token.start))

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index].text if index < len(self.tokens) else ""

    def next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.error("unexpected end of text", token)
        self.at += 1
        return token

    def number(self) -> int:
        """The next token, which must be an integer constant."""
        token = self.next()
        if token.kind != "number" or not re.fullmatch(
            r"0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|0[0-7]*U?|[1-9]\d*U?", token.text
        ):
            raise self.error(f"expected an integer, found {token.text!r}", token)
        return integer(token.text)

    def accept(self, text: str) -> bool:
        if self.peek() == text and self.tokens[self.at].kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise self.error(f"expected {text!r}, found {token.text!r}", token)
        return token

    # ---- constants
    def constant_expression(self, level: int = 0) -> int:
        """C-like integer expressions of declarations and initialisers, by precedence climbing."""
        table = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"),
                 ("+", "-"), ("*", "/", "%")]
        if level == len(table):
            return self.constant_unary()
        value = self.constant_expression(level + 1)
        while self.peek() in table[level]:
            sign = self.next().text
            right = self.constant_expression(level + 1)
            if sign in ("/", "%") and right == 0:
                raise self.error("division by zero in a constant expression")
            value = {
                "||": lambda a, b: int(bool(a or b)),
                "&&": lambda a, b: int(bool(a and b)),
                "|": lambda a, b: a | b,
                "^": lambda a, b: a ^ b,
                "&": lambda a, b: a & b,
                "==": lambda a, b: int(a == b),
                "!=": lambda a, b: int(a != b),
                "<": lambda a, b: int(a < b),
                ">": lambda a, b: int(a > b),
                "<=": lambda a, b: int(a <= b),
                ">=": lambda a, b: int(a >= b),
                "<<": lambda a, b: a << b,
                ">>": lambda a, b: a >> b,
                "+": lambda a, b: a + b,
                "-": lambda a, b: a - b,
                "*": lambda a, b: a * b,
                "/": lambda a, b: int(a / b),
                "%": lambda a, b: a - b * int(a / b),
            }[sign](value, right)
        return value

    def constant_unary(self) -> int:
        token = self.next()
        if token.text == "-":
            return -self.constant_unary()
        if token.text == "+":
            return self.constant_unary()
        if token.text == "~":
            return ~self.constant_unary()
        if token.text == "!":
            return int(not self.constant_unary())
        if token.text == "(":
            value = self.constant_expression()
            self.expect(")")
            return value
        self.at -= 1
        return self.number()

    def read_immediate(self) -> Immediate:
        token = self.tokens[self.at]
        if token.kind == "number" and token.text[:2].lower() == "0f" and len(token.text) == 10:
            self.next()
            return Immediate(int(token.text[2:], 16), "f32")
        if token.kind == "number" and token.text[:2].lower() == "0d" and len(token.text) == 18:
            self.next()
            return Immediate(int(token.text[2:], 16), "f64")
        if token.text == "-" and self.peek(1)[:2].lower() in ("0f", "0d"):
            self.next()
            value = self.read_immediate()
            return Immediate(value.value ^ (1 << (31 if value.kind == "f32" else 63)), value.kind)
        if token.kind == "number" and re.fullmatch(r"\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+", token.text):
            self.next()
            return self.double(float(token.text))
        return Immediate(self.constant_expression())

    @staticmethod
    def double(value: float) -> Immediate:
        return Immediate(struct.unpack("<Q", struct.pack("<d", value))[0], "f64")
