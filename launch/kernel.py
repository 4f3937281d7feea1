"""Load a compiled program once for the life of the process, and bind arguments to a repeatable launch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import device as device_module
from .compile import compile_cubin

__all__ = ["Geometry", "Launch", "load"]

_lock = threading.Lock()


@dataclass(frozen=True)
class Geometry:
    """Shape of a launch. `grid` counts CTAs, as in CUDA C++ (cuda.core counts clusters)."""

    grid: int
    block: int
    cluster: int = 1
    shared_bytes: int = 0
    dependent: bool = False
    """Programmatic dependent launch: the kernel may start before its predecessor in the stream has ended."""

    def __post_init__(self) -> None:
        if self.grid % self.cluster:
            raise ValueError(f"grid {self.grid} is no multiple of the cluster size {self.cluster}")


@functools.lru_cache(maxsize=None)
def _object_code(source: str, arch: str, name: str):
    """Held for the life of the process: unloading a module that a captured graph still needs is a fault."""
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(compile_cubin(source, arch, name=name).code, name=name)


def load(source: str, arch: str, entry: str, *, name: str, ordinal: int, geometry: Geometry):
    """Compile (or find in a cache), load and fully resolve one entry on one device.

    Everything lazy happens here, because loading a module is illegal while a stream is being captured: the
    first launch ever made may be a captured one.
    """
    from cuda.bindings import driver

    with _lock, device_module.current(ordinal):
        kernel = _object_code(source, arch, name).get_kernel(entry)
        attributes, wanted = driver.CUfunction_attribute, {}
        if geometry.shared_bytes > 48 * 1024:
            wanted[attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = geometry.shared_bytes
        if geometry.cluster > 8:
            wanted[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        # Attributes of cuda.core's kernels are read-only in 1.2.
        for attribute, value in wanted.items():
            (status,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, ordinal)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(
                    f"{name}: {entry} cannot have {attribute.name} = {value} on cuda:{ordinal}: {status.name}"
                )
        status, _ = driver.cuKernelGetFunction(kernel.handle)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {entry} cannot be loaded on cuda:{ordinal}: {status.name}")
        return kernel


class Launch:
    """One kernel, its configuration and its arguments; calling it enqueues the kernel on a stream.

    Arguments are fixed-width NumPy scalars, and `cuda.core` tensor maps; nothing is looked up, converted or
    allocated at call time beyond what `cuda.core.launch` does with them.
    """

    __slots__ = ("_arguments", "_config", "_kernel", "_launch", "entry", "geometry")

    def __init__(self, kernel, geometry: Geometry, arguments: Sequence[Any], *, entry: str) -> None:
        from cuda.core import LaunchConfig, TensorMapDescriptor, launch

        for position, argument in enumerate(arguments):
            if not isinstance(argument, (np.generic, TensorMapDescriptor)):
                raise TypeError(
                    f"argument {position} of {entry} is a {type(argument).__name__}; "
                    f"accepted are NumPy scalars and cuda.core tensor maps"
                )
        expected = kernel.num_arguments
        if expected != len(arguments):
            raise TypeError(f"{entry} takes {expected} arguments, {len(arguments)} were bound")
        options: dict = {}
        if geometry.cluster > 1:
            options["cluster"] = geometry.cluster
        if geometry.dependent:
            options["programmatic_stream_serialization"] = True
        self._config = LaunchConfig(
            grid=geometry.grid // geometry.cluster,
            block=geometry.block,
            shmem_size=geometry.shared_bytes,
            **options,
        )
        self._kernel = kernel
        # cuda.core packs a Python int as 64 bits in half the time that a NumPy scalar takes it.
        self._arguments = tuple(
            int(argument) if isinstance(argument, (np.uint64, np.int64)) else argument
            for argument in arguments
        )
        self._launch = launch
        self.entry = entry
        self.geometry = geometry

    def __call__(self, stream) -> None:
        self._launch(stream, self._config, self._kernel, *self._arguments)
