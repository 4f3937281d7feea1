"""What a Python operation sees of the warp that executes it: operands in, results out, agents, faults."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import layout as L
from .agents import Agent, Cta
from .builder import WIDTHS
from .model import Immediate, Pair, Register, Sink, Symbol, Vector


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> np.ndarray:
    """Numbers of the lanes in a mask, ascending."""
    lanes = np.array([lane for lane in range(32) if mask >> lane & 1], np.int64)
    lanes.flags.writeable = False
    return lanes


class WarpContext:
    """What an operation sees of the warp that executes it (one object, refilled for every call)."""

    def __init__(self, machine) -> None:
        self.machine = machine
        self.spurious = False

    def begin(self, slot: int, pc: int, mask: int) -> None:
        machine = self.machine
        self.slot, self.mask = slot, mask
        self.cta: Cta = machine.ctas[machine.W[slot, L.W_CTA]]
        self.index = int(machine.W[slot, L.W_INDEX])
        fragment = machine.W[slot, L.W_CURRENT]
        self.base = int(machine.FR[slot, fragment, L.FR_BASE])
        self.local = int(machine.FR[slot, fragment, L.FR_LOCAL])
        self.depth = int(machine.FR[slot, fragment, L.FR_DEPTH])
        self.handler, self.instruction, self.registers = machine.decoded.handlers[pc]
        self.active = lanes_of(mask)
        self.agent = Agent(machine, self.cta, slot, self.index, self.instruction, f"warp {self.index}")

    @property
    def lanes(self) -> np.ndarray:
        return self.active

    @property
    def full(self) -> bool:
        return self.mask == 0xFFFFFFFF

    @property
    def first(self) -> int:
        return int(self.active[0])

    # ---- operands
    def read(self, operand) -> np.ndarray:
        """uint64 [32] of any scalar operand."""
        if isinstance(operand, Register):
            return self.machine.F[self.base + self.registers[operand.name]].copy()
        if isinstance(operand, Immediate):
            return np.full(32, operand.value & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if isinstance(operand, Symbol):
            return np.full(32, self.machine.symbol_value(operand) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if isinstance(operand, Vector) and len(operand.items) == 1:
            return self.read(operand.items[0])
        raise TypeError(f"operand {operand} has no single value")

    def operand(self, i: int, j: int | None = None):
        operand = self.instruction.operands[i]
        return operand.items[j] if j is not None else operand

    def values(self, i: int, j: int | None = None) -> np.ndarray:
        return self.read(self.operand(i, j))

    def vector(self, i: int) -> np.ndarray:
        """uint64 [n, 32] of a vector operand (n = 1 for a scalar)."""
        operand = self.instruction.operands[i]
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return np.stack([self.read(item) for item in items])

    def u32(self, i: int, j: int | None = None) -> np.ndarray:
        return self.values(i, j).astype(np.uint32)

    def s32(self, i: int, j: int | None = None) -> np.ndarray:
        return self.u32(i, j).view(np.int32)

    def f32(self, i: int, j: int | None = None) -> np.ndarray:
        return self.u32(i, j).view(np.float32)

    def uniform(self, i: int, j: int | None = None) -> int:
        """The operand's value, which all executing lanes must share (fault "nonuniform-operand"
        otherwise)."""
        return self.same(self.values(i, j), f"operand {i + 1}")

    def same(self, values: np.ndarray, what: str) -> int:
        values = values[self.active]
        if (values != values[0]).any():
            lane = int(self.active[np.argmax(values != values[0])])
            self.fault("nonuniform-operand", f"{what} differs between lanes: {int(values[0]):#x} and "
                       f"{int(values[values != values[0]][0]):#x}", lane=lane)
        return int(values[0])

    def predicate(self, i: int) -> int:
        """Mask of lanes where a predicate operand is true (`!p` applied)."""
        operand = self.instruction.operands[i]
        if isinstance(operand, Immediate):
            return 0xFFFFFFFF if operand.value else 0
        bits = int(self.machine.F[self.base + self.registers[operand.name], 0])
        return (~bits if operand.negated else bits) & 0xFFFFFFFF

    def address(self, i: int) -> np.ndarray:
        """uint64 [32]: base + offset of an address operand."""
        operand = self.instruction.operands[i]
        return self.read(operand.base) + np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF)

    def extra(self, i: int, k: int):
        """Operand k behind the base of a compound address; read it with `read` (a Vector item by item)."""
        return self.instruction.operands[i].extra[k]

    def coordinates(self, i: int, k: int = 0) -> np.ndarray:
        """int32 [n, 32] of a vector inside a compound address."""
        vector = self.extra(i, k)
        items = vector.items if isinstance(vector, Vector) else (vector,)
        return np.stack([self.read(item).astype(np.uint32).view(np.int32) for item in items])

    # ---- results
    def write_operand(self, operand, values) -> None:
        if isinstance(operand, Sink):
            return
        if isinstance(operand, Pair):
            operand = operand.first
            if isinstance(operand, Sink):
                return
        width = WIDTHS.get(operand.type, 64)
        values = np.broadcast_to(np.asarray(values), (32,))
        if values.dtype.kind == "f":
            values = values.astype(np.float32).view(np.uint32)
        bits = (
            values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values.astype(np.uint64)
        )
        row = self.machine.F[self.base + self.registers[operand.name]]
        row[self.active] = bits[self.active] & np.uint64((1 << width) - 1)

    def write(self, i: int, values, j: int | None = None) -> None:
        """Write operand i (element j of a vector) in the executing lanes; bits beyond the register are
        dropped."""
        self.write_operand(self.operand(i, j), values)

    def write_predicate(self, i: int, mask: int) -> None:
        operand = self.instruction.operands[i]
        if isinstance(operand, Pair):
            operand = operand.second
        if isinstance(operand, Sink):
            return
        row = self.machine.F[self.base + self.registers[operand.name]]
        row[0] = np.uint64((int(row[0]) & ~self.mask) | (mask & self.mask))

    # ---- asynchronous work and faults
    def spawn(self, label: str, proxy: str = "async") -> Agent:
        """A pseudo-thread that starts now and knows all that this warp knows."""
        return self.machine.spawn(self, label, proxy)

    def fault(self, kind: str, message: str, lane: int | None = None, address: int | None = None) -> None:
        self.agent.fault(kind, message, lane=lane, address=address)
