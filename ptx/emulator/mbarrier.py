"""mbarrier: the state of a barrier object, its rules, and the instructions of the family.

The 64-bit object is opaque; here it is a ``Barrier`` beside the shared memory of its CTA, and the eight bytes
hold a pattern that shows up when something overwrites them.  Rules: PTX ISA, "mbarrier" (phase completion,
tx-count, parity).
"""

from __future__ import annotations

import numpy as np

from .forms import operation
from .machine import Wait
from .places import groups, is_generic, require_started, shared_address

MAXIMUM_COUNT = (1 << 20) - 1


class BarrierError(Exception):
    """A rule of the barrier was broken; the message says which."""


class Barrier:
    """State of one mbarrier object: phase, expected and pending arrivals, pending transaction bytes."""

    def __init__(self, count):
        if not 1 <= count <= MAXIMUM_COUNT:
            raise BarrierError(f"initialised with count {count}; 1 to {MAXIMUM_COUNT} are possible")
        self.phase = 0
        self.expected = self.pending = count
        self.tx = 0
        #: who initialised it, for the check of lanes: (warp slot, lane, clock of the lane)
        self.made_by = (-1, 0, 0)

    def __str__(self):
        return (f"phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.expected} arrivals "
                f"pending, "
                f"{self.tx} bytes pending")

    def expect(self, nbytes):
        """expect_tx: the present phase waits for this many more bytes."""
        self.tx += nbytes
        if abs(self.tx) > MAXIMUM_COUNT:
            raise BarrierError(f"tx-count {self.tx} outside -{MAXIMUM_COUNT}..{MAXIMUM_COUNT} after "
                               f"expect_tx of "
                               f"{nbytes} bytes")

    def complete(self, nbytes):
        """complete_tx; True when that completed the phase."""
        self.tx -= nbytes
        if abs(self.tx) > MAXIMUM_COUNT:
            raise BarrierError(f"tx-count {self.tx} outside -{MAXIMUM_COUNT}..{MAXIMUM_COUNT} after "
                               f"complete_tx of "
                               f"{nbytes} bytes")
        return self._advance()

    def arrive(self, count=1, *, drop=False, may_complete=True):
        """Arrive ``count`` times; True when that completed the phase."""
        if not 1 <= count <= MAXIMUM_COUNT:
            raise BarrierError(f"arrive count {count}; 1 to {MAXIMUM_COUNT} are possible")
        if count > self.pending:
            raise BarrierError(f"{count} arrivals where phase {self.phase} has {self.pending} pending of "
                               f"{self.expected}")
        if not may_complete and count == self.pending:
            raise BarrierError(f"arrive.noComplete with count {count} would complete phase {self.phase}")
        self.pending -= count
        if drop:
            self.expected -= count
        return self._advance()

    def increment(self):
        """The pending count grows by one (cp.async.mbarrier.arrive without .noinc)."""
        if self.pending == MAXIMUM_COUNT:
            raise BarrierError("pending count overflows")
        self.pending += 1

    def _advance(self):
        if self.tx < 0 and self.pending == 0:
            # Nobody is left who could announce these bytes in this phase.
            raise BarrierError(f"{-self.tx} bytes more arrived than phase {self.phase} expects")
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.expected
        return True

    def token(self):
        """The opaque 64-bit state that arrive returns: the phase and the pending count before the arrival."""
        return (self.phase & 0xFFFFFFFF) << 20 | self.pending

    def completed(self, token):
        """Whether the phase in a token has completed."""
        return (self.phase & 0xFFFFFFFF) != token >> 20

    def completed_parity(self, parity):
        return (self.phase & 1) != parity


def pattern(offset):
    """What the eight bytes of a barrier at this offset hold."""
    word = 0x6D62617272696572 ^ offset * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return np.frombuffer(word.to_bytes(8, "little"), np.uint8)


def barriers_of(cta):
    return cta.state.setdefault("mbarriers", {})


