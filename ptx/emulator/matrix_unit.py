"""mma.sync as a separately compiled unit: operand lists come from V."""

from __future__ import annotations

from .jit import unit
from .matrix_compiled import run_matrix


@unit("void", "U2 I1 i i i i i", allocates=True)
def matrix_lanes(F, V, base, registers, register_count, attributes, attribute_count):
    """One mma.sync of a full warp; both lists lie in V."""
    run_matrix(
        0, F, V[registers : registers + register_count], base, V[attributes : attributes + attribute_count]
    )
