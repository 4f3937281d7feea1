"""The few array operations that the benchmarks need, on torch or on CuPy, whichever is installed."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import ml_dtypes
import numpy as np

__all__ = ["Arrays", "choose", "require"]


class Arrays(Protocol):
    """Device arrays of one library on one CUDA device."""

    name: str
    bf16_as_uint16: bool
    """bfloat16 arrays are handed over as their bits."""

    def put(self, array: np.ndarray) -> Any:
        """A device copy of a host array."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def random_bytes(self, shape: tuple[int, int], seed: int) -> Any:
        """uint8 of uniformly random bytes, drawn on the device."""

    def poison(self, array: Any) -> None:
        """Set every bit of a dense array: NaN in any floating-point type."""

    def pointer(self, array: Any) -> int: ...

    def finish(self) -> None:
        """Wait for the work that the operations above started."""

    def release(self) -> None:
        """Give memory that no array holds any more back to the driver."""


class TorchArrays:
    name = "torch"
    bf16_as_uint16 = False

    def __init__(self, ordinal: int) -> None:
        import torch

        self._torch = torch
        self.device = torch.device("cuda", ordinal)

    def put(self, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return self._torch.from_numpy(array.view(np.int16)).to(self.device).view(self._torch.bfloat16)
        return self._torch.from_numpy(array).to(self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self.device)

    def random_bytes(self, shape: tuple[int, int], seed: int) -> Any:
        generator = self._torch.Generator(device=self.device)
        generator.manual_seed(seed)
        return self._torch.randint(
            0, 256, shape, dtype=self._torch.uint8, device=self.device, generator=generator
        )

    def poison(self, array: Any) -> None:
        array.view(self._torch.uint8).fill_(0xFF)

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def finish(self) -> None:
        self._torch.cuda.synchronize(self.device)

    def release(self) -> None:
        self._torch.cuda.empty_cache()


class CupyArrays:
    name = "cupy"
    bf16_as_uint16 = True

    def __init__(self, ordinal: int) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._device.use()

    def put(self, array: np.ndarray) -> Any:
        return self._cupy.asarray(array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._cupy.empty(shape, "uint16" if dtype == "bfloat16" else dtype)

    def random_bytes(self, shape: tuple[int, int], seed: int) -> Any:
        state = self._cupy.random.RandomState(seed)
        pool = self._cupy.empty(shape, self._cupy.uint8)
        # A piece at a time: the generator's own temporaries are several times as wide as its result.
        step = max(1, (128 << 20) // shape[1])
        for start in range(0, shape[0], step):
            rows = min(step, shape[0] - start)
            pool[start : start + rows] = state.randint(0, 256, (rows, shape[1]), dtype=self._cupy.uint8)
        return pool

    def poison(self, array: Any) -> None:
        array.view(self._cupy.uint8).fill(0xFF)

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def finish(self) -> None:
        self._device.synchronize()

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()


_LIBRARIES = {"torch": TorchArrays, "cupy": CupyArrays}


def require(wanted: str | None = None) -> str:
    """The name of the library to use: `wanted`, or torch or CuPy, the first installed. Raises
    ModuleNotFoundError.
    """
    for name in (wanted,) if wanted else _LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ModuleNotFoundError(
        f"{wanted} is not installed"
        if wanted
        else "neither torch nor CuPy is installed, and one of them must hold the arrays: "
        "pip install torch, or cupy-cuda13x"
    )


def choose(ordinal: int, wanted: str | None = None) -> Arrays:
    """Arrays on a device, of the library that :func:`require` names."""
    return _LIBRARIES[require(wanted)](ordinal)
