"""Vector clocks: who knows what has happened.

Every warp and every asynchronous agent has a *slot*. Row s of VC holds, for each slot t, the last clock value
of t that s knows of (columns 0..S-1, "seen") and the last value whose writes were also made visible to the
async proxy by fence.proxy.async (columns S..2S-1, "proxied"). An access stamped (t, c) happens before s's
present iff c <= VC[s, t].

Synchronising through memory follows the fence rules of the PTX memory model: a release publishes the whole
row, a relaxed access after a fence publishes the row the fence saw (VF), an acquire takes a published row
over at once, a relaxed read keeps it aside (VP) until the next fence. Scopes are not distinguished: a `.cta`
fence counts as `.sys`.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .bitcast import U0
from .jit import inlined
from .layout import G_SYNC_USED

#: columns of K: first clock of the present CTA in this slot, what it knows of earlier CTAs of its own slot,
#: whether VF (published by a fence) and VP (kept until a fence) hold anything, first clock of the launch
(K_START, K_OWN, K_FENCED, K_PENDING, K_EPOCH) = range(5)


@inlined
def join_rows(target, source):
    """target = max(target, source), element by element."""
    for i in range(target.shape[0]):
        if source[i] > target[i]:
            target[i] = source[i]


@inlined
def clear_row(rows, at):
    for i in range(rows.shape[1]):
        rows[at, i] = 0


@inlined
def acquire_into(VC, K, slot, row):
    """Take over a published row; keeps what it says about earlier CTAs of the slot itself apart."""
    own = VC[slot, slot]
    for i in range(VC.shape[1]):
        if row[i] > VC[slot, i]:
            VC[slot, i] = row[i]
    if row[slot] < K[slot, K_START] and row[slot] > K[slot, K_OWN]:
        K[slot, K_OWN] = row[slot]
    VC[slot, slot] = own


@inlined
def knows_start(VC, K, slot, first, count):
    """Whether `slot` knows of anything that the warps in slots first.. did since their CTA started."""
    for other in range(first, first + count):
        if VC[slot, other] >= K[other, K_START]:
            return True
    return False


@inlined
def fence(VC, VF, VP, K, slot):
    """membar / fence.acq_rel / fence.sc by a warp."""
    if K[slot, K_PENDING]:
        acquire_into(VC, K, slot, VP[slot])
        clear_row(VP, slot)
        K[slot, K_PENDING] = 0
    for i in range(VC.shape[1]):
        VF[slot, i] = VC[slot, i]
    K[slot, K_FENCED] = 1
    VC[slot, slot] += 1


@inlined
def proxy_fence(VC, slot):
    """fence.proxy.async: everything known so far becomes visible to the async proxy too."""
    half = VC.shape[1] // 2
    for i in range(half):
        if VC[slot, i] > VC[slot, half + i]:
            VC[slot, half + i] = VC[slot, i]
    VC[slot, slot] += 1


@inlined
def find_sync(SK, address, insert):
    """Index of `address` in the open-addressing table of synchronisation words, -1 when absent."""
    size = np.uint64(SK.shape[0])
    at = (address * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    while True:
        at = at % size
        if SK[at] == address:
            return np.int64(at)
        if SK[at] == U0:
            if insert:
                SK[at] = address
                return np.int64(at)
            return np.int64(-1)
        at += np.uint64(1)


@inlined
def publish(VC, VF, K, SK, SV, G, slot, address, release, update):
    """A strong write (or the write half of an atomic, `update`) by `slot` to the host address."""
    if not release and K[slot, K_FENCED] == 0:
        if not update:
            at = find_sync(SK, address, False)
            if at >= 0:
                clear_row(SV, at)
        return
    at = find_sync(SK, address, False)
    if at < 0:
        at = find_sync(SK, address, True)
        G[G_SYNC_USED] += 1
        clear_row(SV, at)
    if not update:
        clear_row(SV, at)
    join_rows(SV[at], VC[slot] if release else VF[slot])
    if release:
        VC[slot, slot] += 1


@inlined
def observe(VC, VP, K, SK, SV, slot, address, acquire):
    """A strong read (or the read half of an atomic)."""
    at = find_sync(SK, address, False)
    if at < 0:
        return
    if acquire:
        acquire_into(VC, K, slot, SV[at])
    else:
        join_rows(VP[slot], SV[at])
        K[slot, K_PENDING] = 1


class Clocks:
    """The clock state of one launch, for the Python side: same arrays, same rules as the compiled loop."""

    def __init__(self, slots: int, barriers: int, epoch: int = 0, sync_words: int = 1 << 12) -> None:
        self.slots = slots
        self.VC = np.zeros((slots, 2 * slots), np.int64)
        self.VF = np.zeros((slots, 2 * slots), np.int64)
        self.VP = np.zeros((slots, 2 * slots), np.int64)
        self.K = np.zeros((slots, 5), np.int64)
        self.K[:, K_START] = self.K[:, K_EPOCH] = epoch + 1
        self.BV = np.zeros((max(barriers, 1), 2 * slots), np.int64)
        self.SK = np.zeros(sync_words, np.uint64)
        self.SV = np.zeros((sync_words, 2 * slots), np.int64)
        for slot in range(slots):
            self.VC[slot, slot] = epoch + 1
        self.objects: dict[Hashable, np.ndarray] = {}

    def start(self, slot: int, parent: int | None = None) -> None:
        """A new warp or agent begins in `slot`; it knows what `parent` knows, or nothing."""
        clock = self.VC[slot, slot] + 1
        if parent is None:
            self.VC[slot, :] = 0
        else:
            self.VC[slot, :] = self.VC[parent]
        self.VC[slot, slot] = clock
        self.VF[slot, :] = 0
        self.VP[slot, :] = 0
        self.K[slot, K_FENCED] = self.K[slot, K_PENDING] = 0
        if parent is None:
            # The first clock stamps no access: whoever knows it knows that the warp has started, no more.
            self.K[slot, K_START], self.K[slot, K_OWN] = clock, 0
            self.VC[slot, slot] += 1
        else:
            # The slot's earlier agents stay on record for others; K_START moves only when a cluster starts.
            self.VC[parent, parent] += 1

    def release_fenced(self, slot: int, key: Hashable) -> None:
        """A relaxed operation's release: publishes what the slot's last fence saw, without one only that the
        slot has started."""
        row = self.objects.setdefault(key, np.zeros(2 * self.slots, np.int64))
        row[slot] = max(row[slot], self.K[slot, K_START])
        if self.K[slot, K_FENCED]:
            np.maximum(row, self.VF[slot], out=row)

    def knows_start(self, slot: int, first: int, count: int) -> bool:
        """The rule of the compiled `knows_start`."""
        own = slice(first, first + count)
        return bool((self.VC[slot, own] >= self.K[own, K_START]).any())

    def release(self, slot: int, key: Hashable) -> None:
        """Join the slot's knowledge into the object `key` and step the slot's clock."""
        row = self.objects.get(key)
        if row is None:
            self.objects[key] = self.VC[slot].copy()
        else:
            np.maximum(row, self.VC[slot], out=row)
        self.VC[slot, slot] += 1

    def acquire(self, slot: int, key: Hashable) -> None:
        """Take over what was released into `key` (nothing if nobody released)."""
        row = self.objects.get(key)
        if row is not None:
            self.acquire_row(slot, row)

    def forget(self, key: Hashable) -> None:
        self.objects.pop(key, None)

    def acquire_row(self, slot: int, row: np.ndarray) -> None:
        """The rule of the compiled `acquire_into`."""
        own = self.VC[slot, slot]
        if self.K[slot, K_OWN] < row[slot] < self.K[slot, K_START]:
            self.K[slot, K_OWN] = row[slot]
        np.maximum(self.VC[slot], row, out=self.VC[slot])
        self.VC[slot, slot] = own

    def learn(self, slot: int, other: int, clock: int) -> None:
        """`slot` now knows what `other` did up to `clock`."""
        self.VC[slot, other] = max(self.VC[slot, other], clock)

    def join(self, target: int, source: int) -> None:
        """target now knows what source knows."""
        self.acquire_row(target, self.VC[source].copy())
        self.VC[source, source] += 1

    def proxy_fence(self, slot: int) -> None:
        """fence.proxy.async by `slot`."""
        row = self.VC[slot]
        np.maximum(row[self.slots :], row[: self.slots], out=row[self.slots :])
        row[slot] += 1

    def fence(self, slot: int) -> None:
        """membar / fence by `slot`."""
        if self.K[slot, K_PENDING]:
            self.acquire_row(slot, self.VP[slot])
            self.VP[slot] = 0
            self.K[slot, K_PENDING] = 0
        self.VF[slot] = self.VC[slot]
        self.K[slot, K_FENCED] = 1
        self.VC[slot, slot] += 1

    def grow_sync_table(self) -> None:
        """Double the table of synchronisation words (the compiled loop asks when it is half full)."""
        keys, rows = self.SK, self.SV
        self.SK = np.zeros(2 * len(keys), np.uint64)
        self.SV = np.zeros((2 * len(keys), rows.shape[1]), np.int64)
        size = len(self.SK)
        for key, row in zip(keys, rows):
            if key:
                at = (int(key) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 40
                while self.SK[at % size]:
                    at = at % size + 1
                self.SK[at % size], self.SV[at % size] = key, row
