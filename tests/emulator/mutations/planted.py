"""The kernels of the mutation suite: what each computes, and the faults that can be planted in it.

A fault is a name. The kernel's source asks `fault == Fault::name` wherever the fault changes something, and carries the
comment `// <- name` on the line (or lines) where a checker may report it. The kinds are those of `emulator.Fault.kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Map:
    """A tensor map over an array of float32 with a box of (rows, columns)."""

    array: np.ndarray
    box: tuple[int, int]


@dataclass(frozen=True)
class Kernel:
    """`build(rng, fault)` gives launch arguments, `expected(arguments)` the outputs by position, computed before the
    launch."""

    name: str
    arch: str
    grid: int
    block: int
    cluster: int
    build: Callable[[np.random.Generator, str], list]
    expected: Callable[[list], dict[int, np.ndarray]]
    faults: dict[str, frozenset[str]]


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _nan(*shape):
    return np.full(shape, np.nan, np.float32)


def _ring(rng, fault):
    rows = {"box_one_row_too_tall": 9, "box_one_row_too_short": 7}.get(fault, 8)
    array = rng.integers(-100, 100, (40, 16)).astype(np.float32)
    return [Map(array, (rows, 16)), _nan(5, 32)]


_RING_FAULTS = dict(
    missing_init=_kinds("mbarrier"),
    init_twice=_kinds("mbarrier"),
    init_count_zero=_kinds("mbarrier"),
    missing_barrier_after_init=_kinds("mbarrier race"),
    count_one_too_many=_kinds("deadlock"),
    count_one_too_few=_kinds("race mbarrier"),
    missing_wait=_kinds("race uninitialised"),
    wrong_phase_of_ready=_kinds("race uninitialised"),
    waits_for_other_stage=_kinds("race uninitialised"),
    wrong_phase_of_empty=_kinds("deadlock"),
    early_reuse=_kinds("race mbarrier"),
    missing_release=_kinds("deadlock"),
    missing_expect=_kinds("mbarrier race uninitialised"),
    arrives_twice=_kinds("mbarrier"),
    bytes_too_few=_kinds("mbarrier race uninitialised"),
    bytes_too_many=_kinds("deadlock"),
    loads_twice=_kinds("mbarrier race"),
    misaligned_destination=_kinds("misaligned"),
    box_one_row_too_tall=_kinds("mbarrier race"),
    box_one_row_too_short=_kinds("deadlock"),
)

_STORE_FAULTS = dict(
    missing_proxy_fence=_kinds("proxy"),
    missing_read_wait=_kinds("race cluster-exit"),
    missing_commit=_kinds("race cluster-exit"),
    hole_in_tile=_kinds("uninitialised"),
    misaligned_source=_kinds("misaligned"),
)

_BULK_FAULTS = dict(
    size_not_a_multiple_of_16=_kinds("misaligned"),
    misaligned_source=_kinds("misaligned"),
    misaligned_destination=_kinds("misaligned"),
    source_past_the_end=_kinds("out-of-bounds"),
    destination_past_the_end=_kinds("out-of-bounds"),
    load_past_the_array=_kinds("out-of-bounds"),
    missing_wait=_kinds("race uninitialised"),
    missing_proxy_fence=_kinds("proxy"),
    store_past_the_end=_kinds("out-of-bounds"),
    reads_before_store_done=_kinds("race proxy"),
)

_PRODUCT_FAULTS = dict(
    columns_not_a_power_of_two=_kinds("tensor-memory"),
    too_many_columns=_kinds("tensor-memory"),
    alloc_by_one_lane=_kinds("divergence"),
    alloc_after_relinquish=_kinds("tensor-memory"),
    missing_dealloc=_kinds("tensor-memory"),
    dealloc_of_other_size=_kinds("tensor-memory"),
    missing_barrier_before_dealloc=_kinds("tensor-memory race"),
    missing_proxy_fence=_kinds("proxy"),
    missing_barrier_before_mma=_kinds("race proxy uninitialised"),
    hole_in_operand=_kinds("uninitialised"),
    descriptor_without_version=_kinds("descriptor"),
    illegal_swizzle=_kinds("descriptor"),
    wrong_stride=_kinds("uninitialised out-of-bounds"),
    illegal_n=_kinds("descriptor"),
    illegal_m=_kinds("descriptor"),
    illegal_format=_kinds("descriptor"),
    reserved_bit=_kinds("descriptor"),
    n_past_the_allocation=_kinds("tensor-memory uninitialised out-of-bounds"),
    accumulator_past_the_allocation=_kinds("tensor-memory"),
    accumulates_onto_nothing=_kinds("uninitialised"),
    operand_overwritten=_kinds("race"),
    missing_commit=_kinds("deadlock"),
    commit_count=_kinds("deadlock"),
    missing_wait=_kinds("race tensor-memory uninitialised"),
    missing_fence_after=_kinds("race tensor-memory"),
    wrong_lane_window=_kinds("tensor-memory"),
    column_past_the_allocation=_kinds("tensor-memory"),
    columns_never_written=_kinds("uninitialised"),
)

_CHAIN_FAULTS = dict(
    store_in_wrong_window=_kinds("tensor-memory"),
    operand_overlaps_result=_kinds("tensor-memory race"),
    missing_wait_st=_kinds("race tensor-memory uninitialised"),
    missing_fence_before=_kinds("race tensor-memory uninitialised"),
    missing_fence_after=_kinds("race tensor-memory uninitialised"),
    missing_barrier=_kinds("race tensor-memory uninitialised"),
    missing_wait_for_mma=_kinds("race tensor-memory uninitialised"),
    same_phase_twice=_kinds("race tensor-memory"),
    missing_wait_ld=_kinds("race tensor-memory"),
)

_SCALED_FAULTS = dict(
    illegal_scale_id=_kinds("descriptor"),
    code_of_other_kind=_kinds("descriptor"),
    illegal_m=_kinds("descriptor"),
    transposed_operand=_kinds("descriptor"),
    scales_in_one_quarter=_kinds("uninitialised"),
    scales_never_written=_kinds("uninitialised"),
    scales_overlap_result=_kinds("tensor-memory race"),
    scales_overwritten=_kinds("race tensor-memory"),
)

_EXCHANGE_FAULTS = dict(
    missing_cluster_barrier=_kinds("cluster-start"),
    missing_cluster_wait=_kinds("cluster-start"),
    barrier_in_divergent_code=_kinds("divergence"),
    rank_outside_cluster=_kinds("out-of-bounds cluster"),
    misaligned_store=_kinds("misaligned"),
    store_past_the_end=_kinds("out-of-bounds"),
    barrier_of_other_cta=_kinds("mbarrier"),
    missing_expect=_kinds("mbarrier race uninitialised"),
    bytes_too_few=_kinds("mbarrier race uninitialised"),
    bytes_too_many=_kinds("deadlock"),
    missing_wait=_kinds("race uninitialised"),
)

_REMOTE_FAULTS = dict(
    missing_first_barrier=_kinds("cluster-start"),
    missing_wait=_kinds("cluster-start"),
    barrier_before_store=_kinds("race uninitialised"),
    missing_last_barrier=_kinds("cluster-exit"),
    one_cta_skips_barrier=_kinds("cluster-exit"),
    arrives_twice=_kinds("cluster barrier deadlock"),
)

_SHARING_FAULTS = dict(
    missing_barrier=_kinds("race uninitialised"),
    warp_barrier_only=_kinds("race uninitialised"),
    barrier_in_divergent_code=_kinds("divergence"),
    one_warp_skips_barrier=_kinds("deadlock race uninitialised"),
    barriers_of_different_names=_kinds("deadlock"),
    barrier_waits_for_too_many=_kinds("deadlock"),
    barrier_of_no_warp_multiple=_kinds("barrier"),
    uninitialised_shared=_kinds("uninitialised"),
    global_load_past_the_end=_kinds("out-of-bounds"),
    global_load_before_the_start=_kinds("out-of-bounds"),
    shared_load_past_the_end=_kinds("out-of-bounds"),
    local_past_the_end=_kinds("out-of-bounds"),
    constant_past_the_end=_kinds("out-of-bounds"),
    misaligned_shared_load=_kinds("misaligned"),
    misaligned_global_store=_kinds("misaligned"),
    two_blocks_one_word=_kinds("race"),
    plain_add=_kinds("race"),
    shuffle_from_absent_lane=_kinds("divergence"),
    membermask_without_itself=_kinds("divergence"),
)

_STAGED_FAULTS = dict(
    misaligned_destination=_kinds("misaligned"),
    source_past_the_end=_kinds("out-of-bounds"),
    missing_wait=_kinds("race uninitialised"),
    waits_for_too_few=_kinds("race uninitialised"),
    missing_commit=_kinds("race uninitialised"),
    missing_barrier=_kinds("race uninitialised"),
    overwritten_early=_kinds("race"),
)

_FRAGMENT_FAULTS = dict(
    misaligned_row=_kinds("misaligned"),
    row_past_the_end=_kinds("out-of-bounds"),
    hole_in_tile=_kinds("uninitialised"),
    mma_by_half_a_warp=_kinds("divergence"),
)


def _small_halves(rng, *shape):
    return rng.integers(-4, 5, shape).astype(np.float16)


def _bits(x):
    return x.view(np.uint16)


def _product(rng, fault):
    return [_bits(_small_halves(rng, 128, 32)), _bits(_small_halves(rng, 16, 32)), _nan(128, 16)]


def _product_answer(arguments):
    a, b = (x.view(np.float16).astype(np.float32) for x in arguments[:2])
    return {2: a @ b.T}


def _chain(rng, fault):
    return [_small_halves(rng, 2, 128, 16).view(np.uint32), _bits(_small_halves(rng, 16, 16)), _nan(2, 128, 16)]


def _chain_answer(arguments):
    a, b = (x.view(np.float16).astype(np.float32) for x in arguments[:2])
    return {2: a @ b.T}


def _scaled(rng, fault):
    codes = [rng.integers(0, 256, (rows, 32)).astype(np.uint8).view(np.uint32) for rows in (128, 8)]
    # Powers of two, so that every sum is exact.
    scales = [
        (2.0 ** rng.integers(-1, 2, (rows, 4))).astype(ml_dtypes.float8_e4m3fn).view(np.uint32)[:, 0] for rows in (128, 8)
    ]
    return [*codes, *scales, _nan(128, 8)]


def _scaled_answer(arguments):
    def values(codes, scales):
        codes = codes.view(np.uint8)
        elements = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], -1).reshape(len(codes), 64)
        factors = scales.view(ml_dtypes.float8_e4m3fn).reshape(-1, 4).astype(np.float64)
        return elements * np.repeat(factors, 16, 1)

    return {4: values(arguments[0], arguments[2]) @ values(arguments[1], arguments[3]).T}


def _bulk(rng, fault):
    return [rng.integers(0, 1000, 64).astype(np.uint32), np.full(64, 0xDEAD, np.uint32)]


def _bulk_answer(arguments):
    out = arguments[0] + 1
    out[0] = out[1] + 1
    return {1: out}


def _exchange(rng, fault):
    return [rng.integers(-50, 50, (4, 64)).astype(np.float32), _nan(4, 64)]


def _sharing(rng, fault):
    return [rng.integers(0, 1000, 128).astype(np.uint32), np.full(128, 0xDEAD, np.uint32), np.zeros(1, np.uint32)]


def _sharing_answer(arguments):
    turned = arguments[0].reshape(2, 64)[:, ::-1].astype(np.uint32)
    k = turned % 4
    out = turned + np.arange(64, dtype=np.uint32) * k + (k + 1)
    return {1: out.reshape(-1), 2: out.sum(keepdims=True).reshape(1)}


def _fragments(rng, fault):
    return [_bits(_small_halves(rng, 16, 16)), _bits(_small_halves(rng, 16, 16)), _nan(16, 8)]


def _fragments_answer(arguments):
    a, b = (x.view(np.float16).astype(np.float32) for x in arguments[:2])
    return {2: a.T @ b[:, :8]}


KERNELS = (
    Kernel("tensor_ring", "sm_100a", 1, 64, 1, _ring,
           lambda a: {1: a[0].array.reshape(5, 4, 32).sum(1)}, _RING_FAULTS),
    Kernel("tensor_store", "sm_90a", 1, 32, 1, lambda rng, fault: [Map(_nan(16, 16), (8, 16))],
           lambda a: {0: 100.0 * np.arange(16)[:, None] + np.arange(16)[None, :]}, _STORE_FAULTS),
    Kernel("bulk_copy", "sm_100a", 1, 32, 1, _bulk, _bulk_answer, _BULK_FAULTS),
    Kernel("product", "sm_100a", 1, 128, 1, _product, _product_answer, _PRODUCT_FAULTS),
    Kernel("chain", "sm_100a", 1, 128, 1, _chain, _chain_answer, _CHAIN_FAULTS),
    Kernel("scaled", "sm_100a", 1, 128, 1, _scaled, _scaled_answer, _SCALED_FAULTS),
    Kernel("exchange", "sm_90a", 4, 32, 2, _exchange,
           lambda a: {1: a[0] + a[0].reshape(2, 2, 64)[:, ::-1].reshape(4, 64)}, _EXCHANGE_FAULTS),
    Kernel("remote_read", "sm_90a", 4, 32, 2,
           lambda rng, fault: [rng.integers(0, 99, (4, 32)).astype(np.uint32), np.full((4, 32), 0xDEAD, np.uint32)],
           lambda a: {1: a[0].reshape(2, 2, 32)[:, ::-1, ::-1].reshape(4, 32)}, _REMOTE_FAULTS),
    Kernel("sharing", "sm_80", 2, 64, 1, _sharing, _sharing_answer, _SHARING_FAULTS),
    Kernel("staged_copy", "sm_80", 1, 64, 1,
           lambda rng, fault: [rng.integers(0, 99, (3, 64)).astype(np.uint32), np.full((3, 64), 0xDEAD, np.uint32)],
           lambda a: {1: np.concatenate([a[0][:, 32:], a[0][:, :32]], 1)}, _STAGED_FAULTS),
    Kernel("fragments", "sm_80", 1, 32, 1, _fragments, _fragments_answer, _FRAGMENT_FAULTS),
)
