"""The command `msa-cudacore`. Exit codes: 0 done, 1 a result failed its check, 2 an error, told in one line."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import click

_LAZY = {
    # name: (module, attribute, line of help, extra that brings what it imports)
    "emulate": ("msa_cudacore.ptx.emulator.cli", "command", "Run PTX in the emulator, without a GPU.", "emulator"),
    "bench": ("msa_cudacore.benchmarks.cli", "command", "Measure every row of the benchmark on this GPU.", "bench"),
}


class Commands(click.Group):
    """A group that loads heavy commands when they are used, and tells every expected error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LAZY})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _LAZY:
            return super().get_command(ctx, name)
        module, attribute, _, extra = _LAZY[name]
        from importlib import import_module

        try:
            return getattr(import_module(module), attribute)
        except ImportError as error:
            if (error.name or "").startswith("msa_cudacore"):
                raise
            raise _failure(f"{name} needs {error.name or error}: pip install 'msa-cudacore[{extra}]'") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Unlike click's own, this does not import the lazy commands for their help lines.
        rows = [
            (name, _LAZY[name][2] if name in _LAZY else self.commands[name].get_short_help_str(80))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def make_context(self, *arguments: Any, **keywords: Any) -> click.Context:
        with _usage_in_one_line():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _usage_in_one_line():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(130)  # as shells have it; click's own is 1
        except click.ClickException as error:
            # click's own is 1, which here tells of a result; a command that fails a check exits by itself.
            error.exit_code = 2
            raise
        except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError, OverflowError) as error:
            if ctx.params.get("debug") or isinstance(error, click.exceptions.Exit):
                raise
            message = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.filename:
                message = f"{error.strerror}: {error.filename}"
            raise _failure(message) from error


@contextmanager
def _usage_in_one_line():
    """Without the three lines of usage that click prints before what is wrong."""
    try:
        yield
    except getattr(click.exceptions, "NoArgsIsHelpError", ()):
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "msa-cudacore"
        raise _failure(f"{error.format_message().rstrip('.')}. See '{command} --help'.") from error


def _failure(message: str) -> click.ClickException:
    failure = click.ClickException(" ".join(message.split()))
    failure.exit_code = 2
    return failure


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="msa-cudacore")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def main(debug: bool) -> None:
    """Sparse decode attention over a paged NVFP4 KV cache.

    `msa-cudacore demo` builds a cache, decodes one step on the best device here and checks the result.
    """


