"""The Blackwell program: which configuration of `kernels/blackwell.cu` runs a problem, and how it is bound.

tcgen05 MMAs read the packed K pages as they lie in the pool; docs/blackwell.md has the design. The same
program runs on a device of compute capability 10.x and, for host arrays, in the PTX emulator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .arguments import Tensor
from .contract import Call, Problem
from .launch.device import DeviceFacts
from .pool import CODE_BYTES, PAGE_SIZE, SCALE_BYTES
from .program import Bound, Plan
from .ptx.descriptors import TiledMap

__all__ = [
    "ARCHITECTURES",
    "BlackwellProgram",
    "Configuration",
    "choose_configuration",
    "kernel_arguments",
    "source",
    "tensor_maps",
]

ENTRY = "msa_decode_blackwell"
SPLITS = (1, 2, 4, 8)
"""Split factors that `splits=` accepts: the sizes of a portable cluster."""

ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a", (10, 7): "sm_107a", (11, 0): "sm_110a"}
"""Compute capabilities with tcgen05, tensor memory and 227 KB of shared memory a CTA, and what to compile
for."""

_KERNEL = Path(__file__).parent / "kernels" / "blackwell.cu"
_THREADS = 512
_STAGE_BYTES = 2 * PAGE_SIZE * (64 + 8)
_SHORT_PAGES = 4
_SHORT_TABLE = 32

_MERGE_PAGES = 3.7
"""What a merge through distributed shared memory costs, in pages: 1.25 us against 0.34 us
(benchmarks/blackwell_model.py)."""


@dataclass(frozen=True)
class Configuration:
    """What one compiled instance of the kernel is specialised for, and its grid."""

    splits: int
    """CTAs of a cluster; they share the pages of an item in the split round."""
    stages: int
    """Pages in flight in a CTA."""
    short: bool
    """The short-item program: a ring of four pages, and the page-table row is fetched together with the
    ids."""
    ctas: int
    """CTAs of the launch."""
    unsplit_rounds: int
    """Rounds of one whole item a CTA before the split round; only with splits > 1."""

    block = _THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA, bytes; `kernels/blackwell_plan.cuh` lays it out and asserts that
        it fits."""
        return self.stages * _STAGE_BYTES + (26 if self.splits == 1 else 34) * 1024

    @property
    def constants(self) -> str:
        """The `constexpr` lines that specialise the kernel."""
        return (
            f"constexpr unsigned SPLITS = {self.splits};\n"
            f"constexpr unsigned STAGES = {self.stages};\n"
            f"constexpr bool SHORT_TABLE = {'true' if self.short else 'false'};\n"
            f"constexpr unsigned DYNAMIC_SHARED_BYTES = {self.shared_bytes};\n"
        )

    @property
    def description(self) -> str:
        """What the choice was, for logs."""
        stages = "short" if self.short else f"{self.stages} stages"
        parts = [f"splits={self.splits}", stages, f"{self.ctas} CTAs"]
        if self.unsplit_rounds:
            parts.append(f"{self.unsplit_rounds} whole rounds, the last round split")
        return ", ".join(parts)


