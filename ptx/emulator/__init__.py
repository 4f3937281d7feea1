"""Runs PTX on the CPU and reports what would go wrong on the GPU.

    from msa_cudacore.ptx import emulator

    module = emulator.load(ptx_text)
    report = module.launch("kernel", grid=(8,), block=(256,), args=[array, np.int32(3)], seed=0)
"""

from .diagnostics import Checks, Fault
from .memory import Memory
from .module import Bytes, Module, compile, load
from .report import Report
from .tensor_map import TensorMap
from .text import PtxSyntaxError

__all__ = [
    "Bytes",
    "Checks",
    "Fault",
    "Memory",
    "Module",
    "PtxSyntaxError",
    "Report",
    "TensorMap",
    "compile",
    "load",
]
