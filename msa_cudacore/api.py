"""The public function: check and bind the tensors of a decode step once, then launch it as often as wanted."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable
from typing import Any

from .arguments import Tensor, allocate_like, describe
from .checks import shown
from .contract import (
    MAX_GROUP, MAX_SEQLEN_Q, MAX_TOPK, Call, Problem, check_call, check_integer, check_splits, check_workspace,
    with_outputs,
)
from .launch import device as device_module
from .launch.device import DeviceFacts
from .program import Bound, Plan, Program
from .programs import select

__all__ = ["MSANvfp4DecodeRunner", "msa_nvfp4_decode_workspace_size", "prepare_msa_nvfp4_sparse_decode"]


class MSANvfp4DecodeRunner:
    """A prepared decode step. Calling it launches the step and returns `out`.

    The runner allocates nothing, reads no device memory on the host and waits for nothing, so the first call ever
    may be made while a CUDA graph is captured. It keeps every bound array, the workspace, counters of its own and
    the loaded kernel alive; neither a launch in flight nor a captured graph does. So keep the runner until its last
    launch has ended, and for as long as the graph is replayed: dropped earlier, it lets a framework give the workspace
    and outputs that the launch still writes to other work. Preparing a runner and dropping it may wait for the device,
    where there are counters to allocate and free.

    New queries, selections, page ids, lengths and cache contents may be written into the bound arrays between
    launches, not during one. One launch of a runner must have ended before the next begins, as on one stream: both
    write the same outputs, partials and counters. Two runners may share a workspace on one stream, not on two.
    """

    def __init__(self, call: Call, bound: Bound, backend: str, workspace: Tensor | None) -> None:
        self._call = call
        self._bound = bound
        self._steps = bound.steps
        self._out = _given(call.out)
        self._lse = _given(call.lse)
        self._workspace = workspace
        self._backend = backend
        if bound.device is not None:
            from .launch import stream

            self._current_stream: Callable[[], Any] = stream.current(call.q.framework, call.q.ordinal)
            self._context = device_module.current(bound.device.ordinal)

    def __call__(self) -> Any:
        """Launch on the current stream of the library that `q` came from, and return `out`."""
        return self.launch()

    def launch(self, stream: Any | None = None) -> Any:
        """Launch on `stream` and return `out`.

        Parameters
        ----------
        stream
            A `cuda.core` stream or graph builder, an object with `__cuda_stream__`, a torch or CuPy stream, the
            integer value of a `cudaStream_t`, or None for the current stream of the library that `q` came from.
            Host backends ignore it.

        Raises
        ------
        TypeError
            `stream` is none of these.
        ValueError
            It is a negative integer.
        """
        if self._bound.device is None:
            for step in self._steps:
                step(None)
            return self._out
        stream = self._current_stream() if stream is None else _resolve_stream(stream)
        pushed = self._context.push()
        try:
            for step in self._steps:
                step(stream)
        finally:
            if pushed:
                self._context.pop()
        return self._out

    @property
    def out(self) -> Any:
        """bfloat16 [batch * seqlen_q, num_q_heads, 128], of the library of `q`.

        Allocated by preparation inside `torch.inference_mode()`, it is an inference tensor, and so is `lse`; give
        outputs of your own where autograd is to see them.
        """
        return self._out

    @property
    def lse(self) -> Any:
        """float32 [batch * seqlen_q, num_q_heads], natural logarithm; -inf for a row that sees no key."""
        return self._lse

    @property
    def splits(self) -> int:
        """Into how many CTAs each work item, a (query token, KV head) pair, is split.

        It is 1 as well where only some items, the last ones, are split; `program` then says into how many.
        """
        return self._bound.plan.splits

    @property
    def backend(self) -> str:
        """The backend that serves this runner: what `auto` resolved to."""
        return self._backend

    @property
    def program(self) -> str:
        """The chosen program with its specialisation, for logs and bug reports."""
        return self._bound.plan.description

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a launch writes; 0 where none is needed."""
        return self._bound.plan.workspace_bytes

    @property
    def problem(self) -> Problem:
        """The sizes of the step."""
        return self._call.problem

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy would return arrays of its own while its launches wrote those of the original.
        raise TypeError("a runner is bound to memory and cannot be copied or pickled; prepare another")

    def __repr__(self) -> str:
        problem = self._call.problem
        return (
            f"MSANvfp4DecodeRunner(program={self.program!r}, splits={self.splits}, device={self._call.q.place!r}, "
            f"batch={problem.batch}, seqlen_q={problem.seqlen_q}, heads={problem.num_q_heads}/{problem.num_kv_heads}, "
            f"topk={problem.topk}, workspace_bytes={self.workspace_bytes})"
        )


