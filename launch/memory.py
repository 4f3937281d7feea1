"""Device memory that a program keeps for itself, zero from the start."""

from __future__ import annotations

import weakref

from . import device as device_module

__all__ = ["ZeroedWords"]


class ZeroedWords:
    """32-bit words of device memory, zero when the constructor returns, freed with the object.

    They belong to nobody's pool and no stream: words of a pool may still be written by work that was enqueued
    before they were handed out, and a launch on any stream has to find zeros. Freeing waits for the device,
    so that the words outlive launches in flight. All of it is legal while a stream is being captured.
    """

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, count: int, ordinal: int) -> None:
        from cuda.bindings import driver

        with device_module.current(ordinal), _Uncaptured():
            self.pointer = int(_checked(driver.cuMemAlloc(4 * count)))
            weakref.finalize(self, _free, self.pointer, ordinal).atexit = False
            # A stream of its own waits for nobody's work.
            stream = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                _checked(driver.cuMemsetD32Async(self.pointer, 0, count, stream))
                _checked(driver.cuStreamSynchronize(stream))
            finally:
                driver.cuStreamDestroy(stream)


class _Uncaptured:
    """Inside, this thread may allocate and wait although a stream is being captured; nothing of it is."""

    def __enter__(self) -> None:
        from cuda.bindings import driver

        self._exchange = driver.cuThreadExchangeStreamCaptureMode
        self._mode = _checked(self._exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def __exit__(self, *exception: object) -> None:
        self._exchange(self._mode)


def _free(pointer: int, ordinal: int) -> None:
    from cuda.bindings import driver

    with device_module.current(ordinal), _Uncaptured():
        driver.cuMemFree(pointer)


def _checked(result):
    """The value of a driver call, `(status,)` or `(status, value)`."""
    from cuda.bindings import driver

    if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError("no device memory is left for a runner's completion counters")
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a runner's completion counters cannot be made: {result[0].name}")
    return result[1] if len(result) > 1 else None