def choose_configuration(problem: Problem, multiprocessors: int, splits: int | None = None) -> Configuration:
    """Fill the device, one CTA a multiprocessor, at the least predicted time.

    Time is counted in pages: whole rounds cost an item's pages each, a split round a share of them and a
    merge. With fixed `splits` every item is split alike, so that a row's bits do not depend on the rest of
    the batch.

    Raises ValueError for a factor that is not served.
    """
    pages = max(problem.pages_per_item, 1)
    items = problem.items
    if splits is not None:
        if splits not in SPLITS:
            raise ValueError(f"splits is {splits}; backend 'blackwell' accepts {', '.join(map(str, SPLITS))}")
        ctas = min(items, multiprocessors) if splits == 1 else items * splits
        return _configuration(problem, splits, ctas, 0)
    best = _configuration(problem, 1, min(items, multiprocessors), 0)
    best_time: float = -(-items // multiprocessors) * pages
    for factor in SPLITS[1:]:
        # Few pages are one CTA's work: the way of a single page through it takes longer than three more
        # behind it.
        if factor > pages or pages <= _SHORT_PAGES:
            break
        resident = multiprocessors // factor * factor
        rounds, rest = divmod(items, max(resident, 1))
        if rest == 0 or rest * factor > resident:
            continue
        time = rounds * pages + -(-pages // factor) + _MERGE_PAGES
        if time < best_time:
            best = _configuration(problem, factor, resident if rounds else rest * factor, rounds)
            best_time = time
    return best


def _configuration(problem: Problem, splits: int, ctas: int, unsplit_rounds: int) -> Configuration:
    short = splits == 1 and problem.pages_per_item <= _SHORT_PAGES and problem.max_pages <= _SHORT_TABLE
    stages = _SHORT_PAGES if short else 10
    return Configuration(splits, stages, short, ctas, unsplit_rounds)


@functools.cache
def source(constants: str) -> str:
    """The complete CUDA C++ text of one specialisation."""
    from .ptx.source import load

    return load(_KERNEL, constants)


def tensor_maps(call: Call) -> tuple[TiledMap, ...]:
    """How K, V, K scales and V scales are seen by tensor copies, in this order: one head's part of one page
    is a box.

    K as [128 tokens][64 bytes] with the 64B swizzle, the form of an MMA operand; V as [64 token pairs][128
    bytes] with the 128B swizzle, by which ldmatrix reads even and odd tokens without bank conflicts; scales
    as they are, in four rows because a box has at most 256 elements a side. All four take the same
    coordinates, and the page is one of them: pools beyond 4 GiB need no 64-bit address arithmetic.
    """
    pages = call.problem.num_pages
    maps = []
    for tensor, rows, row_bytes, swizzle in (
        (call.k, PAGE_SIZE, CODE_BYTES, "64B"),
        (call.v, PAGE_SIZE // 2, 2 * CODE_BYTES, "128B"),
        (call.k_scale, 4, PAGE_SIZE * SCALE_BYTES // 4, "none"),
        (call.v_scale, 4, PAGE_SIZE * SCALE_BYTES // 4, "none"),
    ):
        page_stride, head_stride = tensor.canonical_strides()[:2]
        maps.append(
            TiledMap(
                # An empty pool has no address; a map must have one, and no page id is legal, so it is never
                # followed.
                pointer=tensor.pointer if pages else call.q.pointer,
                shape=(max(pages, 1), call.problem.num_kv_heads, rows, row_bytes),
                strides=(page_stride, head_stride, row_bytes, 1),
                box=(1, 1, rows, row_bytes),
                swizzle=swizzle,
            )
        )
    return tuple(maps)


def pointed_at(call: Call) -> tuple[Tensor, ...]:
    """The tensors that the entry takes as pointers, in its order."""
    return call.q, call.q2k_indices, call.page_table, call.seqused_k, call.out, call.lse


def kernel_arguments(call: Call, configuration: Configuration) -> list[np.generic]:
    """The parameters of the entry after the tensor maps."""
    problem = call.problem
    strides = [*call.q.canonical_strides()[:2]]
    strides += call.q2k_indices.canonical_strides()
    strides += call.page_table.canonical_strides()
    strides += call.seqused_k.canonical_strides()
    strides += call.out.canonical_strides()[:2]
    strides += call.lse.canonical_strides()
    # From an item of a CTA to its next one: the grid, in rows and KV heads.
    round_rows, round_heads = divmod(configuration.ctas, problem.num_kv_heads)
    sizes = (
        problem.items, problem.seqlen_q, problem.num_kv_heads, problem.group, problem.topk, problem.max_pages,
        problem.num_pages, configuration.unsplit_rounds, round_rows, round_heads,
    )
    return [
        *(np.uint64(tensor.pointer) for tensor in pointed_at(call)),
        *(np.int64(stride) for stride in strides),
        *(np.int32(size) for size in sizes),
        np.float32(call.score_scale),
        np.float32(call.v_global_scale),
    ]


class BlackwellProgram:
    """tcgen05 tensor cores with tensor memory, compute capability 10.x and 11.0."""

    backend = "blackwell"
    summary = "tcgen05 tensor cores on the packed pool, compute capability 10.0, 10.3, 10.7, 11.0"
    place = "cuda"

    def refusal(self, device: DeviceFacts | None) -> str | None:
        if device is None:
            return "needs a CUDA device"
        if device.compute_capability not in ARCHITECTURES:
            major, minor = device.compute_capability
            known = ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES)
            return f"needs compute capability {known}; this device has {major}.{minor}"
        return None

    def plan(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> Plan:
        assert device is not None
        configuration = choose_configuration(problem, device.multiprocessors, splits)
        if configuration.ctas > 2**31 - 1:
            raise ValueError(
                f"q and k make {problem.items} work items of {configuration.splits} CTAs; "
                f"accepted are at most {2**31 - 1} CTAs in a launch"
            )
        return Plan(
            splits=1 if configuration.unsplit_rounds else configuration.splits,
            workspace_bytes=0,
            description=f"blackwell({ARCHITECTURES[device.compute_capability]}, {configuration.description})",
            configuration=configuration,
        )

    def most_workspace_bytes(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> int:
        return self.plan(problem, device, splits).workspace_bytes  # none, for all sizes

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        assert device is not None
        from .launch import device as device_module
        from .launch.kernel import Geometry, Launch, load

        configuration: Configuration = plan.configuration
        if call.problem.items == 0:
            return Bound(steps=(), plan=plan, device=device)
        geometry = Geometry(
            grid=configuration.ctas, block=configuration.block, cluster=configuration.splits,
            shared_bytes=configuration.shared_bytes, dependent=call.enable_pdl,
        )
        kernel = load(
            source(configuration.constants), ARCHITECTURES[device.compute_capability], ENTRY,
            name="blackwell.cu", ordinal=device.ordinal, geometry=geometry,
        )
        with device_module.current(device.ordinal):
            maps = [tiles.for_device() for tiles in tensor_maps(call)]
        launch = Launch(kernel, geometry, [*maps, *kernel_arguments(call, configuration)], entry=ENTRY)
        return Bound(steps=(launch,), plan=plan, device=device)