def prepare_msa_nvfp4_sparse_decode(
    q: Any,
    k: Any,
    v: Any,
    q2k_indices: Any,
    *,
    k_scale: Any,
    v_scale: Any,
    page_table: Any,
    seqused_k: Any,
    k_global_scale: float,
    v_global_scale: float,
    workspace_buffer: Any | None = None,
    seqlen_q: int = 1,
    softmax_scale: float | None = None,
    out: Any | None = None,
    lse: Any | None = None,
    backend: str = "auto",
    splits: int | None = None,
    bf16_as_uint16: bool = False,
    enable_pdl: bool = False,
) -> MSANvfp4DecodeRunner:
    """Prepare one decode step of MiniMax Sparse Attention over a paged NVFP4 KV cache.

    Every tensor may be a torch tensor, a CuPy or NumPy array, or any object with `__dlpack__`; all lie on one device.
    Tensors are read in place, by their strides; strides of size-1 dimensions are ignored.

    Parameters
    ----------
    q
        bfloat16 [batch * seqlen_q, num_q_heads, 128]. Request b owns rows [b * seqlen_q, (b + 1) * seqlen_q); query
        head h attends to KV head h // (num_q_heads // num_kv_heads). At most 16 query heads for each KV head. Unit
        inner stride; base and other strides multiples of 16 bytes.
    k, v
        uint8 [num_pages, num_kv_heads, 128, 64]: packed E2M1, the even element in the low nibble. Dense [128, 64]
        head tiles; base, page and head strides multiples of 16 bytes. Views of a planar pool (see
        `msa_cudacore.pool`) or of separate allocations.
    q2k_indices
        int32 [num_kv_heads, batch * seqlen_q, topk], topk from 1 to 64 (16 is the tuned case): selected logical
        blocks of the request. Normally ascending and padded with -1. An id that is negative, beyond the page table or
        beyond the request's visible blocks is dropped wherever it stands; an id that appears twice counts twice.
    k_scale, v_scale
        uint8 or float8_e4m3fn [num_pages, num_kv_heads, 128, 8]: E4M3 scales of blocks of 16 elements. K scales are
        token-major; V scales are in the cache writer's swizzled order: the scale of token t, group s is byte
        (t // 4) * 32 + s * 4 + t % 4 of the tile. Linear V scales are not accepted and cannot be told apart.
    page_table
        int32 [batch, max_pages]: physical pages of a request. Entries that are not selected may hold anything; a
        selected entry outside [0, num_pages) is dropped.
    seqused_k
        int32 [batch]: KV tokens of a request, the new tokens included.
    k_global_scale, v_global_scale
        Positive floats. An element's value is e2m1 * e4m3 * global_scale (a factor, not its reciprocal).
    workspace_buffer
        Contiguous device bytes for split-KV partials, at least :func:`msa_nvfp4_decode_workspace_size`, 16-byte
        aligned. Its contents before a launch do not matter. Left out, preparation allocates what is needed.
    seqlen_q
        Query tokens of each request, 1 to 32. Token i sits at position seqused_k[b] - seqlen_q + i and attends
        causally.
    softmax_scale
        Positive; 1 / sqrt(128) when left out.
    out, lse
        Optional outputs: bfloat16 like q, and float32 [batch * seqlen_q, num_q_heads]. `lse` is the natural logarithm
        of the sum of exp(softmax_scale * k_global_scale * q . k). Every row is written on each launch; a row that
        sees no key gets exact zeros and -inf.
    backend
        `auto` takes the best program for the device (`cake` is a synonym); `blackwell` tcgen05 tensor cores, compute
        capability 10.x and 11.0; `portable` any CUDA device of compute capability 8.0 and up; `reference` the float64
        oracle on host arrays, which `auto` takes for those; `emulated` the Blackwell program on host arrays, run
        instruction by instruction in the PTX emulator. `msa_cudacore.programs` has the registry.
    splits
        Into how many CTAs to split each item; None lets the program choose from the shapes and the device. With a
        fixed factor the bits of a row do not depend on the other requests of the batch. The automatic choice
        depends on the batch size and may divide the last items otherwise than the rest, so there a row may differ
        by a rounding between batch sizes and between places in a batch.
    bf16_as_uint16
        Take `q` and `out` as uint16 arrays that hold bfloat16 bits, for libraries without the dtype.
    enable_pdl
        Programmatic dependent launch, compute capability 9.0 and up: the step may be started while the kernel ahead
        of it on the stream still runs, and waits for its end before it touches global memory. It lets a kernel behind
        it, launched in the same way, start early likewise. Results are the same; time is gained where the kernel ahead
        lets dependents start before its end. Host backends ignore it.

    Returns
    -------
    MSANvfp4DecodeRunner

    Raises
    ------
    TypeError, ValueError
        An argument is refused; the message names it, what it was and what is accepted. Nothing has been allocated.
        No driver call has been made either, but to read the device's properties before a split factor, `enable_pdl`,
        `workspace_buffer` or a known `backend` is refused. ValueError as well where `out` or `lse` is left out and the
        library of `q`, known through DLPack alone, cannot allocate it.
    DriverUnavailable
        A CUDA backend is asked for and there is no usable driver or device. It is a RuntimeError.
    RuntimeError
        No program, or not the one asked for, runs on the device or, `emulated`, on this machine, which lacks numba.
    CompileError
        NVRTC cannot compile the program for this device.
    """
    # Allocation comes last, so that a refused call leaves no trace.
    call = check_call(
        q=q, k=k, v=v, q2k_indices=q2k_indices, k_scale=k_scale, v_scale=v_scale, page_table=page_table,
        seqused_k=seqused_k, k_global_scale=k_global_scale, v_global_scale=v_global_scale, seqlen_q=seqlen_q,
        softmax_scale=softmax_scale, out=out, lse=lse, bf16_as_uint16=bf16_as_uint16, enable_pdl=enable_pdl,
    )
    splits = check_splits(splits)
    workspace = None if workspace_buffer is None else describe("workspace_buffer", workspace_buffer)
    program, device = select(backend, call.q.device, call.q.ordinal)
    if enable_pdl and device is not None and device.compute_capability < (9, 0):
        raise ValueError(
            f"enable_pdl is True and q lies on {device}; "
            f"programmatic dependent launch needs compute capability 9.0 or later"
        )
    plan = program.plan(call.problem, device, splits)
    if workspace is not None:
        check_workspace(workspace, plan.workspace_bytes, call)
    return bind_plan(with_outputs(call, bf16_as_uint16), program, device, plan, workspace)


