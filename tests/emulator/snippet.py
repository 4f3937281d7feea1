"""Runs a few PTX lines on arrays of operands: one thread an element."""

from __future__ import annotations

import numpy as np

from msa_cudacore.ptx import emulator

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
_DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def kernel(body: str, parameters: str = "", declarations: str = "") -> str:
    """A module with one entry `k`."""
    return f"{HEADER}{declarations}\n.visible .entry k({parameters})\n{{\n{body}\nret;\n}}\n"


def evaluate(body: str, *operands: np.ndarray, result: int = 32, outputs: int = 1, registers: str = ""):
    """Run `body` once an element: inputs %a0, %a1, ... and results %d0, ... in registers of their width.

    Returns one unsigned array for each output. 8-bit operands sit in 16-bit registers, as PTX wants it.
    """
    count = len(operands[0])
    size = result // 8
    lines = [".reg .b64 %p<40>; .reg .b32 %t; .reg .b32 %n; .reg .pred %q;", registers]
    names = []
    for i, operand in enumerate(operands):
        bits = operand.dtype.itemsize * 8
        lines.append(f".reg .b{max(bits, 16)} %a{i};")
        names.append(f".param .u64 in{i}")
    for i in range(outputs):
        lines.append(f".reg .b{max(result, 16)} %d{i};")
        names.append(f".param .u64 out{i}")
    lines.append("mov.u32 %t, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %t, %t, 256, %n;"
                 f"setp.ge.u32 %q, %t, {count}; @%q ret;")
    for i, operand in enumerate(operands):
        width = operand.dtype.itemsize
        lines.append(f"ld.param.u64 %p0, [in{i}]; mad.wide.u32 %p0, %t, {width}, %p0;"
                     f"ld.global.b{8 * width} %a{i}, [%p0];")
    lines.append(body)
    for i in range(outputs):
        lines.append(
            f"ld.param.u64 %p0, [out{i}]; mad.wide.u32 %p0, %t, {size}, %p0;"
            f"st.global.b{result} [%p0], %d{i};"
        )
    module = emulator.load(kernel("\n".join(lines), ", ".join(names)))
    results = [np.zeros(count, _DTYPES[result]) for _ in range(outputs)]
    module.launch("k", grid=(-(-count // 256),), block=(256,), args=[*operands, *results], schedule="eager",
                  checks=False)
    return results[0] if outputs == 1 else results
