"""What the torch peers share: the pool in the forms they read, and capture into a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..candidates import Bench, Prepared
from ..workload import Workload

__all__ = ["capture", "code_pairs", "dense_pool", "dequantize", "dequantized_pool"]

_CHUNK = 2048
"""Tiles dequantised at once: bounds the temporaries to a few hundred megabytes."""


def dense_pool(workload: Workload) -> tuple[Any, Any, Any, Any]:
    """(K codes, K scales, V codes, V scales) with page and head merged, [tiles, 128, 64] and [tiles, 128, 8];
    V linear.

    The layout of an engine that keeps the four in allocations of their own; the same bytes.
    """

    def make() -> tuple[Any, Any, Any, Any]:
        k, v, k_scale, v_scale = (view.reshape(-1, *view.shape[2:]) for view in workload.views)
        # Swizzled, the four tokens of a quad are adjacent for one group: [quad, group, token of the quad].
        linear = v_scale.reshape(-1, 32, 8, 4).transpose(-1, -2).reshape(v_scale.shape)
        return k.contiguous(), k_scale.contiguous(), v.contiguous(), linear.contiguous()

    return workload.form("dense", make)


@functools.cache
def code_pairs(device: Any) -> Any:
    """bfloat16 [256, 2]: the two values of a byte of codes."""
    import torch

    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((magnitudes, -magnitudes)).to(torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).to(device)


def dequantize(codes: Any, scales: Any) -> Any:
    """bfloat16 [tiles, 128, 128] of codes [tiles, 128, 64] and linear scales [tiles, 128, 8]; exact."""
    import torch

    elements = code_pairs(codes.device).index_select(0, codes.reshape(-1).int()).view(*codes.shape[:2], 8, 16)
    factors = scales.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return (elements * factors[..., None]).view(*codes.shape[:2], 128)


def dequantized_pool(workload: Workload, dtype: Any) -> tuple[Any, Any]:
    """(K, V) [tiles, 128, 128] in bfloat16, or rounded to float8_e4m3fn."""
    import torch

    def make() -> tuple[Any, Any]:
        k, v, k_scale, v_scale = (view.reshape(-1, *view.shape[2:]) for view in workload.views)
        sides = []
        for codes, scales, swizzled in ((k, k_scale, False), (v, v_scale, True)):
            side = torch.empty(codes.shape[0], 128, 128, dtype=dtype, device=codes.device)
            for start in range(0, codes.shape[0], _CHUNK):
                part = slice(start, start + _CHUNK)
                linear = scales[part]
                if swizzled:
                    linear = linear.reshape(-1, 32, 8, 4).transpose(-1, -2).reshape(linear.shape)
                side[part] = dequantize(codes[part], linear.contiguous()).to(dtype)
            sides.append(side)
        return sides[0], sides[1]

    return workload.form(str(dtype), make)


def capture(bench: Bench, compute: Callable[[], tuple[Any, Any]]) -> Prepared:
    """Run `compute` twice, capture it in a CUDA graph of torch's, and replay that on the bench's stream."""
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.ExternalStream(int(bench.stopwatch.stream.handle))
    with torch.cuda.stream(stream):
        for _ in range(2):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would also collect garbage and empty the allocator's cache, a tenth of a second
        # each time.
        graph.capture_begin()
        out, lse = compute()
        graph.capture_end()

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return Prepared(replay, out, lse, keep=(graph, compute, stream))
