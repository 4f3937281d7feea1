"""Compiles a Case for a target and lays out its launch arguments as Triton's own launcher does."""

from __future__ import annotations

import inspect

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_cases import POINTERS, Case, HostMap

_SCALARS = {np.dtype(np.int32): "i32", np.dtype(np.float32): "fp32", np.dtype(np.int64): "i64"}


def _type(value) -> str:
    if isinstance(value, HostMap):
        return f"tensordesc<{POINTERS[value.array.dtype][1:]}[{','.join(map(str, value.tile))}]>"
    if isinstance(value, np.ndarray):
        return POINTERS[value.dtype]
    return _SCALARS[value.dtype]


def compile_case(case: Case, target: int):
    """The compiled kernel; `.asm["ptx"]` and `.metadata` are what a launch needs. Triton caches it on disk."""
    arguments = case.build(np.random.default_rng(0))
    names = list(inspect.signature(case.kernel.fn).parameters)
    signature = {n: "constexpr" if n in case.constants else _type(arguments[n]) for n in names}
    # What the launcher would find at run time: arrays start on 16 bytes, and sizes that are multiples of 16.
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in arguments
        and (isinstance(arguments[n], np.ndarray) or arguments[n].__class__ is np.int32 and arguments[n] % 16 == 0)
    }
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    source = ASTSource(case.kernel, signature, constexprs=case.constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def arguments_of(case: Case, compiled, arguments: dict, target: int) -> list:
    """Launch arguments in the order of the kernel's parameters: what the signature names, then the two scratch pointers."""
    from msa_cudacore.ptx import emulator

    passed = []
    maps = iter(compiled.metadata.tensordesc_meta or ())
    for name in inspect.signature(case.kernel.fn).parameters:
        if name in case.constants:
            continue
        value = arguments[name]
        if isinstance(value, HostMap):
            described = next(maps)
            passed.append(
                emulator.TensorMap.from_array(value.array, tuple(described["block_size"]), swizzle=described["swizzle"])
            )
            passed += [np.int32(n) for n in value.array.shape]
            passed += [np.int64(n // value.array.itemsize) for n in value.array.strides]
        else:
            passed.append(value)
    scratch = compiled.metadata.global_scratch_size * int(np.prod(case.grid))
    passed.append(np.zeros(scratch, np.uint8) if scratch else np.uint64(0))
    passed.append(np.uint64(0))
    return passed


def launch(module, case: Case, compiled, arguments: dict, target: int, **schedule):
    """Run it; arrays are written in place. Returns the emulator's report."""
    return module.launch(
        case.kernel.fn.__name__,
        grid=case.grid,
        block=(32 * compiled.metadata.num_warps,),
        shared_bytes=compiled.metadata.shared,
        args=arguments_of(case, compiled, arguments, target),
        **schedule,
    )
