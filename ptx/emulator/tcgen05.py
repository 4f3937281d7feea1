"""tcgen05 except the products: allocation, loads and stores, copies from shared memory, commit, waits,
fences.

PTX ISA, "TensorCore 5th generation instructions".
"""

from __future__ import annotations

import numpy as np

from .forms import operation, row
from .machine import Wait
from .matrix_descriptors import DescriptorError, decode_tcgen05_matrix_descriptor, padded_fp_elements
from .mbarrier import apply, find
from .model import Immediate
from .places import is_generic, shared_address
from .tcgen05_state import CP, LD, ST, Toucher, state_of, warp_toucher
from .tensor_core import E2M1, E2M3
from .tensor_memory import (COPY_SHAPES, TensorMemoryError, copy_lanes, register_cells, register_count,
                            split_address)

_GROUP = "cta_group::1|cta_group::2"


def group_of(warp, ins):
    group = 2 if ins.has("cta_group::2") else 1
    state_of(warp.machine).check_group(warp, group)
    return group


def pair_of(cta):
    """The CTAs of the pair, even rank first."""
    even = cta.rank & ~1
    return cta.cluster[even:even + 2]


# --- allocation ---------------------------------------------------------------------------------------------

def _memory_key(cta):
    return ("tensor-memory", cta.index)


def _meet(warp, name, request, act):
    """cta_group::2: one warp of each CTA of the pair brings a request; ``act(requests)`` runs once both are
    there.

    Returns None when this warp's part is done, else a Wait.
    """
    pair = pair_of(warp.cta)
    if len(pair) < 2:
        warp.fault("tensor-memory", f"{name}.cta_group::2: CTA {warp.cta.rank} of the cluster has no peer")
    meeting = pair[0].state.setdefault(("meet", name), {"requests": {}, "served": {}})
    rank = warp.cta.rank & 1
    if rank in meeting["served"]:
        return meeting["served"].pop(rank)
    key = ("tcgen05", name, pair[0].index)
    peer = pair[1 - rank]
    if peer.exited:
        warp.fault("tensor-memory", f"{name}.cta_group::2: the peer CTA {peer.rank} has exited")
    meeting["requests"][rank] = request
    if len(meeting["requests"]) == 2:
        results = act(meeting["requests"])
        if results is not None:
            meeting["requests"] = {}
            meeting["served"] = {1 - rank: results[1 - rank]}
            warp.machine.wake(key)
            return results[rank]
    return Wait(key, f"the peer CTA's {name}, or free columns")


def _choose_base(warp, memories, columns):
    """A base free in all memories, or None; which one is part of the schedule."""
    bases = set(memories[0].free_bases(columns))
    for memory in memories[1:]:
        bases &= set(memory.free_bases(columns))
    if not bases:
        return None
    ordered = sorted(bases)
    return warp.machine.rng.choice(ordered) if warp.machine.schedule == "random" else ordered[0]


def _check_request(warp, memory, columns):
    try:
        memory.check_request(columns)
    except TensorMemoryError as error:
        warp.fault("tensor-memory", str(error))


@operation("tcgen05.alloc", f"{_GROUP} sync aligned shared::cta? b32", "[a], b")
def tcgen05_alloc(warp, ins):
    group = group_of(warp, ins)
    state, cta = state_of(warp.machine), warp.cta
    columns = warp.uniform(1) & 0xFFFFFFFF
    _, offset = shared_address(warp, warp.same(warp.address(0), "address"), warp.first,
                               generic=is_generic(ins), cluster=False, size=4, align=4)
    memory = state.memory(cta)
    _check_request(warp, memory, columns)
    if group == 1:
        base = _choose_base(warp, [memory], columns)
        if base is None:
            return Wait(_memory_key(cta), f"{columns} free columns of tensor memory, held: "
                                          f"{memory.allocations}")
        memory.allocate(columns, base)
    else:
        def act(requests):
            if requests[0] != requests[1]:
                warp.fault("tensor-memory", f"the CTAs of a pair allocate {requests[0]} and {requests[1]} "
                                            f"columns")
            memories = [state.memory(c) for c in pair_of(cta)]
            base = _choose_base(warp, memories, columns)
            if base is None:
                return None
            for each in memories:
                each.allocate(columns, base)
            return {0: base, 1: base}

        base = _meet(warp, "tcgen05.alloc", columns, act)
        if isinstance(base, Wait):
            return base
    state.allocators[cta.index, base] = (warp.index, ins)
    warp.machine.access.write_shared(warp.agent, cta.rank, offset, np.array([base], np.uint32).view(np.uint8))
    return None


