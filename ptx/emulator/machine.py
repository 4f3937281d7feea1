"""The Python half of a running launch: CTAs, agents, waits, the asynchronous queue, what operations may call.

engine.run executes warps; this module starts CTAs, runs the operations that leave the compiled loop, decides when
asynchronous work completes, and explains faults and deadlocks.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import layout as L
from . import pool
from .clocks import Clocks
from .diagnostics import Checks, Fault
from .engine import addresses_for, run
from .fragments import release_waiting
from .memory import Access, Memory, SharedMemory
from .model import Address, Immediate, Pair, Register, Sink, Symbol, Vector

#: Clock slots for asynchronous agents of the generic proxy (cp.async, remote arrivals) and of the async proxy.
GENERIC_AGENTS, ASYNC_AGENTS = 24, 48
_FOREVER = 1 << 60


@dataclass(frozen=True)
class Wait:
    """Returned by an operation that cannot go on: sleep until `Machine.wake(key)`, then run it again.

    `text` (or its result, if callable) says in a deadlock report what is missing. `spurious` allows the machine to
    wake the warp early with `WarpContext.spurious` set (try_wait may return false at any time).
    """

    key: Hashable
    text: str | Callable[[], str]
    spurious: bool = False


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> np.ndarray:
    """Numbers of the lanes in a mask, ascending."""
    lanes = np.array([lane for lane in range(32) if mask >> lane & 1], np.int64)
    lanes.flags.writeable = False
    return lanes


class Agent:
    """Somebody who touches memory: a warp, or a piece of asynchronous work with a clock slot of its own."""

    def __init__(self, machine: "Machine", cta: "Cta", slot: int, warp: int, instruction, label: str,
                 proxy: str = "generic") -> None:
        self.machine, self.cta, self.slot, self.warp = machine, cta, slot, warp
        self.instruction, self.label, self.proxy = instruction, label, proxy
        self.pc = max(getattr(instruction, "pc", 0) or 0, 0)
        self.done = False
        self.held = True

    def fault(self, kind: str, message: str, *, lane: int | None = None, address: int | None = None) -> None:
        """Raise a Fault placed at the instruction that this agent executes or that started it."""
        raise self.machine.fault_at(kind, message, self.instruction, self.cta, self.warp, lane, address)

    def race(self, out: np.ndarray, place: str, mine: str) -> None:
        """Raise the race that a compiled check left in `out`; `mine` is "read" or "write"."""
        cell = int(out[L.OUT_AUX]) & 0xFFFFFFFFFFFFFFFF
        self.fault("race", f"{self.label}: {mine} of {place} is not ordered after an earlier "
                   f"{self.machine.describe_cell(cell)}", address=int(out[L.OUT_ADDRESS]))

    def release(self, key: Hashable) -> None:
        """Publish everything this agent did into the synchronisation object `key`."""
        self.machine.clocks.release(self.slot, key)

    def acquire(self, key: Hashable) -> None:
        self.machine.clocks.acquire(self.slot, key)

    def retire(self) -> None:
        """Give the clock slot back; what the agent did stays on record."""
        if self.held and self.slot >= self.machine.warp_slots:
            self.held = False
            self.machine.free_agent(self.slot)


class Cta:
    """One resident CTA."""

    def __init__(self, machine: "Machine", slot: int, index: int, rank: int, cluster: list, coordinates) -> None:
        self.machine, self.slot, self.index, self.rank = machine, slot, index, rank
        self.cluster, self.coordinates = cluster, coordinates
        self.shared: SharedMemory = machine.shared[slot]
        self.state: dict = {}
        self.exited = False
        self.cluster_arrived = 0


@dataclass
class _Task:
    agent: Agent
    stages: deque
    after: tuple
    label: str
    start: int


class Queue:
    """Asynchronous work in flight. Stages of one task run in order; tasks interleave as the schedule decides."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.tasks: list[_Task] = []

    def submit(self, agent: Agent, stages, after=(), label: str = "") -> Agent:
        """Queue callables to run one after the other at times of the schedule's choice, none before every agent in
        `after` is done. With schedule "eager" they run now if they may."""
        self.tasks.append(_Task(agent, deque(stages), tuple(after), label or agent.label,
                                int(self.machine.G[L.G_CLOCK])))
        if self.machine.schedule == "eager":
            self.drain()
        elif self.machine.schedule == "random":
            self.machine.plan_tick()
        return agent

    def ready(self) -> list[_Task]:
        return [task for task in self.tasks if all(other.done for other in task.after)]

    def step(self, task: _Task) -> None:
        """Run the next stage of a task."""
        task.stages.popleft()()
        if not task.stages:
            self.finish(task)

    def finish(self, task: _Task) -> None:
        task.agent.done = True
        self.tasks.remove(task)
        self.machine.note(task.agent.cta, task.label, task.start, "asynchronous", task.agent.instruction)

    def drain(self) -> None:
        """Run everything that may run."""
        while ready := self.ready():
            for task in ready:
                while task.stages:
                    task.stages.popleft()()
                self.finish(task)

    def force(self, agents) -> None:
        """Finish the given agents' work (and what it waits for) now."""
        for agent in agents:
            while not agent.done:
                task = next(t for t in self.tasks if t.agent is agent)
                self.force(task.after)
                while task.stages:
                    task.stages.popleft()()
                self.finish(task)

    def tick(self) -> bool:
        """One stage of one random ready task; False when there is none."""
        ready = self.ready()
        if not ready:
            return False
        self.step(self.machine.rng.choice(ready))
        return True


