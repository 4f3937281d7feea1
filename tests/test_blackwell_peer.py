"""Side by side with FlashInfer's one-split program in the emulator, on the same item of 16 pages. Opt in with
`MSA_PEER=1`.

Prints the counts that docs/blackwell.md quotes (`pytest -s`).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msa_cudacore import emulated
from msa_cudacore.blackwell import Configuration
from msa_cudacore.cases import random_case
from msa_cudacore.contract import validate
from msa_cudacore.reference import compare

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        os.environ.get("MSA_PEER") != "1", reason="set MSA_PEER=1 to run FlashInfer's programs"
    ),
]

# What the engines move besides, bytes a page / 128: copies in; K and q, or V and q, as MMA operands; P; our
# K scales.
OUR_ENGINES = 144 + 176 + 32 + 8
PEER_ENGINES = 144 + 256 + 32 + 32


def peer_harness():
    path = Path(__file__).parent / "emulator" / "evidence" / "test_flashinfer.py"
    spec = importlib.util.spec_from_file_location("flashinfer_harness", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fewer_shared_memory_cycles_and_a_smaller_error(rng, monkeypatch):
    from msa_cudacore.ptx.emulator.module import Module

    reports = []
    run = Module.launch

    def recorded(self, *arguments, **options):
        reports.append(run(self, *arguments, **options))
        return reports[-1]

    monkeypatch.setattr(Module, "launch", recorded)
    case = random_case(
        rng, topk=16, layout="planar", hostile=False, strided_inputs=False, score_deviation=2.0, group=16,
        seqlen_q=1, lengths=[2048], num_kv_heads=1, max_pages=16,
    )
    # All sixteen pages: a random selection may have fewer.
    case = replace(case, q2k_indices=np.arange(16, dtype=np.int32).reshape(1, 1, 16))
    call = validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False)
    emulated.launch(call, Configuration(1, 10, False, 1, 0), schedule="eager")
    peer_out, peer_lse = peer_harness()._launch("one_split", case, "eager", 0)

    ours, peer = reports
    cycles = {}
    for name, report, engines in (("ours", ours, OUR_ENGINES), ("FlashInfer", peer, PEER_ENGINES)):
        groups = np.reshape(report.by_warp, (-1, 4)).sum(axis=1) / 16
        threads = report.shared_wavefronts / 16
        cycles[name] = threads + engines
        print(
            f"{name}: {report.warp_instructions / 16:.0f} PTX instructions a page, "
            f"by warpgroup {groups.round()}; "
            f"{threads:.0f} wavefronts by threads, "
            f"{cycles[name]:.0f} shared-memory cycles"
        )
    assert cycles["ours"] <= 0.58 * cycles["FlashInfer"]
    assert ours.shared_wavefronts <= 0.37 * peer.shared_wavefronts
    ours_report = compare(call.out.owner, call.lse.owner, *case.exact())
    assert ours_report, ours_report
    assert ours_report.worst_ratio < compare(peer_out, peer_lse, *case.exact(), ratio=10).worst_ratio
