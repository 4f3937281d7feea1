"""CUDA C++ to cubin through NVRTC, with a persistent cache; needs no CUDA driver and no toolkit.

The cache is `cuda.core.utils.FileStreamProgramCache`, in the folder that `ptx.cache` names: writes are atomic, so
concurrent processes see whole entries. Its key covers the source (headers are already inlined into it), every option,
and the version of NVRTC. Each entry carries a SHA-256 of the cubin behind the ELF image, because a disk that fills up
or a copied home directory can leave a truncated or damaged file, and loading one into the driver would fail far from
the cause.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from dataclasses import dataclass, field

from ..ptx.cache import CACHE_VARIABLE, cache_directory
from ..ptx.nvrtc import CompileError, supported_archs

__all__ = ["CompileError", "Cubin", "Resources", "compile_cubin"]

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Resources:
    """What one entry needs, as ptxas reports it (bytes are per thread, shared bytes per CTA)."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled program: the ELF image, its exact architecture, and the log of a fresh compilation."""

    code: bytes = field(repr=False)
    arch: str
    name: str
    log: str = field(repr=False, default="")

    def resources(self) -> dict[str, Resources]:
        """Resources by entry name; empty when the cubin came from the cache, which keeps no log."""
        return _parse_ptxas_log(self.log)


def compile_cubin(source: str, arch: str, *, name: str = "kernel.cu", use_cache: bool = True) -> Cubin:
    """Compile self-contained CUDA C++ to machine code for one exact architecture.

    Parameters
    ----------
    source
        The complete text, see :func:`msa_cudacore.ptx.source.load`.
    arch
        `sm_80`, `sm_90a`, `sm_100a`, ...: the part the code will run on.
    name
        File name in messages.
    use_cache
        Look in, and add to, the on-disk cache. Off, the log with the resource usage is always there.

    Raises
    ------
    CompileError
        NVRTC does not know `arch`, or refused the source; the message holds its log.
    """
    from cuda.core import Program, ProgramOptions

    _check_arch(arch, name, source)
    options = ProgramOptions(name=name, arch=arch, std="c++17", ptxas_options=["-v"])
    cache = _open_cache() if use_cache else None
    if cache is None:
        return _compile(Program, source, options, arch, name)

    from cuda.core.utils import make_program_cache_key

    key = make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin")
    code = _read_entry(cache, key)
    if code is not None:
        return Cubin(code, arch, name)
    cubin = _compile(Program, source, options, arch, name)
    _write_entry(cache, key, cubin.code)
    return cubin


def _check_arch(arch: str, name: str, source: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    known = supported_archs()
    if match is None or int(match.group(1)) not in known:
        accepted = ", ".join(f"sm_{number}" for number in known)
        raise CompileError(name, arch, f"unknown architecture {arch!r}; this NVRTC knows {accepted}", source)


def _compile(program_type, source: str, options, arch: str, name: str) -> Cubin:
    logs = io.StringIO()
    program = program_type(source, "c++", options)
    try:
        code = bytes(program.compile("cubin", logs=logs).code)
    except Exception as error:
        raise CompileError(name, arch, f"{error}\n{logs.getvalue()}", source) from error
    finally:
        program.close()
    return Cubin(code, arch, name, logs.getvalue())


def _open_cache():
    """The cache, or None where it cannot be had: compiling again is slower, never wrong."""
    from cuda.core.utils import FileStreamProgramCache

    directory = cache_directory("programs")
    if directory is None:
        return None
    try:
        return FileStreamProgramCache(directory)
    except OSError as error:
        warnings.warn(
            f"program cache {directory} cannot be opened ({error}); kernels are compiled anew in each "
            f"process. Set {CACHE_VARIABLE} to a writable folder, or to 'off' to silence this.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _read_entry(cache, key: bytes) -> bytes | None:
    try:
        entry = bytes(cache[key])
    except (KeyError, OSError):
        return None
    code, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write_entry(cache, key: bytes, code: bytes) -> None:
    try:
        cache[key] = code + hashlib.sha256(code).digest()
    except OSError:
        # A home that became read-only, or a full disk: the program in hand is good all the same.
        return


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def _parse_ptxas_log(log: str) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    entry = None
    stack = (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, stack = match.group(1), (0, 0, 0)
        elif match := _STACK.search(line):
            stack = tuple(int(number) for number in match.groups())
        elif entry is not None and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[entry] = Resources(int(match.group(1)), *stack, int(shared.group(1)) if shared else 0)
            entry = None
    return found
