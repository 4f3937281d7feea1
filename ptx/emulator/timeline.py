"""The time line of a launch: what each warp ran, what it waited for, and the asynchronous work beside it.

One tick is one executed warp instruction anywhere on the machine: the axis shows order and overlap, not
nanoseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

#: colours of instruction classes in the picture
_COLOURS = {
    "matrix": "#c0392b",
    "tensor memory": "#e67e22",
    "async copy": "#2980b9",
    "barrier": "#7f8c8d",
    "load": "#27ae60",
    "store": "#16a085",
    "atomic": "#8e44ad",
    "float": "#f1c40f",
    "half": "#f39c12",
    "convert": "#d4ac0d",
    "warp": "#9b59b6",
    "control": "#bdc3c7",
    "fence": "#34495e",
    "wait": "#ecf0f1",
    "asynchronous": "#3498db",
}


@dataclass(frozen=True)
class Span:
    """A piece of a row: [start, start + length) in ticks; `kind` is an instruction class, "wait" or
    "asynchronous"."""

    cta: int
    row: str
    start: int
    length: int
    kind: str
    name: str
    source: str = ""


class Timeline:
    """Spans of every warp and of asynchronous work, in order of their start."""

    def __init__(self, machine) -> None:
        from .report import instruction_class
        from .warp_copies import EVENT_COPY, EVENT_WAIT

        self.spans: list[Span] = []
        instructions, program = machine.decoded.instructions, machine.P
        for block in machine.trace_blocks:
            for start, count, slot, begin, _, cta in block.tolist():
                instruction = instructions[begin]
                kind = (
                    instruction_class(instruction, int(program[begin, 0]))
                    if instruction is not None
                    else "move"
                )
                name = instruction.text if instruction is not None else "prologue"
                source = str(instruction.source or "") if instruction is not None else ""
                row = f"warp {slot % EVENT_WAIT % machine.warps_per_cta}"
                if slot >= EVENT_COPY:
                    row, kind = name, "asynchronous"
                elif slot >= EVENT_WAIT:
                    kind = "wait"
                self.spans.append(
                    Span(
                        machine.cta_at(cta, start),
                        row,
                        start,
                        max(count, 1),
                        kind,
                        name,
                        source,
                    )
                )
        for cta, row, start, end, kind, name, source in machine.notes:
            self.spans.append(Span(cta, row, start, max(end - start, 1), kind, name, source))
        self.spans.sort(key=lambda span: span.start)

    def save_trace(self, path) -> None:
        """Chrome/Perfetto JSON: one process a CTA, one thread a warp; asynchronous work in threads of its
        own."""
        rows = {}
        events = []
        for span in self.spans:
            thread = rows.setdefault((span.cta, span.row), len(rows) + 1)
            events.append(
                {
                    "name": span.name,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": span.start,
                    "dur": span.length,
                    "pid": span.cta,
                    "tid": thread,
                    "args": {"source": span.source},
                }
            )
        for (cta, row), thread in rows.items():
            events.append(
                {"name": "thread_name", "ph": "M", "pid": cta, "tid": thread, "args": {"name": row}}
            )
            events.append({"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"CTA {cta}"}})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)

    def plot(self, path=None, cta: int | None = None):
        """Picture with one row a warp (and one for each kind of asynchronous work) of one CTA; returns the
        figure."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        cta = min((span.cta for span in self.spans), default=0) if cta is None else cta
        spans = [span for span in self.spans if span.cta == cta]
        rows = sorted({span.row for span in spans}, key=_row_order)
        figure = Figure(figsize=(12, 1 + 0.35 * max(len(rows), 1)), layout="constrained")
        axes = figure.add_subplot()
        for number, row in enumerate(rows):
            for kind in {span.kind for span in spans if span.row == row}:
                pieces = [(s.start, s.length) for s in spans if s.row == row and s.kind == kind]
                axes.broken_barh(pieces, (number - 0.4, 0.8), facecolors=_COLOURS.get(kind, "#95a5a6"))
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel("executed warp instructions")
        axes.set_title(f"CTA {cta}")
        kinds = sorted({span.kind for span in spans})
        axes.legend(handles=[Patch(color=_COLOURS.get(kind, "#95a5a6"), label=kind) for kind in kinds],
                    loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        if path is not None:
            figure.savefig(path)
        return figure


def _row_order(row: str) -> tuple:
    kind, _, number = row.rpartition(" ")
    return (kind != "warp", kind, int(number) if number.isdigit() else 0)
