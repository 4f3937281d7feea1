"""The planar page pool: where each byte of a page lies, views of it in any array library, and the host cache writer.

One page holds 128 tokens of every KV head, K side first::

    0                        K codes   [Hkv, 128, 64]   packed E2M1, the even element in the low nibble
    Hkv*128*64               K scales  [Hkv, 128, 8]    E4M3, token-major
    Hkv*128*72               V codes   [Hkv, 128, 64]
    Hkv*128*136              V scales  [Hkv, 128, 8]    E4M3, swizzled (nvfp4.v_scale_positions)
    Hkv*128*144              end of the page

vLLM spells the same bytes ``[pages, 2, Hkv, 128, 72]``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from msa_cudacore.arguments import describe
from msa_cudacore.checks import check_integer, check_positive
from msa_cudacore.nvfp4 import SCALE_GROUP, as_bytes, quantize, v_scale_positions

HEAD_DIM = 128
PAGE_SIZE = 128
"""Tokens of a page, which is also the sparse block."""

CODE_BYTES = HEAD_DIM // 2
SCALE_BYTES = HEAD_DIM // SCALE_GROUP
TOKEN_BYTES = CODE_BYTES + SCALE_BYTES

_INT32_MAX = 2**31 - 1
_MOST_BYTES = 2**48
"""Of a pool: the address space of a process, far above any memory and far below what NumPy can count."""


class PoolViews(NamedTuple):
    """The four views of a pool: codes [pages, Hkv, 128, 64] and scales [pages, Hkv, 128, 8], uint8."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class Region(NamedTuple):
    """One part of a page: its first byte, and its inner extent (the part is [Hkv, 128, inner])."""

    offset: int
    inner: int


def page_bytes(num_kv_heads: int) -> int:
    """Bytes of one page: Hkv * 128 * 144."""
    return _heads(num_kv_heads) * PAGE_SIZE * 2 * TOKEN_BYTES


def page_regions(num_kv_heads: int) -> dict[str, Region]:
    """The byte map of a page, keyed by the names of :class:`PoolViews`."""
    tokens = _heads(num_kv_heads) * PAGE_SIZE
    return {
        "k": Region(0, CODE_BYTES),
        "k_scale": Region(tokens * CODE_BYTES, SCALE_BYTES),
        "v": Region(tokens * TOKEN_BYTES, CODE_BYTES),
        "v_scale": Region(tokens * (TOKEN_BYTES + CODE_BYTES), SCALE_BYTES),
    }


def empty_pool(num_pages: int, num_kv_heads: int, *, fill: int = 0) -> np.ndarray:
    """A NumPy pool uint8 [num_pages, page_bytes], 256-byte aligned, every byte set to ``fill``.

    Raises TypeError and ValueError naming an argument, and MemoryError where there is no memory for so many pages.
    """
    num_pages = check_integer("num_pages", num_pages, 1, _INT32_MAX)
    fill = check_integer("fill", fill, 0, 255)
    shape = num_pages, page_bytes(num_kv_heads)
    if math.prod(shape) > _MOST_BYTES:
        raise ValueError(
            f"num_pages and num_kv_heads are {num_pages} and {num_kv_heads}, which make {math.prod(shape)} bytes; "
            f"accepted are at most {_MOST_BYTES}"
        )
    return aligned_bytes(shape, fill)