def check_overlap(agent, cta, offsets, size):
    """A copy of pieces of ``size`` bytes must not write over a live mbarrier."""
    low, high = int(offsets.min()), int(offsets.max()) + size
    if not cta.shared.barriers[low >> 3:(high + 7) >> 3].any():
        return
    for place in barriers_of(cta):
        if ((offsets < place + 8) & (place < offsets + size)).any():
            address = cta.rank << 24 | place
            agent.fault("mbarrier", f"{size} bytes to shared {cta.rank << 24 | int(offsets[0]):#x} overwrite "
                                    f"the mbarrier at {address:#x}", address=address)


def phase_key(cta, offset, phase):
    return ("mbarrier", cta.index, offset, phase)


def find(agent, cta, offset, what, lane=None):
    """The live Barrier at a place; faults where there is none or its bytes were overwritten."""
    barrier = barriers_of(cta).get(offset)
    address = cta.rank << 24 | offset
    if cta.exited:
        agent.fault("cluster-exit", f"{what} on the mbarrier at shared {address:#x}: CTA {cta.index} has "
                                    f"exited",
                    lane=lane, address=address)
    require_started(agent, cta, address, lane)
    if lane is not None and agent.machine.checks.warp_races and barrier is not None:
        slot, maker, clock = barrier.made_by
        if slot == agent.slot and agent.machine.lane_clocks.reshape(-1, 32, 32)[slot, lane, maker] < clock:
            agent.fault("warp-race", f"{what} on the mbarrier at shared {address:#x}, which lane {maker} of "
                                     "the same warp initialised, and no instruction that both lanes execute "
                                     "together came in between", lane=lane, address=address)
    if barrier is None:
        agent.fault("mbarrier", f"{what} on shared {address:#x}, where no mbarrier was initialised",
                    lane=lane, address=address)
    if not np.array_equal(cta.shared.bytes[offset:offset + 8], pattern(offset)):
        agent.fault("mbarrier", f"{what}: the mbarrier at shared {address:#x} was overwritten", lane=lane,
                    address=address)
    return barrier


def describe(cta, offset):
    place = f"mbarrier at shared {cta.rank << 24 | offset:#x} of CTA {cta.index}"
    return f"{place}: {barriers_of(cta).get(offset)}"


def apply(agent, cta, offset, what, change, *, release=True, lane=None, relaxed=False):
    """Run ``change(barrier)`` (True: the phase completed), publish what the agent knows, and wake the
    waiters.
    """
    machine = agent.machine
    barrier = find(agent, cta, offset, what, lane)
    phase = barrier.phase
    try:
        done = change(barrier)
    except BarrierError as error:
        agent.fault("mbarrier", f"{what}: {error} (mbarrier at shared {cta.rank << 24 | offset:#x})",
                    lane=lane, address=cta.rank << 24 | offset)
    key = phase_key(cta, offset, phase)
    if release:
        if relaxed:
            machine.clocks.release_fenced(agent.slot, key)
        else:
            agent.release(key)
    if done:
        # The changes of one barrier form a chain, so whoever sees a phase end has seen all earlier ones end.
        known = machine.clocks.objects.get(key)
        if known is not None:
            machine.clocks.objects[phase_key(cta, offset, phase + 1)] = known.copy()
        machine.clocks.forget(phase_key(cta, offset, phase - 1))
        machine.wake(("mbarrier", cta.index, offset))
    return barrier


def complete_tx(agent, cta, offset, nbytes, what):
    """The completion signal of an asynchronous copy."""
    apply(agent, cta, offset, what, lambda barrier: barrier.complete(nbytes))


# --- instructions -------------------------------------------------------------------------------------------

_SPACE = "shared|shared::cta?"
_CLUSTER = "shared|shared::cta|shared::cluster?"


def _targets(warp, ins, index, *columns, cluster=True):
    """(mask, lane, CTA, offset, further values) for each distinct barrier that the active lanes name."""
    generic = is_generic(ins)
    for mask, lane, (address, *rest) in groups(warp, warp.address(index), *columns):
        cta, offset = shared_address(warp, address, lane, generic=generic, cluster=cluster, size=8, align=8,
                                     what="mbarrier address")
        yield mask, lane, cta, offset, rest


