"""What the operator accepts: every check of an argument that needs no device, made without a driver call.

A refused argument raises `ValueError` or `TypeError` whose message names the argument, what it was, and what is
accepted. Values that live in device memory (ids, page ids, lengths) cannot be checked here without a
synchronisation; the programs bound them on the device instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arguments import Tensor, allocate_like, describe
from .checks import check_integer, check_positive, shown
from .pool import CODE_BYTES, HEAD_DIM, PAGE_SIZE, SCALE_BYTES

__all__ = [
    "ALIGNMENT", "LOG2E", "MAX_GROUP", "MAX_SEQLEN_Q", "MAX_TOPK", "Call", "Problem", "check_call", "check_integer",
    "check_splits", "check_workspace", "validate", "with_outputs",
]

MAX_GROUP = 16
"""Most query heads that may share a KV head."""
MAX_SEQLEN_Q = 32
MAX_TOPK = 64
ALIGNMENT = 16
"""Bytes: bases and outer strides of q, out, the pool views and the workspace are multiples of it."""
LOG2E = math.log2(math.e)

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """The sizes of one decode step. Plain integers, so that plans are hashable and testable without a GPU."""

    batch: int
    seqlen_q: int
    num_q_heads: int
    num_kv_heads: int
    topk: int
    max_pages: int
    num_pages: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query tokens of the batch."""
        return self.batch * self.seqlen_q

    @property
    def items(self) -> int:
        """Units of independent work: (query token, KV head) pairs."""
        return self.rows * self.num_kv_heads

    @property
    def pages_per_item(self) -> int:
        """Most pages an item can select that exist."""
        return min(self.topk, self.max_pages)


