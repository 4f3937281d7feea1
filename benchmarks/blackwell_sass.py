"""Warp instructions of the Blackwell program a page, counted in its machine code.

    python -m benchmarks.blackwell_sass

The unsplit program is compiled for sm_100a, and the loop over pages of each role is found by an instruction
that only this role has. Counted is the common path of an item of 16 full pages: waits that succeed at once,
origins set at the first page and not moved later, no negative K scale. What a role does once an item is
divided by 16. An instruction counts once a warp that executes it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
from msa_cudacore.launch.compile import compile_cubin
from rich.console import Console
from rich.table import Table

from msa_cudacore.blackwell import Configuration, source

PAGES = 16
REFERENCE = 2_427
"""The reference program built by the same NVRTC 13.5: 2,302 of its loops and 125 of its epilogue a page of
such items."""

KINDS = {
    "conversions": r"F2FP|I2F|F2I|HADD2\.F32",
    "multiplies": r"HMUL2|HFMA2",
    "exponentials": r"MUFU",
    "packed float": r"F(ADD|FMA|MUL)2|F(ADD|FMA|MUL)\b|FHFMA|FHADD",
    "maxima": r"FMNMX|HMNMX|VIMNMX|VHMNMX",
    "logic and shifts": r"LOP3|SHF|PRMT|LEA",
    "shared memory": r"LDS|STS|LDSM",
    "tensor memory": r"LDTM|STTM",
    "MMAs and commits": r"UTCHMMA|UTCOMMA|UTCCP|UTCBAR",
    "copies": r"UTMALDG|UBLKCP",
    "barriers": r"SYNCS|BAR|B2R|ELECT|WARPSYNC|MEMBAR|FENCE|VOTE",
    "global memory": r"LDG|STG",
    "uniform": r"U[A-Z]|R2UR|S2UR|LDCU",
    "branches": r"BRA|BSSY|BSYNC|NOP|YIELD|CALL|RET",
}


@dataclass(frozen=True)
class Role:
    """Its page loop (or, without pages, its item loop) is the innermost that has `marker`."""

    name: str
    warps: int
    marker: str
    rare: str
    """A block that is jumped over on the common path when it has such an instruction."""
    pages: int
    """Pages of one trip of the loop; 0 for roles that work once an item."""
    once: str | None = None
    """A rare block with such an instruction runs once an item, its own blocks with `never` left out."""
    never: str = "$^"


ROLES = (
    Role("values", 4, r"LDSM", r"CALL|BAR\.SYNC", 2),
    Role("softmax", 4, r"BAR\.RED", r"BAR\.SYNC|FSEL .*-INF", 2, once=r"BAR\.SYNC", never=r"LDTM"),
    Role("edge", 4, r"F2FP.SATFINITE.E2M1", r"CALL|WARPSYNC.COLLECTIVE", 0),
    Role("MMA", 1, r"UTC[OH]MMA", r"CALL", 2),
    Role("K scales", 1, r"LOP3.*0x80808080", r"CALL", 1),
    Role("copy", 1, r"UTMALDG", r"CALL", 1),
    Role("selection", 1, r"POPC", r"CALL", 0),
)


@dataclass(frozen=True)
class Instruction:
    guard: str
    opcode: str
    text: str
    target: int | None
    """Position of a branch's target."""


def disassembler() -> str | None:
    """nvdisasm of the toolkit's wheel, or of an installed toolkit."""
    spec = find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        found = shutil.which("nvdisasm", path=f"{folder}/bin")
        if found:
            return found
    return shutil.which("nvdisasm")