def bind_plan(
    call: Call, program: Program, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None = None
) -> MSANvfp4DecodeRunner:
    """The runner of a checked call by one program's plan; the workspace is allocated where one is needed and none
    given.
    """
    if workspace is None and plan.workspace_bytes:
        shape = (plan.workspace_bytes,)
        workspace = describe("workspace_buffer", allocate_like(call.q, "workspace_buffer", shape, "uint8"))
    return MSANvfp4DecodeRunner(call, program.bind(call, device, plan, workspace), program.backend, workspace)


def msa_nvfp4_decode_workspace_size(
    batch: int,
    num_kv_heads: int,
    device: Any,
    *,
    seqlen_q: int = 1,
    topk: int = 16,
    group: int = MAX_GROUP,
    splits: int | None = None,
) -> int:
    """Bytes of workspace that suffice for a problem of these sizes and for every smaller batch, whatever the
    page table's width: one buffer serves them all. Where several `seqlen_q`, `topk` or `splits` are in use, take the
    largest of their sizes: it need not be that of the largest of them.

    Parameters
    ----------
    batch, num_kv_heads, seqlen_q
        Sizes as :func:`prepare_msa_nvfp4_sparse_decode` sees them.
    device
        A CUDA device: its ordinal, a string such as `"cuda:0"`, a `torch.device`, a `cupy.cuda.Device` or a
        `cuda.core.Device`. `"cuda"` and `torch.device("cuda")` mean the device that is current for the calling
        thread, or 0 where none is. `"cpu"` needs no workspace.
    topk, group, splits
        Selected pages a row, query heads for each KV head, and a forced split factor, where they differ from the
        defaults.

    Returns
    -------
    int
        Bytes, for the program that `auto` takes on the device; 0 where it merges split results without a workspace.

    Raises
    ------
    TypeError, ValueError
        An argument is refused; the message names it, what it was and what is accepted.
    DriverUnavailable
        There is no usable driver, or no such device. It is a RuntimeError.
    RuntimeError
        No program runs on the device.
    """
    batch = check_integer("batch", batch, 0, 2**31 - 1)
    num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1, 2**31 - 1)
    seqlen_q = check_integer("seqlen_q", seqlen_q, 1, MAX_SEQLEN_Q)
    topk = check_integer("topk", topk, 1, MAX_TOPK)
    group = check_integer("group", group, 1, MAX_GROUP)
    forced = check_splits(splits)
    place, ordinal = _place(device)
    program, facts = select("auto", place, ordinal)
    problem = Problem(batch, seqlen_q, num_kv_heads * group, num_kv_heads, topk, max_pages=topk, num_pages=1)
    return program.most_workspace_bytes(problem, facts, forced)


