"""Other ways to compute the same step, as far as they are installed.

A peer's module offers `candidates()`, which raises `candidates.Unavailable` with the reason where it cannot run,
and may offer `build()`, which compiles what it needs without touching the GPU.
"""

from __future__ import annotations

import importlib

from ..candidates import Candidate

__all__ = ["ARRAYS", "build", "load"]

ARRAYS = {"triton": "torch", "flashinfer": "torch", "torch": "torch", "unfused": "cupy"}
"""Every peer group, and the array library that its candidates work on."""

_MODULES = {
    "triton": "triton_nvfp4",
    "flashinfer": "flashinfer_paged",
    "torch": "torch_sdpa",
    "unfused": "unfused",
}


def load(group: str) -> list[Candidate]:
    """The candidates of a group. Raises Unavailable, or ValueError for a name that is no group."""
    if group not in _MODULES:
        raise ValueError(f"no peer is called {group!r}; there are {', '.join(_MODULES)}")
    return importlib.import_module(f".{_MODULES[group]}", __name__).candidates()


def build(group: str) -> None:
    """Compile what a group needs; groups that compile when they first run need nothing here."""
    module = importlib.import_module(f".{_MODULES[group]}", __name__)
    if hasattr(module, "build"):
        module.build()
