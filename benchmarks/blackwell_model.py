"""A cost model of decode programs on a 148-SM Blackwell part: fitted on published times, applied unchanged to
ours.

    python -m benchmarks.blackwell_model

No such part was at hand: every time printed here is predicted. The model has four fitted numbers, all fitted
on the reference program's published B200 times (flashinfer-ai/flashinfer pull request 5875):

* `fixed`: launch, the chain lengths -> ids -> page ids -> first page, and the epilogue;
* `efficiency`: the share of cycles in which the program's busiest resource of an SM is busy;
* `start`: what a start costs more the more CTAs start together, of a full chip: they all fetch code and ids,
  walk the same page tables of the address space, and ask for a ring full of pages at once;
* `merge`: exchanging the parts of a split item.

A page then takes max(busiest resource / efficiency, its bytes x active SMs / DRAM bandwidth), an item its
pages one after the other, a round of items as long as its longest. Resources are cycles a page and SM;
docs/blackwell.md derives ours, and the reference program's were counted the same way from its machine code
(NVRTC 13.5) and its shared-memory addresses.

Of the short row the model says nothing on the reference's side: its program for requests of at most four
pages has no tensor copies, no tcgen05 and no ring; eight CTAs of four warps share an item, half a page each,
by mma.sync. Ours is the same kernel with the page-table row fetched together with the ids, which takes one
trip to memory out of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from msa_cudacore.blackwell import choose_configuration

from .rows import ROWS, TILE_BYTES, Row

SMS = 148
CLOCK_GHZ = 1.92
BANDWIDTHS = (5.8, 6.7)
"""DRAM, TB/s. The published stream-only replay of the batch-128 row (30.4 us for 151 MB) reads as 5.8 when
4.2 us of it are fixed, and as 6.7 when it also pays for its partly filled fourth round."""


ROUND_TRIP_US = 0.45
"""A dependent load, measured on an H200: 780 cycles, cold or in L2."""


@dataclass(frozen=True)
class Profile:
    """Busy cycles of each resource of an SM for one page."""

    name: str
    resources: dict[str, float]

    @property
    def bound(self) -> tuple[str, float]:
        return max(self.resources.items(), key=lambda item: item[1])


REFERENCE = Profile(
    "reference",
    {
        # Threads 456 (K codes 64, K scales 8, V codes 64, V scales 32, V stores 256, P 32); copies in 144;
        # MMA operands V 256, P 32, q 32.
        "shared memory": 920,
        "issue": (2_302 + 125) / 4,
        "conversions and exponentials": 272 + 32 + 128,
        "tensor memory stores": 95,
        "tensor cores": 544,
    },
)
OURS = Profile(
    "msa_cudacore",
    {
        "shared memory": 144 + 176 + 96 + 24 + 64,
        "issue": 1_587 / 4,
        "conversions and exponentials": 160 + 32 + 128,
        "tensor memory stores": 95,
        "tensor cores": 432,
    },
)


PUBLISHED = tuple(row for row in ROWS if row.b200_us is not None and not row.ragged)


def pages_of(row: Row) -> int:
    """Pages that an item of the row reads."""
    return row.problem.pages_per_item


def is_short(row: Row) -> bool:
    """Whether the row's requests are so short that both projects have another program for them."""
    return pages_of(row) <= 4


