"""What a result depends on besides the code: versions, the GPU with its driver and clocks, and the kernels'
identity.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import msa_cudacore

__all__ = ["clocks", "kernel_identity", "machine", "versions"]

_PACKAGES = (
    "msa-cudacore",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "numpy",
    "ml-dtypes",
    "torch",
    "triton",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "flashinfer-python",
    "nvmath-python",
    "nvidia-cublas",
)


def versions() -> dict[str, str]:
    """Versions of Python and of every package that takes part and is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def kernel_identity() -> str:
    """SHA-256 over the kernels and the PTX wrappers, names included: which kernels a result belongs to."""
    kernels = Path(msa_cudacore.__file__).parent / "kernels"
    from msa_cudacore.ptx.source import INCLUDE_DIR

    digest = hashlib.sha256()
    for path in sorted(
        [*kernels.glob("*.cu"), *kernels.glob("*.cuh"), *INCLUDE_DIR.glob("*.cuh")],
        key=lambda path: (path.name, str(path)),
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def machine(ordinal: int) -> dict[str, Any]:
    """The GPU, its driver and its sizes. Raises :class:`msa_cudacore.DriverUnavailable` where there is
    none.
    """
    from cuda.bindings import driver

    from msa_cudacore.launch import device as device_module
    from msa_cudacore.ptx.nvrtc import version

    facts = device_module.facts(ordinal)
    from cuda.core import Device

    properties = Device(ordinal).properties
    return {
        "gpu": facts.name,
        "compute_capability": list(facts.compute_capability),
        "multiprocessors": facts.multiprocessors,
        "l2_bytes": properties.l2_cache_size,
        "driver": _nvml_value(ordinal, "driver"),
        "cuda_driver_api": driver.cuDriverGetVersion()[1],
        "nvrtc": "{}.{}".format(*version()),
        "platform": platform.platform(),
    }


def clocks(ordinal: int) -> dict[str, Any] | None:
    """Clocks (MHz), temperature (C), power (W) and throttle reasons now; None without nvidia-ml-py.

    NVML counts devices by itself: with CUDA_VISIBLE_DEVICES set, the device is looked up by its PCI address.
    """
    return _nvml_value(ordinal, "clocks")


def _nvml_value(ordinal: int, what: str) -> Any:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    from cuda.core import Device

    try:
        pynvml.nvmlInit()
        if what == "driver":
            return pynvml.nvmlSystemGetDriverVersion()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(Device(ordinal).pci_bus_id.encode())
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "watts": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            if hasattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
            else pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
    except pynvml.NVMLError as error:
        return {"error": str(error)}