@operation("tcgen05.dealloc", f"{_GROUP} sync aligned b32", "a, b")
def tcgen05_dealloc(warp, ins):
    group = group_of(warp, ins)
    state = state_of(warp.machine)
    address, columns = warp.uniform(0) & 0xFFFFFFFF, warp.uniform(1) & 0xFFFFFFFF
    ctas = [warp.cta]

    def free(cta):
        try:
            base = split_address(address)[1]
            state.memory(cta).release(address, columns)
        except TensorMemoryError as error:
            warp.fault("tensor-memory", str(error))
        # Whoever still works on the columns is not ordered before this.
        toucher = warp_toucher(warp)
        lanes, cells = np.meshgrid(np.arange(0, 128, 16), np.arange(base, base + columns), indexing="ij")
        toucher.check_free(cta, lanes, cells)
        state.shadows[cta.index].forget(np.arange(base, base + columns))
        warp.machine.wake(_memory_key(cta))

    if group == 2:
        done = _meet(warp, "tcgen05.dealloc", (address, columns), lambda requests: {0: True, 1: True})
        if isinstance(done, Wait):
            return done
    for cta in ctas:
        free(cta)
    if group == 2:
        warp.machine.wake(("tcgen05", "tcgen05.alloc", pair_of(warp.cta)[0].index))
    return None


@operation("tcgen05.relinquish_alloc_permit", f"{_GROUP} sync aligned", "")
def tcgen05_relinquish(warp, ins):
    group_of(warp, ins)
    state_of(warp.machine).memory(warp.cta).relinquished = True


# --- loads and stores ---------------------------------------------------------------------------------------

_SHAPES = "32x32b|16x64b|16x128b|16x256b|16x32bx2"
_NUMBERS = "x1|x2|x4|x8|x16|x32|x64|x128"


def _cells(warp, ins, address_index, vector_index, packed, second_index):
    """Lanes and columns [cells per register, registers, 32] of a load or store, checked against the warp's
    window.
    """
    shape, num = ins.one_of(*_SHAPES.split("|")), int(ins.one_of(*_NUMBERS.split("|"))[1:])
    given = len(warp.vector(vector_index)) if vector_index is not None else None
    if given is not None and given != register_count(shape, num):
        warp.fault("operand", f".{shape}.x{num} has {register_count(shape, num)} registers, not {given}")
    second = 0
    if second_index is not None:
        operand = ins.operands[second_index]
        second = (operand.value if isinstance(operand, Immediate)
                  else warp.uniform(second_index)) & 0xFFFFFFFF
    lane, column = split_address(warp.same(warp.address(address_index), "tensor-memory address"))
    lanes, columns = register_cells(shape, num, packed, second)
    lanes, columns = lanes + lane, columns + column
    window = 32 * (warp.index % 4)
    if warp.machine.checks.forgiving_lanes:
        lanes = lanes % 32 + window
    elif int(lanes.min()) < window or int(lanes.max()) >= window + 32:
        warp.fault("tensor-memory", f"lanes {int(lanes.min())}..{int(lanes.max())}: warp {warp.index} "
                                    f"reaches lanes "
                   f"{window}..{window + 31} (32 * (warp % 4))", address=lane << 16 | column)
    if shape.startswith("16") and lane % 16:
        warp.fault("tensor-memory", f"lane {lane}: shape .{shape} starts at a multiple of 16 lanes")
    return lanes, columns


@operation("tcgen05.ld", f"sync aligned {_SHAPES} {_NUMBERS} pack::16b? b32", "{d}, [a], b?")
@operation("tcgen05.ld", f"sync aligned {_SHAPES} {_NUMBERS} pack::16b? b32", "d, [a], b?")
def tcgen05_ld(warp, ins):
    state = state_of(warp.machine)
    lanes, columns = _cells(warp, ins, 1, 0, ins.has("pack::16b"), 2 if len(ins.operands) > 2 else None)
    warp_toucher(warp).read(warp.cta, lanes, columns, LD, ins)
    words = state.memory(warp.cta).cells[lanes, columns]
    values = words[0] if len(words) == 1 else (words[0] & np.uint32(0xFFFF)) | words[1] << np.uint32(16)
    items = getattr(ins.operands[0], "items", (ins.operands[0],))
    for item, value in zip(items, values):
        warp.write_operand(item, value)
    warp.machine.report.count_bytes("tensor memory load", values.size * 4)