def disassemble(code: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.cubin"
        path.write_bytes(code)
        command = [disassembler() or "nvdisasm", "-c", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(text: str, entry: str) -> list[Instruction]:
    """The instructions of one function in the order of their addresses."""
    text = text[text.index(f".text.{entry}:") :]
    rows: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines()[1:]:
        if re.match(r"\s*\.section", line):
            break
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(rows)
        elif row := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;", line):
            rows.append(((row[1] or "").strip(), row[2]))
    instructions = []
    for guard, body in rows:
        jump = re.match(r"BRA(?:\.U)?\s.*`\((\.L_x_\d+)\)", body)
        instructions.append(Instruction(guard, body.split()[0], body, labels[jump[1]] if jump else None))
    return instructions


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """First and last position of every backward branch's body, waits of one instruction left out."""
    found = [(i.target, at) for at, i in enumerate(code) if i.target is not None and i.target <= at]
    end = next(at for at in range(len(code) - 1, -1, -1) if code[at].opcode == "EXIT")
    # What lies behind the exit are retries of waits, which jump back into the loops.
    return [(first, last) for first, last in found if last < end and last - first > 8]


def has(code: list[Instruction], first: int, last: int, pattern: str) -> bool:
    return any(re.match(pattern, i.text) for i in code[first : last + 1])


def walk(
    code: list[Instruction], first: int, last: int, rare: str, skipped: tuple[int, int] | None = None
) -> list[Instruction]:
    """The common path through a loop: a branch is taken when it jumps over a rare block inside."""
    path = []
    at = first
    while at <= last:
        if skipped and at == skipped[0]:
            at = skipped[1] + 1
            continue
        instruction = code[at]
        path.append(instruction)
        target = instruction.target
        if target is not None and at < target <= last:
            always = not instruction.guard and ("BRA.U" not in instruction.opcode)
            if always or has(code, at + 1, target - 1, rare):
                at = target
                continue
        at += 1
    return path


def rare_block(code: list[Instruction], first: int, last: int, role: Role) -> list[Instruction]:
    """What one run of the first block with `role.once` executes."""
    for at in range(first, last + 1):
        target = code[at].target
        if target is not None and at < target <= last and has(code, at + 1, target - 1, role.once):
            return walk(code, at + 1, target, role.never)[:-1]
    raise ValueError(f"{role.name}: no block with {role.once}")


@dataclass(frozen=True)
class Count:
    role: Role
    loop: Counter[str]
    """Of one trip of the loop, by kind."""
    item: int
    """Once an item, most of it around the loop over pages."""

    @property
    def a_page(self) -> float:
        """Of one warp."""
        trip = sum(self.loop.values())
        return trip / self.role.pages + self.item / PAGES if self.role.pages else trip / PAGES

    @property
    def all_warps(self) -> float:
        return self.role.warps * self.a_page


def kind_of(instruction: Instruction) -> str:
    matching = (kind for kind, pattern in KINDS.items() if re.match(pattern, instruction.opcode))
    return next(matching, "the rest")


def count_role(code: list[Instruction], role: Role) -> Count:
    around = [pair for pair in loops(code) if has(code, *pair, role.marker)]
    around.sort(key=lambda pair: pair[1] - pair[0])
    inner = around[0]
    path = walk(code, *inner, role.rare)
    item = 0
    if role.pages:
        item = len(walk(code, *around[-1], f"{role.rare}|{role.marker}", inner))
    if role.once:
        item += len(rare_block(code, *inner, role))
    return Count(role, Counter(map(kind_of, path)), item)


def count(architecture: str = "sm_100a") -> list[Count]:
    text = source(Configuration(1, 10, False, 148, 0).constants)
    cubin = compile_cubin(text, architecture, name="blackwell.cu")
    code = parse(disassemble(cubin.code), "msa_decode_blackwell")
    return [count_role(code, role) for role in ROLES]


@click.command(help=__doc__.split("\n\n")[0])
def main() -> None:
    counts = count()
    table = Table(title="warp instructions a page, sm_100a")
    for column in ("role", "a trip of its loop", "once an item", "a warp and page", "all warps"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for one in counts:
        trip = sum(one.loop.values())
        pages = f"{trip} ({one.role.pages} pages)" if one.role.pages else ""
        item = one.item if one.role.pages else trip
        table.add_row(one.role.name, pages, str(item), f"{one.a_page:.1f}", f"{one.all_warps:.0f}")
    total = sum(one.all_warps for one in counts)
    table.add_row("sum", "", "", "", f"{total:.0f}")
    console = Console()
    console.print(table)
    for one in counts:
        kinds = ", ".join(f"{kind} {number}" for kind, number in one.loop.most_common())
        console.print(f"{one.role.name}: {kinds}", soft_wrap=True)
    console.print(f"{total / REFERENCE:.3f} of the reference program's {REFERENCE}")


if __name__ == "__main__":
    main()
