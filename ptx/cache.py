"""Where compiled code is kept between processes: kernels, and the emulator's own machine code."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_directory"]

CACHE_VARIABLE = "MSA_CUDACORE_CACHE"
"""Environment variable: folder of all caches, or `off` for none."""


def cache_directory(part: str) -> Path | None:
    """Folder of one cache, `programs` or `emulator`, or None where `MSA_CUDACORE_CACHE` says `off`.

    It lies in `$MSA_CUDACORE_CACHE`, or else in `msa_cudacore` of `$XDG_CACHE_HOME` or of `~/.cache`. Nothing is created.
    """
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    if setting.lower() == "off":
        return None
    if setting:
        return Path(setting) / part
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "msa_cudacore" / part
