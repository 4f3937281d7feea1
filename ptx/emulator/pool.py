"""Reuses the large arrays of a launch: fresh pages cost more than the instructions that touch them.

Shadow cells need no clearing between launches, because the clocks of a process never run backwards: a cell
with a clock below the launch's epoch is older than the launch and ignored.
"""

from __future__ import annotations

import threading

import numpy as np

#: Cells keep 28 bits of clock; past this the epoch starts again and old cells are thrown away.
_LAST_EPOCH = 1 << 27
#: Smaller arrays are not worth looking for.
_SMALL = 1 << 15
#: Bytes of unused arrays that are kept.
_LIMIT = 2 << 30


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[np.ndarray] = []
        self.epoch = 0
        self.generation = 0


_state = _State()


def take(shape: tuple, dtype, *, cells: bool = False) -> np.ndarray:
    """An array of the shape with arbitrary contents; with `cells`, only zeros or cells of earlier epochs."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size < _SMALL:
        return np.zeros(shape, dtype)
    with _state.lock:
        fitting = [a for a in _state.free if a.nbytes >= size and _is_cells(a) == cells]
        if fitting:
            best = min(fitting, key=lambda a: a.nbytes)
            if best.nbytes <= 4 * size + (1 << 16):
                _state.free = [a for a in _state.free if a is not best]
                return best[: size // best.itemsize].view(dtype).reshape(shape)
    rounded = -(-max(size, 8) // 4096) * 4096
    buffer = np.zeros(rounded // 8, np.uint64) if cells else np.zeros(rounded, np.uint8)
    return buffer[: size // buffer.itemsize].view(dtype).reshape(shape)


def _is_cells(buffer: np.ndarray) -> bool:
    return buffer.dtype == np.uint64


def give(*arrays: np.ndarray) -> None:
    """Return arrays that `take` handed out and that nobody uses any more."""
    with _state.lock:
        for array in arrays:
            root = array
            while isinstance(root.base, np.ndarray):
                root = root.base
            if root.nbytes >= _SMALL:
                _state.free.append(root)
        while sum(a.nbytes for a in _state.free) > _LIMIT:
            _state.free.pop(0)


def begin_epoch() -> tuple[int, int]:
    """(first clock of a new launch, generation of the cells that may be reused)."""
    with _state.lock:
        if _state.epoch > _LAST_EPOCH:
            _state.epoch = 0
            _state.generation += 1
            _state.free = [a for a in _state.free if not _is_cells(a)]
        # A launch in another thread may start before this one ends: leave room for its clocks.
        _state.epoch += 1
        return _state.epoch, _state.generation


def end_epoch(last_clock: int) -> None:
    """The launch is over and used clocks up to `last_clock`."""
    with _state.lock:
        _state.epoch = max(_state.epoch, last_clock)