@operation("mbarrier.init", f"{_SPACE} b64", "[a], b")
def mbarrier_init(warp, ins):
    for mask, lane, cta, offset, (count,) in _targets(warp, ins, 0, warp.u32(1), cluster=False):
        if mask & (mask - 1):
            warp.fault("mbarrier", f"{mask.bit_count()} lanes initialise the same mbarrier", lane=lane,
                       address=cta.rank << 24 | offset)
        if offset in barriers_of(cta):
            warp.fault("mbarrier", "initialised again without mbarrier.inval", lane=lane,
                       address=cta.rank << 24 | offset)
        warp.machine.access.write_shared(warp.agent, cta.rank, offset, pattern(offset))
        try:
            barriers_of(cta)[offset] = Barrier(count)
            cta.shared.barriers[offset >> 3] = 1
            if warp.machine.checks.warp_races:
                clocks = warp.machine.lane_clocks.reshape(-1, 32, 32)
                barriers_of(cta)[offset].made_by = (warp.slot, lane, clocks[warp.slot, lane, lane])
        except BarrierError as error:
            warp.fault("mbarrier", str(error), lane=lane, address=cta.rank << 24 | offset)


@operation("mbarrier.inval", f"{_SPACE} b64", "[a]")
def mbarrier_inval(warp, ins):
    for _, lane, cta, offset, _ in _targets(warp, ins, 0, cluster=False):
        barrier = find(warp, cta, offset, "inval", lane)
        if barrier.tx:
            warp.fault("mbarrier", f"inval while {barrier.tx} bytes are pending", lane=lane,
                       address=cta.rank << 24 | offset)
        del barriers_of(cta)[offset]
        cta.shared.barriers[offset >> 3] = 0
        for phase in (barrier.phase - 1, barrier.phase, barrier.phase + 1):
            warp.machine.clocks.forget(phase_key(cta, offset, phase))
        warp.machine.access.write_shared(warp.agent, cta.rank, offset, np.full(8, 0xFF, np.uint8))
        cta.shared.initialised[offset:offset + 8] = 0


def _scope(ins):
    return ins.has("relaxed")


@operation("mbarrier.expect_tx", f"relaxed? cta|cluster? {_CLUSTER} b64", "[a], b")
def mbarrier_expect_tx(warp, ins):
    for mask, lane, cta, offset, (nbytes,) in _targets(warp, ins, 0, warp.u32(1)):
        for _ in range(mask.bit_count()):
            apply(warp.agent, cta, offset, "expect_tx", lambda b: b.expect(nbytes), release=False, lane=lane)


@operation("mbarrier.complete_tx", f"relaxed? cta|cluster? {_CLUSTER} b64", "[a], b")
def mbarrier_complete_tx(warp, ins):
    for mask, lane, cta, offset, (nbytes,) in _targets(warp, ins, 0, warp.u32(1)):
        for _ in range(mask.bit_count()):
            apply(warp.agent, cta, offset, "complete_tx", lambda b: b.complete(nbytes), release=False,
                  lane=lane)


def _arrive(warp, ins, *, counted, with_tx, drop=False, may_complete=True):
    """The arrive forms: d, [a]{, count or bytes}."""
    amount = warp.u32(2) if len(ins.operands) > 2 else np.full(32, 0 if with_tx else 1, np.uint32)
    tokens = np.zeros(32, np.uint64)
    for mask, lane, cta, offset, (value,) in _targets(warp, ins, 1, amount):
        phase = find(warp, cta, offset, "arrive", lane).phase
        for each in range(32):
            if not mask >> each & 1:
                continue
            barrier = find(warp, cta, offset, "arrive", each)
            if barrier.phase != phase:
                warp.fault("mbarrier", f"the arrivals of the {mask.bit_count()} lanes of one instruction "
                                       f"fall into two "
                           f"phases: the mbarrier expects {barrier.expected}", lane=each,
                           address=cta.rank << 24 | offset)
            tokens[each] = barrier.token()
            if with_tx:
                apply(warp.agent, cta, offset, "arrive.expect_tx", lambda b: b.expect(value), release=False,
                      lane=each)
            count = value if counted else 1
            apply(warp.agent, cta, offset, "arrive_drop" if drop else "arrive",
                  lambda b: b.arrive(count, drop=drop, may_complete=may_complete), lane=each,
                  relaxed=_scope(ins))
    warp.write(0, tokens)