@operation("tcgen05.st", f"sync aligned {_SHAPES} {_NUMBERS} unpack::16b? b32", "[a], {b}")
@operation("tcgen05.st", f"sync aligned {_SHAPES} {_NUMBERS} unpack::16b? b32", "[a], b, c?")
def tcgen05_st(warp, ins):
    state = state_of(warp.machine)
    last = len(ins.operands) - 1
    lanes, columns = _cells(warp, ins, 0, last, ins.has("unpack::16b"), 1 if last == 2 else None)
    values = warp.vector(last).astype(np.uint32)
    warp_toucher(warp).write(warp.cta, lanes, columns, ST, ins)
    cells = state.memory(warp.cta).cells
    if len(lanes) == 1:
        cells[lanes[0], columns[0]] = values
    else:
        cells[lanes[0], columns[0]] = values & np.uint32(0xFFFF)
        cells[lanes[1], columns[1]] = values >> np.uint32(16)
    warp.machine.report.count_bytes("tensor memory store", values.size * 4)


@operation("tcgen05.wait::ld", "sync aligned", "")
def tcgen05_wait_ld(warp, ins):
    _step(warp, state_of(warp.machine).fences_of(warp).waited_ld)


@operation("tcgen05.wait::st", "sync aligned", "")
def tcgen05_wait_st(warp, ins):
    _step(warp, state_of(warp.machine).fences_of(warp).waited_st)


def _step(warp, clocks_seen):
    """Note the warp's clock and step it, so that later accesses are told from earlier ones."""
    clocks = warp.machine.clocks
    clocks_seen.append(int(clocks.VC[warp.slot, warp.slot]))
    clocks.VC[warp.slot, warp.slot] += 1


@operation("tcgen05.fence::before_thread_sync", "", "")
def tcgen05_fence_before(warp, ins):
    _step(warp, state_of(warp.machine).fences_of(warp).before)


@operation("tcgen05.fence::after_thread_sync", "", "")
def tcgen05_fence_after(warp, ins):
    clocks = warp.machine.clocks
    state_of(warp.machine).fences_of(warp).after[:] = clocks.VC[warp.slot, :clocks.slots]


@row("tcgen05.ld", f"red min|max sync aligned {_SHAPES} {_NUMBERS} abs? NaN? f32|u32|s32", None)
@row("tcgen05.ld.red", f"min|max sync aligned {_SHAPES} {_NUMBERS} abs? NaN? f32|u32|s32", None)
def tcgen05_ld_red(builder, ins):
    raise builder.error("tcgen05.ld.red exists on sm_103a only and is not modelled")


@row("tcgen05.shift", f"{_GROUP} down", None)
def tcgen05_shift(builder, ins):
    raise builder.error("tcgen05.shift is not modelled")


# --- asynchronous instructions ------------------------------------------------------------------------------

class Member:
    """One asynchronous tcgen05 instruction in the sequence of its warp: its agent and what is known at its
    end.
    """

    def __init__(self, agent, toucher):
        self.agent, self.toucher = agent, toucher
        self.row = None


def start(warp, ins, label, run, claim):
    """Queue an asynchronous instruction behind the earlier ones of this warp.

    ``run(toucher)`` does its work later; ``claim(toucher)`` marks at once the cells that it will write, so
    that any access in between is reported where it is made.
    """
    machine, state = warp.machine, state_of(warp.machine)
    key = (warp.cta.index, warp.index)
    pipeline = state.pipelines.setdefault(key, [])
    agent = warp.spawn(label, proxy="async")
    clocks = machine.clocks
    own = warp_toucher(warp)
    toucher = Toucher(agent, agent.slot, key, clocks.VC[agent.slot, :clocks.slots], own.fenced.copy(), state,
                      queued=True)
    claim(toucher)
    member = Member(agent, toucher)
    before = pipeline[-1] if pipeline else None
    pipeline.append(member)

    def work():
        if before is not None:
            clocks.acquire_row(agent.slot, before.row)
            np.maximum(toucher.fenced, before.row[:clocks.slots], out=toucher.fenced)
        run(toucher)
        member.row = clocks.VC[agent.slot].copy()
        agent.retire()

    machine.queue.submit(agent, [work], after=[before.agent] if before is not None else ())
    return member


def trim(pipeline):
    """Keep the newest instruction only once all are done."""
    if pipeline and all(member.agent.done for member in pipeline):
        del pipeline[:-1]


@operation("tcgen05.commit", f"{_GROUP} mbarrier::arrive::one shared::cluster? multicast::cluster? b64",
           "[a], b?")
