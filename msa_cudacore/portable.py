"""The portable program: which configuration of `kernels/portable.cu` runs a problem, and how it is bound.

One kernel family on `mma.sync` serves compute capability 8.0 and up. A configuration is a few integers that
become `constexpr` lines in front of the source; the choice is a pure function of the problem and the device's
facts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import Tensor
from .contract import Call, Problem
from .launch.device import DeviceFacts
from .program import Bound, Plan

__all__ = ["Configuration", "PortableProgram", "choose_configuration", "exact_arch", "source"]

SPLITS = (1, 2, 4, 8)
"""Split factors that `splits=` accepts; the automatic choice also knows 16."""

ENTRY = "msa_decode"
_KERNEL = Path(__file__).parent / "kernels" / "portable.cu"
_HEADS = 16
_TABLE_BYTES = 64 * 1024
_PAGE_RING_BYTES = 2 * (2 * 128 * 64 + 2 * 128 * 8)  # two stages of codes and scales
_LARGE_SHARED_BYTES = 227 * 1024
_ROUNDS_WITH_SPLITS = ((8, 3), (4, 4))
"""Item slots, of which the last quarter may have splits, and in how many rounds of CTAs at most."""
_LAST_SPLITS = (8, 4, 2)


@dataclass(frozen=True)
class Configuration:
    """What one compiled instance of the kernel is specialised for."""

    page_slots: int
    """Pages of an item that a CTA decodes side by side."""
    splits: int
    """CTAs that share the pages of one item."""
    cluster_merge: bool
    """The CTAs of an item form a cluster that merges in distributed shared memory; else each puts its partial
    into a workspace, and the last to arrive merges them."""
    ids_per_lane: int
    """Selected ids that each lane of a warp holds: 1 for a top-k up to 32, 2 up to 64."""
    item_slots: int = 1
    """Items that a CTA works on side by side."""
    many_items: bool = False
    """An item slot takes one item after the other, and a CTA stays on its multiprocessor."""
    warps_per_page: int = 4
    """4 warps of 32 tokens, 8 of 16 where they cooperate, or 2 of 32 and then another 32."""
    table: bool = False
    """Keys, and values unless warps cooperate, are decoded by a table in shared memory."""
    cooperative: bool = False
    """The warps of a page share their probabilities and divide the value dims; else they merge their sums."""
    pieces: int = 0
    """Where CTAs have slots for all items but a few, the leftovers: into how many pieces these are cut."""
    piece_slots: int = 0
    """Page slots of an item slot that begin with a piece of a leftover."""
    pairs: bool = False
    """Two CTAs, a cluster, share a leftover, which merges in distributed shared memory."""
    last_splits: int = 1
    """Item slots that share an item, in the last quarter of each CTA's. They meet in the workspace."""
    shared_item: bool = False
    """The item slots of a CTA share one item more: each begins with a part of it."""

    @property
    def item_warps(self) -> int:
        """Warps of a CTA that share an item."""
        return self.page_slots * self.warps_per_page

    @property
    def whole_slots(self) -> int:
        """Item slots of a CTA that have items of their own."""
        return self.item_slots - (self.item_slots // 4 if self.last_splits > 1 else 0)

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 32 * self.item_slots * self.item_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA, bytes; `kernels/portable_plan.cuh` lays out the same sum."""
        max_topk = 32 * self.ids_per_lane
        maxima = self.page_slots * _HEADS * self.warps_per_page * 4 if self.cooperative else 0
        if self.cluster_merge and self.page_slots == 1:
            maxima *= 2  # and sums
        # Queries, visible tokens, scales; barriers, items and ends of lists.
        slot = (2 if self.pieces else 1) * (8 * 512 + max_topk * 4 + _HEADS * 8) + (96 if self.pieces else 64)
        if self.shared_item:  # scales and lists of a part of it, too
            slot += _HEADS * 8 + (max_topk // self.item_slots + 4) * (4 + 32)
        if self.item_slots == 8 or self.shared_item:  # the queries lie in the table's gaps
            slot += max_topk * 32 + self.item_warps * 128 - 8 * 512
        elif self.table:  # sources and statistics lie in the table's gaps, as far apart as the slots
            slot = -(-(slot + maxima) // 256) * 256
        else:
            slot += max_topk * 32 + self.item_warps * 128 + maxima
        # Where two warps take two parts of a page each, the ring holds half of it at a time.
        ring = self.page_slots * _PAGE_RING_BYTES * min(self.warps_per_page, 4) // 4
        inbox = _HEADS * (128 * 4 + 8) if self.cluster_merge else 0
        if self.pairs:  # a quarter of a piece's sums, its statistics and those of the partner's
            inbox = self.warps_per_page * (2048 + 128 + 64)
        return (
            (_TABLE_BYTES if self.table else 0)
            + self.item_slots * (ring + slot)
            + inbox
        )

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.pairs else self.splits if self.cluster_merge else 1

    @property
    def constants(self) -> str:
        """The `constexpr` lines that specialise the kernel."""
        numbers = {
            "kItemSlots": self.item_slots, "kWarpsPerPage": self.warps_per_page,
            "kPageSlots": self.page_slots, "kSplits": self.splits, "kIdsPerLane": self.ids_per_lane,
            "kPieces": self.pieces, "kPieceSlots": self.piece_slots,
            "kLastSplits": self.last_splits,
        }
        flags = {
            "kManyItems": self.many_items, "kClusterMerge": self.cluster_merge, "kTable": self.table,
            "kCooperative": self.cooperative, "kPairs": self.pairs, "kSharedItem": self.shared_item,
        }
        return "".join(f"constexpr int {name} = {value};\n" for name, value in numbers.items()) + "".join(
            f"constexpr bool {name} = {str(value).lower()};\n" for name, value in flags.items()
        )

    def ctas(self, items: int, multiprocessors: int) -> int:
        """Grid size. With item slots, items are spread over the multiprocessors before the slots fill up."""
        if self.pieces:
            return multiprocessors
        if self.shared_item:  # rounds of CTAs that leave at most one item for each multiprocessor
            return multiprocessors * max((items - 1) // (self.item_slots * multiprocessors), 1)
        if self.last_splits > 1:  # full rounds of CTAs
            return multiprocessors * -(-items // (self.item_slots * multiprocessors))
        if self.item_slots == 1:
            return items * self.splits
        if self.many_items:
            return min(items, multiprocessors)
        return max(-(-items // self.item_slots), min(items, multiprocessors))

    def leftovers(self, items: int, multiprocessors: int) -> int:
        """Items without an item slot of their own."""
        if not self.pieces and not self.shared_item and self.last_splits == 1:
            return 0
        return max(items - self.whole_slots * self.ctas(items, multiprocessors), 0)

    def stored_items(self, items: int, multiprocessors: int) -> int:
        """Items whose partials meet in the workspace: all where splits are no cluster, else the leftovers."""
        if self.splits > 1 and not self.cluster_merge:
            return items
        return 0 if self.pairs else self.leftovers(items, multiprocessors)

    def workspace_bytes(self, problem: Problem, multiprocessors: int) -> int:
        """Float32 partials [stored items, parts, pieces or splits, group, 128] and (maximum, sum) pairs."""
        parts = self.item_slots if self.shared_item else self.pieces or self.splits * self.last_splits
        partials = self.stored_items(problem.items, multiprocessors) * parts
        return partials * problem.group * (128 + 2) * 4

    def counters(self, items: int, multiprocessors: int) -> int:
        """Arrivals at the workspace that are counted apart: of an item's warps, or of a leftover's."""
        if self.shared_item:  # within a CTA
            return 0
        warps = self.warps_per_page if self.pieces else self.item_warps
        return self.stored_items(items, multiprocessors) * warps


def choose_configuration(problem: Problem, device: DeviceFacts, splits: int | None = None) -> Configuration:
    """Fill the device: slots and splits grow as items get fewer than multiprocessors.

    A fixed `splits` fixes everything else, so that the order of a row's sums, and with it the row's bits,
    depends on `splits`, the top-k and the device alone. Raises ValueError for a factor that is not served.
    """
    pages = max(problem.pages_per_item, 1)
    ids_per_lane = 1 if problem.topk <= 32 else 2
    # Elsewhere the table takes more registers than 16 warps leave, or more shared memory than there is.
    roomy = device.compute_capability[0] == 9 and device.shared_bytes_per_block >= _LARGE_SHARED_BYTES
    if splits is not None:
        if splits not in SPLITS:
            raise ValueError(f"splits is {splits}; backend 'portable' accepts {', '.join(map(str, SPLITS))}")
        if splits == 1 and roomy:
            return Configuration(1, 1, False, ids_per_lane, item_slots=4, table=True)
        return Configuration(1, splits, splits > 1 and device.clusters, ids_per_lane)
    choice = (
        _fill(problem.items, pages, device.multiprocessors, ids_per_lane)
        if roomy
        else _fill_others(problem.items, pages, device.multiprocessors)
    )
    return replace(
        choice, ids_per_lane=ids_per_lane,
        cluster_merge=choice.cluster_merge and choice.splits > 1 and device.clusters,
        # Clusters of two take all multiprocessors, and memory has room for lists of 32 pages.
        pairs=choice.piece_slots == 2 and ids_per_lane == 1 and device.clusters
        and device.multiprocessors % 2 == 0,
    )


def _fill(items: int, pages: int, multiprocessors: int, ids_per_lane: int) -> Configuration:
    """For 9.0 with all of its shared memory. The crossovers were measured on an H200 (docs/portable.md);
    others scale with their multiprocessors.

    `pages` is the most that an item can have. The width of the ids is the caller's; eight items have no room
    for two ids a lane.
    """

    def parts_of(pages_each: int, most: int) -> int:
        return min(most, _power_of_two_at_least(-(-pages // pages_each)))

    four_each = 3 * multiprocessors < items <= 4 * multiprocessors
    if pages <= 4 and multiprocessors < items <= 5 * multiprocessors and not (four_each and pages > 2):
        # Five CTAs of four cooperating warps fit an SM. With few pages they end before larger ones with as
        # many items, but for four of three or four pages.
        splits = 2 if pages > 2 and 2 * items <= 3 * multiprocessors else 1
        return Configuration(1, splits, True, 1, cooperative=True)
    if items > 2 * multiprocessors:
        return _fill_item_slots(items, pages, multiprocessors, ids_per_lane)
    if items > multiprocessors:
        # One item on every SM and pieces of a few more, where whole items would leave two on some.
        pieces, piece_slots = _pieces(items - multiprocessors, multiprocessors, 1, pages)
        if pieces:
            return Configuration(4, 1, False, 1, table=True, pieces=pieces, piece_slots=piece_slots)
        return Configuration(2, 1, False, 1, item_slots=2, table=True)
    # A cluster lies in one GPC, so its size goes by how many find room. Three CTAs of one page fit an SM: of four
    # splits then 92 clusters run at once on an H200, of eight 45. The fullest SM has 12 pages, or 6, where whole
    # items would be 16 and halves 8.
    if 2 * items > multiprocessors:
        if 3 * items <= 2 * multiprocessors and pages > 4:
            return Configuration(1, 4, True, 1, cooperative=True)
        page_slots = min(4, _power_of_two_at_least(pages))
        return Configuration(page_slots, 1, False, 1, table=True, cooperative=pages <= 8)
    # With an SM for each CTA, 15 clusters of eight run at once, 30 of four and 66 of two. Where one more would
    # share, CTAs that merge through the workspace need not.
    if 22 * items > 5 * multiprocessors and pages > 2:
        if 4 * items <= multiprocessors and pages > 4:
            return Configuration(2, 4, False, 1, table=True, cooperative=True)
        if 3 * items <= multiprocessors and pages > 4:
            return Configuration(1, 8, True, 1, cooperative=True)
        return Configuration(parts_of(2, 4), 2, True, 1, table=True, cooperative=True)
    if 44 * items > 5 * multiprocessors and pages > 8:
        if 8 * items <= multiprocessors:
            return Configuration(2, 8, False, 1, table=True, cooperative=True)
        return Configuration(4, 4, True, 1, table=True, cooperative=True)
    # Of 128 multiprocessors in at most eight GPCs, one GPC has 16, one for each CTA of a cluster of 16. With
    # fewer, as on a part of a GPU, perhaps none has; a cluster of 8 fits everywhere.
    splits = parts_of(1, 16 if items <= 8 and multiprocessors >= 128 else 8)
    return Configuration(1, splits, True, 1, warps_per_page=8, cooperative=True)


def _fill_item_slots(items: int, pages: int, multiprocessors: int, ids_per_lane: int) -> Configuration:
    """The same with more than two items for each multiprocessor: CTAs of two, four or eight."""
    # Two items on every SM and pieces of a few more, where whole items would leave three on some.
    pieces, piece_slots = _pieces(items - 2 * multiprocessors, multiprocessors, 2, pages)
    if piece_slots == 1:
        return Configuration(2, 1, False, 1, item_slots=2, table=True, pieces=pieces, piece_slots=1)
    # Six items or three on every SM and splits of a few more, where whole items would be eight or four on
    # some; in full rounds of CTAs. Eight items have no room for more than 32 ids each.
    for item_slots, most_rounds in _ROUNDS_WITH_SPLITS:
        rounds = -(-items // (item_slots * multiprocessors))
        last_slots = rounds * multiprocessors * item_slots // 4
        last_splits = _last_splits(items - 3 * last_slots, last_slots, pages)
        if last_splits > 1 and rounds <= most_rounds and (item_slots == 4 or ids_per_lane == 1):
            return Configuration(
                1, 1, False, 1, item_slots, warps_per_page=16 // item_slots, table=True,
                last_splits=last_splits,
            )
    # Behind full rounds of four items, a fifth one on some SMs, of which each slot takes a part. Of four
    # pages each, eight items side by side are faster.
    more = items > 4 * multiprocessors
    if more and (items - 1) % (4 * multiprocessors) < multiprocessors and pages > 4:
        return Configuration(1, 1, False, 1, item_slots=4, table=True, shared_item=True)
    # With more items than slots, CTAs come in rounds. Eight items side by side are one round instead of
    # two; with seven, two of the four schedulers are as busy as with eight.
    full = -items % (8 * multiprocessors) < multiprocessors
    if more and ids_per_lane == 1 and (full or items <= 6 * multiprocessors):
        return Configuration(1, 1, False, 1, item_slots=8, warps_per_page=2, table=True)
    # Where the last round would leave a slot of every multiprocessor empty, slots that go on by
    # themselves end earlier; full rounds are as good.
    many_items = more and -items % (4 * multiprocessors) >= multiprocessors
    return Configuration(1, 1, False, 1, item_slots=4, many_items=many_items, table=True)


def _fill_others(items: int, pages: int, multiprocessors: int) -> Configuration:
    """For devices without room for the table; these crossovers were not measured."""
    page_slots = min(2, _power_of_two_at_least(pages))
    if items > multiprocessors // 2:
        return Configuration(page_slots if items <= 2 * multiprocessors else 1, 1, False, 1)
    if items > multiprocessors // 4:
        return Configuration(page_slots, min(2, _power_of_two_at_least(-(-pages // page_slots))), True, 1)
    return Configuration(1, min(8, _power_of_two_at_least(pages)), True, 1, cooperative=True)


def _pieces(leftovers: int, multiprocessors: int, item_slots: int, pages: int) -> tuple[int, int]:
    """Into how many pieces leftovers are cut, and how many of them an item slot takes; 0, 0 where too many
    are left over or pages too few.
    """
    # Small pieces pay as long as no CTA has two of them.
    for pieces, each, most in ((8, 1, 1), (4, 1, item_slots), (4, 2, 2 * item_slots)):
        if pages >= pieces and leftovers * pieces <= multiprocessors * most:
            return pieces, each
    return 0, 0


def _last_splits(items: int, slots: int, pages: int) -> int:
    """How many of these item slots share an item; 1 where there are no items, too many, or pages too few."""
    for splits in _LAST_SPLITS:
        if pages >= splits and 0 < items * splits <= slots:
            return splits
    return 1


def _most_shared_items(multiprocessors: int) -> set[int]:
    """Numbers of items up to which the partials that item slots store get more with every item."""
    ends = {5 * multiprocessors}
    for item_slots, most_rounds in _ROUNDS_WITH_SPLITS:
        for rounds in range(1, most_rounds + 1):
            last_slots = rounds * multiprocessors * item_slots // 4
            ends |= {3 * last_slots + last_slots // splits for splits in _LAST_SPLITS}
    return ends


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
        return self.plan_of(choose_configuration(problem, device, splits), problem, device)

    def plan_of(self, configuration: Configuration, problem: Problem, device: DeviceFacts) -> Plan:
        """How a configuration, chosen or not, would run a problem."""
        last_splits = configuration.last_splits
        if problem.items * configuration.splits > 2**31 - 1:
            raise ValueError(
                f"q and k make {problem.items} work items of {configuration.splits} CTAs; "
                f"accepted are at most {2**31 - 1} CTAs in a launch"
            )
        merge = "cluster" if configuration.cluster_merge else "workspace"
        return Plan(
            splits=configuration.splits,
            workspace_bytes=configuration.workspace_bytes(problem, device.multiprocessors),
            description=(
                f"portable({exact_arch(device.compute_capability)}, splits={configuration.splits}, "
                f"item_slots={configuration.item_slots}"
                f"{' for many items' if configuration.many_items else ''}"
                f"{' that share one more' if configuration.shared_item else ''}"
                f"{f', the last in {last_splits} splits' if last_splits > 1 else ''}, "
                f"page_slots={configuration.page_slots}, warps_per_page={configuration.warps_per_page}"
                f"{', table' if configuration.table else ''}"
                f"{', cooperative' if configuration.cooperative else ''}"
                f"{f', leftovers in {configuration.pieces} pieces' if configuration.pieces else ''}"
                f"{' of pairs' if configuration.pairs else ''}"
                f"{f', merge={merge}' if configuration.splits > 1 else ''}"
                f"{', more than 32 ids' if configuration.ids_per_lane > 1 else ''})"
            ),
            configuration=configuration,
        )

    def most_workspace_bytes(self, problem: Problem, device: DeviceFacts | None, splits: int | None) -> int:
        assert device is not None
        self.plan(problem, device, splits)  # or there are too many
        # A smaller batch may be split where a larger one is not; with more items than this, none is, unless
        # that is forced.
        most_items = 5 * device.multiprocessors
        each = problem.seqlen_q * problem.num_kv_heads
        counts = {batch * each for batch in range(1, min(problem.batch, most_items // each + 1))}
        # Where item slots share some of the items, most partials are stored with just so many items in all.
        counts |= {min(problem.items, items) for items in _most_shared_items(device.multiprocessors)}
        # All that the choice and its workspace depend on are the items and the pages that one can have.
        sizes = (
            Problem(items, 1, problem.group, 1, problem.topk, pages, problem.num_pages)
            for items, pages in itertools.product(counts | {problem.items}, range(problem.topk + 1))
        )
        return max(
            choose_configuration(size, device, splits).workspace_bytes(size, device.multiprocessors)
            for size in sizes
        )

    def bind(self, call: Call, device: DeviceFacts | None, plan: Plan, workspace: Tensor | None) -> Bound:
        assert device is not None
        from .launch.kernel import Geometry, Launch, load
        from .launch.memory import ZeroedWords

        configuration: Configuration = plan.configuration
        items = call.problem.items
        if items == 0:
            return Bound(steps=(), plan=plan, device=device)
        geometry = Geometry(
            grid=configuration.ctas(items, device.multiprocessors),
            block=configuration.block,
            cluster=configuration.cluster,
            shared_bytes=configuration.shared_bytes,
            dependent=call.enable_pdl,
        )
        kernel = load(
            source(configuration), exact_arch(device.compute_capability), ENTRY,
            name="portable.cu", ordinal=device.ordinal, geometry=geometry,
        )
        # Not in the workspace, where another runner may have left its partials.
        counters = configuration.counters(items, device.multiprocessors)
        arrivals = ZeroedWords(counters, device.ordinal) if counters else None
        arguments = kernel_arguments(
            call, workspace.pointer if workspace is not None else 0, arrivals.pointer if arrivals else 0
        )
        step = Launch(kernel, geometry, list(arguments.values()), entry=ENTRY)
        return Bound(steps=(step,), plan=plan, device=device, memory=arrivals)


def _device_pointer(tensor: Tensor) -> np.generic:
    return np.uint64(tensor.pointer)


def kernel_arguments(
    call: Call,
    workspace_pointer: int,
    arrivals_pointer: int = 0,
    pointer: Callable[[Tensor], Any] = _device_pointer,
) -> dict[str, Any]:
    """The parameters of the entry by name, in the order of `kernels/portable.cu`; `pointer` gives that of a
    tensor, for who takes pointers in another form.

    That is the order of their first use: a line of 64 bytes that nobody has read yet costs a CTA 115 cycles
    (H200), and the loads of the selection wait for the first two lines alone.
    """
    problem = call.problem
    values: dict[str, Any] = {}

    def size(**sizes: int) -> None:
        values.update((name, np.int32(number)) for name, number in sizes.items())

    def tensor(name: str, of: Tensor, *strides: str) -> None:
        values[name] = pointer(of)
        values.update(
            (f"{name}_{axis}", np.int64(stride))
            for axis, stride in zip(strides, of.canonical_strides())
            if axis
        )

    size(
        num_kv_heads=problem.num_kv_heads, seqlen_q=problem.seqlen_q, topk=problem.topk,
        max_pages=problem.max_pages,
    )
    tensor("q2k", call.q2k_indices, "head", "row", "j")
    tensor("seqused_k", call.seqused_k, "stride")
    tensor("page_table", call.page_table, "row", "j")
    tensor("q", call.q, "row", "head")
    size(num_pages=problem.num_pages, group=problem.group)
    for name in ("k", "v", "k_scale", "v_scale"):
        tensor(name, getattr(call, name), "page", "head")
    values["score_scale"] = np.float32(call.score_scale)
    values["v_global_scale"] = np.float32(call.v_global_scale)
    values["workspace"] = np.uint64(workspace_pointer)
    tensor("out", call.out, "row", "head")
    tensor("lse", call.lse, "row", "head")
    size(batch=problem.batch)
    values["arrivals"] = np.uint64(arrivals_pointer)
    return values
