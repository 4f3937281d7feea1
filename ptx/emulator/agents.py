"""Who acts in a launch: CTAs, warps and asynchronous agents, what a warp waits for, and the queue of work in
flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from . import explain
from . import layout as L
from .memory import SharedMemory
from .warp_copies import (
    COPY_AGENTS, FINISH, FINISHED, FREE, GC_COLUMNS, GC_FINISHED, Q_CLOCK, Q_COLUMNS, Q_CTA, Q_MASK, Q_PC,
    Q_SERIAL, Q_STATE, Q_WARP, STEP, copy_unit,
)


@dataclass(frozen=True)
class Wait:
    """Returned by an operation that cannot go on: sleep until `Machine.wake(key)`, then run it again.

    `text` (or its result, if callable) says in a deadlock report what is missing. `spurious` allows the
    machine to wake the warp early with `WarpContext.spurious` set (try_wait may return false at any time).
    """

    key: Hashable
    text: str | Callable[[], str]
    spurious: bool = False


class Agent:
    """Somebody who touches memory: a warp, or a piece of asynchronous work with a clock slot of its own."""

    def __init__(self, machine, cta: "Cta", slot: int, warp: int, instruction, label: str,
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

    def __init__(self, machine, slot: int, index: int, rank: int, cluster: list, coordinates) -> None:
        self.machine, self.slot, self.index, self.rank = machine, slot, index, rank
        self.cluster, self.coordinates = cluster, coordinates
        self.shared: SharedMemory = machine.shared[slot]
        self.state: dict = {}
        self.exited = False


class Copy:
    """One cp.async in flight, as something that other work can wait for."""

    def __init__(self, copies: "Copies", number: int) -> None:
        self.copies, self.number = copies, number
        self.serial = copies.Q[number, Q_SERIAL]

    @property
    def done(self) -> bool:
        row = self.copies.Q[self.number]
        return row[Q_STATE] == FREE or row[Q_SERIAL] != self.serial

    def finish(self) -> None:
        self.copies.run(FINISH, self.number)


class Copies:
    """The Python side of warp_copies: cp.async in flight and ended copies that nobody has waited for yet."""

    def __init__(self, machine, used: bool) -> None:
        self.machine, self.count = machine, COPY_AGENTS if used else 0
        warps = machine.warp_slots if used else 1
        self.Q = np.zeros((COPY_AGENTS if used else 1, Q_COLUMNS), np.int64)
        self.GC = np.zeros((warps, GC_COLUMNS), np.int64)
        self.DN = np.zeros((warps, FINISHED, 4), np.int64)

    def run(self, what: int, number: int) -> None:
        m = self.machine
        code = copy_unit(m.F, m.P, m.A, m.C, m.W, m.FR, m.G, m.clocks.VC, m.clocks.K, self.Q, self.GC,
                         self.DN, m.EV, m.OUT, what, number, 0, 0, 0, 0)
        if code:
            m.OUT[L.OUT_CODE] = code
            raise explain.loop_fault(m)

    def flying(self) -> int:
        return int(self.machine.G[L.G_COPIES])

    def step(self) -> None:
        """One stage of a random copy in flight."""
        self.run(STEP, self.machine.rng.randrange(self.flying()))

    def of_warp(self, slot: int, mask: int) -> tuple[list[Copy], list[tuple[int, int]]]:
        """What lanes started and did not wait for: copies in flight, and (clock slot, clock) of all."""
        Q, flying, clocks = self.Q, [], []
        for number in np.flatnonzero((Q[:, Q_STATE] != FREE) & (Q[:, Q_WARP] == slot)).tolist():
            if self.count and int(Q[number, Q_MASK]) & mask:
                flying.append(Copy(self, number))
                clocks.append((self.first + number, int(Q[number, Q_CLOCK])))
        if self.count:
            for other, clock, lanes, _ in self.DN[slot, : self.GC[slot, GC_FINISHED]].tolist():
                if lanes & mask:
                    clocks.append((other, clock))
        return flying, clocks

    @property
    def first(self) -> int:
        """The first of the clock slots."""
        return int(self.machine.G[L.G_COPY_SLOT])

    def active(self) -> dict[int, int]:
        """Clock slot -> clock at its start, of copies in flight."""
        rows = np.flatnonzero(self.Q[:, Q_STATE] != FREE) if self.count else ()
        return {self.first + int(n): int(self.Q[n, Q_CLOCK]) for n in rows}

    def finish(self, ctas: set[int]) -> None:
        """Complete the copies of these CTA slots."""
        for number in range(self.count):
            if self.Q[number, Q_STATE] != FREE and int(self.Q[number, Q_CTA]) in ctas:
                self.run(FINISH, number)

    def forget(self, slot: int) -> None:
        """A new warp begins in this slot."""
        if self.count:
            self.GC[slot] = 0

    def issuer(self, number: int) -> tuple[int, int]:
        """(warp slot, program row) of who started a copy."""
        return int(self.Q[number, Q_WARP]), int(self.Q[number, Q_PC])

    def describe(self, slot: int) -> str:
        row = self.Q[slot - self.first]
        warps = self.machine.warps_per_cta
        cta = self.machine.ctas.get(int(row[Q_CTA]))
        return (f"cp.async issued by warp {int(row[Q_WARP]) % warps} of "
                f"{'an earlier CTA' if cta is None else f'CTA {cta.index}'}")


@dataclass
class _Task:
    agent: Agent
    stages: deque
    after: tuple
    label: str
    start: int


class Queue:
    """Asynchronous work in flight. Stages of one task run in order; tasks interleave as the schedule
    decides."""

    def __init__(self, machine) -> None:
        self.machine = machine
        self.tasks: list[_Task] = []

    def submit(self, agent: Agent, stages, after=(), label: str = "") -> Agent:
        """Queue callables to run one after the other at times of the schedule's choice, none before every
        agent in `after` is done. With schedule "eager" they run now if they may."""
        self.tasks.append(_Task(agent, deque(stages), tuple(after), label or agent.label,
                                int(self.machine.G[L.G_CLOCK])))
        self.machine.G[L.G_TASKS] = len(self.tasks)
        if self.machine.schedule == "eager":
            self.drain()
        else:
            self.machine.plan_tick()
        return agent

    def ready(self) -> list[_Task]:
        return [task for task in self.tasks if not task.after or all(other.done for other in task.after)]

    def step(self, task: _Task) -> None:
        """Run the next stage of a task."""
        task.stages.popleft()()
        if not task.stages:
            self.finish(task)

    def finish(self, task: _Task) -> None:
        task.agent.done = True
        self.tasks.remove(task)
        self.machine.G[L.G_TASKS] = len(self.tasks)
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
                if isinstance(agent, Copy):
                    agent.finish()
                    break
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
