"""Packs a function's virtual registers into few rows by linear scan, so that a warp's register file stays in
cache."""

from __future__ import annotations

import heapq



def compact(builder, successors: list[tuple], lists: list[int]) -> tuple[dict[int, int], int]:
    """Renumber the rows of `builder.codes` (and its lists) in place.

    Returns (virtual register -> row, number of rows). Liveness is that of one thread: lanes that diverged are
    other threads, and writes touch only executing lanes, so rows may be shared whenever one thread's live
    ranges allow it.
    """
    codes = builder.codes
    count = len(codes)
    uses, defs, kills = [], [], []
    for code in codes:
        used, defined = 0, 0
        for where, listed in (("use", code.uses), ("def", code.defs)):
            for kind, position in listed:
                register = code.row[position] if kind == "f" else lists[position]
                if where == "use":
                    used |= 1 << register
                else:
                    defined |= 1 << register
        # A guarded or partial write leaves the other lanes' value alive.
        uses.append(used)
        defs.append(defined)
        kills.append(defined if code.killing else 0)
    leaders = {0, *(t for k, s in enumerate(successors) if s != (k + 1,) for t in (*s, k + 1) if t < count)}
    starts = sorted(leaders)
    ends = [*starts[1:], count]
    block_of = {start: number for number, start in enumerate(starts)}
    generated, killed = [], []
    for start, end in zip(starts, ends):
        live, dead = 0, 0
        for k in range(end - 1, start - 1, -1):
            live = (live & ~kills[k]) | uses[k]
            dead |= kills[k]
        generated.append(live)
        killed.append(dead)
    live_in = [0] * len(starts)
    changed = True
    while changed:
        changed = False
        for number in range(len(starts) - 1, -1, -1):
            out = 0
            for target in successors[ends[number] - 1]:
                out |= live_in[block_of[target]]
            value = generated[number] | (out & ~killed[number])
            if value != live_in[number]:
                live_in[number] = value
                changed = True
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def touch(mask: int, at: int) -> None:
        while mask:
            low = mask & -mask
            register = low.bit_length() - 1
            first.setdefault(register, at)
            last[register] = at
            mask ^= low

    for number, (start, end) in enumerate(zip(starts, ends)):
        touch(live_in[number], start)
        out = 0
        for target in successors[end - 1]:
            out |= live_in[block_of[target]]
        for k in range(start, end):
            touch(uses[k] | defs[k], k)
        touch(out, end - 1)
    # A predicate is a mask in column 0 of its row, a value lies in its lane's column: rows that both kinds
    # used at different times would let one half of a diverged warp destroy the other half's predicates.
    predicates = {number for name, number in builder.registers.items()
                  if builder.function.registers.get(name) == "pred"}
    free: dict[bool, list[int]] = {False: [], True: []}
    active: list[tuple[int, int, bool]] = []
    rows: dict[int, int] = {}
    total = 0
    for register in sorted(first, key=first.get):
        begin = first[register]
        # Strictly before: an operation with several results must not overwrite its own operands.
        while active and active[0][0] < begin:
            _, row, kind = heapq.heappop(active)
            heapq.heappush(free[kind], row)
        kind = register in predicates
        if free[kind]:
            row = heapq.heappop(free[kind])
        else:
            row, total = total, total + 1
        rows[register] = row
        heapq.heappush(active, (last[register], row, kind))
    renumbered = set()
    for code in codes:
        for kind, position in (*code.uses, *code.defs):
            if kind == "f":
                if (id(code), position) not in renumbered:
                    renumbered.add((id(code), position))
                    code.row[position] = rows[code.row[position]]
            elif position not in renumbered:
                renumbered.add(position)
                lists[position] = rows[lists[position]]
    return rows, max(total, 1)