@dataclass(frozen=True)
class Call:
    """A validated call: what to compute and where its operands lie. `out` and `lse` are None, in a call that
    :func:`check_call` returns, where the caller gave none."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    q2k_indices: Tensor
    page_table: Tensor
    seqused_k: Tensor
    out: Tensor | None
    lse: Tensor | None
    softmax_scale: float
    k_global_scale: float
    v_global_scale: float
    enable_pdl: bool = False
    """Launch by programmatic dependent launch."""

    @property
    def score_scale(self) -> float:
        """Factor from `q . (e2m1 * e4m3)` to scores in base-2 logarithm units."""
        return self.softmax_scale * self.k_global_scale * LOG2E

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (
            self.q, self.k, self.v, self.k_scale, self.v_scale, self.q2k_indices, self.page_table, self.seqused_k,
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """`out` and `lse`, as far as they are there."""
        return tuple(tensor for tensor in (self.out, self.lse) if tensor is not None)


def check_call(
    *,
    q: Any,
    k: Any,
    v: Any,
    q2k_indices: Any,
    k_scale: Any,
    v_scale: Any,
    page_table: Any,
    seqused_k: Any,
    k_global_scale: float,
    v_global_scale: float,
    seqlen_q: int,
    softmax_scale: float | None,
    out: Any | None,
    lse: Any | None,
    bf16_as_uint16: bool,
    enable_pdl: bool = False,
) -> Call:
    """Check every argument of :func:`msa_cudacore.prepare_msa_nvfp4_sparse_decode` but `backend`, `splits` and
    `workspace_buffer`. Nothing is allocated: :func:`with_outputs` does that. Raises TypeError and ValueError.
    """
    for name, flag in (("bf16_as_uint16", bf16_as_uint16), ("enable_pdl", enable_pdl)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {shown(flag)}; accepted are True and False")
    q_tensor = _bf16(describe("q", q), bf16_as_uint16)
    tensors = {
        name: describe(name, value)
        for name, value in (
            ("k", k), ("v", v), ("k_scale", k_scale), ("v_scale", v_scale), ("q2k_indices", q2k_indices),
            ("page_table", page_table), ("seqused_k", seqused_k),
        )
    }
    for tensor in tensors.values():
        _same_place(tensor, q_tensor)

    seqlen_q = check_integer("seqlen_q", seqlen_q, 1, MAX_SEQLEN_Q)
    problem = _problem(q_tensor, tensors, seqlen_q)
    _check_rows(q_tensor)
    _check_pool(tensors, problem)
    _check_indices(tensors)

    k_global_scale = check_positive("k_global_scale", k_global_scale)
    v_global_scale = check_positive("v_global_scale", v_global_scale)
    softmax_scale = HEAD_DIM**-0.5 if softmax_scale is None else check_positive("softmax_scale", softmax_scale)
    _check_float32(
        "softmax_scale * k_global_scale * log2(e)", softmax_scale * k_global_scale * LOG2E,
        f"softmax_scale {softmax_scale!r} and k_global_scale {k_global_scale!r}",
    )
    _check_float32("v_global_scale", v_global_scale, f"v_global_scale {v_global_scale!r}")

    call = Call(
        problem=problem, q=q_tensor, **tensors,
        out=None if out is None else _output(describe("out", out), q_tensor, bf16_as_uint16),
        lse=None if lse is None else _output(describe("lse", lse), q_tensor, bf16_as_uint16),
        softmax_scale=softmax_scale, k_global_scale=k_global_scale, v_global_scale=v_global_scale,
        enable_pdl=enable_pdl,
    )
    _check_aliasing(call)
    return call


def with_outputs(call: Call, bf16_as_uint16: bool) -> Call:
    """The call with the outputs that the caller did not give allocated in the library of `q`.

    Raises ValueError where that library is known through DLPack alone and cannot.
    """
    q, missing = call.q, {}
    for name, shape, dtype in (("out", q.shape, "uint16" if bf16_as_uint16 else "bfloat16"), ("lse", q.shape[:2], "float32")):
        if getattr(call, name) is None:
            missing[name] = _output(describe(name, allocate_like(q, name, shape, dtype)), q, bf16_as_uint16)
    return replace(call, **missing)


def validate(*, bf16_as_uint16: bool, **arguments: Any) -> Call:
    """:func:`check_call` and then :func:`with_outputs`."""
    return with_outputs(check_call(bf16_as_uint16=bf16_as_uint16, **arguments), bf16_as_uint16)


def check_workspace(workspace: Tensor, needed: int, call: Call) -> None:
    """Check a caller-owned workspace: where it lies, its size and alignment, and that it overlaps nothing.

    Raises ValueError.
    """
    _same_place(workspace, call.q)
    if not workspace.writable:
        raise ValueError("workspace_buffer is read-only; accepted is writable memory")
    dense = 1
    for size, stride in zip(reversed(workspace.shape), reversed(workspace.strides), strict=True):
        if workspace.elements and size != 1 and stride != dense * workspace.element_bytes:
            raise ValueError(f"workspace_buffer has byte strides {workspace.strides}; accepted is contiguous memory")
        dense *= size
    available = workspace.elements * workspace.element_bytes
    if available < needed:
        raise ValueError(
            f"workspace_buffer holds {available} bytes; this call needs at least {needed} "
            f"(see msa_nvfp4_decode_workspace_size)"
        )
    if workspace.pointer % ALIGNMENT:
        raise ValueError(f"workspace_buffer starts at {workspace.pointer:#x}; accepted are multiples of 16 bytes")
    for tensor in (*call.inputs, *call.outputs):
        if workspace.overlaps(tensor):
            raise ValueError(f"workspace_buffer overlaps {tensor.name}; accepted is memory of its own")


def check_splits(splits: Any) -> int | None:
    """Check that a requested split factor is a positive integer; which ones are served is the program's to say."""
    accepted = "None and the positive integers that the backend serves"
    return None if splits is None else check_integer("splits", splits, 1, _INT32_MAX, accepted)


def _check_float32(what: str, value: float, inputs: str) -> None:
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= value <= float(limits.max):
        raise ValueError(
            f"{inputs}: {what} is {value:.6g}, outside the normal range of float32 "
            f"[{float(limits.tiny):.3g}, {float(limits.max):.3g}] in which the kernels hold it"
        )


def _same_place(tensor: Tensor, q: Tensor) -> None:
    if tensor.place != q.place:
        raise ValueError(f"{tensor.name} lies on {tensor.place} and q on {q.place}; accepted is one device for all")


