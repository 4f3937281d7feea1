"""Every program compiles to machine code for every part it serves: no spills, no local memory, shared memory that fits."""

from __future__ import annotations

import itertools

import pytest

from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.portable import SPLITS, Configuration, source

SHARED_BYTES_PER_BLOCK = {
    # CUDA C++ Programming Guide, technical specifications by compute capability: most shared memory of one block.
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_103a": 227 * 1024,
    "sm_120a": 99 * 1024,
}
CLUSTER_ARCHS = {"sm_90a", "sm_100a", "sm_103a", "sm_120a"}


def portable_configurations(arch: str) -> list[Configuration]:
    found = []
    for slots, splits, ids_per_lane in itertools.product((1, 2), SPLITS, (1, 2)):
        cluster = splits > 1 and arch in CLUSTER_ARCHS
        found.append(Configuration(slots, splits, cluster, ids_per_lane))
    return found


@pytest.mark.parametrize("arch", SHARED_BYTES_PER_BLOCK)
def test_portable_program_fits_every_part(arch):
    for configuration in portable_configurations(arch):
        resources = compile_cubin(source(configuration), arch, name="portable.cu", use_cache=False).resources()
        entries = {"msa_decode"}
        if configuration.splits > 1 and not configuration.cluster_merge:
            entries.add("msa_merge")
        assert set(resources) >= entries, configuration
        for entry in entries:
            used = resources[entry]
            assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), (configuration, entry, used)
            assert used.registers * configuration.block <= 65536
        shared = configuration.shared_bytes + resources["msa_decode"].static_shared_bytes
        assert shared <= SHARED_BYTES_PER_BLOCK[arch], (configuration, shared)
