"""The Python half of a running launch.

engine.run executes warps; this module starts CTAs, runs the operations that leave the compiled loop and
decides when asynchronous work completes.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from . import explain, pool
from . import layout as L
from .agents import Agent, Copies, Cta, Queue, Wait
from .clocks import Clocks
from .diagnostics import Checks, Fault
from .engine import addresses_for, run
from .fragments import release_waiting
from .lane_races import LANE_CLOCKS, lane_event
from .memory import Access, Memory, SharedMemory
from .model import Symbol
from .opcodes import COPY
from .warp_context import WarpContext

if TYPE_CHECKING:
    from .tcgen05_state import TensorState

__all__ = ["Machine", "Wait", "on_launch"]

#: Clock slots for asynchronous agents of the generic proxy (cp.async, remote arrivals) and of the async
#: proxy.
GENERIC_AGENTS, ASYNC_AGENTS = 24, 48
_FOREVER = 1 << 60
#: Warp instructions after which schedule "late" completes a piece of work although warps still run.
_LATE = 50_000


class Machine:
    """One launch."""

    def __init__(
        self,
        decoded,
        memory: Memory,
        grid,
        block,
        cluster,
        shared_bytes: int,
        schedule: str,
        seed: int,
        checks: Checks,
        concurrent: int,
        instruction_limit: int,
        trace: bool,
        parameters: bytes,
        variables: dict,
        report,
    ) -> None:
        self.decoded, self.memory, self.schedule, self.checks = decoded, memory, schedule, checks
        self.grid, self.block, self.cluster_shape = grid, block, cluster
        self.rng = random.Random(seed)
        self.report = report
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_cta = -(-self.threads // 32)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.resident = concurrent * self.cluster_size
        self.warp_slots = self.resident * self.warps_per_cta
        copying = bool((decoded.program[:, L.P_OP] & 0xF00 == COPY).any())
        self.copies = Copies(self, copying)
        #: slots below belong to the generic proxy: warps, cp.async and other generic agents
        self.generic_slots = self.warp_slots + self.copies.count + GENERIC_AGENTS
        self.slots = self.generic_slots + ASYNC_AGENTS
        if self.slots >= 1 << 12:
            raise ValueError(
                f"{self.resident} resident CTAs of {self.warps_per_cta} warps need {self.slots} clock slots; "
                "at most 4095: lower concurrent_clusters"
            )
        self.shared_bytes = shared_bytes
        self.shared_end = decoded.shared_dynamic + shared_bytes if shared_bytes else max(
            decoded.shared_static, L.SHARED_RESERVED)
        self.shared = [SharedMemory(self.shared_end, self.slots, checks.warp_races)
                       for _ in range(self.resident)]
        epoch, self.generation = pool.begin_epoch()
        self.clocks = Clocks(self.slots, self.resident * 16, epoch)
        self.access = Access(self)
        self.queue = Queue(self)
        self.context = WarpContext(self)
        self.ctas: dict[int, Cta] = {}
        self.sleepers: dict[Hashable, list] = {}
        self.waits: dict[tuple[int, int], Wait] = {}
        self.exit_hooks: list[Callable] = []
        self.labels: dict[int, str] = {}
        self.spawned: dict[int, int] = {}
        self.free_agents = {"generic": deque(range(self.generic_slots - GENERIC_AGENTS, self.generic_slots)),
                            "async": deque(range(self.generic_slots, self.slots))}
        self.trace_blocks: list[np.ndarray] = []
        self.notes: list[tuple] = []
        self.sleep_start: dict[tuple[int, int], int] = {}
        self.history: dict[int, list[tuple[int, int]]] = {}
        self.variables = variables
        self.tensor_state: TensorState | None = None
        """Set by tcgen05_state for every launch; kept here, so that it ends with the launch."""
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
        self.T = np.zeros((7, 32), np.uint64)
        self.N = np.zeros((len(self.P), 3 + self.warps_per_cta), np.int64)
        self.OUT = np.zeros(L.OUT_COLUMNS, np.int64)
        self.EV = np.zeros((1 << 16 if trace else 1, 6), np.int64)
        self.addresses = addresses_for(self.P, self.checks.warp_races)
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
        G[L.G_SCHEDULE] = {"eager": L.SCHEDULE_EAGER, "late": L.SCHEDULE_LATE}.get(self.schedule,
                                                                                  L.SCHEDULE_RANDOM)
        G[L.G_COPY_SLOT] = self.warp_slots
        if checks.warp_races:
            self.lane_clocks = np.zeros(self.warp_slots * LANE_CLOCKS // 8, np.uint64)
            G[L.G_LANES] = self.lane_clocks.ctypes.data

    def constant_bits(self, key, parameters: bytes) -> np.uint64:
        if isinstance(key, int):
            return np.uint64(key)
        if key[0] == "parameter":
            _, offset, size, signed_width = key
            value = int.from_bytes(parameters[offset : offset + size], "little", signed=bool(signed_width))
            return np.uint64(value & ((1 << (signed_width or 64)) - 1))
        _, name, offset = key
        return np.uint64(self.variables[name] + offset & 0xFFFFFFFFFFFFFFFF)

    def symbol_value(self, symbol: Symbol) -> int:
        entry = next((o for o, v in self.decoded.parameters if v.name == symbol.name), None)
        if entry is not None:
            return L.PARAMETER_WINDOW + entry + symbol.offset
        if symbol.name in self.variables:
            return self.variables[symbol.name] + symbol.offset
        raise KeyError(symbol.name)

    # ---- CTAs
    def start_cluster(self, first: int, number: int) -> None:
        """Make cluster `number` of the grid resident in CTA slots first.. ."""
        shape, size = self.cluster_shape, self.cluster_size
        counts = [g // c for g, c in zip(self.grid, shape)]
        at = (number % counts[0], number // counts[0] % counts[1], number // (counts[0] * counts[1]))
        cluster: list[Cta] = []
        # What asynchronous work of earlier clusters left in these shared-memory windows no longer counts.
        # (With several clusters resident, work of the others that has ended is forgotten with it.)
        active = {task.agent.slot: self.spawned[task.agent.slot] for task in self.queue.tasks}
        active |= self.copies.active()
        for slot in range(self.warp_slots, self.slots):
            if slot in active:
                self.clocks.K[slot, 0] = active[slot]
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
        row[L.C_LINEAR] = cta.index
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
        state[L.W_STATUS], state[L.W_CTA], state[L.W_INDEX], state[L.W_ALIVE] = (
            L.WARP_READY,
            cta.slot,
            warp,
            alive,
        )
        state[L.W_SPECIAL] = special
        state[L.W_FRAGMENTS] = 1
        self.FR[slot] = 0
        self.FR[slot, 0, L.FR_STATE] = L.FRAG_READY
        self.FR[slot, 0, L.FR_MASK] = alive
        self.FR[slot, 0, L.FR_BASE] = special + self.special_rows
        self.FR[slot, 0, L.FR_RECORD] = -1
        self.RC[slot] = 0
        self.copies.forget(slot)
        if self.checks.warp_races:
            lane_event(self.G, slot, 0, 0)
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
            "tid": (thread % x, thread // x % y, thread // (x * y)),
            "ntid": self.block,
            "ctaid": cta.coordinates,
            "nctaid": self.grid,
            "clusterid": cluster_at,
            "nclusterid": counts,
            "cluster_ctaid": inner,
            "cluster_nctaid": self.cluster_shape,
            "laneid": (lane,),
            "warpid": (warp,),
            "nwarpid": (self.warps_per_cta,),
            "smid": (cta.slot,),
            "nsmid": (max(self.resident, 1),),
            "gridid": (1,),
            "lanemask_eq": (one << lane,),
            "lanemask_lt": ((one << lane) - one,),
            "lanemask_le": ((one << lane) * np.uint64(2) - one,),
            "lanemask_ge": (np.uint64(0xFFFFFFFF) & ~((one << lane) - one),),
            "lanemask_gt": (np.uint64(0xFFFFFFFF) & ~((one << lane) * np.uint64(2) - one),),
            "cluster_ctarank": (cta.rank,),
            "cluster_nctarank": (self.cluster_size,),
            "dynamic_smem_size": (self.shared_bytes,),
            "total_smem_size": (self.shared_end - L.SHARED_RESERVED,),
            "aggr_smem_size": (self.shared_end,),
            "reserved_smem_offset_begin": (0,),
            "reserved_smem_offset_end": (L.SHARED_RESERVED,),
            "reserved_smem_offset_cap": (L.SHARED_RESERVED,),
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
                if ready:
                    self.queue.step(ready[0])
                elif self.copies.flying():
                    self.copies.step()
                else:
                    raise RuntimeError("no clock slot is free and no asynchronous work can complete")
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

    def plan_tick(self) -> None:
        """Bring the compiled loop back soon for asynchronous work."""
        if self.schedule == "random" and self.queue.tasks:
            self.G[L.G_BUDGET] = self.rng.randrange(1, 160)
        elif self.schedule == "late" and self.queue.tasks:
            # A warp that polls (test_wait, a flag) can always run: late work must come before it polls for
            # ever.
            self.G[L.G_BUDGET] = _LATE

    # ---- faults
    def fault_at(self, kind, message, instruction, cta, warp, lane=None, address=None) -> Fault:
        return Fault(kind, message, getattr(instruction, "line", None), getattr(instruction, "text", ""),
                     getattr(instruction, "source", None), getattr(cta, "index", None), warp, lane, address)

    def describe_cell(self, cell: int) -> str:
        """Who made the access recorded in a shadow cell."""
        return explain.describe_cell(self, cell)

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
            reason = run(
                self.F,
                self.P,
                self.V,
                self.W,
                self.FR,
                self.RC,
                self.RS,
                self.C,
                self.B,
                self.A,
                self.G,
                self.T,
                clocks.VC,
                clocks.VF,
                clocks.VP,
                clocks.K,
                clocks.BV,
                clocks.SK,
                clocks.SV,
                self.N,
                self.OUT,
                self.EV,
                self.addresses,
                self.copies.Q,
                self.copies.GC,
                self.copies.DN,
            )
            if reason == L.LEAVE_PYTHON:
                self.python_operation()
            elif reason == L.LEAVE_TICK:
                self.queue.tick()
                self.G[L.G_BUDGET] = _FOREVER
                self.disturb()
                self.plan_tick()
            elif reason == L.LEAVE_FAULT:
                raise explain.loop_fault(self)
            elif reason == L.LEAVE_CTA:
                self.cta_ended(int(self.OUT[L.OUT_MASK]), free)
            elif reason == L.LEAVE_IDLE:
                if not self.idle():
                    if not self.ctas and not pending:
                        return
                    if self.ctas:
                        raise explain.deadlock(self)
            elif reason == L.LEAVE_LIMIT:
                raise explain.limit(self)
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
            if self.checks.warp_races and "wait" in warp.instruction.opcode:
                lane_event(self.G, slot, mask, 2)
            return
        if not isinstance(result, Wait):
            raise TypeError(
                f"operation {warp.instruction.opcode} returned {result!r}: None or Wait is needed"
            )
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
        """No warp can run: let asynchronous work complete, then lanes that wait only to reconverge. False:
        stuck."""
        while self.complete_something():
            if (self.W[: self.warp_slots, L.W_STATUS] == L.WARP_READY).any():
                self.plan_tick()
                return True
        freed = 0
        for slot in np.flatnonzero(self.W[: self.warp_slots, L.W_STATUS] == L.WARP_BLOCKED):
            freed += release_waiting(self.W, self.FR, self.RC, int(slot), 0xFFFFFFFF)
        return freed > 0

    def complete_something(self) -> bool:
        """One stage of a random piece of work in flight; False when there is none."""
        ready, copies = self.queue.ready(), self.copies.flying()
        if not ready and not copies:
            return False
        at = self.rng.randrange(len(ready) + copies)
        if at < len(ready):
            self.queue.step(ready[at])
        else:
            self.copies.step()
        return True

    def cta_ended(self, slot: int, free: list) -> None:
        cta = self.ctas[slot]
        cta.exited = True
        for hook in self.exit_hooks:
            hook(cta)
        if all(other.exited for other in cta.cluster):
            for task in [task for task in self.queue.tasks if task.agent.cta in cta.cluster]:
                self.queue.force([task.agent])
            self.copies.finish({other.slot for other in cta.cluster})
            for other in cta.cluster:
                del self.ctas[other.slot]
            free.append(cta.cluster[0].slot)

    def flush_events(self) -> None:
        self.trace_blocks.append(self.EV[: self.G[L.G_EVENTS]].copy())
        self.G[L.G_EVENTS] = 0




_LAUNCH_HOOKS: list[Callable] = []


def on_launch(hook: Callable) -> Callable:
    """Register `hook(machine)` to be called at the beginning of every launch (a decorator)."""
    _LAUNCH_HOOKS.append(hook)
    return hook