def _bf16(tensor: Tensor, as_uint16: bool) -> Tensor:
    if tensor.dtype == "uint16" and as_uint16:
        return tensor.retyped("bfloat16")
    if tensor.dtype != "bfloat16":
        accepted = "bfloat16 (or its bits as uint16 with bf16_as_uint16=True)"
        raise TypeError(f"{tensor.name} has dtype {tensor.dtype}; accepted is {accepted}")
    return tensor


def _dtype(tensor: Tensor, *accepted: str) -> None:
    if tensor.dtype not in accepted:
        raise TypeError(f"{tensor.name} has dtype {tensor.dtype}; accepted is {' or '.join(accepted)}")


def _shape(tensor: Tensor, expected: tuple[int | None, ...], meaning: str) -> None:
    fits = len(tensor.shape) == len(expected) and all(
        want is None or want == got for want, got in zip(expected, tensor.shape)
    )
    if not fits:
        numbers_wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}; accepted is {meaning} = [{numbers_wanted}]")


def _problem(q: Tensor, tensors: dict[str, Tensor], seqlen_q: int) -> Problem:
    _shape(q, (None, None, HEAD_DIM), "[batch * seqlen_q, num_q_heads, 128]")
    rows, num_q_heads, _ = q.shape
    k, seqused_k = tensors["k"], tensors["seqused_k"]
    _shape(k, (None, None, PAGE_SIZE, CODE_BYTES), "[num_pages, num_kv_heads, 128, 64]")
    num_pages, num_kv_heads = k.shape[:2]
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_q_heads} heads and k {num_kv_heads}; accepted is a positive multiple of the KV heads"
        )
    if num_q_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"q has {num_q_heads} heads and k {num_kv_heads}, {num_q_heads // num_kv_heads} query heads for each "
            f"KV head; accepted are at most {MAX_GROUP}"
        )
    _shape(seqused_k, (None,), "[batch]")
    batch = seqused_k.shape[0]
    if rows != batch * seqlen_q:
        raise ValueError(
            f"q has {rows} rows, seqused_k {batch} requests and seqlen_q is {seqlen_q}; "
            f"accepted is batch * seqlen_q = {batch * seqlen_q} rows"
        )
    _shape(tensors["q2k_indices"], (num_kv_heads, rows, None), "[num_kv_heads, batch * seqlen_q, topk]")
    topk = tensors["q2k_indices"].shape[2]
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"q2k_indices selects {topk} pages a row; accepted are 1 to {MAX_TOPK}")
    _shape(tensors["page_table"], (batch, None), "[batch, max_pages]")
    problem = Problem(
        batch, seqlen_q, num_q_heads, num_kv_heads, topk, tensors["page_table"].shape[1], num_pages
    )
    for what, count in (
        ("num_pages", num_pages), ("page_table columns", problem.max_pages), ("query rows x heads", rows * num_q_heads),
        ("batch * seqlen_q * num_kv_heads", problem.items),
    ):
        if count > _INT32_MAX:
            raise ValueError(f"{what} is {count}; accepted are at most {_INT32_MAX}")
    return problem


def _check_rows(tensor: Tensor) -> None:
    """Rows and heads of q or out: unit inner stride, the rest in 16-byte steps, for vector loads and stores."""
    if tensor.elements == 0:
        return
    *outer, inner = tensor.canonical_strides()
    if inner != tensor.element_bytes:
        accepted = f"{tensor.element_bytes} (dense heads)"
        raise ValueError(f"{tensor.name} has inner byte stride {inner}; accepted is {accepted}")
    _aligned(tensor, outer)


def _aligned(tensor: Tensor, strides: list[int] | tuple[int, ...]) -> None:
    for stride in strides:
        if stride % ALIGNMENT:
            raise ValueError(
                f"{tensor.name} has byte strides {tensor.strides}; accepted are multiples of {ALIGNMENT} bytes "
                f"in all dimensions but the innermost"
            )
    if tensor.pointer % ALIGNMENT:
        raise ValueError(f"{tensor.name} starts at {tensor.pointer:#x}; accepted are multiples of {ALIGNMENT} bytes")