_ARRIVE = f"release|relaxed? cta|cluster? {_CLUSTER} b64"


@operation("mbarrier.arrive", _ARRIVE, "d, [a], b?")
def mbarrier_arrive(warp, ins):
    _arrive(warp, ins, counted=len(ins.operands) > 2, with_tx=False)


@operation("mbarrier.arrive", f"expect_tx {_ARRIVE}", "d, [a], b")
def mbarrier_arrive_expect_tx(warp, ins):
    _arrive(warp, ins, counted=False, with_tx=True)


@operation("mbarrier.arrive", f"noComplete {_ARRIVE}", "d, [a], b")
def mbarrier_arrive_no_complete(warp, ins):
    _arrive(warp, ins, counted=True, with_tx=False, may_complete=False)


@operation("mbarrier.arrive_drop", _ARRIVE, "d, [a], b?")
def mbarrier_arrive_drop(warp, ins):
    _arrive(warp, ins, counted=len(ins.operands) > 2, with_tx=False, drop=True)


@operation("mbarrier.arrive_drop", f"expect_tx {_ARRIVE}", "d, [a], b")
def mbarrier_arrive_drop_expect_tx(warp, ins):
    _arrive(warp, ins, counted=False, with_tx=True, drop=True)


@operation("mbarrier.arrive_drop", f"noComplete {_ARRIVE}", "d, [a], b")
def mbarrier_arrive_drop_no_complete(warp, ins):
    _arrive(warp, ins, counted=True, with_tx=False, drop=True, may_complete=False)


@operation("mbarrier.pending_count", "b64", "d, a")
def mbarrier_pending_count(warp, ins):
    warp.write(0, warp.values(1) & np.uint64(MAXIMUM_COUNT))


def _wait(warp, ins, *, parity, blocking):
    """test_wait and try_wait: p, [a], state or parity."""
    waiting = warp.u32(2) if parity else warp.values(2)
    true = 0
    sleep = None
    for mask, lane, cta, offset, (value,) in _targets(warp, ins, 1, waiting, cluster=False):
        barrier = find(warp, cta, offset, ins.name.split(".")[1], lane)
        if parity and value > 1:
            warp.fault("mbarrier", f"phase parity {value}: it is 0 or 1", lane=lane,
                       address=cta.rank << 24 | offset)
        if not (barrier.completed_parity(value) if parity else barrier.completed(value)):
            sleep = (cta, offset)
            continue
        true |= mask
        if not ins.has("relaxed"):
            warp.machine.clocks.acquire(warp.slot, phase_key(cta, offset, barrier.phase - 1))
    if sleep is not None and blocking and not warp.spurious:
        return Wait(("mbarrier", sleep[0].index, sleep[1]), lambda: describe(*sleep), spurious=True)
    if sleep is not None and warp.machine.schedule == "late":
        # A warp that polls never lets the machine run idle, which is when late work completes.
        warp.machine.complete_something()
    warp.write_predicate(0, true)
    return None


_WAIT = f"acquire|relaxed? cta|cluster? {_SPACE} b64"


@operation("mbarrier.test_wait", _WAIT, "p, [a], b")
def mbarrier_test_wait(warp, ins):
    return _wait(warp, ins, parity=False, blocking=False)


@operation("mbarrier.test_wait", f"parity {_WAIT}", "p, [a], b")
def mbarrier_test_wait_parity(warp, ins):
    return _wait(warp, ins, parity=True, blocking=False)


@operation("mbarrier.try_wait", _WAIT, "p, [a], b, c?")
def mbarrier_try_wait(warp, ins):
    return _wait(warp, ins, parity=False, blocking=True)


@operation("mbarrier.try_wait", f"parity {_WAIT}", "p, [a], b, c?")
def mbarrier_try_wait_parity(warp, ins):
    return _wait(warp, ins, parity=True, blocking=True)