def tcgen05_commit(warp, ins):
    group_of(warp, ins)
    machine, state = warp.machine, state_of(warp.machine)
    pipeline = state.pipelines.setdefault((warp.cta.index, warp.index), [])
    trim(pipeline)
    last = pipeline[-1] if pipeline else None
    for lane in warp.lanes:
        own, offset = shared_address(warp, warp.address(0)[lane], lane, generic=is_generic(ins), cluster=True,
                                     size=8, align=8, what="mbarrier address")
        targets = [own]
        if ins.has("multicast::cluster"):
            mask = int(warp.u32(1)[lane]) & 0xFFFF
            if mask == 0 or mask >> len(warp.cta.cluster):
                warp.fault("operand", f"multicast mask {mask:#x} for a cluster of {len(warp.cta.cluster)} "
                                      f"CTAs",
                           lane=lane)
            targets = [cta for cta in warp.cta.cluster if mask >> cta.rank & 1]
        for cta in targets:
            find(warp, cta, offset, "tcgen05.commit", lane)
        agent = warp.spawn(ins.text, proxy="generic")

        def arrive(agent=agent, targets=targets, offset=offset, own=warp.cta):
            if last is not None:
                machine.clocks.acquire_row(agent.slot, last.row)
            for cta in targets:
                if cta is own and own.exited:
                    # A CTA may end before its own last commits arrive: nobody is left to wait for them, and shipped
                    # programs do. Work that the commit tracks is checked where it touches memory.
                    continue
                apply(agent, cta, offset, "tcgen05.commit", lambda b: b.arrive())
            agent.retire()

        machine.queue.submit(agent, [arrive], after=[last.agent] if last is not None else ())


@operation("tcgen05.cp", f"{_GROUP} 128x256b|4x256b|128x128b b8x16? b4x16_p64|b6x16_p32?", "[a], b")
@operation("tcgen05.cp", f"{_GROUP} 64x128b|32x128b warpx2::02_13|warpx2::01_23|warpx4 b8x16? "
                         f"b4x16_p64|b6x16_p32?",
           "[a], b")
def tcgen05_cp(warp, ins):
    group = group_of(warp, ins)
    state = state_of(warp.machine)
    shape = ".".join(m for m in ins.modifiers if m[0].isdigit() or m.startswith("warpx"))
    if shape not in COPY_SHAPES:
        warp.fault("operand", f"tcgen05.cp shape {shape}: known are {', '.join(COPY_SHAPES)}")
    rows, nbytes, _ = COPY_SHAPES[shape]
    narrow = E2M1 if ins.has("b4x16_p64") else E2M3 if ins.has("b6x16_p32") else None
    source_rows, lanes = copy_lanes(shape)
    row_index, unit_index = np.meshgrid(np.arange(rows), np.arange(nbytes // 16), indexing="ij")
    for lane in warp.lanes:
        base_lane, column = split_address(warp.address(0)[lane])
        try:
            descriptor = decode_tcgen05_matrix_descriptor(int(warp.values(1)[lane]))
        except DescriptorError as error:
            warp.fault("descriptor", str(error), lane=lane)
        offsets = descriptor.address(row_index, 16 * unit_index)
        columns = column + np.arange(nbytes // 4)
        if base_lane:
            warp.fault("tensor-memory", f"tcgen05.cp to lane {base_lane}: .{shape} starts at lane 0",
                       lane=lane)
        ctas = pair_of(warp.cta) if group == 2 else [warp.cta]

        cells = tuple(np.meshgrid(lanes, columns, indexing="ij"))

        def run(toucher, offsets=offsets, cells=cells, ctas=ctas):
            for cta in ctas:
                units = warp_access(toucher, cta, offsets.ravel())
                if narrow is not None:
                    # FP4 goes to bits 5:2 of its byte and FP6 to bits 6:1, where the MMA looks for them.
                    units = padded_fp_elements(units, narrow) << (2 if narrow == E2M1 else 1)
                words = np.ascontiguousarray(units.reshape(rows, nbytes)).view(np.uint32)
                toucher.write(cta, *cells, CP, ins)
                state.memory(cta).cells[cells] = words[source_rows]

        def claim(toucher, cells=cells, ctas=ctas):
            for cta in ctas:
                toucher.write(cta, *cells, CP, ins, claim=True)

        start(warp, ins, ins.text, run, claim)
        warp.machine.report.count_bytes("tensor memory copy", rows * nbytes * len(ctas))


def warp_access(toucher, cta, offsets, used=16):
    """16-byte units of shared memory of which an asynchronous instruction reads the first `used` bytes: uint8
    [n, 16].
    """
    units = toucher.who.machine.access.gather_shared(toucher.who, cta.rank, offsets, used)
    return units if used == 16 else np.pad(units, ((0, 0), (0, 16 - used)))
