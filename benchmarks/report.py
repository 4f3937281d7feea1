"""Results as a Markdown table, a terminal table and files; works on the JSON form alone, so on saved results
too.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rows import ROWS, SWEEP, SWEPT, Row

__all__ = ["Point", "Summary", "failures", "markdown", "points", "show", "summarize", "write"]

_ROWS = {row.name: row for row in ROWS}


class Summary:
    """The figures of one row that everything shown is made of, microseconds."""

    def __init__(self, row: Row, results: dict[str, Any]) -> None:
        self.row = row
        self.bytes = results["rows"].get(row.name, {})
        mine = [one for one in results["measurements"] if one["row"] == row.name]
        self.timed = {one["candidate"]: one for one in mine if "median_us" in one}
        self.missing = {
            one["candidate"]: one.get("skipped") or one["failed"] for one in mine if "median_us" not in one
        }

    def median(self, candidate: str) -> float | None:
        one = self.timed.get(candidate)
        return None if one is None else one["median_us"]

    @property
    def ours(self) -> float | None:
        return self.median("ours")

    @property
    def ceiling(self) -> float | None:
        """The better of the two ways to stream the selected pages as listed."""
        return min(
            (us for us in map(self.median, ("ceiling_registers", "ceiling_bulk")) if us is not None),
            default=None,
        )

    @property
    def distinct_ceiling(self) -> float | None:
        """The same with every page read once; None where no page is selected twice."""
        both = map(self.median, ("ceiling_registers_distinct", "ceiling_bulk_distinct"))
        return min((us for us in both if us is not None), default=None)

    @property
    def over_ceiling(self) -> float | None:
        return self.ours / self.ceiling if self.ours and self.ceiling else None

    def peers(self, cache_format: str | None = None) -> dict[str, float]:
        """Times of the peers that computed the right thing, of one cache format or of all."""
        return {
            name: one["median_us"]
            for name, one in self.timed.items()
            if one["kind"] == "peer" and one["check"]["passed"] and cache_format in (None, one["format"])
        }


def summarize(results: dict[str, Any]) -> list[Summary]:
    """One summary for each measured row, in the order of :data:`.rows.ROWS`."""
    measured = {one["row"] for one in results["measurements"]}
    return [Summary(row, results) for name, row in _ROWS.items() if name in measured]


@dataclass(frozen=True)
class Point:
    """One number of items of the sweep, microseconds."""

    items: int
    ours: float
    ceiling: float | None
    same_code: tuple[int, int]
    """The first and the last number of items around this one for which the program runs the same code."""
    configuration: str

    @property
    def over_ceiling(self) -> float | None:
        return None if self.ceiling is None else self.ours / self.ceiling


def points(results: dict[str, Any]) -> list[Point]:
    """What the sweep measured, by number of items; results of before there was one have nothing."""
    found = [
        Point(
            one["items"],
            one["ours"]["median_us"],
            min((read["median_us"] for read in one["ceilings"]), default=None),
            tuple(one["same_code"]),
            _specialisation(one["ours"]["configuration"]),
        )
        for one in results.get(SWEEP, [])
        if "ours" in one
    ]
    return sorted(found, key=lambda point: point.items)


def _specialisation(configuration: str) -> str:
    """What a configuration says beyond the program's name, the architecture and that nothing is split."""
    return re.sub(r"^\w+\(\w+, (.*)\)", r"\1", configuration).removeprefix("splits=1, ")