class WarpContext:
    """What an operation sees of the warp that executes it (one object, refilled for every call)."""

    def __init__(self, machine: "Machine") -> None:
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
            return np.full(32, self.machine.symbol_value(operand, self) & 0xFFFFFFFFFFFFFFFF, np.uint64)
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
        """The operand's value, which all executing lanes must share (fault "nonuniform-operand" otherwise)."""
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
        width = self.machine.register_width(operand)
        values = np.broadcast_to(np.asarray(values), (32,))
        if values.dtype.kind == "f":
            values = values.astype(np.float32).view(np.uint32)
        bits = values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values.astype(np.uint64)
        row = self.machine.F[self.base + self.registers[operand.name]]
        row[self.active] = bits[self.active] & np.uint64((1 << width) - 1)

    def write(self, i: int, values, j: int | None = None) -> None:
        """Write operand i (element j of a vector) in the executing lanes; bits beyond the register are dropped."""
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


class Machine:
    """One launch."""

    def __init__(self, decoded, memory: Memory, grid, block, cluster, shared_bytes: int, schedule: str, seed: int,
                 checks: Checks, concurrent: int, instruction_limit: int, trace: bool, parameters: bytes,
                 variables: dict, report) -> None:
        self.decoded, self.memory, self.schedule, self.checks = decoded, memory, schedule, checks
        self.grid, self.block, self.cluster_shape = grid, block, cluster
        self.rng = random.Random(seed)
        self.report = report
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_cta = -(-self.threads // 32)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.resident = concurrent * self.cluster_size
        self.warp_slots = self.resident * self.warps_per_cta
        #: slots below belong to the generic proxy: warps and generic agents
        self.generic_slots = self.warp_slots + GENERIC_AGENTS
        self.slots = self.generic_slots + ASYNC_AGENTS
        if self.slots >= 1 << 12:
            raise ValueError(f"{self.resident} resident CTAs of {self.warps_per_cta} warps need {self.slots} clock slots; "
                             "at most 4095: lower concurrent_clusters")
        self.shared_bytes = shared_bytes
        self.shared_end = decoded.shared_dynamic + shared_bytes if shared_bytes else max(
            decoded.shared_static, L.SHARED_RESERVED)
        self.shared = [SharedMemory(self.shared_end, self.slots) for _ in range(self.resident)]
        epoch, self.generation = pool.begin_epoch()
        self.clocks = Clocks(self.slots, self.resident * 16, epoch)
        self.access = Access(self)
        self.queue = Queue(self)
        self.context = WarpContext(self)
        self.ctas: dict[int, Cta] = {}
        self.sleepers: dict[Hashable, list] = {}
        self.waits: dict[tuple[int, int], Wait] = {}
        self.exit_hooks: list[Callable] = []
        self.start_hooks: list[Callable] = []
        self.labels: dict[int, str] = {}
        self.spawned: dict[int, int] = {}
        self.free_agents = {"generic": deque(range(self.warp_slots, self.generic_slots)),
                            "async": deque(range(self.generic_slots, self.slots))}
        self.trace_blocks: list[np.ndarray] = []
        self.notes: list[tuple] = []
        self.sleep_start: dict[tuple[int, int], int] = {}
        self.history: dict[int, list[tuple[int, int]]] = {}
        self.variables = variables
        self.build_arrays(parameters, instruction_limit, trace, seed)
        for hook in _LAUNCH_HOOKS:
            hook(self)

    # ---- arrays of the compiled loop
    def build_arrays(self, parameters: bytes, limit: int, trace: bool, seed: int) -> None:
        decoded, slots = self.decoded, self.slots
        constants = [self.constant_bits(key, parameters) for key in decoded.constants]
        special = len(decoded.specials)
        block_rows = special + decoded.frame_rows * max(decoded.max_depth, 1)
        self.F = pool.take((len(constants) + self.warp_slots * block_rows, 32), np.uint64)
        for k, bits in enumerate(constants):
            self.F[k] = bits
        self.first_row, self.block_rows, self.special_rows = len(constants), block_rows, special
        self.P, self.V = decoded.program, decoded.lists
        self.W = np.zeros((slots, L.W_COLUMNS), np.int64)
        self.FR = np.zeros((self.warp_slots, L.FRAGMENTS, L.FR_COLUMNS), np.int64)
        self.RC = np.zeros((self.warp_slots, L.RECORDS, L.RC_COLUMNS), np.int64)
        self.RS = np.zeros((self.warp_slots, max(decoded.max_depth, 1), 32), np.int64)
        self.C = np.zeros((self.resident, L.C_COLUMNS), np.int64)
        self.B = np.zeros((self.resident * 16, L.B_COLUMNS), np.int64)
        self.A = self.memory.table(self.checks.races, self.generation)
        self.T = np.zeros((4, 32), np.uint64)
        self.N = np.zeros((len(self.P), 3 + self.warps_per_cta), np.int64)
        self.OUT = np.zeros(L.OUT_COLUMNS, np.int64)
        self.EV = np.zeros((1 << 16 if trace else 1, 6), np.int64)
        self.addresses = addresses_for(self.P)
        self.local_size = decoded.local_bytes * max(decoded.max_depth, 1)
        self.local = pool.take((self.warp_slots * 32 * self.local_size,), np.uint8)
        self.local_initialised = pool.take((self.warp_slots * 32 * self.local_size,), np.uint8)
        G = self.G = np.zeros(L.G_COLUMNS, np.int64)
        checks = self.checks
        G[L.G_SLOTS] = self.warp_slots
        G[L.G_QUANTUM] = 400
        G[L.G_BUDGET] = _FOREVER
        G[L.G_LIMIT] = limit
        G[L.G_CHECK_RACES], G[L.G_CHECK_SHARED_RACES] = checks.races, checks.shared_races
        G[L.G_CHECK_UNINITIALISED] = checks.uninitialised
        G[L.G_CHECK_MEMORY] = checks.races or checks.shared_races or checks.uninitialised
        G[L.G_CHECK_CONVERGENCE], G[L.G_BANKS] = checks.convergence, checks.bank_conflicts
        G[L.G_LOCAL_HOST], G[L.G_LOCAL_INIT] = self.local.ctypes.data, self.local_initialised.ctypes.data
        G[L.G_LOCAL_SIZE], G[L.G_TRACE] = self.local_size, trace
        G[L.G_RANDOM] = random.Random(seed * 2 + 1).getrandbits(63) | 1
        G[L.G_MAX_DEPTH] = decoded.max_depth - 1

    def constant_bits(self, key, parameters: bytes) -> np.uint64:
        if isinstance(key, int):
            return np.uint64(key)
        if key[0] == "parameter":
            _, offset, size, signed_width = key
            value = int.from_bytes(parameters[offset : offset + size], "little", signed=bool(signed_width))
            return np.uint64(value & ((1 << (signed_width or 64)) - 1))
        _, name, offset = key
        return np.uint64(self.variables[name] + offset & 0xFFFFFFFFFFFFFFFF)

    def symbol_value(self, symbol: Symbol, warp: WarpContext) -> int:
        entry = next((o for o, v in self.decoded.parameters if v.name == symbol.name), None)
        if entry is not None:
            return L.PARAMETER_WINDOW + entry + symbol.offset
        if symbol.name in self.variables:
            return self.variables[symbol.name] + symbol.offset
        raise KeyError(symbol.name)

    def register_width(self, operand: Register) -> int:
        from .decode import WIDTHS

        return WIDTHS.get(operand.type, 64)

    # ---- CTAs
    def start_cluster(self, first: int, number: int) -> None:
        """Make cluster `number` of the grid resident in CTA slots first.. ."""
        shape, size = self.cluster_shape, self.cluster_size
        counts = [g // c for g, c in zip(self.grid, shape)]
        at = (number % counts[0], number // counts[0] % counts[1], number // (counts[0] * counts[1]))
        cluster: list[Cta] = []
        # What asynchronous work of earlier clusters left in these shared-memory windows no longer counts. (With several
        # clusters resident, work of the others that has ended is forgotten with it.)
        active = {task.agent.slot for task in self.queue.tasks}
        for slot in range(self.warp_slots, self.slots):
            if slot in active:
                self.clocks.K[slot, 0] = self.spawned[slot]
            else:
                self.clocks.VC[slot, slot] += 1
                self.clocks.K[slot, 0] = self.clocks.VC[slot, slot]
        for rank in range(size):
            inner = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            coordinates = tuple(a * s + i for a, s, i in zip(at, shape, inner))
            linear = coordinates[0] + self.grid[0] * (coordinates[1] + self.grid[1] * coordinates[2])
            cta = Cta(self, first + rank, linear, rank, cluster, coordinates)
            cluster.append(cta)
            self.ctas[first + rank] = cta
            self.history.setdefault(first + rank, []).append((int(self.G[L.G_CLOCK]), linear))
        for cta, rank in zip(cluster, range(size)):
            inner = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            self.start_cta(cta, at, inner, counts)
        for cta in cluster:
            for hook in self.start_hooks:
                hook(cta)

    def start_cta(self, cta: Cta, cluster_at, inner, counts) -> None:
        slot = cta.slot
        cta.shared.clear()
        row = self.C[slot]
        row[:] = 0
        cta.shared.fill_row(row)
        first = slot * self.warps_per_cta
        row[L.C_USED], row[L.C_RANK], row[L.C_CLUSTER_SIZE] = 1, cta.rank, self.cluster_size
        row[L.C_FIRST_CTA], row[L.C_FIRST_SLOT] = slot - cta.rank, first
        row[L.C_WARPS] = row[L.C_ALIVE] = self.warps_per_cta
        row[L.C_GROUP_SLOT], row[L.C_GROUP_SLOTS] = 0, self.slots
        row[L.C_LINEAR], row[L.C_THREADS] = cta.index, self.threads
        self.B[slot * 16 : slot * 16 + 16] = 0
        self.clocks.BV[slot * 16 : slot * 16 + 16] = 0
        size = self.local_size * 32 * self.warps_per_cta
        self.local_initialised[first * 32 * self.local_size :][:size] = 0
        for warp in range(self.warps_per_cta):
            self.start_warp(cta, first + warp, warp, cluster_at, inner, counts)

    def start_warp(self, cta: Cta, slot: int, warp: int, cluster_at, inner, counts) -> None:
        special = self.first_row + slot * self.block_rows
        lanes = min(32, self.threads - 32 * warp)
        alive = (1 << lanes) - 1
        state = self.W[slot]
        state[:] = 0
        state[L.W_STATUS], state[L.W_CTA], state[L.W_INDEX], state[L.W_ALIVE] = L.WARP_READY, cta.slot, warp, alive
        state[L.W_SPECIAL], state[L.W_BASE] = special, special + self.special_rows
        state[L.W_FRAGMENTS] = 1
        self.FR[slot] = 0
        self.FR[slot, 0, L.FR_STATE] = L.FRAG_READY
        self.FR[slot, 0, L.FR_MASK] = alive
        self.FR[slot, 0, L.FR_BASE] = special + self.special_rows
        self.FR[slot, 0, L.FR_RECORD] = -1
        self.RC[slot] = 0
        self.clocks.start(slot)
        # Registers that nobody wrote hold noise, different in every launch seed.
        self.F[special : special + self.block_rows] = np.uint64(self.rng.getrandbits(32))
        for k, name in enumerate(self.decoded.specials):
            self.F[special + k] = self.special_value(name, cta, warp, cluster_at, inner, counts)

    def special_value(self, name, cta: Cta, warp: int, cluster_at, inner, counts):
        lane = np.arange(32, dtype=np.uint64)
        if isinstance(name, tuple):
            offset = self.decoded.shared_dynamic if name[1] == "dynamic" else name[1]
            return np.uint64(cta.rank << L.RANK_SHIFT | offset)
        base, _, axis = name[1:].partition(".")
        k = "xyz".index(axis) if axis else 0
        thread = lane + np.uint64(32 * warp)
        x, y = np.uint64(self.block[0]), np.uint64(self.block[1])
        one = np.uint64(1)
        values = {
            "tid": (thread % x, thread // x % y, thread // (x * y)), "ntid": self.block, "ctaid": cta.coordinates,
            "nctaid": self.grid, "clusterid": cluster_at, "nclusterid": counts, "cluster_ctaid": inner,
            "cluster_nctaid": self.cluster_shape, "laneid": (lane,), "warpid": (warp,),
            "nwarpid": (self.warps_per_cta,), "smid": (cta.slot,), "nsmid": (max(self.resident, 1),), "gridid": (1,),
            "lanemask_eq": (one << lane,), "lanemask_lt": ((one << lane) - one,),
            "lanemask_le": ((one << lane) * np.uint64(2) - one,),
            "lanemask_ge": (np.uint64(0xFFFFFFFF) & ~((one << lane) - one),),
            "lanemask_gt": (np.uint64(0xFFFFFFFF) & ~((one << lane) * np.uint64(2) - one),),
            "cluster_ctarank": (cta.rank,), "cluster_nctarank": (self.cluster_size,),
            "dynamic_smem_size": (self.shared_bytes,), "total_smem_size": (self.shared_end - L.SHARED_RESERVED,),
            "aggr_smem_size": (self.shared_end,), "reserved_smem_offset_begin": (0,),
            "reserved_smem_offset_end": (L.SHARED_RESERVED,), "reserved_smem_offset_cap": (L.SHARED_RESERVED,),
            "is_explicit_cluster": (0xFFFFFFFF if self.report.explicit_cluster else 0,),
        }[base][k]
        return np.asarray(values, np.uint64)

    # ---- agents, waits
    def spawn(self, warp: WarpContext, label: str, proxy: str) -> Agent:
        pool = self.free_agents["generic" if proxy == "generic" else "async"]
        if not pool:
            # More work in flight than slots: the oldest that may run completes now, as it may.
            while not pool:
                ready = [task for task in self.queue.ready()]
                if not ready:
                    raise RuntimeError("no clock slot is free and no asynchronous work can complete")
                self.queue.step(ready[0])
        slot = pool.popleft()
        self.clocks.start(slot, warp.slot)
        agent = Agent(self, warp.cta, slot, warp.index, warp.instruction, label, proxy)
        self.spawned[slot] = self.clocks.VC[slot, slot]
        self.labels[slot] = f"{label} issued by warp {warp.index} of CTA {warp.cta.index}"
        return agent

    def free_agent(self, slot: int) -> None:
        self.free_agents["generic" if slot < self.generic_slots else "async"].append(slot)

    def wake(self, key: Hashable) -> None:
        """Let every warp that sleeps on `key` run its instruction again."""
        for slot, fragment in self.sleepers.pop(key, ()):
            self.waits.pop((slot, fragment), None)
            self.note_wait(slot, fragment)
            if self.FR[slot, fragment, L.FR_STATE] == L.FRAG_KEY:
                self.FR[slot, fragment, L.FR_STATE] = L.FRAG_READY
                self.W[slot, L.W_STATUS] = L.WARP_READY

    def note(self, cta: Cta, row: str, start: int, kind: str, instruction) -> None:
        """Add a span from `start` until now to the time line, if one is kept."""
        if self.G[L.G_TRACE]:
            self.notes.append((cta.index, row, start, int(self.G[L.G_CLOCK]), kind, instruction.text,
                               str(instruction.source or "")))

    def note_wait(self, slot: int, fragment: int) -> None:
        start = self.sleep_start.pop((slot, fragment), None)
        cta = self.ctas.get(int(self.W[slot, L.W_CTA]))
        if start is not None and cta is not None:
            instruction = self.decoded.instructions[int(self.FR[slot, fragment, L.FR_PC])]
            self.note(cta, f"warp {slot % self.warps_per_cta}", start, "wait", instruction)

    def cta_at(self, slot: int, time: int) -> int:
        """Grid index of the CTA that was resident in a slot at a time of the trace."""
        history = self.history[slot]
        return history[max(bisect.bisect_right(history, (time, 1 << 62)) - 1, 0)][1]

    def on_cta_exit(self, hook: Callable) -> None:
        self.exit_hooks.append(hook)

    def on_cta_start(self, hook: Callable) -> None:
        self.start_hooks.append(hook)

    def plan_tick(self) -> None:
        """Bring the compiled loop back soon for asynchronous work."""
        if self.schedule == "random" and self.queue.tasks:
            self.G[L.G_BUDGET] = self.rng.randrange(1, 160)

    # ---- faults
    def fault_at(self, kind, message, instruction, cta, warp, lane=None, address=None) -> Fault:
        return Fault(kind, message, getattr(instruction, "line", None), getattr(instruction, "text", ""),
                     getattr(instruction, "source", None), getattr(cta, "index", None), warp, lane, address)

    def describe_cell(self, cell: int) -> str:
        """Who made the access recorded in a shadow cell."""
        slot, pc = (cell >> 24) & 0xFFF, (cell >> 5) & 0x7FFFF
        instruction = self.decoded.instructions[pc] if pc < len(self.decoded.instructions) else None
        if slot < self.warp_slots:
            cta = self.ctas.get(slot // self.warps_per_cta)
            warp = slot % self.warps_per_cta
            earlier = (cell >> 36) < self.clocks.K[slot, 0]
            who = f"warp {warp} of {'an earlier CTA' if earlier or cta is None else f'CTA {cta.index}'}"
        else:
            who = self.labels.get(slot, "asynchronous work")
        where = f" at PTX line {instruction.line}: {instruction.text}" if instruction is not None else ""
        return f"access by {who}{where}"

    def loop_fault(self) -> Fault:
        """The fault that the compiled loop reported in OUT."""
        out = self.OUT
        slot, pc, code = int(out[L.OUT_SLOT]), int(out[L.OUT_PC]), int(out[L.OUT_CODE])
        cta = self.ctas[int(self.W[slot, L.W_CTA])]
        instruction = self.decoded.instructions[pc]
        address = int(out[L.OUT_ADDRESS]) & 0xFFFFFFFFFFFFFFFF
        aux, aux2, size = int(out[L.OUT_AUX]), int(out[L.OUT_AUX2]), int(out[L.OUT_SIZE])
        message, where = self.explain(code, address, aux, aux2, size)
        return self.fault_at(L.FAULTS[code], message, instruction, cta, int(self.W[slot, L.W_INDEX]),
                             int(out[L.OUT_LANE]), where)

    def explain(self, code: int, address: int, aux: int, aux2: int, size: int) -> tuple[str, int | None]:
        spaces = {L.SPACE_GLOBAL: "global", L.SPACE_LOCAL: "local", L.SPACE_FRAME: "local"}
        space = spaces.get(aux, "shared") if code in (1, 2, 3, 6, 12, 14) else ""
        if code == L.F_BOUNDS:
            if space == "global":
                return f"{size} bytes at global address {address:#x}: {self.memory.describe(address)}", address
            if space == "shared":
                return (f"{size} bytes at shared address {address:#x}: a CTA's shared memory is "
                        f"{L.SHARED_RESERVED:#x}..{self.shared_end:#x}"), address
            return f"{size} bytes at local address {address:#x}: a thread has {self.local_size}", address
        if code == L.F_ALIGN:
            return f"address {address:#x} is not a multiple of {size}", address
        if code == L.F_UNINITIALISED:
            return f"read of {space} memory at {address:#x} that nobody wrote", address
        if code in (L.F_RACE_WRITE, L.F_RACE_READ):
            place = (f"shared memory at {address:#x}" if address < 1 << 32 else
                     f"{self.memory.describe(address)} ({address:#x})")
            what = "write" if code == L.F_RACE_WRITE else "read"
            return (f"{place}: not ordered with an earlier {what}, "
                    f"{self.describe_cell(aux & 0xFFFFFFFFFFFFFFFF)}"), address
        if code == L.F_READ_ONLY:
            return f"write to read-only memory at {address:#x}: {self.memory.describe(address)}", address
        if code == L.F_DIVERGED:
            return "an .aligned instruction is executed by a part of the warp" + self.converged(address, aux), None
        if code == L.F_GUARD_DIVERGED:
            return "the guard of an .aligned instruction differs between lanes" + self.converged(address, aux), None
        if code == L.F_MEMBER:
            if aux2:
                return (f"lanes {address & ~aux:#010x} are in the member mask {address:#010x} but predicated off"), None
            return f"a lane executes with member mask {address:#010x} that does not name it (executing {aux:#010x})", None
        if code == L.F_ABSENT:
            return f"shfl reads lane {address}, which does not execute it (executing {aux:#010x})", None
        if code == L.F_BARRIER_COUNT:
            return (f"barrier {address}: thread count {aux if aux >= 0 else 'of the whole CTA'}, but earlier arrivals of "
                    f"this phase gave {aux2 if aux2 >= 0 else 'the whole CTA'}"), None
        if code == L.F_BARRIER_NUMBER:
            return f"barrier {address} with thread count {aux}: 0..15 and positive multiples of 32 exist", None
        if code == L.F_SPACE:
            return (f"shared address {address:#x} lies in CTA {aux2} of the cluster; this instruction reaches only the "
                    "executing CTA's own shared memory"), address
        if code == L.F_CLUSTER_EXIT:
            return f"shared address {address:#x}: CTA {aux2} of the cluster has exited", address
        if code == L.F_BRX:
            return f"brx.idx index {address}, the table has {aux} entries", None
        if code == L.F_STACK:
            return (f"indirect call to {address:#x}, which is no function of fitting signature" if aux else
                    f"call stack deeper than {address + 1} frames"), None
        if code == L.F_TRAP:
            return "trap executed", None
        return "breakpoint executed", None

    def converged(self, alive: int, mask: int) -> str:
        return f": executing lanes {mask & 0xFFFFFFFF:#010x}, live lanes of the warp {alive & 0xFFFFFFFF:#010x}"

    def close(self) -> None:
        """Give the large arrays back. Nothing of the launch but its report may be used afterwards."""
        pool.end_epoch(int(self.clocks.VC.max()))
        for shared in self.shared:
            shared.give_back()
        pool.give(self.F, self.local, self.local_initialised)

    # ---- the run
    def run(self) -> None:
        """Execute the whole grid."""
        counts = [g // c for g, c in zip(self.grid, self.cluster_shape)]
        pending = list(range(counts[0] * counts[1] * counts[2]))
        if self.schedule == "random":
            self.rng.shuffle(pending)
        pending.reverse()
        free = [k * self.cluster_size for k in reversed(range(self.resident // self.cluster_size))]
        clocks = self.clocks
        while True:
            while pending and free:
                self.start_cluster(free.pop(), pending.pop())
            reason = run(self.F, self.P, self.V, self.W, self.FR, self.RC, self.RS, self.C, self.B, self.A, self.G,
                         self.T, clocks.VC, clocks.VF, clocks.VP, clocks.K, clocks.BV, clocks.SK, clocks.SV, self.N,
                         self.OUT, self.EV, self.addresses)
            if reason == L.LEAVE_PYTHON:
                self.python_operation()
            elif reason == L.LEAVE_TICK:
                self.queue.tick()
                self.G[L.G_BUDGET] = _FOREVER
                self.disturb()
                self.plan_tick()
            elif reason == L.LEAVE_FAULT:
                raise self.loop_fault()
            elif reason == L.LEAVE_CTA:
                self.cta_ended(int(self.OUT[L.OUT_MASK]), free)
            elif reason == L.LEAVE_IDLE:
                if not self.idle():
                    if not self.ctas and not pending:
                        return
                    if self.ctas:
                        raise self.deadlock()
            elif reason == L.LEAVE_LIMIT:
                raise self.limit()
            elif reason == L.LEAVE_EVENTS:
                self.flush_events()
            elif reason == L.LEAVE_SYNC_TABLE:
                clocks.grow_sync_table()

    def python_operation(self) -> None:
        slot, pc, mask = int(self.OUT[L.OUT_SLOT]), int(self.OUT[L.OUT_PC]), int(self.OUT[L.OUT_MASK])
        warp = self.context
        warp.begin(slot, pc, mask)
        fragment = int(self.W[slot, L.W_CURRENT])
        result = warp.handler(warp, warp.instruction)
        warp.spurious = False
        state = self.FR[slot, fragment]
        if result is None:
            state[L.FR_PC] = pc + 1
            return
        if not isinstance(result, Wait):
            raise TypeError(f"operation {warp.instruction.opcode} returned {result!r}: None or Wait is needed")
        state[L.FR_STATE] = L.FRAG_KEY
        self.sleepers.setdefault(result.key, []).append((slot, fragment))
        self.waits[slot, fragment] = result
        if self.G[L.G_TRACE]:
            self.sleep_start[slot, fragment] = int(self.G[L.G_CLOCK])

    def disturb(self) -> None:
        """Sometimes let a try_wait return false early."""
        candidates = [place for place, wait in self.waits.items() if wait.spurious]
        if candidates and self.rng.random() < 0.05:
            slot, fragment = self.rng.choice(candidates)
            wait = self.waits.pop((slot, fragment))
            self.sleepers[wait.key].remove((slot, fragment))
            self.FR[slot, fragment, L.FR_STATE] = L.FRAG_READY
            self.W[slot, L.W_STATUS] = L.WARP_READY

    def idle(self) -> bool:
        """No warp can run: let asynchronous work complete, then lanes that wait only to reconverge. False: stuck."""
        while self.queue.tick():
            if (self.W[: self.warp_slots, L.W_STATUS] == L.WARP_READY).any():
                self.plan_tick()
                return True
        freed = 0
        for slot in np.flatnonzero(self.W[: self.warp_slots, L.W_STATUS] == L.WARP_BLOCKED):
            freed += release_waiting(self.W, self.FR, self.RC, int(slot), 0xFFFFFFFF)
        return freed > 0

    def cta_ended(self, slot: int, free: list) -> None:
        cta = self.ctas[slot]
        cta.exited = True
        for hook in self.exit_hooks:
            hook(cta)
        if all(other.exited for other in cta.cluster):
            for task in [task for task in self.queue.tasks if task.agent.cta in cta.cluster]:
                self.queue.force([task.agent])
            for other in cta.cluster:
                del self.ctas[other.slot]
            free.append(cta.cluster[0].slot)

    def flush_events(self) -> None:
        self.trace_blocks.append(self.EV[: self.G[L.G_EVENTS]].copy())
        self.G[L.G_EVENTS] = 0

    # ---- reports of stuck launches
    def standing(self) -> list[str]:
        """What every unfinished warp does or waits for."""
        lines = []
        for cta in self.ctas.values():
            for warp in range(self.warps_per_cta):
                slot = cta.slot * self.warps_per_cta + warp
                if self.W[slot, L.W_STATUS] in (L.WARP_DONE, L.WARP_FREE):
                    continue
                for f in range(L.FRAGMENTS):
                    state = self.FR[slot, f]
                    if state[L.FR_STATE] != L.FRAG_FREE:
                        lines.append(f"  CTA {cta.index} warp {warp} lanes {int(state[L.FR_MASK]):#010x}: "
                                     + self.waiting_for(cta, slot, f, state))
        return lines

    def waiting_for(self, cta: Cta, slot: int, f: int, state) -> str:
        instruction = self.decoded.instructions[int(state[L.FR_PC])]
        at = f" at PTX line {instruction.line}: {instruction.text}" if instruction is not None else ""
        if instruction is not None and instruction.source is not None:
            at += f" ({instruction.source})"
        kind = int(state[L.FR_STATE])
        if kind == L.FRAG_BARRIER:
            number = int(state[L.FR_KEY])
            row = self.B[cta.slot * 16 + number]
            expected = int(row[L.B_EXPECTED])
            expected = f"{32 * int(self.C[cta.slot, L.C_ALIVE])} (all live warps)" if expected < 0 else str(expected)
            return f"barrier {number}, {int(row[L.B_ARRIVED])} of {expected} threads arrived{at}"
        if kind == L.FRAG_KEY:
            wait = self.waits.get((slot, f))
            text = wait.text() if wait is not None and callable(wait.text) else getattr(wait, "text", "?")
            return f"{text}{at}"
        if kind == L.FRAG_MEMBERS:
            return f"the other lanes of the member mask{at}"
        if kind == L.FRAG_RECONVERGE:
            return f"the other lanes of a divergent branch{at}"
        return f"running{at}"

    def first_instruction(self):
        for cta in self.ctas.values():
            for warp in range(self.warps_per_cta):
                slot = cta.slot * self.warps_per_cta + warp
                for f in range(L.FRAGMENTS):
                    if self.FR[slot, f, L.FR_STATE] not in (L.FRAG_FREE, L.FRAG_RECONVERGE):
                        return self.decoded.instructions[int(self.FR[slot, f, L.FR_PC])], cta, warp
        return None, None, None

    def deadlock(self) -> Fault:
        instruction, cta, warp = self.first_instruction()
        lines = self.standing()
        return self.fault_at("deadlock", "no warp can run and no asynchronous work is in flight\n" + "\n".join(lines),
                             instruction, cta, warp)

    def limit(self) -> Fault:
        instruction, cta, warp = self.first_instruction()
        return self.fault_at("livelock", f"{int(self.G[L.G_STEPS])} instructions executed without an end (a spin on "
                             "something that never comes, possibly on a CTA that is not resident: see "
                             "concurrent_clusters and instruction_limit)\n" + "\n".join(self.standing()),
                             instruction, cta, warp)


_LAUNCH_HOOKS: list[Callable] = []


def on_launch(hook: Callable) -> Callable:
    """Register `hook(machine)` to be called at the beginning of every launch (a decorator)."""
    _LAUNCH_HOOKS.append(hook)
    return hook
