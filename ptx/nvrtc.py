"""CUDA C++ to PTX text through NVRTC, on a machine with or without a CUDA driver.

`cuda.core.Program.compile("ptx")` asks the driver for its version and so needs one. The emulator
does not, so this module calls the NVRTC bindings directly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["CompileError", "compile_ptx", "supported_archs", "version"]

_ARCH = re.compile(r"^(?:sm|compute)_(\d+[af]?)$")


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a source. `log` holds the compiler's messages, `source` the text."""

    def __init__(self, name: str, arch: str, log: str, source: str) -> None:
        nvrtc_version = "{}.{}".format(*version())
        super().__init__(f"{name}: NVRTC {nvrtc_version} cannot compile for {arch}\n{log.strip()}")
        self.name = name
        self.arch = arch
        self.log = log
        self.source = source


def _nvrtc():
    from cuda.bindings import nvrtc

    return nvrtc


def _checked(result: tuple) -> object:
    """Unpack a bindings result `(status, value...)`, raising on a status that is not success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"NVRTC call failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def version() -> tuple[int, int]:
    """Major and minor version of the NVRTC library that is loaded."""
    return tuple(_checked(_nvrtc().nvrtcVersion()))


def supported_archs() -> tuple[int, ...]:
    """Numeric architectures this NVRTC knows, for instance `(75, 80, ..., 100, 103, 120)`."""
    nvrtc = _nvrtc()
    return tuple(_checked(nvrtc.nvrtcGetSupportedArchs()))


def compile_ptx(
    source: str,
    arch: str = "sm_100a",
    *,
    name: str = "kernel.cu",
    options: Sequence[str] = (),
    lineinfo: bool = False,
) -> str:
    """Compile self-contained CUDA C++ to PTX text.

    Parameters
    ----------
    source
        The complete text, see :func:`msa_cudacore.ptx.source.load`.
    arch
        `sm_90a`, `sm_100a`, ...; the virtual architecture of the same number is what is compiled for.
    name
        File name in messages.
    options
        Further NVRTC options, for instance `("--use_fast_math",)`.
    lineinfo
        Emit `.loc` marks, so that the emulator can name source lines.

    Raises
    ------
    ValueError
        `arch` is not of the form `sm_NN`, `sm_NNa` or `sm_NNf`.
    CompileError
        NVRTC refused the source; the message holds its log.
    """
    match = _ARCH.match(arch)
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a' or 'compute_100f', got {arch!r}")
    nvrtc = _nvrtc()
    arguments = [f"--gpu-architecture=compute_{match.group(1)}", "--std=c++17", *options]
    if lineinfo:
        arguments.append("--generate-line-info")
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        encoded = [argument.encode() for argument in arguments]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status) != 0:
            raise CompileError(name, arch, _log(nvrtc, program), source)
        size = _checked(nvrtc.nvrtcGetPTXSize(program))
        buffer = bytearray(size)
        _checked(nvrtc.nvrtcGetPTX(program, buffer))
        return bytes(buffer).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc, program) -> str:
    size = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    buffer = bytearray(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, buffer))
    return bytes(buffer).rstrip(b"\0").decode(errors="replace")
