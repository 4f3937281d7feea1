"""Decode row of mma.sync: operand rows and the attribute vector go into the program's lists."""

from __future__ import annotations

from . import layout as L
from . import opcodes as O
from .forms import row
from .matrix_compiled import encode_mma, register_counts
from .model import Vector

_SHAPES = "m8n8k4|m8n8k16|m8n8k32|m16n8k4|m16n8k8|m16n8k16|m16n8k32|m16n8k64"
_TYPES = "f16|bf16|tf32|f32|f64|e4m3|e5m2|e2m3|e3m2|e2m1|u8|s8|u4|s4|s32"


@row("mma.sync", f"aligned {_SHAPES} row|col row|col kind::f8f6f4? satfinite? {_TYPES} {_TYPES} {_TYPES} "
                 f"{_TYPES}",
     "d, a, b, c")
def mma(builder, ins):
    words = ins.modifiers
    # A set of modifiers does not say which type is whose: their order does.
    try:
        attributes = encode_mma(words)
    except ValueError as error:
        raise builder.error(str(error)) from None
    kind = {"f64": "f64"}.get(words[-1], "b32")
    rows = []
    for operand, count in zip(ins.operands, register_counts(attributes)):
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            raise builder.error(f"{len(items)} registers where the shape needs {count}")
        if operand is ins.operands[0]:
            rows += [builder.dest(item) for item in items]
        else:
            rows += [builder.value(item, kind) for item in items]
    start = builder.row_list(rows)
    known = builder.decoder.__dict__.setdefault("matrix_attributes", {})
    key = attributes.tobytes()
    if key not in known:
        known[key] = builder.row_list([int(x) for x in attributes])
    written = register_counts(attributes)[0]
    builder.emit(O.MATRIX, a=start, b=len(rows), c=known[key], e=len(attributes), sync=L.SYNC_ALIGNED,
                 defs="", uses="", def_list=(start, written), use_list=(start + written, len(rows) - written))