def aligned_bytes(shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
    """A C-ordered uint8 array whose first byte is 256-byte aligned, as a GPU allocation is."""
    size = math.prod(shape)
    raw = np.full(size + 255, fill, np.uint8) if fill else np.zeros(size + 255, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].reshape(shape)


def pool_views(pool: Any, num_kv_heads: int | None = None) -> PoolViews:
    """The four strided views of a pool; nothing is copied, and the array library is that of ``pool``.

    Parameters
    ----------
    pool
        A uint8 array (NumPy, torch, CuPy: whatever slices into views), either ``[pages, page_bytes]``, whose pages may
        lie apart (a slice of a larger allocation), or vLLM's ``[pages, 2, Hkv, 128, 72]``.
    num_kv_heads
        Needed for the first form only.

    Raises
    ------
    TypeError
        The elements are not bytes.
    ValueError
        The shape, or the inside of a page, does not fit the layout.
    """
    if not (hasattr(pool, "dtype") and hasattr(pool, "shape")):
        raise TypeError(f"pool: a uint8 array is needed, got a {type(pool).__name__}")
    if str(pool.dtype).rpartition(".")[2] != "uint8":
        raise TypeError(f"pool: a uint8 array is needed, got {pool.dtype}")
    shape = tuple(int(n) for n in pool.shape)
    if len(shape) == 5:
        if shape[1] != 2 or shape[3:] != (PAGE_SIZE, TOKEN_BYTES):
            raise ValueError(f"pool: [pages, 2, Hkv, {PAGE_SIZE}, {TOKEN_BYTES}] is needed, got {shape}")
        if num_kv_heads is not None and _heads(num_kv_heads) != shape[2]:
            raise ValueError(f"num_kv_heads: {num_kv_heads} was given, but the pool's shape says {shape[2]}")
        heads = _heads(shape[2])
    elif len(shape) == 2:
        if num_kv_heads is None:
            raise ValueError("num_kv_heads: needed when the pool is [pages, page_bytes]")
        heads = _heads(num_kv_heads)
        if shape[1] != page_bytes(heads):
            raise ValueError(f"pool: {heads} KV heads need pages of {page_bytes(heads)} bytes, got shape {shape}")
    else:
        forms = f"[pages, page_bytes] or [pages, 2, Hkv, {PAGE_SIZE}, {TOKEN_BYTES}]"
        raise ValueError(f"pool: {forms} is needed, got {shape}")
    _require_dense_pages(pool, shape)
    flat = pool.reshape(shape[0], page_bytes(heads))
    parts = {
        name: flat[:, at : at + heads * PAGE_SIZE * inner].reshape(shape[0], heads, PAGE_SIZE, inner)
        for name, (at, inner) in page_regions(heads).items()
    }
    return PoolViews(**parts)


def vllm_view(pool: Any, num_kv_heads: int) -> Any:
    """The pool ``[pages, page_bytes]`` in vLLM's spelling ``[pages, 2, Hkv, 128, 72]``; a view."""
    pool_views(pool, num_kv_heads)
    return pool.reshape(int(pool.shape[0]), 2, num_kv_heads, PAGE_SIZE, TOKEN_BYTES)


def slot_mapping(page_table: np.ndarray, request: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """Slots (int64) of tokens at logical ``positions`` of ``request``.

    A slot is ``page_table[request, position // 128] * 128 + position % 128``.

    Raises
    ------
    TypeError
        An argument is not of integers.
    ValueError
        A request or a position lies beyond the page table, or a position on a page that its request does not
        have: the entry is negative, and a token written there would be lost, since a negative slot is skipped.
    """
    page_table, request, positions = np.asarray(page_table), np.asarray(request), np.asarray(positions)
    if page_table.ndim != 2:
        raise ValueError(f"page_table: [batch, max_pages] is needed, got shape {page_table.shape}")
    for name, array in (("page_table", page_table), ("request", request), ("positions", positions)):
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name}: integers are needed, got {array.dtype}")
    try:
        request, positions = np.broadcast_arrays(request, positions)
    except ValueError:
        shapes = f"{request.shape} and {positions.shape}"
        raise ValueError(f"request and positions: shapes that broadcast are needed, got {shapes}") from None
    if positions.size == 0:
        return np.empty(positions.shape, np.int64)
    if request.min() < 0 or request.max() >= page_table.shape[0]:
        raise ValueError(
            f"request: must lie in 0..{page_table.shape[0] - 1} for a page table of {page_table.shape[0]} rows, "
            f"got {request.min()}..{request.max()}"
        )
    if positions.min() < 0 or positions.max() >= page_table.shape[1] * PAGE_SIZE:
        raise ValueError(
            f"positions: must lie in 0..{page_table.shape[1] * PAGE_SIZE - 1} for a page table of "
            f"{page_table.shape[1]} columns, got {positions.min()}..{positions.max()}"
        )
    pages = page_table[request, positions // PAGE_SIZE].astype(np.int64)
    if pages.min() < 0:
        first = np.argmin(pages)
        raise ValueError(
            f"positions: request {request.flat[first]} has page {pages.flat[first]} at position "
            f"{positions.flat[first]}; needed is a page that it owns"
        )
    return pages * PAGE_SIZE + (positions % PAGE_SIZE).astype(np.int64)


def write_tokens(
    views: PoolViews,
    k: np.ndarray,
    v: np.ndarray,
    slots: np.ndarray,
    *,
    k_global_scale: float,
    v_global_scale: float,
) -> None:
    """Quantise new tokens and write them into their slots, in place, on the host.

    K scales are stored token-major, V scales swizzled. Every other byte of the pool is left alone. For tests and for
    pools on the host; `examples/torch_engine.py` has a writer that gives the same bytes on a device.

    Parameters
    ----------
    views
        NumPy views of the pool, as :func:`pool_views` gives them; separate allocations are fine.
    k, v
        NumPy arrays [tokens, Hkv, 128] of real numbers (float32, float64, float16, ``ml_dtypes.bfloat16``).
    slots
        Integers [tokens], ``page id * 128 + offset in the page`` (:func:`slot_mapping`). A negative slot skips its
        token, which is how engines pad a batch.
    k_global_scale, v_global_scale
        Positive; the same numbers are given to the decode.

    Raises
    ------
    TypeError
        A view, `k` or `v` is no NumPy array, or a dtype is not accepted; nothing is written.
    ValueError
        A shape does not fit, a slot lies outside the pool or is named twice, a value is not finite, or a scale is not
        positive; nothing is written.
    """
    if not isinstance(views, (tuple, list)) or len(views) != len(PoolViews._fields):
        raise TypeError(f"views: {', '.join(PoolViews._fields)} are needed, got a {type(views).__name__}")
    views = PoolViews(*views)
    _check_numpy_views(views)
    num_pages, heads = views.k.shape[:2]
    slots = np.asarray(slots)
    if slots.ndim != 1 or slots.dtype.kind not in "iu":
        raise TypeError(f"slots: a vector of integers is needed, got {slots.dtype} of shape {slots.shape}")
    for name, side in (("k", k), ("v", v)):
        if not isinstance(side, np.ndarray):
            raise TypeError(f"{name}: the host writer takes NumPy arrays, got {_kind(side)}")
        if side.shape != (slots.size, heads, HEAD_DIM):
            expected = f"[tokens, Hkv, {HEAD_DIM}] = [{slots.size}, {heads}, {HEAD_DIM}]"
            raise ValueError(f"{name}: {expected} is needed, got {side.shape}")
        if side.dtype.kind != "f" and side.dtype != ml_dtypes.bfloat16:
            raise TypeError(f"{name}: float16, bfloat16, float32 or float64 is needed, got {side.dtype}")
    check_positive("k_global_scale", k_global_scale)
    check_positive("v_global_scale", v_global_scale)
    live = slots >= 0
    chosen = slots[live]
    # Compared as they came: a huge uint64 turns negative in int64.
    if chosen.size and chosen.max() >= num_pages * PAGE_SIZE:
        size = f"{num_pages} pages ({num_pages * PAGE_SIZE} slots)"
        raise ValueError(f"slots: {chosen.max()} lies outside the pool of {size}")
    chosen = chosen.astype(np.int64)
    values, counts = np.unique(chosen, return_counts=True)
    if values.size != chosen.size:
        repeated = counts.argmax()
        raise ValueError(f"slots: slot {values[repeated]} is named {counts[repeated]} times; each may be written once a call")

    quantized = []
    for name, side, scale in (("k", k, k_global_scale), ("v", v, v_global_scale)):
        try:
            quantized.append(quantize(side[live], scale))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    (k_codes, k_scales), (v_codes, v_scales) = quantized
    page, token = np.divmod(chosen, PAGE_SIZE)
    views.k[page, :, token] = k_codes
    views.v[page, :, token] = v_codes
    as_bytes(views.k_scale)[page, :, token] = k_scales
    positions = v_scale_positions(PAGE_SIZE, SCALE_BYTES).reshape(PAGE_SIZE, SCALE_BYTES)
    row, column = np.divmod(positions[token], SCALE_BYTES)
    head = np.arange(heads)[None, :, None]
    as_bytes(views.v_scale)[page[:, None, None], head, row[:, None], column[:, None]] = v_scales


def _heads(num_kv_heads: int) -> int:
    return check_integer("num_kv_heads", num_kv_heads, 1, _INT32_MAX)


def _kind(value: Any) -> str:
    """A type's name with its module, as in `torch.Tensor`."""
    return f"{type(value).__module__}.{type(value).__name__}"


def _require_dense_pages(pool: Any, shape: tuple[int, ...]) -> None:
    # reshape() would silently copy a page whose inside is not dense, and writes through the views would be lost.
    strides = pool.stride() if callable(getattr(pool, "stride", None)) else pool.strides
    dense = 1
    for size, stride in zip(reversed(shape[1:]), reversed(tuple(strides)[1:])):
        if size > 1 and stride != dense:
            raise ValueError(f"pool: the bytes of a page must be dense, got strides {tuple(strides)} for shape {shape}")
        dense *= size


def _check_numpy_views(views: PoolViews) -> None:
    for name, view in views._asdict().items():
        if not isinstance(view, np.ndarray):
            raise TypeError(f"{name}: the host writer takes NumPy views, got {_kind(view)}")
        inner = SCALE_BYTES if name.endswith("scale") else CODE_BYTES
        expected = (*views.k.shape[:2], PAGE_SIZE, inner)
        if view.ndim != 4 or view.shape != expected:
            raise ValueError(f"{name}: shape {expected} is needed, got {view.shape}")
        if name.endswith("scale"):
            if view.dtype not in (np.uint8, ml_dtypes.float8_e4m3fn):
                raise TypeError(f"{name}: E4M3 scales are uint8 or float8_e4m3fn, got {view.dtype}")
        elif view.dtype != np.uint8:
            raise TypeError(f"{name}: packed E2M1 codes are uint8, got {view.dtype}")
        if not view.flags.writeable:
            raise ValueError(f"{name}: the view is read-only")
    tensors = [describe(name, view) for name, view in views._asdict().items()]
    for second, tensor in enumerate(tensors):
        for other in tensors[:second]:
            if tensor.overlaps(other):
                raise ValueError(f"{tensor.name}: memory of its own is needed, got a view that overlaps {other.name}")