def failures(results: dict[str, Any]) -> list[str]:
    """One line for each result of ours that is missing or missed its bars."""
    found = []
    for one in results["measurements"]:
        if one.get("candidate") == "ours":
            if "check" not in one:
                found.append(f"{one['row']}: ours did not run: {one.get('failed') or one.get('skipped')}")
            elif not one["check"]["passed"]:
                found.append(f"{one['row']}: ours does not match the oracle: {one['check']['problem']}")
    for one in results.get("chains", []):
        if "failed" in one:
            found.append(f"{one['row']}: the chain of steps did not run: {one['failed']}")
        for way, figures in one.get("ways", {}).items():
            wrong = [check["problem"] for check in figures["checks"] if not check["passed"]]
            if wrong:
                found.append(f"{one['row']}: a chain of steps ({way}) does not match the oracle: {wrong[0]}")
    for one in results.get(SWEEP, []):
        if "failed" in one:
            found.append(f"{one['row']}, sweep: did not run: {one['failed']}")
        elif "ours" in one and not one["ours"]["check"]["passed"]:
            problem = one["ours"]["check"]["problem"]
            found.append(f"{one['row']}, sweep: ours does not match the oracle: {problem}")
    if "failed" in results["groups"].get("own", {}):
        found.append(f"this package's own measurements: {results['groups']['own']['failed']}")
    return found


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    machine, summaries = results["machine"], summarize(results)
    lines = [
        f"# Benchmark on {machine['gpu']}",
        "",
        f"`{results['command']}`, {results['date'][:10]}. Driver {machine['driver'] or 'unknown'}, "
        f"NVRTC {machine['nvrtc']}, "
        f"kernels {results['kernels_sha256'][:12]}, {_clocks(results)}.",
        "",
        f"Median GPU time of one decode step in microseconds, {results['method']['samples']} CUDA graph "
        f"replays over {results['method']['rotating_steps']} steps in turn, L2 cold. Every figure contains "
        "the empty kernel's (floor). The ceiling reads the same pages and does nothing else; `distinct` "
        "reads a page once where several query tokens select it.",
        "",
    ]
    if summaries:
        lines += _table(_overview_headings(), [_overview(summary) for summary in summaries])
        lines += [
            "",
            "## Peers",
            "",
            "Same selected pages, best launch setting each; a dash where a peer did not run.",
            "",
        ]
        names = _peer_names(results)
        if names:
            lines += _table(
                ["row", "ours", *names.values()],
                [[s.row.name, _us(s.ours), *(_peer_cell(s, name) for name in names)] for s in summaries],
            )
        lines += ["", *_absent(results), ""]
    lines += [*_chains(results), *_sweep(results), "## Errors", ""]
    lines += [
        "Relative L2 error of output rows against the float64 oracle, largest over the rows; the floor is "
        "the error of merely "
        "rounding the exact result to bfloat16.",
        "",
    ]
    lines += _table(
        ["candidate", "cache", "rows checked", "relative error", "floor", "worst row over its floor"],
        _errors(results),
    )
    if "linear_read" in results:
        read = results["linear_read"]
        rate = read["linear_read_bytes"] / read["linear_read_us"] / 1e6
        lines += ["", f"A linear read of 2 GiB runs at {rate:.2f} TB/s.", ""]
    return "\n".join(lines)


def _clocks(results: dict[str, Any]) -> str:
    seen = [
        clock["sm_mhz"]
        for one in [*results["measurements"], *results.get(SWEEP, [])]
        for clock in (one.get("clocks") or {}).values()
        if clock and "sm_mhz" in clock
    ]
    return f"SM clock {min(seen)} to {max(seen)} MHz around the measurements" if seen else "clocks not read"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _overview_headings() -> list[str]:
    return [
        "row",
        "items",
        "MB",
        "floor",
        "ceiling",
        "distinct",
        "ours",
        "p10 to p90",
        "ours / ceiling",
        "at most",
        "best peer / ours",
        "best NVFP4 peer / ours",
        "B200 reference",
    ]


def _overview(summary: Summary) -> list[str]:
    row, ours = summary.row, summary.timed.get("ours")
    any_peer = min(summary.peers().values(), default=None)
    nvfp4 = min(summary.peers("nvfp4").values(), default=None)
    return [
        row.name,
        str(row.items),
        f"{summary.bytes.get('selected_bytes', 0) / 1e6:.1f}",
        _us(summary.median("floor")),
        _us(summary.ceiling),
        _us(summary.distinct_ceiling),
        _us(summary.ours),
        "-" if ours is None else f"{ours['p10_us']:.1f} to {ours['p90_us']:.1f}",
        _ratio(summary.over_ceiling),
        _ratio(row.at_most),
        _ratio(any_peer / summary.ours if any_peer and summary.ours else None),
        _ratio(nvfp4 / summary.ours if nvfp4 and summary.ours else None),
        _us(row.b200_us),
    ]


def _peer_names(results: dict[str, Any]) -> dict[str, str]:
    """Peers that were timed on any row: name and title."""
    return {
        one["candidate"]: one["title"]
        for one in results["measurements"]
        if one.get("kind") == "peer" and "median_us" in one
    }


