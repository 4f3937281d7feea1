"""A plain Triton kernel over the same planar pool: what a good engineer would write in a day.

One program for each (query token, KV head) and share of its pages; codes and scales become fp16 in registers,
both products are `tl.dot`, and a second kernel merges the shares. Shares, warps and pipeline stages are tried
over a small set.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from ..candidates import Bench, Candidate, Prepared, Unavailable
from ..rows import TOPK
from ..workload import Step, Workload
from . import torch_forms

__all__ = ["candidates"]

_SPLITS = (1, 2, 4, 8, 16)
_WARPS_AND_STAGES = ((4, 2), (4, 3), (8, 2))
_GROUP = 16
"""Query rows of a program; `tl.dot` takes no fewer."""


def candidates() -> list[Candidate]:
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package} is not installed")
    return [_TritonDecode()]


class _TritonDecode:
    name, title, format, kind = "triton_nvfp4", "Triton NVFP4 kernel, plainly written", "nvfp4", "peer"

    def variants(self, workload: Workload, bench: Bench) -> dict[str, Callable[[Step], Prepared]]:
        items = workload.row.items
        sms = bench.stopwatch.facts.multiprocessors
        # More shares than four for each multiprocessor only add merging; fewer than half leave the GPU idle.
        fitting = [splits for splits in _SPLITS if sms // 2 <= items * splits <= 4 * sms]
        splits_tried = fitting or [_SPLITS[-1] if items * _SPLITS[-1] < sms // 2 else 1]
        return {
            f"splits={splits}, warps={warps}, stages={stages}": (
                lambda step, settings=(splits, warps, stages): self._prepare(workload, bench, step, *settings)
            )
            for splits in splits_tried
            for warps, stages in _WARPS_AND_STAGES
        }

    def _prepare(
        self, workload: Workload, bench: Bench, step: Step, splits: int, warps: int, stages: int
    ) -> Prepared:
        import torch

        from .triton_kernels import decode, merge

        row, views = workload.row, workload.views
        out = torch.empty_like(step.q)
        lse = torch.empty(row.tokens, row.num_q_heads, dtype=torch.float32, device=step.q.device)
        partial = torch.empty(row.items, splits, _GROUP, 128, dtype=torch.float32, device=step.q.device)
        state = torch.empty(row.items, splits, 2, _GROUP, dtype=torch.float32, device=step.q.device)

        def compute() -> tuple[Any, Any]:
            decode[(row.items, splits)](
                step.q,
                views.k,
                views.v,
                views.k_scale,
                views.v_scale,
                step.q2k_indices,
                step.page_table,
                step.seqused_k,
                out,
                lse,
                partial,
                state,
                row.seqlen_q,
                row.num_kv_heads,
                row.group,
                row.tokens,
                step.page_table.shape[1],
                views.k.stride(0),
                views.k.stride(1),
                views.k_scale.stride(1),
                128**-0.5 / math.log(2),
                WHOLE=splits == 1,
                TOPK=TOPK,
                GROUP=_GROUP,
                num_warps=warps,
                num_stages=stages,
            )
            if splits > 1:
                merge[(row.items,)](partial, state, out, lse, row.group, splits, GROUP=_GROUP, num_warps=4)
            return out, lse

        return torch_forms.capture(bench, compute)
