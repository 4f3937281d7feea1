"""`msa-cudacore bench`: measure, check, and write results that one command reproduces."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from . import peers
from .chain import CHAINED_ROWS
from .rows import QUICK_ROWS, ROWS, SWEEP, SWEPT, Row, named
from .run import Plan, run
from .worker import OWN_GROUP

__all__ = ["command"]

_QUICK_SAMPLES = 30


@click.command(name="bench")
@click.option(
    "--rows",
    "row_names",
    default=None,
    help=f"Comma-separated rows, or beginnings of their names, or {SWEEP}; all when left out.",
)
@click.option(
    "--peers",
    "peer_names",
    default=None,
    help=f"Comma-separated peers, all or none: {', '.join(peers.ARRAYS)}.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder for JSON, table and plots; benchmarks/results/<gpu> here when left out.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=5),
    default=None,
    help="Timed replays of each row; 100 when left out. Of the sweep at most 24.",
)
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random pools and selections.")
@click.option(
    "--budget",
    type=click.FloatRange(min=30),
    default=900.0,
    show_default=True,
    help="Seconds for the whole run.",
)
@click.option(
    "--quick", is_flag=True, help=f"Three rows, {_QUICK_SAMPLES} replays, two steps, no peers unless named."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print results, or the list, as JSON instead of a table; write no files unless --output.",
)
@click.option("--list", "listing", is_flag=True, help="List the rows and peers that would run; needs no GPU.")
def command(
    row_names: str | None,
    peer_names: str | None,
    output: Path | None,
    samples: int | None,
    device: int,
    seed: int,
    budget: float,
    quick: bool,
    as_json: bool,
    listing: bool,
) -> None:
    """Measure every row on this GPU, against a page-streaming ceiling and the peers that are installed.

    Some rows are measured as a chain of steps in one graph, too, with and without dependent launches; and
    one is swept over the number of items. Each result is checked against the float64 oracle. Exit code 1:
    one of ours failed its check; 2: an error, such as no GPU.
    """
    rows, sweep = ROWS, True
    if row_names is not None or quick:
        rows, sweep = named(row_names if row_names is not None else ",".join(QUICK_ROWS))
    measured = _peers(peer_names if peer_names is not None else "none" if quick else "all")
    if not rows:
        measured = ()  # no peer takes part in the sweep
    if listing:
        _list(rows, sweep, measured, as_json)
        return
    plan = Plan(
        rows=rows,
        sweep=sweep,
        peers=measured,
        samples=samples or (_QUICK_SAMPLES if quick else 100),
        steps=2 if quick else 4,
        seed=seed,
        device=device,
        budget_seconds=budget,
    )
    _require_gpu(device)
    _measure(plan, output, as_json)


def _peers(names: str) -> tuple[str, ...]:
    if names in ("all", "none"):
        return tuple(peers.ARRAYS) if names == "all" else ()
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in peers.ARRAYS:
            raise ValueError(f"--peers names {name!r}; accepted are all, none, and {', '.join(peers.ARRAYS)}")
    return chosen


def _require_gpu(device: int) -> None:
    from msa_cudacore.launch import device as device_module

    from .arrays import require

    count = device_module.count()
    if device >= count:
        seen = (
            f"{count} CUDA device{'s are' if count != 1 else ' is'} visible"
            if count
            else "no CUDA device is visible"
        )
        raise RuntimeError(f"bench needs a GPU: --device is {device} and {seen} (see msa-cudacore doctor)")
    capability = device_module.facts(device).compute_capability
    if capability < (8, 0):
        raise RuntimeError(
            "bench needs compute capability 8.0 or later; "
            f"device {device} has {capability[0]}.{capability[1]}"
        )
    require()


def _measure(plan: Plan, output: Path | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from . import report

    console = Console(stderr=True, highlight=False)
    total = len(plan.rows) * (1 + len(plan.peers)) + plan.sweep
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("starting", total=total)
        seen: set[tuple[str, str]] = set()

        def progress(group: str, what: str) -> None:
            row, _, candidate = what.partition(": ")
            row = SWEEP if candidate == SWEEP else row
            if candidate and (group, row) not in seen:
                seen.add((group, row))
                if not console.is_terminal and not as_json:
                    console.print(f"{group}: {row}")
            bar.update(
                task,
                completed=len(seen),
                description=f"{'this package' if group == OWN_GROUP else group}, {what}",
            )

        results = run(plan, command=_spelled(plan), progress=progress)

    gpu = re.sub(r"[^a-z0-9]+", "-", results.about["machine"]["gpu"].lower()).strip("-")
    if output is None and not as_json:
        output = Path("benchmarks", "results", gpu)
    written = report.write(results.as_json(), output) if output is not None else []
    if as_json:
        click.echo(json.dumps(results.as_json()))
    else:
        report.show(results.as_json())
        for path in written:
            click.echo(f"wrote {path}")
    failed = report.failures(results.as_json())
    for line in failed:
        click.echo(line, err=True)
    if failed:
        sys.exit(1)


def _spelled(plan: Plan) -> str:
    """The command that measures a plan, wherever its files go."""
    default = Plan(rows=ROWS)
    words = ["msa-cudacore", "bench"]
    if plan.steps != default.steps:
        words.append("--quick")
        default = replace(default, peers=())
    if (plan.rows, plan.sweep) != (default.rows, default.sweep):
        words += ["--rows", ",".join([*(row.name for row in plan.rows), *([SWEEP] if plan.sweep else [])])]
    if not plan.rows:
        default = replace(default, peers=())
    if plan.peers != default.peers:
        words += ["--peers", ",".join(plan.peers) or "none"]
    for option, name in (
        ("samples", "samples"),
        ("seed", "seed"),
        ("device", "device"),
        ("budget", "budget_seconds"),
    ):
        if getattr(plan, name) != getattr(default, name):
            words += [f"--{option}", f"{getattr(plan, name):g}"]
    return " ".join(words)


def _list(rows: tuple[Row, ...], sweep: bool, measured: tuple[str, ...], as_json: bool) -> None:
    chosen = {row.name for row in rows}
    chained = [name for name in CHAINED_ROWS if name in chosen]
    if as_json:
        sizes = [asdict(row) | {"items": row.items, "num_q_heads": row.num_q_heads} for row in rows]
        others = {"chained": chained, "sweep": asdict(SWEPT) | {"name": SWEEP} if sweep else None}
        click.echo(json.dumps({"rows": sizes, **others, "peers": list(measured)}))
        return
    from rich.console import Console
    from rich.table import Table

    # Without rules it fits 80 columns, where rich would cut cells short.
    table = Table(title="Rows", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("row", "kind", "items", "batch", "context", "seqlen_q", "heads", "B200\nus"):
        table.add_column(heading, justify="left" if heading in ("row", "kind") else "right", no_wrap=True)
    for row in rows:
        context = f"up to {row.kv_tokens:,}" if row.ragged else f"{row.kv_tokens:,}"
        table.add_row(
            row.name,
            row.kind,
            str(row.items),
            str(row.batch),
            context,
            str(row.seqlen_q),
            f"{row.num_q_heads}/{row.num_kv_heads}",
            "" if row.b200_us is None else f"{row.b200_us:.1f}",
        )
    console = Console(highlight=False)
    if rows:
        console.print(table)
        console.print("B200 us: published time of the reference program")
    if chained:
        console.print(f"As chains of steps, too: {', '.join(chained)}")
    if sweep:
        console.print(
            f"{SWEEP}: a sweep over 1 to {SWEPT.items:,} items, {SWEPT.num_q_heads}/{SWEPT.num_kv_heads} heads, "
            f"context {SWEPT.kv_tokens:,}"
        )
    console.print(f"Peers: {', '.join(measured) or 'none'}")
