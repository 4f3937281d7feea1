"""The portable program compiles to machine code for every part it serves: no spills, no local memory, shared memory
that fits, and nothing ahead of the wait of a dependent launch.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from msa_cudacore.contract import Problem
from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.portable import ENTRY, SPLITS, Configuration, choose_configuration, source

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


def portable_configurations(arch: str) -> list[Configuration]:
    """Every configuration that the choice can come to on a part of this architecture."""
    capability = divmod(int("".join(filter(str.isdigit, arch))), 10)
    facts = DeviceFacts(0, arch, capability, 132, SHARED_BYTES_PER_BLOCK[arch], 0, capability[0] >= 9)
    return sorted(
        {
            choose_configuration(Problem(batch, 1, 16, 1, topk, max_pages, num_pages=1), facts, splits)
            for batch, topk, max_pages, splits in itertools.product(
                (1, 8, 9, 16, 17, 33, 34, 64, 67, 132, 133, 160, 190, 264, 265, 300, 400, 600, 700, 800, 850),
                (16, 64),
                (1, 2, 3, 4, 8, 16, 64),
                (None, *SPLITS),
            )
        },
        key=repr,
    )


@functools.lru_cache(maxsize=None)
def cubin(configuration: Configuration, arch: str):
    return compile_cubin(source(configuration), arch, name="portable.cu", use_cache=False)


@pytest.mark.parametrize("arch", SHARED_BYTES_PER_BLOCK)
def test_portable_program_fits_every_part(arch):
    configurations = portable_configurations(arch)
    assert {c.splits for c in configurations} >= set(SPLITS)
    for configuration in configurations:
        used = cubin(configuration, arch).resources()[ENTRY]
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), (configuration, used)
        assert used.registers * configuration.block <= 65536
        shared = configuration.shared_bytes + used.static_shared_bytes
        assert shared <= SHARED_BYTES_PER_BLOCK[arch], (configuration, shared)


def test_as_many_small_ctas_fit_an_sm_as_the_choice_counts_on():
    """Registers of compute capability 9.0: 65,536 an SM, given out to warps in eights a thread (CUDA C++
    Programming Guide, technical specifications; occupancy calculator, allocation unit 256 a warp).
    """
    fit = {1: 5, 2: 3, 4: 3, 8: 3}  # by splits
    found = set()
    for one in portable_configurations("sm_90a"):
        if one.block != 128 or not one.cooperative or one.table:
            continue
        found.add(one.splits)
        registers = -(-cubin(one, "sm_90a").resources()[ENTRY].registers // 8) * 8
        assert fit[one.splits] * 128 * registers <= 65536, one
        assert fit[one.splits] * (one.shared_bytes + 1024) <= 228 * 1024, one
    assert found == set(fit)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_portable_program_waits_before_it_touches_global_memory(arch, assert_waits_first):
    for configuration in portable_configurations(arch):
        assert_waits_first(cubin(configuration, arch).code, ENTRY, configuration)