_FILE = click.Path(dir_okay=False)
# Names and ranges stand here as text, since what knows them takes long to import; the tests compare the two.
_BACKEND = click.option(
    "--backend",
    default="auto",
    show_default=True,
    help="auto or its synonym cake; or one program: blackwell, portable, reference, emulated (see doctor).",
)
_FRAMEWORK = click.option(
    "--framework",
    type=click.Choice(["auto", "numpy", "cuda", "torch", "cupy"]),
    default="auto",
    show_default=True,
    help="Whose arrays carry the problem; cuda is bare device memory, numpy the host.",
)
_SPLITS = click.option(
    "--splits", type=int, default=None, help="CTAs for each work item: 1, 2, 4, 8, of the reference 1; chosen when left out."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


@main.command(short_help="Decode one step on the best device here, and check it.")
@click.option("--batch", type=int, default=4, show_default=True, help="Requests, 1 to 1048576.")
@click.option("--tokens", type=int, default=4096, show_default=True, help="Longest context, 1 to 16777216; the shortest is half.")
@click.option("--q-heads", type=int, default=64, show_default=True, help="Query heads: 1 to 16 for each KV head.")
@click.option("--kv-heads", type=int, default=4, show_default=True, help="KV heads, 1 to 1024.")
@click.option("--seqlen-q", type=int, default=1, show_default=True, help="Query tokens of each request, 1 to 32.")
@click.option("--topk", type=int, default=16, show_default=True, help="Pages that each query token selects for each KV head, 1 to 64.")
@click.option("--seed", type=int, default=None, help="Of the random data; fresh data when left out.")
@click.option("--save", type=_FILE, default=None, help="Also write the problem, for `decode`.")
@click.option(
    "--emulate/--no-emulate",
    default=True,
    show_default=True,
    help="Without a GPU, also run the Blackwell program on a small problem in the emulator.",
)
@_BACKEND
@_FRAMEWORK
@_SPLITS
@_JSON
def demo(
    batch: int, tokens: int, q_heads: int, kv_heads: int, seqlen_q: int, topk: int, seed: int | None, save: str | None,
    emulate: bool, backend: str, framework: str, splits: int | None, as_json: bool,
) -> None:
    """Build a KV cache, decode one step on the best device here, and compare it with the float64 oracle.

    Without a GPU the oracle itself decodes; then the Blackwell kernel is run as well, instruction by instruction in
    the PTX emulator, on a small problem.
    """
    from .demo import SMALL_CASE, build_case

    with _progress("Writing the NVFP4 cache", quiet=as_json) as track:
        case = build_case(
            batch=batch, tokens=tokens, num_q_heads=q_heads, num_kv_heads=kv_heads, seqlen_q=seqlen_q, topk=topk,
            seed=seed, progress=track,
        )
    if save is not None:
        with _naming(save):
            case.save(save)
    decoded = _decode(case, backend, framework, splits, quiet=as_json)
    facts = _facts(case, decoded, check=True, quiet=as_json)
    if save is not None:
        facts["saved"] = save
    emulate = emulate and decoded.runner.backend == "reference" and backend in ("auto", "cake")
    emulator_missing = emulate and find_spec("numba") is None
    if not as_json:
        _print_table(facts)
    small = None
    if emulate and not emulator_missing:
        problem = build_case(**SMALL_CASE, seed=seed)
        text = "Running the Blackwell kernel in the emulator (the first run compiles the emulator: one to two minutes)"
        small = _facts(problem, _decode(problem, "emulated", "numpy", None, quiet=as_json, text=text), check=True, quiet=as_json)
        facts["emulated"] = small
        if not as_json:
            _print_table(small, title="The sm_100a kernel, in the PTX emulator")
    if as_json:
        click.echo(json.dumps(facts))
    elif emulator_missing:
        click.echo("The Blackwell kernel can run here too, in the PTX emulator: pip install 'msa-cudacore[emulator]'")
    if not (facts["ok"] and (small is None or small["ok"])):
        sys.exit(1)


@main.command()
@click.option("--input", "source", required=True, type=_FILE, help="Problem, npz; `demo --save` writes one.")
@click.option("--output", "target", required=True, type=_FILE, help="Results, npz.")
@click.option("--check/--no-check", default=False, show_default=True, help="Also compare with the float64 oracle.")
@_BACKEND
@_FRAMEWORK
@_SPLITS
@_JSON
def decode(
    source: str, target: str, check: bool, backend: str, framework: str, splits: int | None, as_json: bool
) -> None:
    """Decode a saved problem.

    \b
    The input npz holds:
      q                [batch * seqlen_q, Hq, 128]: bfloat16 bits as uint16
                       with q_dtype = "bfloat16", or floats of any width,
                       rounded to bfloat16
      k, v             uint8 [pages, Hkv, 128, 64]
      k_scale, v_scale uint8 [pages, Hkv, 128, 8], v_scale swizzled
      q2k_indices      integers [Hkv, batch * seqlen_q, topk]
      page_table       integers [batch, max_pages]
      seqused_k        integers [batch]
      k_global_scale, v_global_scale, and optionally seqlen_q, softmax_scale,
      scale_dtype ("float8_e4m3fn"); or, for the four cache arrays, one
      pool: uint8 [pages, page_bytes] with num_kv_heads, or
      [pages, 2, Hkv, 128, 72].
    Integers may have any width; values beyond int32 are refused, and so is
    any other key.

    \b
    The output npz holds:
      out              bfloat16 bits as uint16 [batch * seqlen_q, Hq, 128]
      lse              float32 [batch * seqlen_q, Hq], natural logarithm
      out_dtype ("bfloat16"), program, splits
    """
    import numpy as np

    from .case_file import load

    if os.path.exists(target) and os.path.samefile(source, target):
        raise ValueError(f"--output {target} is the file of --input {source}; accepted is any other, so that the problem stays")
    case = load(source)
    decoded = _decode(case, backend, framework, splits, quiet=as_json)
    with _naming(target), open(target, "wb") as file:
        np.savez(
            file, out=decoded.out.view(np.uint16), out_dtype="bfloat16", lse=decoded.lse,
            program=decoded.runner.program, splits=decoded.runner.splits,
        )
    facts = _facts(case, decoded, check=check, quiet=as_json)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _print_table(facts)
    if not facts.get("ok", True):
        sys.exit(1)


@main.command(short_help="Say what is installed and which programs run here.")
@_JSON
def doctor(as_json: bool) -> None:
    """Say what is installed, which GPUs are visible and which programs each can run."""
    from .doctor import diagnose

    found = diagnose()
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="Installed", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path cut short is none
    table.add_column()
    table.add_row("Python", found.python, found.system)
    for package in found.packages:
        missing = "[red]missing[/]" if package.required else "[dim]not installed[/]"
        table.add_row(package.name, package.version or missing, package.purpose)
    table.add_row("NVRTC", found.nvrtc or "[red]cannot be loaded[/]", "compiler library")
    table.add_row("driver", f"CUDA {found.driver}" if found.driver else "[yellow]none[/]", "NVIDIA driver")
    table.add_row("program cache", escape(found.cache), "compiled kernels")
    console.print(table)
    programs = Table(title="Programs", title_justify="left")
    for heading in ("device", "backend", "state"):
        programs.add_column(heading)
    for gpu in found.gpus:
        for backend, state in gpu.programs.items():
            programs.add_row(gpu.description, backend, "[green]runs[/]" if state == "runs" else escape(state))
        if not gpu.programs:
            programs.add_row(escape(gpu.description), "", "[red]unusable[/]")
    for backend, state in found.host_programs.items():
        programs.add_row("host CPU", backend, "[green]runs[/]" if state == "runs" else escape(state))
    console.print(programs)
    for line in found.advice:
        console.print(f"- {line}", markup=False, soft_wrap=True)


@contextmanager
def _naming(path: str):
    """Errors of writing a file name it; those of a full disk do not by themselves."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _decode(
    case: Any, backend: str, framework: str, splits: int | None, *, quiet: bool, text: str | None = None
) -> Any:
    from .demo import decode_case

    emulating = "Decoding in the PTX emulator (its first use compiles it, which takes one to two minutes)"
    with status(text or (emulating if backend == "emulated" else "Compiling and decoding"), quiet=quiet):
        return decode_case(case, backend=backend, framework=framework, splits=splits)


def _facts(case: Any, decoded: Any, *, check: bool, quiet: bool) -> dict[str, Any]:
    """What ran and how well it did; with `check`, key `ok` says whether the result meets every bar."""
    from .reference import compare

    report = None
    if check:
        with status("Computing the float64 oracle", quiet=quiet):
            report = compare(decoded.out, decoded.lse, *case.exact())
    runner = decoded.runner
    facts: dict[str, Any] = {
        "device": decoded.device,
        "backend": runner.backend,
        "program": runner.program,
        "framework": decoded.framework,
        "splits": runner.splits,
        "workspace_bytes": runner.workspace_bytes,
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "q_heads": case.num_q_heads,
        "kv_heads": case.num_kv_heads,
        "topk": int(case.q2k_indices.shape[-1]),
        "tokens": [int(n) for n in case.seqused_k],
        "microseconds": decoded.microseconds,
    }
    if report is not None:
        facts |= {
            "ok": bool(report), "problems": list(report.problems), "relative_error": report.relative_error,
            "rounding_floor": report.floor, "worst_ratio": report.worst_ratio, "max_abs_error": report.max_abs_error,
            "max_lse_error": report.max_lse_error,
        }
    return facts


def _print_table(facts: dict[str, Any], title: str = "NVFP4 sparse decode") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shortest, longest = min(facts["tokens"], default=0), max(facts["tokens"], default=0)
    span = f"{longest:,} tokens" if shortest == longest else f"{shortest:,} to {longest:,} tokens"
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_row(
        "problem",
        f"{facts['batch']} request{'s' * (facts['batch'] != 1)} of {span}, {facts['seqlen_q']} query token{'s' * (facts['seqlen_q'] > 1)} each, "
        f"{facts['q_heads']}/{facts['kv_heads']} heads, top-{facts['topk']}",
    )
    table.add_row("device", facts["device"])
    table.add_row("program", facts["program"])
    table.add_row("splits", str(facts["splits"]))
    if "ok" in facts:
        table.add_row("relative error", f"{facts['relative_error']:.3e} against the float64 oracle")
        floor = f"{facts['rounding_floor']:.3e}, the error of storing the exact result in bfloat16"
        table.add_row("rounding floor", floor)
        table.add_row("worst row", f"{facts['worst_ratio']:.3f} times its floor (at most 1.25)")
        table.add_row("largest error", f"out {facts['max_abs_error']:.2e}, lse {facts['max_lse_error']:.2e}")
    if facts["framework"] == "numpy":
        table.add_row("time", f"{facts['microseconds'] / 1e6:.2f} s on the host")
    else:
        table.add_row("time of a launch", f"{facts['microseconds']:,.1f} us, back to back, caches warm")
    if "ok" in facts:
        failed = f"[red]DOES NOT MATCH: [/]{escape('; '.join(facts['problems']))}"
        # Else a machine without a GPU would seem to have tested a kernel.
        itself = ", which is this program itself" if facts["backend"] == "reference" else ""
        table.add_row("result", f"[green]matches the oracle[/]{itself}" if facts["ok"] else failed)
    if "saved" in facts:
        table.add_row("saved", escape(facts["saved"]))
    Console(highlight=False).print(table)


@contextmanager
def _progress(text: str, *, quiet: bool):
    """Yields track(items, total), which shows a bar on stderr while items are taken; off terminals as `status`."""
    if quiet or not sys.stderr.isatty():
        with status(text, quiet=quiet):
            yield lambda items, total: items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:

        def track(items: Iterable[int], total: int) -> Iterable[int]:
            return bar.track(items, total=total, description=text)

        yield track


_PATIENCE = 2.0
"""Seconds of silence in a log before a line says what takes so long: a quick error stays one line."""


@contextmanager
def status(text: str, *, quiet: bool):
    """Names a phase on stderr: a spinner on terminals, elsewhere one line if it lasts."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        line = threading.Timer(_PATIENCE, click.echo, [f"{text} ..."], {"err": True})
        line.start()
        try:
            yield
        finally:
            line.cancel()


if __name__ == "__main__":
    main()
