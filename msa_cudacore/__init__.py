"""Sparse decode attention (MiniMax Sparse Attention) over a paged KV cache stored in NVFP4.

>>> from msa_cudacore import prepare_msa_nvfp4_sparse_decode
>>> runner = prepare_msa_nvfp4_sparse_decode(q, k, v, q2k_indices, k_scale=..., ...)   # checks, compiles, binds
>>> out = runner()                                                                     # launches, nothing else

Importing the package imports neither torch nor CuPy and touches no CUDA driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import MSANvfp4DecodeRunner, msa_nvfp4_decode_workspace_size, prepare_msa_nvfp4_sparse_decode
    from .launch.compile import CompileError
    from .launch.device import DriverUnavailable

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DriverUnavailable",
    "MSANvfp4DecodeRunner",
    "__version__",
    "msa_nvfp4_decode_workspace_size",
    "prepare_msa_nvfp4_sparse_decode",
]

_HOMES = {
    "CompileError": ".launch.compile",
    "DriverUnavailable": ".launch.device",
    "MSANvfp4DecodeRunner": ".api",
    "msa_nvfp4_decode_workspace_size": ".api",
    "prepare_msa_nvfp4_sparse_decode": ".api",
}


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(home, __name__), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{__name__}."):
            raise
        # A clone keeps some subpackages beside this folder; only an installation brings them together.
        hint = f"{__path__[0]} lacks it, as a clone does: start Python outside the clone, or install it with pip install -e"
        raise ModuleNotFoundError(f"{error}; {hint}", name=error.name, path=error.path) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
