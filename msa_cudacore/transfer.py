"""Arrays carried between NumPy, torch, CuPy and bare device memory, strides and shared allocations kept.

Each library is imported when it is asked for, never before.
"""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np

from msa_cudacore.pool import aligned_bytes

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def move(arrays: dict[str, np.ndarray], framework: str, device: Any = None) -> dict[str, Any]:
    """The same arrays in another library.

    float8 arrays arrive as uint8 where the library lacks the type (CuPy, "cuda"); "cuda" takes bfloat16 as uint16 alone.

    Parameters
    ----------
    arrays
        NumPy arrays. Those that share an allocation still share one afterwards; strides, gaps and addresses modulo 16
        bytes are kept.
    framework
        ``"numpy"``, ``"torch"``, ``"cupy"``, or ``"cuda"``, which needs neither: cuda.core memory with ``__dlpack__``.
    device
        Where to: a torch device (default "cuda") or an ordinal (default the current device for CuPy, 0 for "cuda").

    Raises
    ------
    ValueError
        The framework is another one.
    ImportError
        The library is absent.
    RuntimeError
        The library sees no such device.
    """
    carriers = {"numpy": _NumpyCarrier, "torch": _TorchCarrier, "cupy": _CupyCarrier, "cuda": _CudaCarrier}
    if framework not in carriers:
        raise ValueError(f"framework is {framework!r}; accepted are {', '.join(carriers)}")
    carrier = carriers[framework](device)
    roots: dict[int, tuple[np.ndarray, Any]] = {}
    moved = {}
    for name, array in arrays.items():
        root = _root(array)
        if not root.flags.c_contiguous:
            root = array = np.ascontiguousarray(array)
        phase = root.ctypes.data % 16
        if id(root) not in roots:
            # The root is kept beside its copy so that its id stays taken.
            roots[id(root)] = root, carrier.upload(root.reshape(-1).view(np.uint8), phase)
        moved[name] = carrier.view(roots[id(root)][1], phase + array.ctypes.data - root.ctypes.data, array)
    return moved


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy copy of an array of any of those libraries; bfloat16 and float8 keep their types (``ml_dtypes``)."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "cupy":
        return array.get()
    if kind == "cuda":
        return _download(array)
    if kind != "torch":
        return np.array(array)
    import torch

    typed = {torch.bfloat16: (torch.uint16, BF16), torch.float8_e4m3fn: (torch.uint8, E4M3)}.get(array.dtype)
    host = array.detach().cpu()
    return host.view(typed[0]).numpy().view(typed[1]).copy() if typed else host.numpy().copy()


def device_empty(shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
    """Uninitialised device memory as an array with ``__dlpack__``, for machines with neither torch nor CuPy."""
    like = np.empty(0, dtype)
    carrier = _CudaCarrier(device)
    size = int(np.prod(shape, dtype=np.int64)) * like.itemsize
    return carrier.describe(carrier.allocate(size), 0, shape, like.dtype, None)


def _root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _framework(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): pip install 'msa-cudacore[{name}]'") from error


class _NumpyCarrier:
    def __init__(self, device: Any) -> None:
        if device not in (None, "cpu"):
            raise ValueError(f"device is {device!r}; NumPy arrays lie on the host, accepted are None and 'cpu'")

    def upload(self, data: np.ndarray, phase: int) -> np.ndarray:
        copy = aligned_bytes((phase + data.size,))
        copy[phase:] = data
        return copy

    def view(self, base: np.ndarray, offset: int, like: np.ndarray) -> np.ndarray:
        return np.ndarray(like.shape, like.dtype, base, offset, like.strides)


class _TorchCarrier:
    def __init__(self, device: Any) -> None:
        self.torch = torch = _framework("torch")
        self.device = torch.device("cuda" if device is None else device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")

    def upload(self, data: np.ndarray, phase: int) -> Any:
        # A multiple of 8 bytes can be viewed as any element type.
        base = self.torch.empty(-(-(phase + data.size) // 8) * 8, dtype=self.torch.uint8, device=self.device)
        base[phase : phase + data.size].copy_(self.torch.from_numpy(data if data.flags.writeable else data.copy()))
        return base

    def view(self, base: Any, offset: int, like: np.ndarray) -> Any:
        typed = base.view(getattr(self.torch, like.dtype.name))
        strides = [stride // like.itemsize for stride in like.strides]
        return typed.as_strided(like.shape, strides, offset // like.itemsize)


class _CupyCarrier:
    def __init__(self, device: Any) -> None:
        self.cupy = cupy = _framework("cupy")
        self.device = cupy.cuda.Device(device)

    def upload(self, data: np.ndarray, phase: int) -> Any:
        with self.device:
            base = self.cupy.empty(phase + data.size, self.cupy.uint8)
            base[phase:].set(data)
        return base

    def view(self, base: Any, offset: int, like: np.ndarray) -> Any:
        dtype = np.dtype(np.uint8) if like.dtype == E4M3 else like.dtype
        with self.device:
            return self.cupy.ndarray(like.shape, dtype, base.data + offset, strides=like.strides)


class _CudaCarrier:
    """Device memory through cuda.core alone; views are ``StridedMemoryView`` objects that export DLPack."""

    def __init__(self, device: Any) -> None:
        from cuda.core import Device

        self.device = Device(0 if device is None else int(device))
        self.device.set_current()

    def allocate(self, size: int) -> Any:
        buffer = self.device.allocate(max(size, 16), stream=self.device.default_stream)
        self.device.default_stream.sync()
        return buffer

    def upload(self, data: np.ndarray, phase: int) -> Any:
        from cuda.bindings import driver

        buffer = self.allocate(phase + data.size)
        if data.size:
            (status,) = driver.cuMemcpyHtoD(int(buffer.handle) + phase, data.ctypes.data, data.size)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"copying {data.size} bytes to {self.device} failed with {status.name}")
        return buffer

    def view(self, base: Any, offset: int, like: np.ndarray) -> Any:
        return self.describe(base, offset, like.shape, like.dtype, tuple(s // like.itemsize for s in like.strides))

    def describe(
        self, base: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
    ) -> Any:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        if dtype == BF16:
            raise ValueError("bfloat16 has no type in bare device memory; pass its bits as uint16")
        part = Buffer.from_handle(int(base.handle) + offset, base.size - offset, owner=base)
        dtype = np.dtype(np.uint8) if dtype == E4M3 else dtype
        return StridedMemoryView.from_buffer(part, tuple(shape), strides, dtype=dtype)


def _download(view: Any) -> np.ndarray:
    from cuda.bindings import driver

    dense = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides or ())):
        if size > 1 and stride != dense:
            raise ValueError(f"only dense device arrays are copied to the host, got strides {view.strides}")
        dense *= size
    host = np.empty(view.shape, view.dtype)
    if host.size:
        (status,) = driver.cuMemcpyDtoH(host.ctypes.data, view.ptr, host.nbytes)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"copying {host.nbytes} bytes to the host failed with {status.name}")
    return host
