"""Facts about a CUDA device, and making its primary context current for the length of a call."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

__all__ = ["DeviceFacts", "DriverUnavailable", "count", "current", "current_ordinal", "facts"]


class DriverUnavailable(RuntimeError):
    """There is no usable CUDA driver or device; the message says what was tried."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of a program depends on. Plain values, so that plans can be tested without a GPU."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block: int
    """Most dynamic shared memory one CTA can opt in to, bytes."""
    shared_bytes_per_multiprocessor: int
    clusters: bool
    """Thread block clusters and distributed shared memory (compute capability 9.0 and up)."""

    def __str__(self) -> str:
        major, minor = self.compute_capability
        capability = f"compute capability {major}.{minor}"
        return f"cuda:{self.ordinal} {self.name} ({capability}, {self.multiprocessors} SMs)"


def _device(ordinal: int):
    try:
        from cuda.core import Device

        return Device(ordinal)
    except Exception as error:  # cuda.core raises several types for "no driver", "no device", "bad ordinal"
        raise DriverUnavailable(
            f"cuda:{ordinal} cannot be used: {type(error).__name__}: {str(error).rstrip('.')}. "
            f"Run `msa-cudacore doctor` to see which driver and devices are visible."
        ) from error


def count() -> int:
    """Number of visible CUDA devices; 0 where there is no driver."""
    try:
        from cuda.core import system

        return int(system.get_num_devices())
    except Exception:  # no driver library, driver without device, driver older than the bindings
        return 0


def current_ordinal() -> int:
    """The device of the context that is current for the calling thread, as `torch.cuda.set_device` and the like
    leave it; 0 where none is, which is also where those begin.
    """
    try:
        from cuda.bindings import driver

        status, ordinal = driver.cuCtxGetDevice()
    except Exception:  # no driver library: whoever uses the device says so
        return 0
    return int(ordinal) if status == driver.CUresult.CUDA_SUCCESS else 0


@functools.lru_cache(maxsize=None)
def facts(ordinal: int) -> DeviceFacts:
    """Read the facts of device `ordinal` once. Raises :class:`DriverUnavailable` where there is none."""
    device = _device(ordinal)
    properties = device.properties
    capability = device.compute_capability
    return DeviceFacts(
        ordinal=ordinal,
        name=device.name,
        compute_capability=(capability.major, capability.minor),
        multiprocessors=properties.multiprocessor_count,
        shared_bytes_per_block=properties.max_shared_memory_per_block_optin,
        shared_bytes_per_multiprocessor=properties.max_shared_memory_per_multiprocessor,
        clusters=capability.major >= 9,
    )


@functools.lru_cache(maxsize=None)
def _primary_context(ordinal: int):
    """Retain the primary context, the one that torch and CuPy use; held until the process ends."""
    from cuda.bindings import driver

    _device(ordinal)
    status, handle = driver.cuDevicePrimaryCtxRetain(ordinal)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverUnavailable(f"cuda:{ordinal}: cuDevicePrimaryCtxRetain failed with {status.name}")
    return handle


class current:
    """Context manager: the primary context of a device is current inside, and the caller's again afterwards.

    A fresh thread has no context, and a caller may work on another device; both are left as they were. One
    instance may be entered from several threads at once, but not twice by one thread.
    """

    __slots__ = ("_context", "_get", "_handle", "_pop", "_push", "_success", "_thread")

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self._get = driver.cuCtxGetCurrent
        self._push, self._pop = driver.cuCtxPushCurrent, driver.cuCtxPopCurrent
        self._success = driver.CUresult.CUDA_SUCCESS
        self._context = _primary_context(ordinal)
        self._handle = int(self._context)
        self._thread = threading.local()

    def push(self) -> bool:
        """Make the context current; True where that took a push, which :meth:`pop` must undo.

        A pair of methods for the launch path, which a `with` would make slower.
        """
        status, before = self._get()
        if status == self._success and int(before) == self._handle:
            return False
        (status,) = self._push(self._context)
        if status != self._success:
            raise DriverUnavailable(f"cuCtxPushCurrent failed with {status.name}")
        return True

    def pop(self) -> None:
        """Give the caller's context back after a :meth:`push` that returned True."""
        self._pop()

    def __enter__(self) -> None:
        self._thread.pushed = self.push()

    def __exit__(self, *exception: object) -> None:
        if self._thread.pushed:
            self.pop()
