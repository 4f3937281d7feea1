"""Memory of a launch: NumPy buffers as global memory, shared memory windows, shadow cells, checked access for
agents."""

from __future__ import annotations

import bisect

import numpy as np

from . import layout as L
from . import pool
from .bitcast import load8, store8
from .jit import compiled
from .lanes_memory import find_allocation
from .places import require_started
from .shadow import hidden_write, touch_global, touch_shared

_GUARD = 1 << 16
_ALIGN = 512


class Memory:
    """Emulated global address space: maps host buffers to addresses, 512-byte aligned with guard gaps between
    them.

    A NumPy array is mapped by its root buffer, so views of one buffer share an allocation and their overlap
    is seen. Addresses are the same in every run for the same sequence of `map` calls.
    """

    def __init__(self) -> None:
        self.next = L.GLOBAL_WINDOW
        self.next_const = L.CONST_WINDOW
        self.rows: list[tuple[int, int, int, bool]] = []  # begin, end, host pointer, read only; by begin
        self.begins: list[int] = []
        self.names: list[str] = []
        self.kept: list[object] = []
        self.shadow: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.generation = 0

    def map(self, array: np.ndarray, name: str | None = None, *, read_only: bool = False) -> int:
        """Address of the array's first element; maps its root buffer on first sight."""
        pointer, low, high, keep = _extent(array)
        for (begin, end, host, _), _name in zip(self.rows, self.names):
            if host <= low and high <= host + end - begin:
                return begin + pointer - host
            if low < host + end - begin and host < high:
                raise ValueError(
                    f"array {name or ''} overlaps the buffer of {_name} without lying inside it: pass "
                    "views of one NumPy buffer"
                )
        begin = self.place(low, high - low, name or f"array {len(self.rows)}", read_only)
        self.kept.append(keep)
        return begin + pointer - low

    def place(
        self, host: int, size: int, name: str, read_only: bool = False, window: int | None = None
    ) -> int:
        """Add an allocation of `size` bytes at a host pointer; returns its address."""
        if window is None:
            # Keep the host buffer's own offset within 16 bytes out of it: device allocations are 256-byte
            # aligned.
            begin = self.next
            self.next = -(-(begin + max(size, 1) + _GUARD) // _ALIGN) * _ALIGN
        else:
            begin = window
        at = bisect.bisect(self.begins, begin)
        self.rows.insert(at, (begin, begin + size, host, read_only))
        self.names.insert(at, name)
        self.begins.insert(at, begin)
        return begin

    def remove(self, begin: int) -> None:
        """Take out the allocation that begins at an address, if there is one."""
        if begin in self.begins:
            at = self.begins.index(begin)
            del self.rows[at], self.names[at], self.begins[at]

    def new(self, size: int, name: str):
        """A fresh zeroed allocation: (address, its bytes)."""
        buffer = np.zeros(max(size, 1) + 16, np.uint8)
        self.kept.append(buffer)
        return self.place(buffer.ctypes.data, size, name), buffer[:size]

    def close(self) -> None:
        """Give the shadow cells back; nobody launches with this memory again."""
        for cells in self.shadow.values():
            pool.give(*cells)
        self.shadow = {}

    def find(self, address: int) -> int:
        """Index of the allocation that holds the address, -1 if none."""
        at = bisect.bisect_right(self.begins, address) - 1
        return at if at >= 0 and address < self.rows[at][1] else -1

    def view(self, address: int, size: int) -> np.ndarray:
        """Unchecked bytes at a global address (ValueError when they leave the allocation)."""
        at = self.find(address)
        if at < 0 or address + size > self.rows[at][1]:
            raise ValueError(f"{size} bytes at {address:#x} are not inside one allocation")
        begin, _, host, _ = self.rows[at]
        return _bytes_at(host + address - begin, size)

    def describe(self, address: int) -> str:
        """Where an address lies, in words."""
        at = self.find(address)
        if at >= 0:
            return f"{self.names[at]} + {address - self.rows[at][0]}"
        near = bisect.bisect_right(self.begins, address) - 1
        if near >= 0 and address - self.rows[near][1] < _GUARD:
            begin, end = self.rows[near][:2]
            return f"{address - end} bytes past the end of {self.names[near]} ({end - begin} bytes)"
        return "no allocation"

    def table(self, races: bool, generation: int) -> np.ndarray:
        """The array A of the compiled loop. Shadow cells are made on first use; the system commits them
        lazily."""
        if generation != self.generation:
            # Clocks began again: old cells would look new.
            self.shadow, self.generation = {}, generation
        table = np.zeros((len(self.rows), L.A_COLUMNS), np.int64)
        for k, (begin, end, host, read_only) in enumerate(self.rows):
            table[k, :3] = (begin, end, host)
            table[k, L.A_FLAGS] = L.A_READ_ONLY if read_only else 0
            if races and not read_only:
                if begin not in self.shadow:
                    granules = (end - begin + 7) // 4
                    lines = (granules + 31) // 32
                    # Whole lines of cells, so that a record can be spilled without looking at the end.
                    self.shadow[begin] = tuple(pool.take((size,), np.uint64, cells=True)
                                               for size in (32 * lines, 32 * lines, 2 * lines, 2 * lines))
                columns = (L.A_WRITE, L.A_READ, L.A_WRITE_LINES, L.A_READ_LINES)
                for column, cells in zip(columns, self.shadow[begin]):
                    table[k, column] = cells.ctypes.data
        return table

    def resolve(self, address: int) -> tuple[str, object, int]:
        """(space, owner, offset) of a generic address: ("shared", rank, offset), ("local", None, offset) or
        ("global", allocation index or -1, offset in it)."""
        window = address >> 40
        if window == L.SHARED_WINDOW >> 40:
            return "shared", (address >> L.RANK_SHIFT) & 0xFF, address & L.OFFSET_MASK
        if window == L.LOCAL_WINDOW >> 40:
            return "local", None, address & ((1 << 40) - 1)
        at = self.find(address)
        return "global", at, address - self.rows[at][0] if at >= 0 else address

    def address(self, array: np.ndarray) -> np.uint64:
        """The address a kernel sees for an array (mapping it if needed), to store in other arrays or pass by
        value."""
        return np.uint64(self.map(np.asarray(array)))


def _extent(array: np.ndarray):
    """(first element's pointer, lowest byte, byte past the highest, object to keep alive) of an array's
    root."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low = high = root.ctypes.data
    if root.size:
        low += sum(min(0, (n - 1) * stride) for n, stride in zip(root.shape, root.strides))
        high += sum(max(0, (n - 1) * stride) for n, stride in zip(root.shape, root.strides)) + root.itemsize
    return array.ctypes.data, low, high, root


def _bytes_at(host: int, size: int) -> np.ndarray:
    import ctypes

    return (
        np.frombuffer((ctypes.c_uint8 * size).from_address(host), np.uint8) if size else np.zeros(0, np.uint8)
    )


class SharedMemory:
    """The shared memory of one CTA: bytes and initialisation map, both indexed by offset in the window."""

    def __init__(self, end: int, slots: int, lanes: bool = False) -> None:
        self.end = end
        size = -(-end // 128) * 128 + 128
        self.granules = size // 4
        self.bytes = pool.take((size,), np.uint8)[:end]
        self.initialised = pool.take((size,), np.uint8)
        self.write_cells = pool.take((self.granules,), np.uint64, cells=True)
        self.read_cells = pool.take((slots, self.granules), np.uint64, cells=True)
        lines = (self.granules + 31) // 32
        self.write_lines = np.zeros((lines, 2), np.uint64)
        self.read_lines = pool.take((slots, lines, 2), np.uint64, cells=True)
        self.readers = np.zeros(lines, np.uint64)
        #: one byte for each 8 bytes: 1 where an mbarrier lives
        self.barriers = np.zeros(size // 8, np.uint8)
        #: what lane_races keeps of each byte
        self.lanes = np.zeros((size, 3), np.uint64) if lanes else None
        self.clear()

    def give_back(self) -> None:
        """Nobody uses this memory any more."""
        pool.give(self.bytes, self.initialised, self.write_cells, self.read_cells, self.read_lines)

    def clear(self) -> None:
        """A new CTA: contents are poison (NaN in every float format, -1 as integer) and nothing is
        initialised."""
        self.bytes[:] = 0xFF
        self.initialised[:] = 0
        self.readers[:] = 0
        self.write_lines[:] = 0
        self.barriers[:] = 0
        if self.lanes is not None:
            self.lanes[:] = 0

    def fill_row(self, row: np.ndarray) -> None:
        row[L.C_SHARED], row[L.C_SHARED_END] = self.bytes.ctypes.data, self.end
        row[L.C_INIT] = self.initialised.ctypes.data
        row[L.C_WRITE], row[L.C_READ] = self.write_cells.ctypes.data, self.read_cells.ctypes.data
        row[L.C_READ_LINES], row[L.C_READERS] = self.read_lines.ctypes.data, self.readers.ctypes.data
        row[L.C_LANES] = 0 if self.lanes is None else self.lanes.ctypes.data
        row[L.C_WRITE_LINES] = self.write_lines.ctypes.data
        row[L.C_GRANULES], row[L.C_BARRIERS] = self.granules, self.barriers.ctypes.data


@compiled
def unproxied(C, VC, K, OUT, cta, offsets, size, slot, generic_slots):
    """hidden_write for pieces of a CTA's shared memory."""
    for k in range(offsets.shape[0]):
        code = hidden_write(C[cta, L.C_WRITE_LINES], C[cta, L.C_WRITE], C[cta, L.C_RANK] << L.RANK_SHIFT, VC,
                            K, OUT, offsets[k], size, slot, generic_slots, True)
        if code:
            return code
    return 0


@compiled
def unproxied_global(A, VC, K, OUT, allocation, at, size, slot, generic_slots):
    """hidden_write for an allocation of global memory."""
    return hidden_write(A[allocation, L.A_WRITE_LINES], A[allocation, L.A_WRITE], A[allocation, L.A_BEGIN],
                        VC, K, OUT, at, size, slot, generic_slots, False)


@compiled
def record_global(A, VC, K, OUT, allocation, at, size, slot, pc, reads, writes, strong):
    """touch_global for Python callers: helpers that are only inlined have no Python wrapper."""
    return touch_global(A, VC, K, OUT, allocation, at, size, slot, pc, reads, writes, strong, 0)


@compiled
def record_shared(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong):
    """touch_shared for Python callers."""
    return touch_shared(C, VC, K, OUT, cta, at, size, slot, pc, reads, writes, strong, 0)


@compiled
def first_hole(initialised, offsets, size):
    """The first byte of some pieces that nobody wrote, -1 if there is none."""
    for k in range(offsets.shape[0]):
        for at in range(offsets[k], offsets[k] + size):
            if initialised[at] == 0:
                return at
    return -1


@compiled
def touch_many(C, VC, K, OUT, cta, offsets, size, slot, pc, reads, writes):
    """touch_shared for several separate pieces of equal size."""
    for k in range(offsets.shape[0]):
        code = touch_shared(C, VC, K, OUT, cta, offsets[k], size, slot, pc, reads, writes, False, 0)
        if code:
            return code
    return 0


@compiled
def move_global(A, VC, K, OUT, addresses, data, slot, pc, writes, races, asynchronous, generic_slots):
    """Copy pieces between `data` [n, size] and global addresses. On a fault OUT_LANE is the piece; earlier
    ones moved."""
    size = data.shape[1]
    for k in range(addresses.shape[0]):
        address = addresses[k]
        allocation = find_allocation(A, address)
        OUT[L.OUT_LANE] = k
        if allocation < 0 or address + np.uint64(size) > np.uint64(A[allocation, L.A_END]):
            return L.F_BOUNDS
        if writes and A[allocation, L.A_FLAGS] & L.A_READ_ONLY:
            return L.F_READ_ONLY
        at = np.int64(address) - A[allocation, L.A_BEGIN]
        if races and A[allocation, L.A_WRITE] != 0:
            code = 0
            if asynchronous:
                code = unproxied_global(A, VC, K, OUT, allocation, at, size, slot, generic_slots)
            if code == 0:
                code = touch_global(
                    A, VC, K, OUT, allocation, at, size, slot, pc, not writes, writes, False, 0
                )
            if code:
                OUT[L.OUT_LANE] = k
                return code
        host = np.uint64(A[allocation, L.A_HOST] + at)
        for i in range(size):
            if writes:
                store8(host + np.uint64(i), np.uint64(data[k, i]))
            else:
                data[k, i] = np.uint8(load8(host + np.uint64(i)))
    return 0


class Access:
    """Reads and writes on behalf of an agent, with every check that the compiled loop makes for a warp."""

    def __init__(self, machine) -> None:
        self.machine = machine
        self.out = np.zeros(L.OUT_COLUMNS, np.int64)

    # ---- shared memory
    def _target(self, agent, rank: int, offset: int, size: int):
        cluster = agent.cta.cluster
        if not 0 <= rank < len(cluster):
            agent.fault("out-of-bounds", f"shared address of CTA {rank}, the cluster has {len(cluster)}",
                        address=rank << L.RANK_SHIFT | offset)
        cta = cluster[rank]
        if offset < L.SHARED_RESERVED or offset + size > cta.shared.end:
            agent.fault(
                "out-of-bounds",
                f"{size} bytes at shared offset {offset:#x}: the CTA's shared memory is "
                f"{L.SHARED_RESERVED:#x}..{cta.shared.end:#x}",
                address=rank << L.RANK_SHIFT | offset,
            )
        if cta.exited:
            agent.fault("cluster-exit", f"access to the shared memory of CTA {cta.index}, which has exited",
                        address=rank << L.RANK_SHIFT | offset)
        require_started(agent, cta, rank << L.RANK_SHIFT | offset)
        return cta

    def _check_shared(
        self, agent, cta, offsets, size: int, writes: bool, uninitialised_ok: bool = False
    ) -> None:
        machine = self.machine
        clocks = machine.clocks
        if machine.checks.uninitialised and not writes and not uninitialised_ok:
            at = first_hole(cta.shared.initialised, offsets, size)
            if at >= 0:
                agent.fault("uninitialised", f"read of shared memory at {at:#x} that nobody wrote",
                            address=cta.rank << L.RANK_SHIFT | at)
        if not machine.checks.shared_races:
            return
        touched = (machine.C, clocks.VC, clocks.K, self.out, cta.slot, offsets, size, agent.slot)
        if (
            agent.proxy == "async"
            and machine.checks.async_rules
            and (not writes or machine.checks.proxy_overwrites)
            and unproxied(*touched, machine.generic_slots)
        ):
            self._unproxied(agent, "shared", writes)
        code = touch_many(*touched, agent.pc, not writes, writes)
        if code:
            agent.race(
                self.out, f"shared memory at {int(self.out[L.OUT_ADDRESS]):#x}", "write" if writes else "read"
            )

    def _unproxied(self, agent, space: str, writes: bool) -> None:
        cell = int(self.out[L.OUT_AUX]) & 0xFFFFFFFFFFFFFFFF
        address = int(self.out[L.OUT_ADDRESS])
        if cell >> L.CELL_CLOCK_SHIFT > self.machine.clocks.VC[agent.slot, cell >> L.CELL_SLOT_SHIFT & 0xFFF]:
            # Not ordered at all: a fence alone would not help.
            agent.race(self.out, f"{space} memory at {address:#x}", "write" if writes else "read")
        agent.fault(
            "proxy",
            f"the async proxy {'over' if writes else ''}{'writes' if writes else 'reads'} {space} memory "
            f"at {address:#x} whose last generic-proxy write ({self.machine.describe_cell(cell)}) is not "
            "followed by fence.proxy.async",
            address=address,
        )

    def gather_shared(self, agent, rank: int, offsets, size: int) -> np.ndarray:
        """uint8 [n, size]: pieces of `size` bytes at each offset."""
        offsets = np.ascontiguousarray(offsets, np.int64).ravel()
        if not len(offsets):
            return np.zeros((0, size), np.uint8)
        cta = self._target(agent, rank, int(offsets.min()), size)
        self._target(agent, rank, int(offsets.max()), size)
        self._check_shared(agent, cta, offsets, size, False)
        return cta.shared.bytes[offsets[:, None] + np.arange(size)]

    def scatter_shared(self, agent, rank: int, offsets, data) -> None:
        data = np.asarray(data, np.uint8)
        offsets = np.ascontiguousarray(offsets, np.int64).ravel()
        if not len(offsets):
            return
        size = data.shape[1]
        cta = self._target(agent, rank, int(offsets.min()), size)
        self._target(agent, rank, int(offsets.max()), size)
        self._check_shared(agent, cta, offsets, size, True)
        index = offsets[:, None] + np.arange(size)
        cta.shared.bytes[index] = data
        cta.shared.initialised[index] = 1

    def read_shared(self, agent, rank: int, offset: int, nbytes: int) -> np.ndarray:
        return self.gather_shared(agent, rank, np.array([offset]), nbytes)[0]

    def write_shared(self, agent, rank: int, offset: int, data) -> None:
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data, np.uint8)
        self.scatter_shared(agent, rank, np.array([offset]), data.reshape(1, -1))

    def claim_shared(self, agent, rank: int, offset: int, nbytes: int, write: bool) -> None:
        """Mark a range as in use by `agent` from now on: until somebody acquires what the agent releases at
        its end, a conflicting access by anybody else is a race. Nothing is read or written."""
        self.claim_pieces(agent, rank, np.array([offset], np.int64), nbytes, write)

    def claim_pieces(self, agent, rank: int, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """The same for several ranges of one size."""
        cta = self._target(agent, rank, int(offsets.min()), nbytes)
        if len(offsets) > 1:
            self._target(agent, rank, int(offsets.max()), nbytes)
        if self.machine.checks.shared_races:
            self._check_shared(agent, cta, offsets, nbytes, write, uninitialised_ok=True)

    # ---- global memory
    def _check_global(self, agent, address: int, size: int, writes: bool) -> int:
        memory, machine = self.machine.memory, self.machine
        at = memory.find(address)
        if at < 0 or address + size > memory.rows[at][1]:
            agent.fault(
                "out-of-bounds",
                f"{size} bytes at global address {address:#x}: {memory.describe(address)}",
                address=address,
            )
        if writes and memory.rows[at][3]:
            agent.fault("read-only", f"write to {memory.names[at]}", address=address)
        if machine.checks.races and machine.A[at, L.A_WRITE]:
            clocks = machine.clocks
            touched = (machine.A, clocks.VC, clocks.K, self.out, at, address - memory.rows[at][0], size,
                       agent.slot)
            if (
                agent.proxy == "async"
                and machine.checks.async_rules
                and (not writes or machine.checks.proxy_overwrites)
                and unproxied_global(*touched, machine.generic_slots)
            ):
                self._unproxied(agent, "global", writes)
            code = record_global(*touched, agent.pc, not writes, writes, False)
            if code:
                place = int(self.out[L.OUT_ADDRESS])
                agent.race(self.out, f"{memory.describe(place)} ({place:#x})", "write" if writes else "read")
        return at

    def read_global(self, agent, address: int, nbytes: int) -> np.ndarray:
        self._check_global(agent, address, nbytes, False)
        return self.machine.memory.view(address, nbytes).copy()

    def write_global(self, agent, address: int, data) -> None:
        data = (
            np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data, np.uint8).ravel()
        )
        self._check_global(agent, address, len(data), True)
        self.machine.memory.view(address, len(data))[:] = data

    def gather_global(self, agent, addresses, size: int) -> np.ndarray:
        """uint8 [n, size] at n global addresses."""
        data = np.zeros((len(addresses), size), np.uint8)
        self._move_global(agent, addresses, data, False)
        return data

    def scatter_global(self, agent, addresses, data) -> None:
        """Write uint8 [n, size] at n global addresses, in order."""
        self._move_global(agent, addresses, np.ascontiguousarray(data, np.uint8), True)

    def _move_global(self, agent, addresses, data: np.ndarray, writes: bool) -> None:
        machine, clocks = self.machine, self.machine.clocks
        addresses = np.ascontiguousarray(addresses).astype(np.uint64)
        asynchronous = agent.proxy == "async" and machine.checks.async_rules
        code = move_global(
            machine.A,
            clocks.VC,
            clocks.K,
            self.out,
            addresses,
            data,
            agent.slot,
            agent.pc,
            writes,
            machine.checks.races,
            asynchronous,
            machine.generic_slots,
        )
        if code == 0:
            return
        # The checks of one piece say in words what is wrong.
        at = int(self.out[L.OUT_LANE])
        self._check_global(agent, int(addresses[at]), data.shape[1], writes)
        raise AssertionError(f"fault {code} at piece {at} without an explanation")
