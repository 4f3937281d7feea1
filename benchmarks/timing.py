"""GPU time of a captured launch, with caches cold: the one method by which everything here is timed.

Before each sample a kernel reads a buffer of several times the L2 cache. Reading leaves clean lines; a buffer
written instead would leave dirty ones, whose write-back the timed kernel would pay for. Consecutive samples
replay different decode steps. Samples are taken in batches. The host enqueues a whole batch while a kernel
holds the stream, so that none of its delays falls between the two events around a launch; and batches are
short, because on an H200 every launch with more than 32 operations pending behind it took 1.5 us longer. What
remains in every figure is the cost of an empty kernel's launch, which is timed alike and reported as the
floor.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msa_cudacore.launch import device as device_module
from msa_cudacore.launch.kernel import Geometry, Launch, load
from msa_cudacore.portable import exact_arch
from msa_cudacore.ptx.source import load as load_source

__all__ = ["Stopwatch", "Timing", "programmatic_edges"]

_READ_THREADS = 256
_WARMUP_READS = 150
"""Reads of the flush buffer ahead of a measurement, some 20 ms: an idle GPU takes milliseconds to raise its
clocks.
"""
_BATCH = 6
"""Samples enqueued at a time, of four operations each."""
_FIRST_HOLD = 6_000_000
"""Cycles, some 3 ms, for which the stream is held while a batch is enqueued; raised where the host takes
longer.
"""
_LONGEST_HOLD = 2_000_000_000


@functools.cache
def _probe() -> str:
    return load_source(Path(__file__).parent / "probe.cu")


@dataclass(frozen=True)
class Timing:
    """Samples of one measurement, microseconds, in the order they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def p10(self) -> float:
        return self._quantile(0.1)

    @property
    def p90(self) -> float:
        return self._quantile(0.9)

    def as_json(self) -> dict[str, Any]:
        return {
            "median_us": self.median,
            "p10_us": self.p10,
            "p90_us": self.p90,
            "samples_us": [round(sample, 3) for sample in self.samples],
        }

    def _quantile(self, fraction: float) -> float:
        return float(np.quantile(np.asarray(self.samples), fraction))


class Stopwatch:
    """Captures launches on a stream of its own and times their replays."""

    def __init__(self, ordinal: int) -> None:
        from cuda.core import Device, EventOptions

        self.facts = device_module.facts(ordinal)
        self.arch = exact_arch(self.facts.compute_capability)
        self._device = Device(ordinal)
        self._device.set_current()
        self.stream = self._device.create_stream()
        self._event = lambda: self._device.create_event(EventOptions(timing_enabled=True))
        l2 = self._device.properties.l2_cache_size
        self.l2_bytes = l2
        self.flush_bytes = max(8 * l2, 256 << 20)
        self._memories: list[Any] = []
        self._hold = _FIRST_HOLD
        self._flush = self._reader(self.flush_bytes)

    def _reader(self, size: int) -> Launch:
        """A launch that reads `size` bytes from end to end; they are its own, and zero."""
        memory = self._device.allocate(size + 256, stream=self.stream)
        memory.fill(0, stream=self.stream)
        address = int(memory.handle)
        geometry = Geometry(grid=8 * self.facts.multiprocessors, block=_READ_THREADS)
        arguments = (np.uint64(address), np.int64(size // 16), np.uint64(address + size))
        launch = self.bind(_probe(), "read_buffer", geometry, arguments)
        self._memories.append(memory)
        return launch

    def bind(self, source: str, entry: str, geometry: Geometry, arguments: Sequence[np.generic]) -> Launch:
        """Compile and load an entry of one of our own sources, with its arguments."""
        kernel = load(
            source, self.arch, entry, name=f"{entry}.cu", ordinal=self.facts.ordinal, geometry=geometry
        )
        return Launch(kernel, geometry, arguments, entry=entry)

    def empty_kernel(self) -> Callable[[], None]:
        """Replay of a kernel that does nothing."""
        launch = self.bind(_probe(), "empty", Geometry(grid=1, block=32), ())
        return self.capture(launch)

    def linear_read(self, size: int = 2 << 30, samples: int = 20) -> Timing:
        """Time to read `size` contiguous bytes, far beyond the cache: the memory's rate without a page
        list.
        """
        launch = self._reader(size)
        timing = self.time([self.capture(launch)], samples=samples)
        self._memories.pop().close(self.stream)
        return timing

    def capture(self, enqueue: Callable[[Any], Any]) -> Callable[[], None]:
        """Capture what `enqueue` launches on the stream it is given; calling the result replays it on
        ours.
        """
        builder = self._device.create_graph_builder().begin_building()
        enqueue(builder)
        graph = builder.end_building().complete()
        builder.close()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def time(
        self, replays: Sequence[Callable[[], None]], *, samples: int, idle_before: bool = True
    ) -> Timing:
        """Time `samples` replays, taking turns among `replays`.

        `idle_before` says that the GPU may have been idle and has to be kept busy for some time first.
        """
        for _ in range(_WARMUP_READS if idle_before else 1):
            self._flush(self.stream)
        for replay in replays:
            self._flush(self.stream)
            replay()
        times: list[float] = []
        while len(times) < samples:
            batch = self._batch(replays, len(times), min(_BATCH, samples - len(times)))
            if batch is None and self._hold < _LONGEST_HOLD:
                self._hold *= 2
                continue
            if batch is None:
                raise RuntimeError("the host takes more than a second to enqueue a batch of samples")
            times += batch
        return Timing(tuple(times))

    def _batch(self, replays: Sequence[Callable[[], None]], first: int, count: int) -> list[float] | None:
        """Microseconds of `count` samples, the first of which has the number `first`; None if the GPU did not
        wait.
        """
        self.stream.sync()
        arguments = (np.int64(self._hold),)
        self.bind(_probe(), "hold", Geometry(grid=1, block=1), arguments)(self.stream)
        pairs = [(self._event(), self._event()) for _ in range(count)]
        for number, (before, after) in enumerate(pairs, start=first):
            self._flush(self.stream)
            self.stream.record(before)
            replays[number % len(replays)]()
            self.stream.record(after)
        waited = not pairs[0][0].is_done
        self.stream.sync()
        return [(after - before) * 1e3 for before, after in pairs] if waited else None

    def close(self) -> None:
        """Wait for the stream and free what the stopwatch allocated."""
        self.stream.sync()
        for memory in self._memories:
            memory.close(self.stream)
        self._memories = []


def programmatic_edges(builder: Any) -> int:
    """How many launches of the graph that is being captured may begin before their predecessor has ended.

    :meth:`Stopwatch.capture` gives the graph's builder to what it captures.
    """
    from cuda.bindings import driver

    status, _, _, graph, *_ = driver.cuStreamGetCaptureInfo(int(builder.stream.handle))
    if status == driver.CUresult.CUDA_SUCCESS:
        status, _, _, _, count = driver.cuGraphGetEdges(graph)
    if status == driver.CUresult.CUDA_SUCCESS:
        status, _, _, edges, _ = driver.cuGraphGetEdges(graph, count)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the edges of a graph cannot be read: {status.name}")
    programmatic = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return sum(int(edge.type) == int(programmatic) for edge in edges)
