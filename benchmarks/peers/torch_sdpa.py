"""What a user without a kernel writes in torch: gather the selected pages, then scaled dot product attention.

Once from a bf16 cache, and once from the NVFP4 cache with the pages dequantised on the way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from ..candidates import Bench, Candidate, Prepared, Unavailable
from ..workload import Step, Workload
from . import torch_forms

__all__ = ["candidates"]


def candidates() -> list[Candidate]:
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    return [
        _Gathered("torch_sdpa_bf16", "torch gather + SDPA, bf16 cache", "bf16"),
        _Gathered("torch_sdpa_nvfp4", "torch dequantise + SDPA, NVFP4 cache", "nvfp4"),
    ]


class _Gathered:
    kind = "peer"

    def __init__(self, name: str, title: str, cache_format: str) -> None:
        self.name, self.title, self.format = name, title, cache_format

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        return {"": lambda step: self._prepare(workload, bench, step)}

    def _prepare(self, workload: Workload, bench: Bench, step: Step) -> Prepared:
        import torch

        row = workload.row
        tiles = step.host.tiles
        used = max(int((tiles >= 0).sum(axis=-1).max()), 1)
        tiles = tiles[..., :used]
        index = bench.arrays.put(np.maximum(tiles, 0).reshape(-1))
        blocks = step.host.q2k_indices.transpose(1, 0, 2)[..., :used].astype(np.int64)
        seen = (blocks[..., None] * 128 + np.arange(128) < step.host.visible[:, None, None, None]) & (
            tiles >= 0
        )[..., None]
        mask = None
        if not seen.all():
            mask = bench.arrays.put(seen.reshape(row.tokens, row.num_kv_heads, 1, used * 128))
            mask = mask.expand(-1, -1, row.group, -1)
        q = step.q.view(row.tokens, row.num_kv_heads, row.group, 128)
        shape = (row.tokens, row.num_kv_heads, used * 128, 128)

        if self.format == "bf16":
            k, v = torch_forms.dequantized_pool(workload, torch.bfloat16)

            def gather() -> tuple[Any, Any]:
                return k.index_select(0, index), v.index_select(0, index)

        else:
            k, k_scale, v, v_scale = torch_forms.dense_pool(workload)

            def gather() -> tuple[Any, Any]:
                return (
                    torch_forms.dequantize(k.index_select(0, index), k_scale.index_select(0, index)),
                    torch_forms.dequantize(v.index_select(0, index), v_scale.index_select(0, index)),
                )

        def compute() -> tuple[Any, Any]:
            keys, values = gather()
            out = torch.nn.functional.scaled_dot_product_attention(
                q, keys.view(shape), values.view(shape), attn_mask=mask, scale=128**-0.5
            )
            return out, None

        return torch_forms.capture(bench, compute)
