"""Asynchronous copies without a tensor map: cp.async.bulk, cp.reduce.async.bulk, st.async, red.async, and the
decoding of cp.async (warp_copies executes it).

Each copy is an agent of its own that reads its source and writes its destination at times the schedule draws;
until then its destination is claimed, so that any access in between is reported.  PTX ISA, "Data movement and
conversion instructions: asynchronous copy".
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import layout as L
from . import opcodes as O
from .async_groups import Groups, Operation
from .forms import operation, row
from .layout import SHARED_WINDOW
from .machine import Wait
from .mbarrier import apply, check_overlap, complete_tx, find
from .memory import record_global, record_shared
from .model import Immediate
from .places import groups, is_generic, shared_address
from .tensor_map import reduce_values
from .warp_context import lanes_of


def groups_of(warp):
    """The bulk groups of the warp."""
    return warp.cta.state.setdefault(("bulk", warp.index), Groups())


def _wait_key(warp):
    return ("bulk", warp.cta.index, warp.index)


def start(warp, mask, label, read, write, *, proxy, claims=(), sources=(), nbytes=0, report=None,
          signal=None):
    """Queue one copy as an agent.

    Args:
        mask: lanes whose group it joins (0: none).
        read: function of the agent that returns the data; write: function of agent and data.
        claims: (cta, offset, bytes) shared ranges that the copy will write: they hold poison until then, and
            any access that is not ordered behind the copy is a race. Several pieces of one size have an array
            of offsets.
        sources: the same for ranges that it will read; only writes to them are races.
        signal: function of the agent, the completion signal.
    """
    machine = warp.machine
    agent = warp.spawn(label, proxy=proxy)
    member = Operation(label, agent)
    wake_key = _wait_key(warp)
    if mask:
        groups_of(warp).add(mask, member)
    for cta, offset, size in claims:
        offsets = np.array(offset, np.int64, ndmin=1)
        check_overlap(warp, cta, offsets, size)
        machine.access.claim_pieces(agent, cta.rank, offsets, size, write=True)
        if len(offsets) == 1:
            cta.shared.bytes[offsets[0]:offsets[0] + size] = 0xFF
        else:
            cta.shared.bytes[offsets[:, None] + np.arange(size)] = 0xFF
    for cta, offset, size in sources:
        machine.access.claim_shared(agent, cta.rank, offset, size, write=False)
    data = []

    def do_read():
        data.append(read(agent))
        member.read_row = machine.clocks.VC[agent.slot].copy()
        member.read_done = True
        if mask:
            machine.wake(wake_key)

    def do_write():
        write(agent, data[0])
        if signal is not None:
            signal(agent)
        member.row = machine.clocks.VC[agent.slot].copy()
        member.done = True
        agent.retire()
        if mask:
            machine.wake(wake_key)

    if nbytes:
        machine.report.count_bytes(report, nbytes)
    machine.queue.submit(agent, [do_read, do_write])
    return member


def wait_groups(warp, keep, *, read):
    """wait_group: sleep until only the ``keep`` newest groups are unfinished, then learn what the others did.
    """
    history = groups_of(warp)
    unfinished, waited = history.pending(warp.mask, keep, read=read)
    if unfinished:
        return Wait(_wait_key(warp), lambda: f"cp.async.bulk.wait_group for {len(unfinished)} copies, "
                                             f"first {unfinished[0].label}")
    for member in waited:
        row = member.read_row if read else member.row
        if row is not None:
            warp.machine.clocks.acquire_row(warp.slot, row)
    if not read:
        history.forget(warp.mask, keep)
    return None


def immediate(warp, ins, index):
    operand = ins.operands[index]
    return operand.value if isinstance(operand, Immediate) else warp.uniform(index)


def global_address(warp, ins, address, lane):
    """A global operand as it is; faults for a generic address in another window."""
    space, _, _ = warp.machine.memory.resolve(int(address))
    if space != "global":
        warp.fault("address-space", f"address {int(address):#x} is in {space} memory; it must be global",
                   lane=lane, address=int(address))
    return int(address)


# --- cp.async -----------------------------------------------------------------------------------------------

@row("cp.async", "ca|cg shared|shared::cta global L2::cache_hint? L2::64B|L2::128B|L2::256B?", None)
def cp_async(b, ins):
    """[a], [b], cp-size{, src-size or ignore-src}{, cache-policy}: executed by warp_copies."""
    if not 3 <= len(ins.operands) <= 5 or not isinstance(ins.operands[2], Immediate):
        raise b.error("operands are [a], [b], cp-size, src-size or ignore-src, cache-policy")
    rest = list(ins.operands[3:])
    if ins.has("L2::cache_hint"):
        rest.pop()
    count, predicate = L.NONE, False
    if rest:
        predicate = getattr(rest[0], "type", None) == "pred"
        count = b.predicate(rest[0])[0] if predicate else b.value(rest[0], "b32")
    (to, to_offset, to_frame), (source, source_offset, source_frame) = map(b.address, ins.operands[:2])
    if to_frame or source_frame:
        raise b.error("the copy goes from global to shared memory")
    negated = predicate and rest[0].negated
    b.emit(O.CP_ASYNC, a=to, b=source, c=count, x=ins.operands[2].value,
           y=ins.has("cg") | predicate << 1 | negated << 2, z=to_offset, w=source_offset, defs="", uses="abc")


@row("cp.async.commit_group", "", "")
def cp_async_commit(b, ins):
    b.emit(O.CP_COMMIT, defs="", uses="")


@row("cp.async.wait_group", "", "a")
def cp_async_wait(b, ins):
    if not isinstance(ins.operands[0], Immediate):
        raise b.error("the number of groups is a constant")
    b.emit(O.CP_WAIT, x=ins.operands[0].value, defs="", uses="")


@row("cp.async.wait_all", "", "")
def cp_async_wait_all(b, ins):
    b.emit(O.CP_WAIT, x=-1, defs="", uses="")


@operation("cp.async.mbarrier.arrive", "noinc? shared|shared::cta? b64", "[a]")
def cp_async_mbarrier_arrive(warp, ins):
    """An arrival of each lane once its earlier cp.async are done; without .noinc it does not count as
    expected.
    """
    generic = is_generic(ins)
    machine = warp.machine
    for mask, lane, (address,) in groups(warp, warp.address(0)):
        cta, offset = shared_address(warp, address, lane, generic=generic, cluster=False, size=8, align=8,
                                     what="mbarrier address")
        count = mask.bit_count()
        if not ins.has("noinc"):
            for _ in range(count):
                apply(warp.agent, cta, offset, "cp.async.mbarrier.arrive", lambda b: b.increment(),
                      release=False, lane=lane)
        earlier, ended = machine.copies.of_warp(warp.slot, mask)
        agent = warp.spawn(ins.text, proxy="generic")

        def arrive(agent=agent, cta=cta, offset=offset, count=count, ended=ended):
            for slot, clock in ended:
                machine.clocks.learn(agent.slot, slot, clock)
            for _ in range(count):
                apply(agent, cta, offset, "cp.async.mbarrier.arrive", lambda b: b.arrive())
            agent.retire()

        machine.queue.submit(agent, [arrive], after=earlier)


# --- bulk copies --------------------------------------------------------------------------------------------

def bulk_size(warp, size, lane):
    if size % 16:
        warp.fault("misaligned", f"bulk copy of {size} bytes: the size must be a multiple of 16", lane=lane)
    return int(size)


def check_16(warp, address, lane, what):
    if int(address) % 16:
        warp.fault("misaligned", f"{what} {int(address):#x} of a bulk copy is not a multiple of 16",
                   lane=lane, address=int(address))


def signal_of(cta, offset, nbytes, ins):
    """The completion signal of ``nbytes`` at an mbarrier, for ``start``."""
    return lambda agent: complete_tx(agent, cta, offset, nbytes, ins.name)


def multicast_targets(warp, ins, mask_index, destination, barrier, lane, *, pair=False):
    """(CTA, offset, barrier CTA, barrier offset) for each CTA that a load writes to.

    Args:
        mask_index: operand with the CTA mask of .multicast::cluster, or None.
        destination, barrier: (CTA, offset) as the operands name them.
        pair: the .cta_group::2 rule: the signal goes to the CTA of the destination's pair that has the parity
            of the barrier operand's CTA.
    """
    cluster = warp.cta.cluster
    if mask_index is None:
        targets = [destination[0]]
    else:
        chosen = int(warp.u32(mask_index)[lane]) & 0xFFFF
        if chosen == 0 or chosen >> len(cluster):
            warp.fault("operand", f"multicast mask {chosen:#x} for a cluster of {len(cluster)} CTAs",
                       lane=lane)
        targets = [cta for cta in cluster if chosen >> cta.rank & 1]
    found = []
    for cta in targets:
        if pair:
            signalled = cluster[cta.rank & ~1 | barrier[0].rank & 1]
        elif mask_index is not None:
            signalled = cta
        else:
            signalled = barrier[0]
            if signalled is not cta:
                warp.fault("mbarrier", f"the mbarrier is in CTA {signalled.rank}, the destination in CTA "
                                       f"{cta.rank}: "
                           "they must be in the same one", lane=lane)
        found.append((cta, destination[1], signalled, barrier[1]))
    return found


def require_alive(warp, cta, lane, what):
    """A copy or signal into a CTA that has exited is an error of the program."""
    if cta.exited:
        warp.fault("cluster-exit", f"{what} reaches CTA {cta.rank} of the cluster, which has exited",
                   lane=lane)


@operation("cp.async.bulk", "shared::cluster|shared::cta global mbarrier::complete_tx::bytes "
                            "multicast::cluster? "
                            "L2::cache_hint?", "[a], [b], c, [m], x?, y?")
def bulk_load(warp, ins):
    mask_index = 4 if ins.has("multicast::cluster") else None
    access = warp.machine.access
    for lane in warp.lanes:
        size = bulk_size(warp, warp.u32(2)[lane], lane)
        source = global_address(warp, ins, warp.address(1)[lane], lane)
        check_16(warp, source, lane, "source")
        cluster = ins.has("shared::cluster")
        destination = shared_address(warp, warp.address(0)[lane], lane, generic=False, cluster=cluster,
                                     size=size, align=16, what="destination")
        barrier = shared_address(warp, warp.address(3)[lane], lane, generic=False, cluster=cluster, size=8,
                                 align=8, what="mbarrier address")
        targets = multicast_targets(warp, ins, mask_index, destination, barrier, lane)
        load(warp, ins, size, lambda agent, s=source, n=size: warp.machine.access.read_global(agent, s, n),
             [(cta, [(offset, size)], b_cta, b_offset) for cta, offset, b_cta, b_offset in targets],
             lambda agent, cta, data, o=destination[1]: access.write_shared(agent, cta.rank, o, data),
             size, "bulk load")


def load(warp, ins, nbytes, read, targets, write, tx, report):
    """Queue a load to one or several CTAs; each gets its own completion signal.

    Args:
        targets: (CTA, [(offset, size)], barrier CTA, barrier offset).
        write: function of agent, CTA and data.
        tx: bytes of the completion signal.
    """
    for cta, ranges, b_cta, b_offset in targets:
        find(warp, b_cta, b_offset, ins.name)
        require_alive(warp, cta, None, ins.name)
        start(warp, 0, ins.text, read, lambda agent, data, cta=cta: write(agent, cta, data),
              proxy="async",
              claims=[(cta, offset, size) for offset, size in ranges], nbytes=nbytes, report=report,
              signal=signal_of(b_cta, b_offset, tx, ins))


def _cluster_operands(warp, lane):
    """Of a bulk copy from this CTA into the cluster: size, and (CTA, offset) of destination, source and
    mbarrier."""
    size = bulk_size(warp, warp.u32(2)[lane], lane)
    return (
        size,
        shared_address(warp, warp.address(0)[lane], lane, generic=False, cluster=True, size=size, align=16,
                       what="destination"),
        shared_address(warp, warp.address(1)[lane], lane, generic=False, cluster=False, size=size, align=16,
                       what="source"),
        shared_address(warp, warp.address(3)[lane], lane, generic=False, cluster=True, size=8, align=8,
                       what="mbarrier address"),
    )


@operation("cp.async.bulk", "shared::cluster shared::cta mbarrier::complete_tx::bytes", "[a], [b], c, [m]")
def bulk_to_cluster(warp, ins):
    access = warp.machine.access
    for lane in warp.lanes:
        size, (cta, offset), (own, source), (b_cta, b_offset) = _cluster_operands(warp, lane)
        if b_cta is not cta:
            warp.fault("mbarrier", f"the mbarrier is in CTA {b_cta.rank}, the destination in CTA {cta.rank}: "
                                   "they must be in the same one", lane=lane)
        find(warp, b_cta, b_offset, ins.name, lane)
        require_alive(warp, cta, lane, ins.name)
        start(warp, 0, ins.text,
              lambda agent, o=source, n=size, c=own: access.read_shared(agent, c.rank, o, n),
              lambda agent, data, o=offset, c=cta: access.write_shared(agent, c.rank, o, data), proxy="async",
              claims=[(cta, offset, size)], sources=[(own, source, size)], nbytes=size,
              report="bulk dsmem",
              signal=signal_of(b_cta, b_offset, size, ins))


@operation("cp.async.bulk", "global shared::cta bulk_group L2::cache_hint? cp_mask?", "[a], [b], c, x?, y?")
def bulk_store(warp, ins):
    access = warp.machine.access
    for lane in warp.lanes:
        size = bulk_size(warp, warp.u32(2)[lane], lane)
        target = global_address(warp, ins, warp.address(0)[lane], lane)
        check_16(warp, target, lane, "destination")
        own, source = shared_address(warp, warp.address(1)[lane], lane, generic=False, cluster=False,
                                     size=size, align=16, what="source")
        kept = None
        if ins.has("cp_mask"):
            bits = int(warp.u32(4 if ins.has("L2::cache_hint") else 3)[lane]) & 0xFFFF
            kept = np.resize(np.array([bits >> i & 1 for i in range(16)], np.bool_), size)

        def write(agent, data, target=target, kept=kept):
            if kept is None:
                access.write_global(agent, target, data)
            elif kept.any():
                at = np.flatnonzero(kept)
                access.scatter_global(agent, target + at.astype(np.int64), data[at][:, None])

        start(warp, 1 << lane, ins.text,
              lambda agent, o=source, n=size, c=own: access.read_shared(agent, c.rank, o, n), write,
              proxy="async", sources=[(own, source, size)], nbytes=size, report="bulk store")


@operation("cp.async.bulk.prefetch", "L2 global L2::cache_hint?", "[a], b, c?")
def bulk_prefetch(warp, ins):
    for lane in warp.lanes:
        size = bulk_size(warp, warp.u32(1)[lane], lane)
        check_16(warp, warp.address(0)[lane], lane, "source")
        start_address = global_address(warp, ins, warp.address(0)[lane], lane)
        try:
            warp.machine.memory.view(start_address, size)
        except ValueError as error:
            warp.fault("out-of-bounds", str(error), lane=lane, address=start_address)


@operation("cp.async.bulk.commit_group", "", "")
def bulk_commit(warp, ins):
    groups_of(warp).commit(warp.mask)


@operation("cp.async.bulk.wait_group", "read?", "a")
def bulk_wait(warp, ins):
    return wait_groups(warp, immediate(warp, ins, 0), read=ins.has("read"))


_REDUCED = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32,
            "b64": np.uint64,
            "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
_OPERATIONS = "add|min|max|inc|dec|and|or|xor"


def update_global(agent, address, size, change):
    """Replace global bytes by ``change(bytes)``, atomically with respect to other reductions."""
    machine = agent.machine
    allocation = machine.memory.find(address)
    if allocation < 0 or address + size > machine.memory.rows[allocation][1]:
        agent.fault("out-of-bounds", f"{size} bytes at global address {address:#x}: "
                                     f"{machine.memory.describe(address)}",
                    address=address)
    if machine.checks.races and machine.A[allocation, L.A_WRITE]:
        clocks, out = machine.clocks, machine.access.out
        begin = machine.memory.rows[allocation][0]
        if record_global(machine.A, clocks.VC, clocks.K, out, allocation, address - begin, size, agent.slot,
                         agent.pc, True, True, True):
            agent.race(out, machine.memory.describe(address), "reduction")
    view = machine.memory.view(address, size)
    view[:] = change(view.copy())


def update_shared(agent, cta, offset, size, change):
    """The same for the shared memory of a CTA."""
    machine = agent.machine
    if cta.exited:
        agent.fault("cluster-exit", f"reduction into the shared memory of CTA {cta.index}, which has exited")
    if machine.checks.shared_races:
        clocks, out = machine.clocks, machine.access.out
        if record_shared(machine.C, clocks.VC, clocks.K, out, cta.slot, offset, size, agent.slot, agent.pc,
                         True, True, True):
            agent.race(out, f"shared memory at {cta.rank << 24 | offset:#x}", "reduction")
    view = cta.shared.bytes[offset:offset + size]
    view[:] = change(view.copy())


def reduce_bytes(old, new, operation_name, dtype):
    return np.frombuffer(reduce_values(operation_name, old.view(dtype), new.view(dtype)).tobytes(), np.uint8)


@operation("cp.reduce.async.bulk", f"global shared::cta bulk_group L2::cache_hint? {_OPERATIONS} noftz? "
                                   "u32|s32|u64|s64|b32|b64|f16|bf16|f32|f64", "[a], [b], c, x?")
def bulk_reduce_global(warp, ins):
    access = warp.machine.access
    name, dtype = ins.one_of(*_OPERATIONS.split("|")), _REDUCED[ins.modifiers[-1]]
    for lane in warp.lanes:
        size = bulk_size(warp, warp.u32(2)[lane], lane)
        target = global_address(warp, ins, warp.address(0)[lane], lane)
        check_16(warp, target, lane, "destination")
        own, source = shared_address(warp, warp.address(1)[lane], lane, generic=False, cluster=False,
                                     size=size, align=16, what="source")

        def write(agent, data, target=target):
            update_global(agent, target, len(data), lambda old: reduce_bytes(old, data, name, dtype))

        start(warp, 1 << lane, ins.text,
              lambda agent, o=source, n=size, c=own: access.read_shared(agent, c.rank, o, n), write,
              proxy="async", sources=[(own, source, size)], nbytes=size, report="bulk reduction")


@operation("cp.reduce.async.bulk", f"shared::cluster shared::cta mbarrier::complete_tx::bytes {_OPERATIONS} "
                                   "u32|s32|u64|s64|b32|b64", "[a], [b], c, [m]")
def bulk_reduce_cluster(warp, ins):
    access = warp.machine.access
    name, dtype = ins.one_of(*_OPERATIONS.split("|")), _REDUCED[ins.modifiers[-1]]
    for lane in warp.lanes:
        size, (cta, offset), (own, source), (b_cta, b_offset) = _cluster_operands(warp, lane)
        find(warp, b_cta, b_offset, ins.name, lane)
        require_alive(warp, cta, lane, ins.name)

        def write(agent, data, cta=cta, offset=offset):
            update_shared(agent, cta, offset, len(data),
                          lambda old: reduce_bytes(old, data, name, dtype))

        start(warp, 0, ins.text,
              lambda agent, o=source, n=size, c=own: access.read_shared(agent, c.rank, o, n),
              write, proxy="async", sources=[(own, source, size)], nbytes=size, report="bulk dsmem reduction",
              signal=signal_of(b_cta, b_offset, size, ins))


# --- st.async and red.async ---------------------------------------------------------------------------------

_WIDTHS = {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}


def _async_targets(warp, ins, size):
    """Lanes grouped by the mbarrier they signal: {(CTA, mbarrier offset): (lanes, destination offsets)}."""
    generic, destinations, signals = is_generic(ins), warp.address(0), warp.address(2)
    found = {}
    for mask, first, (address,) in groups(warp, signals):
        b_cta, b_offset = shared_address(warp, address, first, generic=generic, cluster=True, size=8, align=8,
                                         what="mbarrier address")
        lanes = lanes_of(mask)
        wanted = destinations[lanes] - np.uint64(SHARED_WINDOW if generic else 0)
        offsets = (wanted & np.uint64(L.OFFSET_MASK)).astype(np.int64)
        if ((wanted >> np.uint64(L.RANK_SHIFT) != b_cta.rank).any() or (offsets % size).any()
                or offsets.max() + size > b_cta.shared.end):
            for lane in lanes:
                cta, _ = shared_address(warp, destinations[lane], lane, generic=generic, cluster=True,
                                        size=size, align=size, what="destination")
                if cta is not b_cta:
                    warp.fault("mbarrier", f"the mbarrier is in CTA {b_cta.rank}, the destination in CTA "
                                           f"{cta.rank}: they must be in the same one", lane=lane)
        find(warp, b_cta, b_offset, ins.name, first)
        require_alive(warp, b_cta, first, ins.name)
        before = found.get((b_cta, b_offset))
        if before is not None:
            # Two spellings of one address.
            lanes, offsets = np.append(before[0], lanes), np.append(before[1], offsets)
        found[b_cta, b_offset] = lanes, offsets
    return found


@operation("st.async", "weak? shared::cluster? mbarrier::complete_tx::bytes v2|v4? "
                       "b32|u32|s32|f32|b64|u64|s64|f64",
           "[a], b, [m]")
def st_async(warp, ins):
    access = warp.machine.access
    width = _WIDTHS[ins.modifiers[-1]]
    count = int((ins.one_of("v2", "v4") or "v1")[1:])
    words = warp.vector(1).astype("<u8")
    size = width * count
    # [lane, bytes]
    data = np.ascontiguousarray(words.T).view(np.uint8).reshape(32, count, 8)[:, :, :width]
    data = np.ascontiguousarray(data).reshape(32, size)
    for (cta, b_offset), (lanes, offsets) in _async_targets(warp, ins, size).items():
        places, chosen = np.unique(offsets, return_index=True)
        if len(places) < len(lanes):
            for lane, offset in zip(lanes, offsets):
                other = lanes[chosen[np.searchsorted(places, offset)]]
                if (data[other] != data[lane]).any():
                    place = cta.rank << L.RANK_SHIFT | int(offset)
                    warp.fault("race", f"lanes {other} and {lane} store different values to shared "
                                       f"{place:#x}", lane=int(lane), address=place)
        rows = data[lanes[chosen]]
        start(warp, 0, ins.text, lambda agent, d=rows: d,
              lambda agent, d, c=cta, o=places: access.scatter_shared(agent, c.rank, o, d), proxy="generic",
              claims=[(cta, places, size)], nbytes=size * len(lanes), report="st.async",
              signal=signal_of(cta, b_offset, size * len(lanes), ins))


@operation("red.async", "relaxed cluster shared::cluster? mbarrier::complete_tx::bytes "
                        f"{_OPERATIONS} b32|u32|s32|u64", "[a], b, [m]")
def red_async(warp, ins):
    dtype = _REDUCED[ins.modifiers[-1]]
    name = ins.one_of(*_OPERATIONS.split("|"))
    width = np.dtype(dtype).itemsize
    words = warp.values(1)
    for (cta, b_offset), (lanes, offsets) in _async_targets(warp, ins, width).items():
        values = [(offset, np.frombuffer(int(words[lane]).to_bytes(8, "little")[:width], np.uint8))
                  for lane, offset in zip(lanes, offsets.tolist())]

        def write(agent, pieces, c=cta):
            for offset, piece in pieces:
                update_shared(agent, c, offset, width,
                              lambda old, new=piece: reduce_bytes(old, new, name, dtype))

        start(warp, 0, ins.text, lambda agent, v=values: v, write, proxy="generic",
              nbytes=width * len(lanes), report="red.async",
              signal=signal_of(cta, b_offset, width * len(lanes), ins))