def _peer_cell(summary: Summary, name: str) -> str:
    one = summary.timed.get(name)
    if one is None:
        return "-"
    return f"{one['median_us']:.1f}" + ("" if one["check"]["passed"] else " (wrong)")


def _absent(results: dict[str, Any]) -> list[str]:
    """Why peers did not run: whole groups, and single rows."""
    lines = [
        f"* {group}: {about.get('skipped') or about.get('failed')}"
        for group, about in results["groups"].items()
        if "skipped" in about or "failed" in about
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in results["measurements"]:
        if "median_us" not in one:
            reasons.setdefault((one["candidate"], one.get("skipped") or one["failed"]), []).append(one["row"])
    lines += [f"* {name} on {', '.join(rows)}: {why}" for (name, why), rows in reasons.items()]
    return lines or ["Every peer ran on every row."]


def _chains(results: dict[str, Any]) -> list[str]:
    """The section of dependent launches; results of before there was one have none."""
    chains = results.get("chains", [])
    if not chains:
        return []
    timed = [one for one in chains if "ways" in one]
    lines = [
        "## Dependent launches",
        "",
        "Microseconds. *One step* is a graph of one, *chain* a graph of all steps of the row, each behind "
        "the last; *further step* what each behind the first takes, the median of (chain - one step) / "
        "others. `pdl` is the same with `enable_pdl=True`; all four graphs were replayed by turns. L2 is "
        "cold where a chain begins; *read before* is the share of a further step's pages that earlier steps "
        "of the chain have read by chance.",
        "",
    ]
    figures = ["one step", "chain", "further step", "p10 to p90"]
    figures += [f"{name}, pdl" for name in figures]
    headings = ["row", "items", "steps", *figures, "gain", "read before"]
    if timed:
        lines += [*_table(headings, [_chain(one) for one in timed]), ""]
    return [*lines, *_missing(chains, "ways")]


def _missing(records: list[dict[str, Any]], measured: str) -> list[str]:
    """Why records lack what was to be measured."""
    missing = [one for one in records if measured not in one]
    lines = [f"* {one['row']}: {one.get('skipped') or one['failed']}" for one in missing]
    return [*lines, ""] if lines else []


def _chain(one: dict[str, Any]) -> list[str]:
    cells = [one["row"], str(_ROWS[one["row"]].items), str(one["steps"])]
    for figures in one["ways"].values():
        cells += [f"{figures[name]:.2f}" for name in ("one_us", "all_us", "further_us")]
        cells.append(f"{figures['further_p10_us']:.2f} to {figures['further_p90_us']:.2f}")
    return [*cells, _gain(one), f"{one['read_before']:.0%}"]


def _gain(one: dict[str, Any]) -> str:
    """What `enable_pdl` takes off a further step."""
    ordinary, pdl = (one["ways"][way]["further_us"] for way in ("ordinary", "enable_pdl"))
    return f"{ordinary - pdl:.2f}"


def _sweep(results: dict[str, Any]) -> list[str]:
    """The section of the sweep over the number of items."""
    if not results.get(SWEEP):
        return []
    lines = [
        "## Over the number of items",
        "",
        f"Steps of 1 to {SWEPT.items:,} requests of {SWEPT.kv_tokens:,} tokens with one KV head and "
        f"{SWEPT.group} query heads: as many items as requests. A line for each stretch within which "
        "neither the kernel changes nor the number of items that some multiprocessor has to take; "
        "microseconds at its two ends, medians of fewer replays than above. The ceiling's settings were "
        "tried at a few numbers of items, not at each.",
        "",
    ]
    headings = ["items", "configuration", "ours", "ceiling", "ours / ceiling"]
    lines += [*_table(headings, [_ends(stretch) for stretch in _stretches(results)], left=2), ""]
    return [*lines, *_missing(results[SWEEP], "ours")]


def _stretches(results: dict[str, Any]) -> list[list[Point]]:
    """Points of the same code and the same number of whole rounds."""
    multiprocessors = results["machine"]["multiprocessors"]

    def stretch(point: Point) -> tuple[tuple[int, int], int]:
        return point.same_code, (point.items - 1) // multiprocessors

    return [list(same) for _, same in itertools.groupby(points(results), key=stretch)]


def _ends(stretch: list[Point]) -> list[str]:
    ends = [stretch[0], stretch[-1]] if len(stretch) > 1 else stretch

    def both(texts: list[str]) -> str:
        return " to ".join(dict.fromkeys(texts))

    return [
        both([str(point.items) for point in ends]),
        stretch[0].configuration,
        both([_us(point.ours) for point in ends]),
        both([_us(point.ceiling) for point in ends]),
        both([_ratio(point.over_ceiling) for point in ends]),
    ]


def _errors(results: dict[str, Any]) -> list[list[str]]:
    checked: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results["measurements"]:
        if "check" in one:
            checked.setdefault((one["candidate"], one["format"]), []).append(one["check"])
    for one in results.get("chains", []):
        for way, figures in one.get("ways", {}).items():
            checked.setdefault((f"ours, chain, {way}", "nvfp4"), []).extend(figures["checks"])
    swept = [one["ours"]["check"] for one in results.get(SWEEP, []) if "ours" in one]
    if swept:
        checked["ours, sweep", "nvfp4"] = swept
    return [
        [
            name,
            cache_format,
            str(sum(check["rows"] for check in checks)),
            f"{max(check['relative_error'] for check in checks):.2e}",
            f"{max(check['floor'] for check in checks):.2e}",
            f"{max(check['worst_over_floor'] for check in checks):.2f}",
        ]
        for (name, cache_format), checks in checked.items()
    ]


def _table(headings: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """`left`: how many columns are text."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * left + "---:|" * (len(headings) - left)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def show(results: dict[str, Any]) -> None:
    """Print the overview, the peers and what did not run to the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    summaries = summarize(results)
    table = Table(
        title=f"{results['machine']['gpu']}: microseconds of one decode step, cold L2", title_justify="left"
    )
    for heading in (
        "row",
        "items",
        "floor",
        "ceiling",
        "ours",
        "ours / ceiling",
        "at most",
        "best peer",
        "best / ours",
    ):
        table.add_column(
            heading, justify="left" if heading in ("row", "best peer") else "right", no_wrap=heading == "row"
        )
    for s in summaries:
        best = min(s.peers().items(), key=lambda pair: pair[1], default=(None, None))
        table.add_row(
            s.row.name,
            str(s.row.items),
            _us(s.median("floor")),
            _us(s.ceiling),
            _us(s.ours),
            _ratio(s.over_ceiling),
            _ratio(s.row.at_most),
            "-" if best[0] is None else f"{best[0]} {best[1]:.1f}",
            _ratio(best[1] / s.ours if best[1] and s.ours else None),
        )
    if summaries:
        console.print(table)
    timed = [one for one in results.get("chains", []) if "ways" in one]
    if timed:
        table = Table(title="A further step of a chain in one graph", title_justify="left")
        table.add_column("row", no_wrap=True)
        for heading in (*timed[0]["ways"], "gain"):
            table.add_column(heading, justify="right")
        for one in timed:
            further = (f"{figures['further_us']:.2f}" for figures in one["ways"].values())
            table.add_row(one["row"], *further, _gain(one))
        console.print(table)
    if points(results):
        table = Table(title="Over the number of items", title_justify="left")
        for heading in ("items", "ours", "ceiling", "ours / ceiling", "configuration"):
            left = heading in ("items", "configuration")
            table.add_column(heading, justify="left" if left else "right", no_wrap=heading == "items")
        for stretch in _stretches(results):
            items, configuration, *figures = _ends(stretch)
            table.add_row(items, *figures, configuration)
        console.print(table)
    for line in _absent(results) if summaries else ():
        console.print(line, markup=False, soft_wrap=True)


def _json(results: dict[str, Any]) -> str:
    """JSON with one measurement a line, so that two runs can be compared line by line."""
    parts = []
    for key, value in results.items():
        text = json.dumps(value)
        if key in ("measurements", "chains", SWEEP):
            text = "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write `results.json`, `table.md` and, where matplotlib is installed, the plots; returns what was
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "results.json", folder / "table.md"]
    written[0].write_text(_json(results), encoding="utf-8")
    written[1].write_text(markdown(results) + "\n", encoding="utf-8")
    try:
        from . import plots
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return written
    return written + plots.draw(results, folder)
