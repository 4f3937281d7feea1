"""The portable program: which configuration of `kernels/portable.cu` runs a problem, and how it is bound.

One kernel family on `mma.sync` serves compute capability 8.0 and up. A configuration is a few integers that become
`constexpr` lines in front of the source; the choice is a pure function of the problem and the device's facts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path


import numpy as np

from .arguments import Tensor
from .contract import Call, Problem
from .launch.device import DeviceFacts
from .program import Bound, Plan

__all__ = ["Configuration", "PortableProgram", "choose_configuration", "exact_arch", "source"]

SPLITS = (1, 2, 4, 8)
"""Split factors that `splits=` accepts."""

_KERNEL = Path(__file__).parent / "kernels" / "portable.cu"
_WARPS_PER_SLOT = 4
_THREADS = 32


@dataclass(frozen=True)
class Configuration:
    """What one compiled instance of the kernel is specialised for."""

    page_slots: int
    """Pages that a CTA decodes side by side, four warps each."""
    splits: int
    """CTAs that share the pages of one item."""
    cluster_merge: bool
    """The CTAs of an item form a cluster and merge through distributed shared memory; else through a workspace."""
    ids_per_lane: int
    """Selected ids that each lane of a warp holds: 1 for a top-k up to 32, 2 up to 64."""

    @property
    def block(self) -> int:
        return self.page_slots * _WARPS_PER_SLOT * _THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA, bytes; `kernels/portable.cu` lays it out and asserts the same sum."""
        warps = self.page_slots * _WARPS_PER_SLOT
        return 9344 * warps + 4096 + 1152 * self.ids_per_lane + 192 + (8320 if self.cluster_merge else 0)

    @property
    def constants(self) -> str:
        """The `constexpr` lines that specialise the kernel."""
        return (
            f"constexpr int kPageSlots = {self.page_slots};\n"
            f"constexpr int kSplits = {self.splits};\n"
            f"constexpr bool kClusterMerge = {'true' if self.cluster_merge else 'false'};\n"
            f"constexpr int kIdsPerLane = {self.ids_per_lane};\n"
        )

    def workspace_bytes(self, problem: Problem) -> int:
        """Float32 partials [items, splits, group, 128] and their (maximum, sum) pairs."""
        if self.splits == 1 or self.cluster_merge:
            return 0
        return problem.items * self.splits * problem.group * (128 + 2) * 4


def choose_configuration(problem: Problem, device: DeviceFacts, splits: int | None = None) -> Configuration:
    """Fill the device: side-by-side pages and splits grow as items get fewer than multiprocessors.

    A fixed `splits` also fixes the page slots, so that the order of a row's sums, and with it the row's bits, depends
    on `splits` and the top-k alone. Raises ValueError for a factor that is not served.
    """
    pages = max(problem.pages_per_item, 1)
    if splits is not None:
        if splits not in SPLITS:
            raise ValueError(f"splits is {splits}; backend 'portable' accepts {', '.join(map(str, SPLITS))}")
        slots = 1
    else:
        slots, splits = _fill(problem.items, device.multiprocessors)
        splits = min(splits, _power_of_two_at_least(-(-pages // slots)))
        slots = min(slots, _power_of_two_at_least(pages))
    return Configuration(
        page_slots=slots,
        splits=splits,
        cluster_merge=splits > 1 and device.clusters,
        ids_per_lane=1 if problem.topk <= 32 else 2,
    )


def _fill(items: int, multiprocessors: int) -> tuple[int, int]:
    if items > 2 * multiprocessors:
        return 1, 1
    if items > multiprocessors // 2:
        return 2, 1
    if items > multiprocessors // 4:
        return 2, 2
    if items > multiprocessors // 8:
        return 1, 4
    return 1, 8


def _power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()


def exact_arch(compute_capability: tuple[int, int]) -> str:
    """The architecture to compile for: exact, with arch-specific features from 9.0 on."""
    major, minor = compute_capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.lru_cache(maxsize=None)
def source(configuration: Configuration) -> str:
    """The complete CUDA C++ text of one configuration."""
    from .ptx.source import load

    return load(_KERNEL, configuration.constants)


class PortableProgram:
    """`mma.sync` with FP32 accumulation, compute capability 8.0 and up."""

    backend = "portable"
    summary = "mma.sync tensor cores, compute capability 8.0 and up"
    place = "cuda"

    def refusal(self, device: DeviceFacts | None) -> str | None:
        if device is None:
            return "needs a CUDA device"
        if device.compute_capability < (8, 0):
            major, minor = device.compute_capability
            return f"needs compute capability 8.0 or later, this device has {major}.{minor}"
        return None

    def plan(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> Plan:
        assert device is not None
        configuration = choose_configuration(problem, device, splits)
        if problem.items * configuration.splits > 2**31 - 1:
            raise ValueError(
                f"q and k make {problem.items} work items of {configuration.splits} CTAs; "
                f"accepted are at most {2**31 - 1} CTAs in a launch"
            )
        merge = "cluster" if configuration.cluster_merge else "workspace"
        return Plan(
            splits=configuration.splits,
            workspace_bytes=configuration.workspace_bytes(problem),
            description=(
                f"portable({exact_arch(device.compute_capability)}, page_slots={configuration.page_slots}"
                f"{f', merge={merge}' if configuration.splits > 1 else ''})"
            ),
            configuration=configuration,
        )

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        assert device is not None
        from .launch.kernel import Geometry, Launch, load

        configuration: Configuration = plan.configuration
        items = call.problem.items
        if items == 0:
            return Bound(steps=(), plan=plan, device=device)
        arguments = kernel_arguments(call, workspace.pointer if workspace is not None else 0)
        geometries = {
            "msa_decode": Geometry(
                grid=items * configuration.splits,
                block=configuration.block,
                cluster=configuration.splits if configuration.cluster_merge else 1,
                shared_bytes=configuration.shared_bytes,
            )
        }
        if configuration.splits > 1 and not configuration.cluster_merge:
            geometries["msa_merge"] = Geometry(grid=items, block=128)
        steps = []
        for entry, geometry in geometries.items():
            kernel = load(
                source(configuration), exact_arch(device.compute_capability), entry,
                name="portable.cu", ordinal=device.ordinal, geometry=geometry,
            )
            steps.append(Launch(kernel, geometry, arguments, entry=entry))
        return Bound(steps=tuple(steps), plan=plan, device=device)


def kernel_arguments(call: Call, workspace_pointer: int) -> list[np.generic]:
    """The parameter list of both entries, in the order of `Params` in `kernels/portable.cu`."""
    problem = call.problem
    pointers = [
        call.q, call.k, call.v, call.k_scale, call.v_scale, call.q2k_indices, call.page_table, call.seqused_k,
        call.out, call.lse,
    ]
    strides: list[int] = []
    for tensor in (call.k, call.v, call.k_scale, call.v_scale, call.q):
        strides += tensor.canonical_strides()[:2]
    strides += call.q2k_indices.canonical_strides()
    strides += call.page_table.canonical_strides()
    strides += call.seqused_k.canonical_strides()
    strides += call.out.canonical_strides()[:2]
    strides += call.lse.canonical_strides()
    sizes = [
        problem.batch, problem.seqlen_q, problem.num_kv_heads, problem.group, problem.topk, problem.max_pages,
        problem.num_pages,
    ]
    return [
        *(np.uint64(tensor.pointer) for tensor in pointers),
        np.uint64(workspace_pointer),
        *(np.int64(stride) for stride in strides),
        *(np.int32(size) for size in sizes),
        np.float32(call.score_scale),
        np.float32(call.v_global_scale),
    ]
