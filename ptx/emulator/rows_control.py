"""Decode rows: branches, calls, exit, barriers, and the instructions by which lanes of a warp communicate."""

from __future__ import annotations

from . import layout as L
from . import opcodes as O
from .barriers import ARRIVE, RED_AND, RED_OR, RED_POPC, SYNC
from .forms import row
from .lanes_float import F_ABS, F_NAN
from .lanes_warp import ALL_UNCHECKED, REDUX_MODES, SHUFFLE_MODES, VOTE_MODES
from .model import Group, Immediate, Pair, Symbol


@row("bra", "uni?", "a")
def branch(b, ins):
    target = ins.operands[0]
    if not isinstance(target, Symbol):
        raise b.error("a branch needs a label")
    b.emit(O.BRA, target=target.name, defs="", uses="")


@row("brx.idx", "uni?", "a, t")
def indexed_branch(b, ins):
    table = ins.operands[1]
    labels = b.function.tables.get(getattr(table, "name", None))
    if labels is None:
        raise b.error("brx.idx needs the label of a .branchtargets list")
    start = b.row_list([0] * len(labels))
    if b.guard[0] != L.NONE:
        # The compiled loop takes all its lanes to a target, so lanes that are predicated off skip it by a
        # branch.
        row_, negated = b.guard
        skip = f"%skip{len(b.codes)}"
        b.guard = (row_, 1 - negated)
        b.emit(O.BRA, target=skip, defs="", uses="")
        b.guard = (L.NONE, 0)
        code = b.emit(O.BRX, a=b.value(ins.operands[0], "u32"), b=start, c=len(labels), defs="", uses="a")
        b.labels[skip] = len(b.codes)
    else:
        code = b.emit(O.BRX, a=b.value(ins.operands[0], "u32"), b=start, c=len(labels), defs="", uses="a")
    code.targets = [(start + k, label) for k, label in enumerate(labels)]


