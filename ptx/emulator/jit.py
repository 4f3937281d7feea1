"""Numba compilation: units that are compiled, cached and called separately.

Two properties of Numba would hurt here. Its disk cache looks only at the file of the outermost function, so
an edit in a callee of another file would run old machine code; the cache folder used here is named by a
digest of the file and of all it imports. And it optimises every callee again inside each caller; a `Unit` is
called through its address instead, so each family of instructions is optimised once, compiled only when a
program needs it, and rebuilt only when its own sources change.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

import numba
from llvmlite import ir  # noqa: F401  (a clear ImportError if Numba's compiler is missing)
from numba import config, types
from numba.core import sigutils
from numba.extending import intrinsic

from ..cache import CACHE_VARIABLE, cache_directory

_HERE = Path(__file__).parent
_IMPORT = re.compile(r"^\s*from \.(\w+) import|^\s*from \. import (.+)$", re.MULTILINE)


@lru_cache(maxsize=None)
def _closure_digest(stem: str) -> str:
    """Digest of a module of this package and of every module of it that it imports, directly or not."""
    seen, pending = set(), [stem]
    while pending:
        name = pending.pop()
        path = _HERE / f"{name}.py"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            pending += [module] if module else [part.split(" as ")[0].strip() for part in names.split(",")]
    digest = hashlib.sha256(numba.__version__.encode())
    for name in sorted(seen):
        digest.update(name.encode() + (_HERE / f"{name}.py").read_bytes())
    return digest.hexdigest()[:20]


@lru_cache(maxsize=None)
def cache_root() -> Path | None:
    """Folder of compiled code, or None where `MSA_CUDACORE_CACHE` says `off` or, with a warning, it cannot be written:
    each process then compiles for itself.
    """
    folder = cache_directory("emulator")
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        warnings.warn(
            f"the emulator's cache {folder} cannot be written ({error}); its code is compiled anew in each process. "
            f"Set {CACHE_VARIABLE} to a writable folder, or to 'off' to silence this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def compiled(function, allocates: bool = True):
    """Like `numba.njit(cache=True)`, cached under a digest of the function's sources where there is a cache.

    Numba picks the folder from its configuration while decorating; it is set for that moment only.
    `allocates=False` drops reference counting, which costs two locked instructions for every array that is
    passed on in a loop: more than the loop's work.
    """
    root, stem = cache_root(), Path(function.__code__.co_filename).stem
    make = numba.njit(cache=root is not None, error_model="numpy", _nrt=allocates)
    if root is None:
        return make(function)
    before = config.CACHE_DIR
    config.CACHE_DIR = str(root / f"{stem}-{_closure_digest(stem)}")
    try:
        return make(function)
    finally:
        config.CACHE_DIR = before


def inlined(function=None, *, allocates: bool = False):
    """A helper that is only called from compiled code: no cache entry, no Python wrapper, and (unless it
    `allocates`) no reference counting."""
    make = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=allocates)
    return make if function is None else make(function)


#: Array types by the letters used in unit signatures: U/I = uint64/int64, digit = dimensions (C order).
_TYPES = {
    "U1": types.Array(types.uint64, 1, "C"), "U2": types.Array(types.uint64, 2, "C"),
    "I1": types.Array(types.int64, 1, "C"), "I2": types.Array(types.int64, 2, "C"),
    "I3": types.Array(types.int64, 3, "C"), "i": types.int64, "u": types.uint64, "b": types.boolean,
    "void": types.void,
}


class Unit:
    """A separately compiled function. From Python call it; from compiled code use `unit.call(address,
    ...)`."""

    def __init__(self, function, result: str, arguments: str, allocates: bool) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.signature = _TYPES[result](*(_TYPES[name] for name in arguments.split()))
        self.dispatcher = compiled(function, allocates)
        self.call = _pointer_call(self.name, self.signature)
        self._address = None

    def __call__(self, *arguments):
        self.address()
        return self.dispatcher(*arguments)

    def address(self) -> int:
        """Entry point of the machine code, compiled or loaded from the cache on first use."""
        if self._address is None:
            arguments, _ = sigutils.normalize_signature(self.signature)
            self.dispatcher.compile(self.signature)
            result = self.dispatcher.overloads[tuple(arguments)]
            self._address = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        return self._address


def unit(result: str, arguments: str, *, allocates: bool = False):
    """Decorator: make a function a Unit of the given signature (letters of `_TYPES`)."""
    return lambda function: Unit(function, result, arguments, allocates)


def _pointer_call(name: str, signature):
    """An intrinsic `call(address, *arguments)` in Numba's own calling convention; exceptions are not passed
    on."""
    count = len(signature.args)
    names = ", ".join(f"a{k}" for k in range(count))

    def build(typingctx, address, *arguments):
        def codegen(context, builder, _, values):
            kind = context.call_conv.get_function_type(signature.return_type, signature.args)
            pointer = builder.inttoptr(values[0], kind.as_pointer())
            _, result = context.call_conv.call_function(
                builder, pointer, signature.return_type, signature.args, values[1:]
            )
            return context.get_dummy_value() if signature.return_type == types.void else result

        return signature.return_type(types.int64, *signature.args), codegen

    # An intrinsic's parameters are read from its Python signature, so the arity has to be spelled out.
    scope = {"build": build}
    exec(
        f"def {name}_call(typingctx, address, {names}):\n    return build(typingctx, address, {names})\n",
        scope,
    )
    return intrinsic(scope[f"{name}_call"])
