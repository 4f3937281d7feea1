"""Where the operands of asynchronous instructions point: lanes grouped by value, shared addresses of a
cluster.
"""

from __future__ import annotations

from .layout import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW

_SHARED_END = SHARED_WINDOW + (1 << 32)


def groups(warp, *columns):
    """Active lanes grouped by equal operand values.

    Args:
        columns: arrays [32] of one value for each lane.

    Yields:
        (lane mask, first lane, values) for each distinct combination, in order of the first lane.
    """
    first = warp.first
    if all((column[warp.lanes] == column[first]).all() for column in columns):
        yield warp.mask, first, tuple(int(column[first]) for column in columns)
        return
    found: dict[tuple, int] = {}
    for lane in warp.lanes:
        key = tuple(int(column[lane]) for column in columns)
        found[key] = found.get(key, 0) | 1 << int(lane)
    for key, mask in found.items():
        yield mask, (mask & -mask).bit_length() - 1, key


def shared_address(warp, address, lane, *, generic, cluster, size=1, align=1, what="address"):
    """(CTA, offset) of a shared-memory operand, checked.

    Args:
        address: the operand's value: a shared address, or a generic one where ``generic``.
        cluster: whether another CTA's shared memory may be meant.
        size, align: bytes accessed there and the alignment needed.
        what: the operand's role, for messages.
    """
    address = int(address)
    if generic:
        if not SHARED_WINDOW <= address < _SHARED_END:
            warp.fault("address-space", f"{what} {address:#x} is a generic address outside shared memory",
                       lane=lane, address=address)
        address -= SHARED_WINDOW
    rank, offset = (address & 0xFFFFFFFF) >> RANK_SHIFT, address & OFFSET_MASK
    cta = warp.cta
    if rank >= len(cta.cluster):
        warp.fault("out-of-bounds",
                   f"{what} {address:#x} names CTA {rank} of a cluster of {len(cta.cluster)}",
                   lane=lane, address=address)
    owner = cta.cluster[rank]
    if owner is not cta and not cluster:
        warp.fault("address-space", f"{what} {address:#x} lies in the shared memory of CTA {rank}; this "
                                    f"instruction "
                   f"reaches only its own, {cta.rank}", lane=lane, address=address)
    if offset % align:
        warp.fault("misaligned", f"{what} {address:#x} is not a multiple of {align}", lane=lane,
                   address=address)
    if offset + size > len(owner.shared.bytes):
        warp.fault("out-of-bounds", f"{what} {address:#x} plus {size} bytes ends outside the "
                                    f"{len(owner.shared.bytes)} "
                   "bytes of shared memory", lane=lane, address=address)
    return owner, offset


def require_started(agent, cta, address, lane=None):
    """Fault unless the agent knows that another CTA of its cluster has started: its shared memory may be
    accessed only then (CUDA programming guide, "Distributed shared memory")."""
    machine = agent.machine
    if cta is agent.cta or not machine.checks.shared_races:
        return
    warps = machine.warps_per_cta
    if not machine.clocks.knows_start(agent.slot, cta.slot * warps, warps):
        agent.fault("cluster-start", not_started(address, cta.rank), lane=lane, address=address)


def not_started(address, rank):
    return (f"shared address {address:#x} lies in CTA {rank} of the cluster, which may not have started: no "
            "barrier.cluster.wait came before, and nothing that this CTA sent")


def is_generic(ins, space="shared"):
    """Whether an address operand is generic: no state space among the modifiers."""
    return not any(m == space or m.startswith(space + "::") for m in ins.modifiers)
