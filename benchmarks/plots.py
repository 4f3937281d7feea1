"""Plots of a run: time of each row, fraction of the ceiling, roofline, and time over the number of items."""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .report import Point, Summary, points, summarize
from .rows import SWEPT

__all__ = ["draw"]

_TOKEN_BYTES = {"nvfp4": 144, "fp8": 256, "bf16": 512}
"""K and V of one token and head, by cache format."""
_FLOPS_PER_QUERY_AND_KEY = 4 * 128
"""Two products of 128 multiply-adds each."""
_DENSE_BF16_TFLOPS = {
    "NVIDIA H200": 989.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA B200": 2250.0,
}
"""Vendor's data sheets; the roofline's flat part is left out for other parts."""
_MARKERS = "osD^vP*X<>hd"


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw everything that was measured into a folder as SVG; returns the files."""
    summaries, swept = summarize(results), points(results)
    by_row = {"time": _time, "fraction": _fraction, "roofline": _roofline} if summaries else {}
    written = []
    # Text stays text, and file contents depend on the results alone.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "msa_cudacore", "font.size": 9}):
        figures = [(name, make(summaries, results)) for name, make in by_row.items()]
        if swept:
            figures.append(("items", _items(swept, results)))
        for name, figure in figures:
            FigureCanvasAgg(figure)
            path = folder / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            written.append(path)
    return written


def _candidates(summaries: list[Summary]) -> dict[str, str]:
    """Everything worth a series, ours first: name and title."""
    found = {"ours": "msa_cudacore"}
    for summary in summaries:
        found.update((name, one["title"]) for name, one in summary.timed.items() if one["kind"] == "peer")
    return found


def _legend(axes: Any) -> None:
    """Beside the plot, every label once."""
    named = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(
        named.values(), named.keys(), loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False
    )


def _time(summaries: list[Summary], results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 0.36 * len(summaries) + 2))
    axes = figure.subplots()
    places = range(len(summaries))
    for number, (name, title) in enumerate(_candidates(summaries).items()):
        points = [
            (s.median(name), place)
            for s, place in zip(summaries, places, strict=True)
            if s.median(name) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker=_MARKERS[number % len(_MARKERS)],
                label=title,
                markersize=8 if name == "ours" else 5,
                zorder=3 if name == "ours" else 2,
            )
    for summary, place in zip(summaries, places, strict=True):
        if summary.ceiling is not None:
            axes.plot(
                [summary.ceiling] * 2,
                [place - 0.4, place + 0.4],
                color="black",
                linewidth=2,
                label="page-streaming ceiling",
            )
        if summary.median("floor") is not None:
            axes.plot(
                [summary.median("floor")] * 2,
                [place - 0.4, place + 0.4],
                color="grey",
                linewidth=1,
                label="empty kernel",
            )
    axes.set_xscale("log")
    axes.set_xlabel("microseconds of one decode step, cold L2 (logarithmic)")
    axes.set_yticks(list(places), [f"{s.row.name} ({s.row.items} items)" for s in summaries])
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", alpha=0.3)
    _legend(axes)
    axes.set_title(f"{results['machine']['gpu']}, {results['date'][:10]}")
    return figure


def _fraction(summaries: list[Summary], results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 0.32 * len(summaries) + 2))
    axes = figure.subplots()
    for place, summary in enumerate(summaries):
        if summary.over_ceiling is None:
            continue
        axes.barh(
            place,
            1 / summary.over_ceiling,
            height=0.6,
            color="tab:blue",
            label="msa_cudacore",
        )
        if summary.row.at_most is not None:
            axes.plot(
                [1 / summary.row.at_most] * 2,
                [place - 0.4, place + 0.4],
                color="tab:red",
                linewidth=2,
                label="target",
            )
        best = min(summary.peers().values(), default=None)
        if best is not None and summary.ceiling is not None:
            axes.plot(summary.ceiling / best, place, "kD", markersize=5, label="best peer")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("page-streaming ceiling's time / time (1 = the ceiling)")
    axes.set_yticks(range(len(summaries)), [f"{s.row.name} ({s.row.items} items)" for s in summaries])
    axes.invert_yaxis()
    _legend(axes)
    axes.set_title(f"Fraction of the ceiling, {results['machine']['gpu']}")
    return figure


def _roofline(summaries: list[Summary], results: dict[str, Any]) -> Figure:
    """Arithmetic rate over arithmetic intensity, both without the launch's floor in time or masked keys in
    bytes.
    """
    figure = Figure(figsize=(8, 5.5))
    axes = figure.subplots()
    read = results.get("linear_read")
    peak = _DENSE_BF16_TFLOPS.get(results["machine"]["gpu"])
    if read is not None:
        rate = read["linear_read_bytes"] / read["linear_read_us"] / 1e6
        corners = [4.0, 1000.0] if peak is None else [4.0, peak / rate, 1000.0]
        roof = [min(rate * intensity, peak or math.inf) for intensity in corners]
        label = f"linear read {rate:.2f} TB/s"
        if peak is not None:
            label += f", dense bf16 {peak:.0f} TFLOP/s (data sheet)"
        axes.plot(corners, roof, color="black", label=label)
    for number, (name, title) in enumerate(_candidates(summaries).items()):
        points = []
        for summary in summaries:
            one = summary.timed.get(name)
            if one is None or "attended" not in summary.bytes:
                continue
            flops = _FLOPS_PER_QUERY_AND_KEY * summary.row.group * summary.bytes["attended"]
            moved = summary.bytes["attended"] * _TOKEN_BYTES[one["format"]]
            points.append((flops / moved, flops / one["median_us"] / 1e6))
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker=_MARKERS[number % len(_MARKERS)],
                label=title,
                alpha=0.7,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP for each byte of selected cache")
    axes.set_ylabel("TFLOP/s, launch included")
    axes.grid(which="both", alpha=0.3)
    _legend(axes)
    axes.set_title(f"Roofline, {results['machine']['gpu']}: one point for each row")
    return figure


def _items(swept: list[Point], results: dict[str, Any]) -> Figure:
    """Time, and time over the ceiling's, over the number of items: on the left up to one for each
    multiprocessor, on the right all. A letter says which configuration runs.
    """
    multiprocessors = results["machine"]["multiprocessors"]
    where: dict[str, list[str]] = {}
    for (first, last), name in _names(swept).items():
        where.setdefault(name, []).append(f"{first} to {last}" if last > first else str(first))
    letters = dict(zip(where, string.ascii_uppercase + string.ascii_lowercase, strict=False))
    key_inches = 0.17 * (len(where) + 1)
    figure = Figure(figsize=(12, 7 + key_inches), layout="constrained")
    plots, key = figure.subfigures(2, 1, height_ratios=[7, key_inches])
    times, ratios = plots.subplots(
        2, 2, sharex="col", gridspec_kw={"width_ratios": [1, 2.2], "height_ratios": [2, 1]}
    )
    most = swept[-1].items
    for column, last in enumerate((min(multiprocessors, most), most)):
        shown = [point for point in swept if point.items <= last]
        read = [point for point in shown if point.ceiling is not None]
        at = [point.items for point in shown]
        time, ratio = times[column], ratios[column]
        ours = {"color": "tab:blue", "marker": ".", "markersize": 4}
        bound = {"color": "black", "marker": ".", "markersize": 3, "linewidth": 1}
        time.plot(at, [point.ours for point in shown], label="msa_cudacore", **ours)
        read_at = [point.items for point in read]
        time.plot(read_at, [point.ceiling for point in read], label="page-streaming ceiling", **bound)
        ratio.plot(read_at, [point.over_ceiling for point in read], **ours)
        # Above the curves there is room for the letters.
        time.set_ylim(0, 1.15 * max(point.ours for point in shown))
        time.set_xlim(0, last + 0.5 + last / 100)
        ratio.set_ylim(bottom=min([1.0, *(point.over_ceiling for point in read)]))
        ratio.set_xlabel("items: (query token, KV head) pairs, here one for each request")
        time.legend(loc="lower right")
        for axes in (time, ratio):
            axes.grid(alpha=0.3)
            _bands(axes, swept, letters if axes is time else {}, last)
    times[0].set_ylabel("microseconds of one decode step, cold L2")
    ratios[0].set_ylabel("time / ceiling's time")
    times[0].set_title(f"Up to one item for each of {multiprocessors} multiprocessors")
    times[1].set_title(
        f"{results['machine']['gpu']}, {results['date'][:10]}: context {SWEPT.kv_tokens:,}, one KV head, "
        f"{SWEPT.group} query heads"
    )
    lines = [("", "items", "configuration")]
    lines += [(letters.get(name, ""), ", ".join(numbers), name) for name, numbers in where.items()]
    for number, line in enumerate(lines):
        for place, text in zip((0.04, 0.06, 0.22), line, strict=True):
            key.text(place, 1 - (number + 0.5) / len(lines), text, va="center", fontsize=8)
    return figure


def _names(swept: list[Point]) -> dict[tuple[int, int], str]:
    """The configuration of every stretch, as its first point calls it."""
    found: dict[tuple[int, int], str] = {}
    for point in swept:
        found.setdefault(point.same_code, point.configuration)
    return found


def _bands(axes: Any, swept: list[Point], letters: dict[str, str], end: int) -> None:
    """Shade every other stretch of one configuration, and give letters to those that have room for one."""
    for number, ((first, last), name) in enumerate(_names(swept).items()):
        low, high = first - 0.5, min(last, end) + 0.5
        if first > end:
            break
        if number % 2:
            axes.axvspan(low, high, color="black", alpha=0.07, linewidth=0)
        if name in letters and high - low > end / 150:
            axes.text(
                (low + high) / 2,
                0.98 - 0.04 * (number % 2),
                letters[name],
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
            )