def _check_pool(tensors: dict[str, Tensor], problem: Problem) -> None:
    for name, inner in (("k", CODE_BYTES), ("v", CODE_BYTES), ("k_scale", SCALE_BYTES), ("v_scale", SCALE_BYTES)):
        tensor = tensors[name]
        scale = name.endswith("scale")
        _shape(
            tensor,
            (problem.num_pages, problem.num_kv_heads, PAGE_SIZE, inner),
            f"[num_pages, num_kv_heads, 128, {inner}] with num_pages and num_kv_heads as in k",
        )
        _dtype(tensor, "uint8", *(("float8_e4m3fn",) if scale else ()))
        if tensor.elements == 0:
            continue
        page, head, token, byte = tensor.canonical_strides()
        if byte != 1 or token != inner:
            raise ValueError(
                f"{name} has byte strides {tensor.strides}; accepted are dense [128, {inner}] head tiles, "
                f"whose last two strides are ({inner}, 1)"
            )
        _aligned(tensor, (page, head))
        _check_disjoint(tensor, ((problem.num_pages, page), (problem.num_kv_heads, head)), PAGE_SIZE * inner, "page and head")


def _check_disjoint(tensor: Tensor, outer: tuple[tuple[int, int], ...], tile_bytes: int, of: str) -> None:
    """Refuse strides by which two tiles, one for each index of the outer dimensions, would share bytes."""
    reach = tile_bytes
    for size, stride in sorted(((s, st) for s, st in outer if s > 1), key=lambda pair: pair[1]):
        if stride < reach:
            raise ValueError(
                f"{tensor.name} has byte strides {tensor.strides}, by which pieces of {tile_bytes} bytes overlap; "
                f"accepted are {of} strides that keep them apart"
            )
        reach = stride * (size - 1) + reach


def _check_indices(tensors: dict[str, Tensor]) -> None:
    for name in ("q2k_indices", "page_table", "seqused_k"):
        tensor = tensors[name]
        if tensor.dtype != "int32":
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted is int32 (nothing is cast silently)")
        _check_words(tensor)


def _check_words(tensor: Tensor) -> None:
    """32-bit elements on their own boundaries, as the kernels load and store them."""
    if tensor.elements and (tensor.pointer % 4 or any(stride % 4 for stride in tensor.canonical_strides())):
        raise ValueError(
            f"{tensor.name} starts at {tensor.pointer:#x} with byte strides {tensor.strides}; accepted are multiples of 4"
        )


def _output(tensor: Tensor, q: Tensor, as_uint16: bool) -> Tensor:
    """Check `out` or `lse`, given or just allocated."""
    if tensor.name == "out":
        tensor, shape = _bf16(tensor, as_uint16), q.shape
        meaning = "[batch * seqlen_q, num_q_heads, 128], as q"
    else:
        _dtype(tensor, "float32")
        shape, meaning = q.shape[:2], "[batch * seqlen_q, num_q_heads]"
    _same_place(tensor, q)
    _shape(tensor, shape, meaning)
    if not tensor.writable:
        raise ValueError(f"{tensor.name} is read-only; accepted is writable memory")
    if tensor.name == "out":
        _check_rows(tensor)
    else:
        _check_words(tensor)
    row, head = tensor.canonical_strides()[:2]
    inner = math.prod(shape[2:]) * tensor.element_bytes
    if tensor.elements:
        _check_disjoint(tensor, ((shape[0], row), (shape[1], head)), inner, "row and head")
    return tensor


def _check_aliasing(call: Call) -> None:
    """Refuse outputs that share memory with an input or each other: some CTAs write results while others still read."""
    if len(call.outputs) == 2 and call.out.overlaps(call.lse):
        raise ValueError("out overlaps lse; accepted is memory of its own for each")
    for output in call.outputs:
        for tensor in call.inputs:
            if output.overlaps(tensor):
                raise ValueError(f"{output.name} overlaps {tensor.name}; accepted is memory of its own")
