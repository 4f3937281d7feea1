"""What the tests of the benchmarks share: arrays on the host, exact results, and the results of a run that
never was.
"""

from __future__ import annotations

import numpy as np

from msa_cudacore import reference


class HostArrays:
    """The array operations on host memory, so that workloads and checks run without a GPU."""

    name = "numpy"
    bf16_as_uint16 = False

    def put(self, array):
        return np.array(array)

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def random_bytes(self, shape, seed):
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def poison(self, array):
        array.view(np.uint8)[...] = 0xFF

    def pointer(self, array):
        return array.ctypes.data

    def finish(self):
        pass

    def release(self):
        pass


def exact(workload):
    """The float64 results of every step, from the whole pool."""
    views = workload.views
    return [
        reference.decode(
            step.q,
            views.k,
            views.v,
            step.q2k_indices,
            k_scale=views.k_scale,
            v_scale=views.v_scale,
            page_table=step.page_table,
            seqused_k=step.seqused_k,
            k_global_scale=1.0,
            v_global_scale=1.0,
            seqlen_q=workload.row.seqlen_q,
        )
        for step in workload.steps
    ]


def canned():
    """Results of two rows: on one every peer ran, on the other one is wrong and one is missing."""

    def timed(row, candidate, kind, us, cache_format="nvfp4", passed=True):
        check = {
            "passed": passed, "rows": 8, "relative_error": 1.7e-3, "floor": 1.6e-3, "worst_over_floor": 1.1,
            "largest_lse_error": None, "problem": "" if passed else "out[0] is off",
        }  # fmt: skip
        about = {
            "row": row,
            "candidate": candidate,
            "group": "own",
            "title": candidate,
            "format": cache_format,
            "kind": kind,
        }
        figures = {"median_us": us, "p10_us": us - 0.1, "p90_us": us + 0.3, "samples_us": [us]}
        return about | figures | ({} if kind in ("floor", "ceiling") else {"check": check})

    big, late = "tp1_b32_kv8k_q8", "tp4_b1_kv1m_q1"
    return {
        "command": "msa-cudacore bench", "date": "2026-11-30T06:00:00+00:00", "version": "0.1.0",
        "kernels_sha256": "ab" * 32,
        "machine": {
            "gpu": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132, "l2_bytes": 60 << 20,
            "driver": "580.1", "cuda_driver_api": 13000, "nvrtc": "13.5", "platform": "Linux",
        },
        "versions": {"python": "3.12"}, "method": {"samples": 100, "rotating_steps": 4}, "seconds": 10.0,
        "linear_read": {"linear_read_bytes": 2 << 30, "linear_read_us": 466.0},
        "groups": {"own": {"arrays": "torch"}, "unfused": {"skipped": "nvmath is not installed"}},
        "rows": {
            big: {"selected_bytes": 301989888, "distinct_bytes": 133300224, "attended": 2093568},
            late: {"selected_bytes": 294912, "distinct_bytes": 294912, "attended": 2048},
        },
        "measurements": [
            timed(big, "floor", "floor", 4.0, "none"), timed(big, "ceiling_registers", "ceiling", 47.0),
            timed(big, "ceiling_bulk", "ceiling", 44.0), timed(big, "ceiling_bulk_distinct", "ceiling", 36.0),
            timed(big, "ours", "ours", 55.0), timed(big, "torch_sdpa_bf16", "peer", 990.0, "bf16"),
            timed(big, "triton_nvfp4", "peer", 300.0), timed(late, "floor", "floor", 4.1, "none"),
            timed(late, "ceiling_registers", "ceiling", 5.6), timed(late, "ours", "ours", 8.4),
            timed(late, "triton_nvfp4", "peer", 7.0, passed=False),
            {"row": late, "candidate": "torch_sdpa_bf16", "group": "torch", "title": "t", "format": "bf16",
             "kind": "peer",
             "failed": "out of memory"},
        ],
    }  # fmt: skip
