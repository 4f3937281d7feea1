"""Numba compilation with a disk cache that can neither go stale nor fail for want of a writable folder.

Numba's own cache looks only at the file of the outermost function, so an edit in a callee of another file would
run old machine code. The cache folder used here is named by a digest of all the emulator's sources instead.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numba
from numba import config

_HERE = Path(__file__).parent


def _digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(_HERE.glob("*.py")):
        text = path.read_bytes()
        # Only files with compiled code, or with constants that compiled code folds in, can change machine code.
        if b"from .jit import" in text or path.name in ("opcodes.py", "layout.py", "jit.py"):
            digest.update(path.name.encode() + text)
    return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """The first writable of $MSA_CUDACORE_CACHE, $XDG_CACHE_HOME, ~/.cache and the temporary folder."""
    roots = [os.environ.get("MSA_CUDACORE_CACHE"), os.environ.get("XDG_CACHE_HOME"), Path.home() / ".cache",
             tempfile.gettempdir()]
    for root in filter(None, roots):
        folder = Path(root) / "msa_cudacore" / "emulator" / _FOLDER_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe{os.getpid()}"
            probe.touch()
            probe.unlink()
            return folder
        except OSError:
            continue
    raise OSError("no writable folder for compiled emulator code: set MSA_CUDACORE_CACHE to one")


_FOLDER_NAME = _digest()
_FOLDER = cache_folder()


def compiled(function=None, **options):
    """Like `numba.njit(cache=True)`, with the cache in `cache_folder()`.

    Numba picks the folder from its configuration while decorating; it is set for that moment only.
    """

    def decorate(target):
        before = config.CACHE_DIR
        config.CACHE_DIR = str(_FOLDER)
        try:
            return numba.njit(cache=True, error_model="numpy", **options)(target)
        finally:
            config.CACHE_DIR = before

    return decorate if function is None else decorate(function)


def inlined(function):
    """A small helper compiled into its callers; it has no cache entry of its own."""
    return numba.njit(error_model="numpy")(function)