def _given(tensor: Tensor) -> Any:
    """The caller's own object behind a tensor."""
    return tensor.owner[0] if tensor.framework == "dlpack" else tensor.owner


def _resolve_stream(stream: Any) -> Any:
    from .launch.stream import resolve

    return resolve(stream)


def _place(device: Any) -> tuple[str, int]:
    """`("cuda", ordinal)` or `("cpu", 0)` out of any way to name a device."""
    if isinstance(device, numbers.Integral) and not isinstance(device, bool):
        return "cuda", _ordinal(device)
    if isinstance(device, str):
        if match := re.fullmatch(r"(cpu|cuda)(?::(\d{1,9}))?", device, re.ASCII):
            return match[1], 0 if match[1] == "cpu" else _ordinal(match[2] and int(match[2]))
    elif (kind := getattr(device, "type", "cuda")) in ("cpu", "cuda"):
        for attribute in ("device_id", "id", "index"):  # cuda.core.Device, cupy.cuda.Device, torch.device
            ordinal = getattr(device, attribute, None)
            if isinstance(ordinal, int):
                return kind, _ordinal(ordinal)
        if hasattr(device, "type"):  # torch.device without an index
            return kind, 0 if kind == "cpu" else _ordinal(None)
    raise TypeError(
        f"device is {shown(device)}; accepted are an ordinal, 'cuda:N' or 'cpu', and a device of torch, CuPy or cuda.core"
    )


def _ordinal(given: int | None) -> int:
    """A device's ordinal; None means the current device."""
    return device_module.current_ordinal() if given is None else check_integer("device", given, 0, 2**31 - 1)
