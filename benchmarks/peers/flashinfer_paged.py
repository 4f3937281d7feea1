"""FlashInfer's paged batch decode over the selected pages: NVFP4, fp8 and bf16 caches.

One request for each (query token, KV head) with a page table of its own, tensor-core path, FA2 backend, which
reads an NVFP4 cache in place on any GPU from Ampere on. Planning is not timed. Besides the plan as shipped,
fixed split sizes and no split are tried.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..candidates import Bench, Candidate, Prepared, Unavailable
from ..workload import Step, Workload
from . import torch_forms

__all__ = ["build", "candidates"]

_WORKSPACE_BYTES = 512 << 20
_SPLIT_PAGES = (1, 2, 4, 8)
_FORMATS = {"nvfp4": "uint8", "fp8": "float8_e4m3fn", "bf16": "bfloat16"}


def candidates() -> list[Candidate]:
    for package in ("torch", "flashinfer"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package} is not installed")
    try:
        _wrapper()
    except ImportError as error:
        raise Unavailable(f"flashinfer cannot be imported: {error}") from error
    return [_Paged(cache_format) for cache_format in _FORMATS]


def build() -> None:
    """Compile the three modules with nvcc, or find them compiled. Raises what FlashInfer raises."""
    import torch
    from flashinfer.jit.attention import modules

    generate = getattr(modules, "_gen_batch_prefill_primary_module", modules.gen_batch_prefill_module)
    for dtype in _FORMATS.values():
        module = generate(
            "fa2",
            torch.bfloat16,
            getattr(torch, dtype),
            torch.bfloat16,
            torch.int32,
            128,
            128,
            0,
            False,
            False,
            False,
        )
        if not module.is_aot:
            module.build(verbose=False)


def _wrapper() -> Any:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    return BatchDecodeWithPagedKVCacheWrapper


class _Paged:
    kind = "peer"

    def __init__(self, cache_format: str) -> None:
        self.format = cache_format
        self.name = f"flashinfer_{cache_format}"
        self.title = (
            f"FlashInfer paged decode (FA2), {'NVFP4' if cache_format == 'nvfp4' else cache_format} cache"
        )
        self._workspace: Any = None

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        plans: dict[str, dict[str, Any]] = {"plan as shipped": {}, "no split": {"disable_split_kv": True}}
        plans |= {f"splits of {pages} pages": {"fixed_split_size": pages} for pages in _SPLIT_PAGES}
        return {
            label: lambda step, plan=plan: self._prepare(workload, bench, step, plan)
            for label, plan in plans.items()
        }

    def _prepare(self, workload: Workload, bench: Bench, step: Step, plan: dict[str, Any]) -> Prepared:
        import torch

        row = workload.row
        items = row.items
        tiles = step.host.tiles.reshape(items, -1)
        counts = (tiles >= 0).sum(axis=-1)
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        indices = bench.arrays.put(tiles[tiles >= 0].astype(np.int32))
        last = torch.from_numpy(
            np.repeat((step.host.visible - 1) % 128 + 1, row.num_kv_heads).astype(np.int32)
        )
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=indices.device)
        # Steps share the float workspace, but not the plan that lies in the wrapper's own integer workspace.
        wrapper = _wrapper()(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=indptr.to(indices.device),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.to(indices.device),
        )
        try:
            wrapper.plan(
                indptr,
                indices,
                last,
                row.group,
                1,
                128,
                128,
                q_data_type=torch.bfloat16,
                kv_data_type=getattr(torch, _FORMATS[self.format]),
                o_data_type=torch.bfloat16,
                sm_scale=128**-0.5,
                **plan,
            )
        except (ValueError, RuntimeError) as error:
            raise Unavailable(f"plan refused: {error}") from error
        q = step.q.view(items, row.group, 128)
        out = torch.empty_like(q)
        lse = torch.empty(items, row.group, dtype=torch.float32, device=q.device)
        options: dict[str, Any] = {}
        if self.format == "nvfp4":
            k, k_scale, v, v_scale = (part[:, None] for part in torch_forms.dense_pool(workload))
            options["kv_cache_sf"] = (k_scale.view(torch.float8_e4m3fn), v_scale.view(torch.float8_e4m3fn))
        else:
            k, v = (
                part[:, None]
                for part in torch_forms.dequantized_pool(workload, getattr(torch, _FORMATS[self.format]))
            )

        def compute() -> tuple[Any, Any]:
            wrapper.run(q, (k, v), out=out, lse=lse, return_lse=True, **options)
            return out, lse

        prepared = torch_forms.capture(bench, compute)
        # Its lse is in base 2.
        return Prepared(prepared.replay, out, lse, math.log(2), keep=(prepared, wrapper))