def reference_splits(row: Row) -> int:
    """The reference program's rule: double the split while the CTAs fit the SMs and every CTA keeps a pair of
    pages."""
    pairs = -(-pages_of(row) // 2)
    splits = 1
    if pairs < 4 or 2 * row.items > SMS:
        return splits
    while splits < 8 and 2 * splits <= pairs and 2 * splits * row.items <= SMS:
        splits *= 2
    return splits


@dataclass(frozen=True)
class Model:
    """The fitted numbers."""

    fixed_us: float
    efficiency: float
    start_us: float
    merge_us: float

    def page_us(self, profile: Profile, active: int, bandwidth: float) -> float:
        """One page on each of `active` SMs."""
        on_chip = profile.bound[1] / self.efficiency / CLOCK_GHZ * 1e-3
        return max(on_chip, TILE_BYTES * active / bandwidth * 1e-6)

    def time_us(
        self, profile: Profile, row: Row, whole_rounds: list[int], splits: int, split_items: int,
        bandwidth: float,
    ) -> float:
        """Rounds of whole items, given by their active SMs, then items that `splits` CTAs share."""
        started = (whole_rounds or [split_items * splits])[0]
        time = self.fixed_us + self.start_us * started / SMS
        time += sum(pages_of(row) * self.page_us(profile, active, bandwidth) for active in whole_rounds)
        if split_items:
            time += -(-pages_of(row) // splits) * self.page_us(profile, split_items * splits, bandwidth)
            time += self.merge_us if splits > 1 else 0.0
        return time

    def reference_us(self, row: Row, bandwidth: float) -> float:
        splits = reference_splits(row)
        if splits > 1:
            return self.time_us(REFERENCE, row, [], splits, row.items, bandwidth)
        return self.time_us(REFERENCE, row, rounds(row.items, SMS), 1, 0, bandwidth)

    def ours_us(self, row: Row, bandwidth: float) -> float:
        chosen = choose_configuration(row.problem, SMS)
        if chosen.splits == 1:
            time = self.time_us(OURS, row, rounds(row.items, chosen.ctas), 1, 0, bandwidth)
            return time - ROUND_TRIP_US if chosen.short else time
        rest = row.items - chosen.unsplit_rounds * chosen.ctas
        return self.time_us(OURS, row, [chosen.ctas] * chosen.unsplit_rounds, chosen.splits, rest, bandwidth)


def rounds(items: int, ctas: int) -> list[int]:
    """Active CTAs of each round."""
    full, rest = divmod(items, ctas)
    return [ctas] * full + ([rest] if rest else [])


def fit() -> Model:
    """Least squares over the rows that are not short: `fixed`, pages of an SM, its share of `start`,
    `merge`."""
    lines, times = [], []
    for row in PUBLISHED:
        if is_short(row):
            continue
        splits = reference_splits(row)
        active = rounds(row.items * splits, SMS)
        lines.append([1.0, -(-pages_of(row) // splits) * len(active), active[0] / SMS, float(splits > 1)])
        times.append(row.b200_us)
    (fixed, page, start, merge), *_ = np.linalg.lstsq(np.array(lines), np.array(times), rcond=None)
    return Model(float(fixed), REFERENCE.bound[1] / (page * 1e3 * CLOCK_GHZ), float(start), float(merge))


@click.command(help=__doc__.split("\n\n")[0])
def main() -> None:
    model = fit()
    console = Console()
    console.print(
        f"fitted on the reference: fixed {model.fixed_us:.2f} us, "
        f"{REFERENCE.bound[0]} busy {model.efficiency:.0%}, "
        f"start of a full chip {model.start_us:.2f} us, merge {model.merge_us:.2f} us"
    )
    for profile in (REFERENCE, OURS):
        cycles = ", ".join(f"{name} {number:.0f}" for name, number in profile.resources.items())
        console.print(f"{profile.name}, cycles a page: {cycles}")
    table = Table(title="us a launch; all but 'published' are PREDICTED")
    ours = [f"ours at {bandwidth} TB/s" for bandwidth in BANDWIDTHS]
    for column in ("row", "items", "published", "reference, model", "error", *ours, "ours: splits"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in PUBLISHED:
        reference = None if is_short(row) else model.reference_us(row, BANDWIDTHS[-1])
        chosen = choose_configuration(row.problem, SMS)
        note = f"last round {chosen.splits}" if chosen.unsplit_rounds else str(chosen.splits)
        note = "short" if chosen.short else note
        table.add_row(
            row.name, str(row.items), f"{row.b200_us:.1f}",
            *(("", "") if reference is None else (f"{reference:.1f}", f"{reference - row.b200_us:+.1f}")),
            *(f"{model.ours_us(row, bandwidth):.1f}" for bandwidth in BANDWIDTHS), note,
        )
    console.print(table)


if __name__ == "__main__":
    main()
