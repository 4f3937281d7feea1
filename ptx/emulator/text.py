"""Tokens of PTX text (PTX ISA, "Lexical elements"): words, numbers, strings and punctuation with their
line."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxSyntaxError(ValueError):
    """Text that is not PTX, or PTX that this emulator does not know: carries the line number and the line."""

    def __init__(self, message: str, line: int, text: str = "") -> None:
        super().__init__(f"PTX line {line}: {message}" + (f"\n    {text.strip()}" if text else ""))
        self.message, self.line, self.text = message, line, text


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # "word" "number" "string" "punct"
    text: str
    line: int
    start: int
    end: int


# A word swallows its dotted and ::-joined tail, so "ld.shared::cta.v2.f32" and "%tid.x" are one token each.
# An inline float constant is 0f/0d and 8/16 hexadecimal digits; it must be tried before plain integers.
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\f]+)|(?P<newline>\n)|(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?"
    r"|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)"
    r"|(?P<word>[.%$_A-Za-z][\w$%]*(?:(?:\.|::)[\w$]+)*)"
    r"|(?P<punct><<|>>|&&|\|\||==|!=|<=|>=|[{}()\[\],;:@!|+\-<>=*&~^/?%])",
    re.DOTALL,
)


def tokenize(text: str) -> list[Token]:
    """Split PTX text into tokens. Raises PtxSyntaxError at the first character that starts no token."""
    tokens: list[Token] = []
    line, position, size = 1, 0, len(text)
    while position < size:
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxSyntaxError(f"unexpected character {text[position]!r}", line, line_text(text, position))
        kind = match.lastgroup
        if kind == "newline":
            line += 1
        elif kind == "comment" or kind == "string":
            if kind == "string":
                tokens.append(Token(kind, match.group()[1:-1], line, position, match.end()))
            line += match.group().count("\n")
        elif kind != "space":
            tokens.append(Token(kind, match.group(), line, position, match.end()))
        position = match.end()
    return tokens


def line_text(text: str, position: int) -> str:
    """The whole line of `text` around `position`."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : len(text) if end < 0 else end]


def integer(text: str) -> int:
    """Value of a PTX integer constant (decimal, 0x, 0b, leading-zero octal, optional U)."""
    digits = text.rstrip("U")
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    if digits[:2] in ("0b", "0B"):
        return int(digits, 2)
    if len(digits) > 1 and digits[0] == "0":
        return int(digits, 8)
    return int(digits)
