"""Imports every module that registers instruction forms."""

from . import (  # noqa: F401
    async_copies,
    clusters,
    mbarrier,
    rows_control,
    rows_float,
    rows_integer,
    rows_matrix,
    rows_memory,
    rows_predicate,
    tcgen05,
    tcgen05_mma,
    tensor_copies,
    warp_matrix,
    wgmma,
)