@row("call", "uni?", None)
def call(b, ins):
    operands = list(ins.operands)
    returns = operands.pop(0).items if operands and isinstance(operands[0], Group) else ()
    if not operands:
        raise b.error("call without a function")
    target = operands.pop(0)
    arguments = operands.pop(0).items if operands and isinstance(operands[0], Group) else ()
    names = list(b.decoder.program.functions)
    if isinstance(target, Symbol) and target.name in b.decoder.program.functions:
        function = b.decoder.program.functions[target.name]
        if not function.defined:
            raise b.error(f"function {target.name!r} has no body in this module")
        formals, results = function.parameters, function.returns
        b.decoder.need(target.name)
        b.decoder.callers.setdefault(b.function.name, set()).add(target.name)
        number, row_ = names.index(target.name), None
    else:
        if not operands:
            raise b.error(f"unknown function {getattr(target, 'name', target)!r}")
        prototype = b.function.prototypes.get(getattr(operands[0], "name", None))
        table = b.function.tables.get(getattr(operands[0], "name", None))
        if prototype is None and table is None:
            raise b.error("an indirect call needs a .callprototype or .calltargets label")
        if prototype is None:
            first = b.decoder.program.functions[table[0]]
            prototype = (first.returns, first.parameters)
        results, formals = prototype
        number, row_ = 0, b.value(target, "b64")
    if len(arguments) != len(formals) or len(returns) != len(results):
        raise b.error(f"call passes {len(arguments)} arguments and {len(returns)} results, the function has "
                      f"{len(formals)} and {len(results)}")
    copies, at = [], 0
    layout = []
    for variable in (*formals, *results):
        at = -(-at // max(variable.align, 1)) * max(variable.align, 1)
        layout.append(at)
        at += variable.bytes
    passed = [(frame_offset(b, actual), place, variable.bytes)
              for actual, place, variable in zip(arguments, layout, formals)]
    copies = b.row_list([n for triple in passed for n in triple])
    back = [(place, frame_offset(b, actual), variable.bytes)
            for actual, place, variable in zip(returns, layout[len(formals):], results)]
    returned = b.row_list([n for triple in back for n in triple])
    if row_ is None:
        b.emit(O.CALL, a=copies, b=len(passed), c=returned, e=len(back), z=number, defs="", uses="")
    else:
        candidates = [
            name
            for name, function in b.decoder.program.functions.items()
            if not function.entry and function.defined and same_signature(function, formals, results)
        ]
        for name in candidates:
            b.decoder.need(name)
            b.decoder.callers.setdefault(b.function.name, set()).add(name)
        table = b.row_list([len(candidates), *([0] * 2 * len(candidates))])
        for k, name in enumerate(candidates):
            b.decoder.lists[table + 1 + 2 * k] = b.decoder.code_address(name)
            b.decoder.call_tables.append((table + 2 + 2 * k, name))
        b.emit(
            O.CALL_INDIRECT,
            d=row_,
            a=copies,
            b=len(passed),
            c=returned,
            e=len(back),
            z=table,
            defs="",
            uses="d",
        )


def same_signature(function, formals, results) -> bool:
    def shape(variables):
        return [(v.bytes, v.align) for v in variables]

    return shape(function.parameters) == shape(formals) and shape(function.returns) == shape(results)


def frame_offset(b, actual) -> int:
    name = getattr(actual, "name", None)
    if name not in b.frame:
        raise b.error(f"call argument {name or actual!r} is not a .param variable of this function")
    return b.frame[name]


@row("ret", "uni?")
def ret(b, ins):
    if b.guard[0] != L.NONE and not b.function.entry:
        b.emit(O.BRA, target="%return", defs="", uses="")
    else:
        b.emit(O.EXIT if b.function.entry else O.RET, defs="", uses="")


@row("exit")
def exit_(b, ins):
    b.emit(O.EXIT, defs="", uses="")


@row("trap")
@row("brkpt")
def trap(b, ins):
    b.emit(O.TRAP, x=int(ins.name == "brkpt"), defs="", uses="")


# ---- CTA barriers
@row("bar bar.cta", "sync|arrive", "a, b?")
@row("bar bar.cta", "red popc u32", "d, a, b, c?")
@row("bar bar.cta", "red and|or pred", "p, a, b, c?")
@row("barrier barrier.cta", "sync|arrive aligned?", "a, b?")
@row("barrier barrier.cta", "red aligned? popc u32", "d, a, b, c?")
@row("barrier barrier.cta", "red aligned? and|or pred", "p, a, b, c?")
def barrier(b, ins):
    # `bar` is `barrier.aligned` (PTX "bar").
    sync = (
        L.SYNC_ALIGNED
        if ins.name.startswith("bar.") or ins.name == "bar" or ins.has("aligned")
        else L.SYNC_NONE
    )
    operands = list(ins.operands)
    if ins.has("red"):
        kind = RED_POPC if ins.has("popc") else (RED_AND if ins.has("and") else RED_OR)
        d = b.dest(operands.pop(0))
        vote, negated = b.predicate(operands.pop())
    else:
        kind, d, vote, negated = (ARRIVE if ins.has("arrive") else SYNC), L.NONE, L.NONE, 0
        if kind == ARRIVE and len(operands) != 2:
            raise b.error("arrive needs a thread count")
    number = b.value(operands[0], "u32")
    count = b.value(operands[1], "u32") if len(operands) > 1 else L.NONE
    code = b.emit(O.BARRIER, d=d, a=number, b=count, c=vote, x=kind, y=negated, sync=sync, uses="abc")
    code.killing = False


@row("bar.warp.sync", "", "a")
def warp_barrier(b, ins):
    b.emit(O.WARP_SYNC, e=b.value(ins.operands[0], "b32"), sync=L.SYNC_MASK, defs="", uses="e", z=L.NONE)


# ---- warp communication
def _split(b, operand):
    if isinstance(operand, Pair):
        return b.dest(operand.first), b.dest(operand.second)
    return b.dest(operand), L.NONE


@row("shfl.sync", "up|down|bfly|idx b32", "d|p, a, b, c, m")
@row("shfl", "up|down|bfly|idx b32", "d|p, a, b, c")
def shuffle(b, ins):
    d, p = _split(b, ins.operands[0])
    a, lane, clamp = (b.value(o, "b32") for o in ins.operands[1:4])
    members = b.value(ins.operands[4], "b32") if len(ins.operands) > 4 else b.constant(int(ALL_UNCHECKED))
    b.emit(O.SHFL, d=d, a=a, b=lane, c=clamp, e=members, x=SHUFFLE_MODES[ins.modifiers[0]], z=p, defs="dz",
           sync=L.SYNC_MASK if ins.name.endswith("sync") else L.SYNC_NONE)


@row("vote.sync", "all|any|uni pred", "p, a, m")
@row("vote", "all|any|uni pred", "p, a")
@row("vote.sync", "ballot b32", "d, a, m")
@row("vote", "ballot b32", "d, a")
def vote(b, ins):
    a, negated = b.predicate(ins.operands[1])
    members = b.value(ins.operands[2], "b32") if len(ins.operands) > 2 else b.constant(0xFFFFFFFF)
    b.emit(
        O.VOTE,
        d=b.dest(ins.operands[0]),
        a=a,
        e=members,
        x=VOTE_MODES[ins.modifiers[0]],
        y=negated,
        z=L.NONE,
        sync=L.SYNC_MASK if ins.name.endswith("sync") else L.SYNC_NONE,
    )


@row("match", "any|all sync b32|b64", "d|p, a, m")
def match(b, ins):
    d, p = _split(b, ins.operands[0])
    kind = ins.modifiers[-1]
    b.emit(
        O.MATCH,
        d=d,
        a=b.value(ins.operands[1], kind),
        e=b.value(ins.operands[2], "b32"),
        x=int(ins.has("all")),
        y=int(kind == "b64"),
        z=p,
        defs="dz",
        sync=L.SYNC_MASK,
    )


def _redux(b, ins, operation, y):
    b.emit(
        operation,
        d=b.dest(ins.operands[0]),
        a=b.value(ins.operands[1], ins.modifiers[-1]),
        e=b.value(ins.operands[2], "b32"),
        x=REDUX_MODES[ins.modifiers[0]],
        y=y,
        z=L.NONE,
        sync=L.SYNC_MASK,
    )


@row("redux.sync", "add|min|max u32|s32", "d, a, m")
@row("redux.sync", "and|or|xor b32", "d, a, m")
def reduce_(b, ins):
    _redux(b, ins, O.REDUX, int(ins.modifiers[1] == "s32"))


@row("redux.sync", "min|max abs? NaN? f32", "d, a, m")
def reduce_floats(b, ins):
    _redux(b, ins, O.REDUX_F, (F_ABS if ins.has("abs") else 0) | (F_NAN if ins.has("NaN") else 0))


@row("activemask", "b32", "d")
def active_mask(b, ins):
    b.emit(O.ACTIVEMASK, d=b.dest(ins.operands[0]), z=L.NONE)


@row("elect.sync", "", "d|p, m")
def elect(b, ins):
    d, p = _split(b, ins.operands[0])
    b.emit(O.ELECT, d=d, e=b.value(ins.operands[1], "b32"), z=p, defs="dz", sync=L.SYNC_MASK)


@row("setmaxnreg", "inc|dec sync aligned u32", "a")
def set_max_registers(b, ins):
    count = ins.operands[0]
    if not isinstance(count, Immediate) or not 24 <= count.value <= 256 or count.value % 8:
        raise b.error("setmaxnreg takes a multiple of 8 between 24 and 256")
    b.emit(O.NOP, sync=L.SYNC_ALIGNED, defs="", uses="")


@row("alloca stacksave stackrestore", "u32|u64|b32?", None)
def stack(b, ins):
    raise b.error("dynamic stack allocation is not supported")
