"""What is installed, which GPUs are visible, which program each can run, and what to do about what is missing."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from .launch import device as device_module
from .programs import PROGRAMS
from .ptx.cache import CACHE_VARIABLE, cache_directory

__all__ = ["Diagnosis", "Package", "diagnose"]

OLDEST_DRIVER = (13, 0)
"""CUDA version of the oldest driver that loads machine code made by the NVRTC of CUDA 13."""

_PACKAGES = (
    ("numpy", True, "host arrays and the oracle"),
    ("ml_dtypes", True, "bfloat16 and float8 in NumPy"),
    ("cuda-core", True, "compiles, loads and launches kernels"),
    ("cuda-bindings", True, "driver and NVRTC bindings"),
    ("nvidia-cuda-nvrtc", True, "the CUDA C++ compiler"),
    ("torch", False, "torch tensors as arguments"),
    ("cupy-cuda13x", False, "CuPy arrays as arguments"),
    ("numba", False, "the emulator"),
    ("matplotlib", False, "benchmark plots"),
)
_EXTRA = {"torch": "torch", "cupy-cuda13x": "cupy", "numba": "emulator", "matplotlib": "bench"}


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None
    required: bool
    purpose: str


@dataclass(frozen=True)
class Gpu:
    ordinal: int
    description: str
    programs: dict[str, str]
    """Backend name to "runs", or to why it does not."""


@dataclass(frozen=True)
class Diagnosis:
    python: str
    system: str
    packages: tuple[Package, ...]
    nvrtc: str | None
    """Version of the NVRTC that was found, or None."""
    driver: str | None
    """CUDA version of the driver, or None where there is none."""
    gpus: tuple[Gpu, ...]
    host_programs: dict[str, str]
    """As `Gpu.programs`, for host arrays."""
    cache: str
    advice: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look around. Nothing is changed, and no context is created on any device."""
    packages = tuple(Package(name, _version(name), required, purpose) for name, required, purpose in _PACKAGES)
    nvrtc, nvrtc_problem = _nvrtc()
    driver = _driver()
    gpus = tuple(_gpu(ordinal) for ordinal in range(device_module.count()))
    cache, cache_problem = _cache()
    return Diagnosis(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.machine()}",
        packages=packages,
        nvrtc=nvrtc,
        driver=".".join(map(str, driver)) if driver else None,
        gpus=gpus,
        host_programs=_programs("cpu", None),
        cache=cache,
        advice=tuple(_advice(packages, nvrtc_problem, driver, gpus, cache_problem)),
    )


def _advice(
    packages: tuple[Package, ...],
    nvrtc_problem: str | None,
    driver: tuple[int, ...] | None,
    gpus: tuple[Gpu, ...],
    cache_problem: str | None,
):
    for package in packages:
        if package.required and package.version is None:
            yield f"{package.name} is missing: pip install {package.name}"
    if nvrtc_problem:
        yield f"NVRTC cannot be loaded ({nvrtc_problem}): pip install --force-reinstall nvidia-cuda-nvrtc"
    if driver is None:
        yield (
            "No NVIDIA driver is visible. On a machine with a GPU, install driver 580 or later (in a container, pass the "
            "GPU through); without one, backend 'reference' runs on the host."
        )
    elif driver < OLDEST_DRIVER:
        found, needed = (".".join(map(str, version)) for version in (driver, OLDEST_DRIVER))
        yield f"The driver supports CUDA {found}, kernels need {needed}: update to driver 580 or later."
    elif not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" CUDA_VISIBLE_DEVICES is {visible!r}." if visible is not None else ""
        yield f"There is a driver but no device is visible.{hint} Check nvidia-smi."
    for gpu in gpus:
        if "runs" not in gpu.programs.values():
            yield (
                f"{gpu.description} runs no program; compute capability 8.0 or later is needed. "
                f"Use backend 'reference' on host arrays."
            )
    versions = {package.name: package.version for package in packages}
    if gpus and versions["torch"] and "+cpu" in versions["torch"]:
        yield "torch is a CPU build and sees no GPU: install a CUDA build (https://pytorch.org/get-started/locally/)."
    for name, extra in _EXTRA.items():
        if versions[name] is None:
            purpose = next(package.purpose for package in packages if package.name == name)
            yield f"{name} is not installed; for {purpose}: pip install 'msa-cudacore[{extra}]'"
    if cache_problem:
        yield (
            f"The program cache cannot be written ({cache_problem}), so kernels compile in each process: "
            f"set {CACHE_VARIABLE} to a writable folder."
        )


def _version(name: str) -> str | None:
    # CuPy's distribution is named after the CUDA version it was built for.
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy") if name == "cupy-cuda13x" else (name,)
    for candidate in names:
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nvrtc() -> tuple[str | None, str | None]:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return None, status.name
        return f"{major}.{minor}", None
    except Exception as error:  # a missing package and a missing library raise different types
        return None, f"{type(error).__name__}: {error}"


def _driver() -> tuple[int, ...] | None:
    try:
        from cuda.core import system

        return tuple(system.get_user_mode_driver_version())
    except Exception:  # several types, depending on what is missing
        pass
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
        return (version // 1000, version % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS else None
    except Exception:
        return None


def _gpu(ordinal: int) -> Gpu:
    try:
        facts = device_module.facts(ordinal)
    except device_module.DriverUnavailable as error:
        return Gpu(ordinal, f"cuda:{ordinal} cannot be used ({error})", {})
    return Gpu(ordinal, str(facts), _programs("cuda", facts))


def _programs(place: str, facts: device_module.DeviceFacts | None) -> dict[str, str]:
    return {program.backend: program.refusal(facts) or "runs" for program in PROGRAMS if program.place == place}


def _cache() -> tuple[str, str | None]:
    directory = cache_directory("programs")
    if directory is None:
        return f"off ({CACHE_VARIABLE})", None
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    problem = None if os.access(nearest, os.W_OK) else f"{nearest} is not writable"
    return str(directory), problem
