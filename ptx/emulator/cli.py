"""`msa-cudacore emulate file.ptx ...`: run a kernel of a PTX (or CUDA) file on the CPU with all checkers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import click
import numpy as np

_SCALARS = {
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


def parse_argument(text: str, rng: np.random.Generator):
    """One kernel argument of the command line.

    `f32[1024]` is a zeroed array, `f32[1024]:random` a random one, `array.npy` a file (changed in memory
    only), `i32=7` or `f32=0.5` a scalar, `null` a null pointer, `bytes[32]` zero bytes by value.
    """
    try:
        return _argument(text, rng)
    except (ValueError, OverflowError, OSError, MemoryError) as error:
        raise click.BadParameter(f"{text!r}: {' '.join(str(error).split())}") from error


def _argument(text: str, rng: np.random.Generator):
    from .module import Bytes

    kind, bracket, rest = text.partition("[")
    if text == "null":
        return None
    count, closing, fill = rest.partition("]")
    if bracket and not closing and kind in ("bytes", *_SCALARS):
        raise ValueError("the size lacks its ']'")
    if bracket and kind == "bytes":
        if fill:
            raise ValueError("after the size of bytes nothing is known")
        (size,) = _extents(count)
        return Bytes(size)
    if bracket and kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        shape = _extents(count)
        if fill not in ("", ":random"):
            raise click.BadParameter(f"{text!r}: after the size only ':random' is known")
        if not fill:
            return np.zeros(shape, dtype)
        if dtype.kind == "f":
            return rng.standard_normal(shape).astype(dtype)
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    kind, equals, value = text.partition("=")
    if equals and kind in _SCALARS:
        dtype = _SCALARS[kind]
        return dtype(float(value)) if np.dtype(dtype).kind == "f" else dtype(int(value, 0))
    if text.endswith(".npy"):
        return np.load(text)
    raise click.BadParameter(
        f"{text!r}: expected f32[1024], f32[1024]:random, file.npy, i32=7, null or bytes[32]"
    )


def _extents(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{text!r} is not a list of sizes such as 128 or 4,32")
    return tuple(int(number) for number in numbers)


def _extent(_context, _parameter, value: str | None):
    try:
        sizes = None if value is None else _extents(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if sizes is not None and not (1 <= len(sizes) <= 3 and all(sizes)):
        raise click.BadParameter(f"{value!r}: accepted are one to three sizes of at least 1, x[,y[,z]]")
    return sizes


def _check_saves(save: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Before the run: what it takes long to compute should not be lost to a typing error."""
    for item in save:
        index, _, target = item.partition("=")
        chosen = arguments[int(index)] if index.isdigit() and int(index) < len(arguments) else ""
        is_array = chosen.endswith(".npy") or ("[" in chosen and not chosen.startswith("bytes"))
        if not (is_array and target):
            raise click.BadParameter(
                f"{item!r}: accepted is N=file.npy with N an array argument", param_hint="--save"
            )
        _check_target(target, "--save")


def _check_target(path: str | Path, option: str) -> None:
    """Also before the run, for the same reason."""
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise click.BadParameter(f"{str(path)!r}: accepted is a file that can be written", param_hint=option)


@click.command("emulate")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option("--entry", help="Kernel to run; the only one by default.")
@click.option("--grid", default="1", callback=_extent, help="CTAs: x[,y[,z]].")
@click.option("--block", default="32", callback=_extent, help="Threads of a CTA: x[,y[,z]].")
@click.option("--cluster", callback=_extent, help="CTAs of a cluster: x[,y[,z]].")
@click.option("--shared", "shared_bytes", type=click.IntRange(min=0), default=0, help="Dynamic shared memory in bytes.")
@click.option("--arch", default="sm_100a", show_default=True, help="Target for .cu files.")
@click.option(
    "--schedule",
    type=click.Choice(["random", "eager", "late"]),
    default="random",
    show_default=True,
    help="When asynchronous work completes: at random times, at once, or as late as the rules allow.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the schedule and of :random arguments."
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Run this many seeds, starting at --seed.")
@click.option("--concurrent", type=click.IntRange(min=1), default=1, show_default=True, help="Clusters resident at once.")
@click.option("--no-checks", is_flag=True, help="Switch every checker off except bounds and alignment.")
@click.option("--lines", type=click.IntRange(min=0), default=0, help="Print the N most executed PTX lines.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome/Perfetto trace here.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the pipeline picture here.")
@click.option("--save", multiple=True, help="N=file.npy: store array argument N, counted from 0, after the run; may be repeated.")
@click.option("--debug", is_flag=True, help="Print every slice that a warp runs.")
def command(
    path,
    arguments,
    entry,
    grid,
    block,
    cluster,
    shared_bytes,
    arch,
    schedule,
    seed,
    seeds,
    concurrent,
    no_checks,
    lines,
    trace,
    picture,
    save,
    debug,
):
    """Run a kernel of PATH (.ptx, or .cu through NVRTC) on the CPU.

    ARGUMENTS, one for each parameter: f32[1024] (zeros), f32[1024]:random, data.npy, i32=7, null, bytes[32].
    """
    from msa_cudacore.cli import status

    from . import Fault, PtxSyntaxError, compile, load

    _check_saves(save, arguments)
    for option, target in (("--trace", trace), ("--picture", picture)):
        if target is not None:
            _check_target(target, option)
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--picture needs matplotlib, which pip install 'msa-cudacore[bench]' brings")
    try:
        if path.suffix == ".cu":
            from ..source import load as load_source

            module = compile(load_source(path), arch, name=path.name)
        else:
            module = load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path} is not text, so neither PTX nor CUDA C++") from error
    except (PtxSyntaxError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if entry is None:
        if len(module.entries) != 1:
            raise click.UsageError(
                f"--entry is needed: the module has {', '.join(module.entries) or 'no kernel'}"
            )
        entry = module.entries[0]
    running = f"Running {entry} in the emulator (its first use compiles it, which takes one to two minutes)"
    for number in range(seed, seed + seeds):
        values = [parse_argument(text, np.random.default_rng(number)) for text in arguments]
        try:
            with status(running, quiet=False):
                report = module.launch(
                    entry,
                    grid,
                    block,
                    values,
                    cluster=cluster,
                    shared_bytes=shared_bytes,
                    schedule=schedule,
                    seed=number,
                    checks=not no_checks,
                    concurrent_clusters=concurrent,
                    trace=trace is not None or picture is not None or debug,
                )
        except Fault as fault:
            click.echo(f"seed {number}: {fault}", err=True)
            sys.exit(1)
        except (ValueError, TypeError) as error:
            raise click.ClickException(str(error)) from error
    click.echo(report.summary())
    if lines:
        click.echo(f"the {lines} most executed PTX lines")
        for item in sorted(report.lines, key=lambda item: -item.warps)[:lines]:
            click.echo(
                f"  {item.warps:>12,}  line {item.line}: {item.text}"
                + (f"  {item.source}" if item.source else "")
            )
    if debug:
        for span in report.timeline.spans:
            click.echo(f"{span.start:>10} CTA {span.cta} {span.row}: {span.kind} x{span.length}: {span.name}")
    if trace is not None:
        report.save_trace(trace)
    if picture is not None:
        report.plot(picture)
    for item in save:
        index, _, target = item.partition("=")
        np.save(target, values[int(index)])
