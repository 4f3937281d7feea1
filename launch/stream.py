"""Any stream a caller may hold, as something `cuda.core.launch` takes.

Accepted: a `cuda.core` stream or graph builder, any object with `__cuda_stream__`, a torch stream, a CuPy
stream, and the integer value of a `cudaStream_t`. Nothing is synchronised: work is enqueued on that stream
alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["current", "from_handle", "resolve"]


@functools.lru_cache(maxsize=256)
def from_handle(handle: int):
    """A `cuda.core.Stream` that borrows the stream behind an integer `cudaStream_t`.

    0 and 1 mean the legacy default stream, 2 the per-thread default stream, as in the CUDA runtime.
    """
    from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream

    if handle in (0, 1):
        return LEGACY_DEFAULT_STREAM
    if handle == 2:
        return PER_THREAD_DEFAULT_STREAM
    return Stream.from_handle(handle)


def resolve(stream):
    """Turn any accepted stream into a `cuda.core.Stream` or `GraphBuilder`.

    Raises
    ------
    TypeError
        `stream` is none of the accepted kinds.
    ValueError
        An integer handle is negative.
    """
    from cuda.core import Stream
    from cuda.core.graph import GraphBuilder

    if isinstance(stream, (Stream, GraphBuilder)):
        return stream
    handle = _handle(stream)
    if handle is None:
        raise TypeError(
            f"stream is a {type(stream).__name__}; accepted are a cuda.core stream or graph builder, an "
            f"object with __cuda_stream__, a torch or CuPy stream, or the integer value of a cudaStream_t"
        )
    if handle < 0:
        raise ValueError(f"stream is {handle}; the integer value of a cudaStream_t is not negative")
    return from_handle(handle)


def _handle(stream) -> int | None:
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # An early draft of the protocol had a property in place of a method; both give (version, handle).
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # torch.cuda.Stream, cupy.cuda.Stream
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    return None


def current(framework: str, ordinal: int) -> Callable[[], Any]:
    """A function that gives the stream on which `framework` would enqueue its next operation.

    That of device `ordinal`; a framework without a notion of a current stream gets the legacy default stream.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        # What Triton and torch's own compiler call before a launch: 2 us less than a `torch.cuda.Stream`.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw_stream is not None:
            return lambda: from_handle(raw_stream(ordinal))
        current_stream = torch.cuda.current_stream
        return lambda: from_handle(current_stream(ordinal).cuda_stream)
    if framework == "cupy":
        get_current_stream = sys.modules["cupy"].cuda.get_current_stream
        return lambda: from_handle(get_current_stream(ordinal).ptr)
    return lambda: from_handle(0)
