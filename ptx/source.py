"""One self-contained CUDA C++ text out of a kernel file and the headers it includes.

NVRTC sees a single string: the headers are inlined here, each once, so the text *is* the complete
dependency set. That lets cuda.core's program cache key on the text alone, and it needs no include
directory at run time. `#line` marks keep the original file and line in compiler messages and, with
`-lineinfo`, in the PTX and in the emulator's reports.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["INCLUDE_DIR", "load", "load_text"]

INCLUDE_DIR = Path(__file__).resolve().parent / "include"
"""Folder of the device headers, one header per PTX instruction family."""

_INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)\s*(?://.*)?$')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


def load(path: str | os.PathLike[str], defines: str = "") -> str:
    """Read a kernel file and inline every `#include "name"`.

    Parameters
    ----------
    path
        A `.cu` or `.cuh` file. Headers are searched beside the including file, then in `INCLUDE_DIR`.
    defines
        Text put in front of the source, usually `constexpr` lines that specialise the kernel.

    Raises
    ------
    FileNotFoundError
        A file or a header does not exist; the message names the including line.
    ValueError
        An angle-bracket include: toolkit headers are not present at run time.
    """
    path = Path(path)
    return load_text(path.read_text(encoding="utf-8"), path, defines)


def load_text(text: str, path: str | os.PathLike[str] = "kernel.cu", defines: str = "") -> str:
    """Like :func:`load`, for source text that need not exist as a file; `path` is its name in messages."""
    parts: list[str] = []
    if defines:
        parts.append('#line 1 "specialisation"\n' + defines.rstrip("\n") + "\n")
    _inline(text, Path(path), parts, seen=set())
    return "".join(parts)


def _label(path: Path) -> str:
    """A name that does not depend on where the package is installed, so that cache keys and PTX agree."""
    if path.parent == INCLUDE_DIR:
        return f"ptx/include/{path.name}"
    return path.name


def _inline(text: str, path: Path, parts: list[str], seen: set[Path]) -> None:
    label = _label(path)
    parts.append(f'#line 1 "{label}"\n')
    for number, line in enumerate(text.splitlines(), start=1):
        if _PRAGMA_ONCE.match(line):
            parts.append("\n")
            continue
        match = _INCLUDE.match(line)
        if match is None:
            parts.append(line + "\n")
            continue
        name, system = match.groups()
        if system is not None:
            raise ValueError(
                f"{label}:{number}: #include <{system}>: device code must be freestanding; "
                f"only headers of this package, in double quotes, can be included"
            )
        header = _find(name, path, label, number)
        if header not in seen:
            seen.add(header)
            _inline(header.read_text(encoding="utf-8"), header, parts, seen)
        parts.append(f'#line {number + 1} "{label}"\n')


def _find(name: str, path: Path, label: str, number: int) -> Path:
    for directory in (path.parent, INCLUDE_DIR):
        candidate = (directory / name).resolve()
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f'{label}:{number}: #include "{name}": no such file in {path.parent} or {INCLUDE_DIR}')
