"""Wraps a few lines of PTX into a kernel: for tests of single instructions."""

from __future__ import annotations

import numpy as np

from msa_cudacore.ptx import emulator


def launch(
    body,
    *arrays,
    threads=32,
    ctas=1,
    cluster=1,
    shared=16384,
    arch="sm_100a",
    schedule="random",
    seed=0,
    checks=True,
):
    """Run ``body`` once in each CTA.

    It finds %tid, %lane, %warp, %rank, %base (shared memory, 1024-byte aligned) and %a0, %a1, ... (the
    arguments); free registers are %r0..99, %rd0..29, %f0..9, %h0..9 (16 bits), %p0..9.

    Returns:
        the launch's report.
    """
    parameters = ", ".join(
        f".param .align 64 .b8 a{i}[128]" if isinstance(a, emulator.TensorMap) else f".param .u64 a{i}"
        for i, a in enumerate(arrays)
    )
    loads = "\n".join(
        f"mov.b64 %a{i}, a{i}; cvta.param.u64 %a{i}, %a{i};"
        if isinstance(a, emulator.TensorMap)
        else f"ld.param.u64 %a{i}, [a{i}];"
        for i, a in enumerate(arrays)
    )
    text = f"""
    .version 8.8
    .target {arch}
    .address_size 64
    .extern .shared .align 1024 .b8 buffer[];
    .visible .entry small({parameters})
    {{
        .reg .b32 %r<100>, %tid, %lane, %warp, %rank, %base;
        .reg .b64 %rd<30>, %a<10>;
        .reg .f32 %f<10>;
        .reg .b16 %h<10>;
        .reg .pred %p<10>;
        mov.u32 %tid, %tid.x; and.b32 %lane, %tid, 31; shr.u32 %warp, %tid, 5;
        mov.u32 %rank, %cluster_ctarank; mov.u32 %base, buffer;
        {loads}
        {body}
        ret;
    }}
    """
    return emulator.load(text).launch(
        "small",
        (ctas,),
        (threads,),
        list(arrays),
        cluster=(cluster,),
        shared_bytes=shared,
        schedule=schedule,
        seed=seed,
        checks=checks,
    )


def filled(*shape, dtype=np.uint32):
    """An output array of noise that no test expects."""
    return np.full(shape, 0xDEADBEEF & (1 << 8 * np.dtype(dtype).itemsize) - 1).astype(dtype)


SCHEDULES = [("random", 0), ("random", 1), ("random", 2), ("eager", 0), ("late", 0)]
