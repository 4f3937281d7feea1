"""barrier.cluster, and the rules of a cluster's lifetime.

Every thread of the cluster that has not exited arrives once and waits once a phase.  PTX ISA,
"barrier.cluster".
"""

from __future__ import annotations

from .forms import operation
from .machine import Wait, on_launch


class ClusterBarrier:
    """Phase and arrivals of one cluster's barrier; arrivals are lane masks of warps."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.phase = 0
        self.arrived: dict[tuple, int] = {}
        self.waits: dict[tuple, dict[int, int]] = {}

    def living(self, machine):
        """(CTA rank, warp) -> mask of live lanes."""
        from . import layout as L

        found = {}
        for cta in self.cluster:
            if cta.exited:
                continue
            for warp in range(machine.warps_per_cta):
                alive = int(machine.W[cta.slot * machine.warps_per_cta + warp, L.W_ALIVE])
                if alive:
                    found[cta.rank, warp] = alive
        return found


def barrier_of(cta):
    first = cta.cluster[0]
    if "cluster barrier" not in first.state:
        first.state["cluster barrier"] = ClusterBarrier(cta.cluster)
    return first.state["cluster barrier"]


def _key(cta, phase):
    return ("cluster barrier", cta.cluster[0].index, phase)


def _advance(machine, cta, barrier):
    """Complete the phase if every live thread of the cluster has arrived."""
    living = barrier.living(machine)
    if not barrier.arrived or any(barrier.arrived.get(place, 0) & mask != mask for place,
                                  mask in living.items()):
        return
    barrier.arrived = {}
    machine.clocks.forget(_key(cta, barrier.phase - 2))
    barrier.phase += 1
    machine.wake(("cluster barrier", cta.cluster[0].index))


@operation("barrier.cluster", "arrive release|relaxed? aligned?", "")
def cluster_arrive(warp, ins):
    barrier = barrier_of(warp.cta)
    place = (warp.cta.rank, warp.index)
    waits = barrier.waits.setdefault(place, {})
    for lane in warp.lanes:
        if int(lane) in waits:
            warp.fault("barrier", "barrier.cluster.arrive twice without a wait in between", lane=int(lane))
        waits[int(lane)] = barrier.phase
    key = _key(warp.cta, barrier.phase)
    if ins.has("relaxed"):
        warp.machine.clocks.release_fenced(warp.slot, key)
    else:
        warp.machine.clocks.release(warp.slot, key)
    barrier.arrived[place] = barrier.arrived.get(place, 0) | warp.mask
    _advance(warp.machine, warp.cta, barrier)


@operation("barrier.cluster", "wait acquire? aligned?", "")
def cluster_wait(warp, ins):
    barrier = barrier_of(warp.cta)
    waits = barrier.waits.setdefault((warp.cta.rank, warp.index), {})
    phases = set()
    for lane in warp.lanes:
        if int(lane) not in waits:
            warp.fault("barrier", "barrier.cluster.wait without an arrive before it", lane=int(lane))
        phases.add(waits[int(lane)])
    if any(phase >= barrier.phase for phase in phases):
        def text():
            living = barrier.living(warp.machine)
            missing = [f"CTA {rank} warp {index}" for (rank, index), mask in living.items()
                       if barrier.arrived.get((rank, index), 0) & mask != mask]
            return f"cluster barrier, phase {barrier.phase}, not arrived: {', '.join(missing) or 'nobody'}"

        return Wait(("cluster barrier", warp.cta.cluster[0].index), text)
    for phase in phases:
        warp.machine.clocks.acquire(warp.slot, _key(warp.cta, phase))
    for lane in warp.lanes:
        del waits[int(lane)]
    return None


@on_launch
def _begin(machine):
    def exited(cta):
        # Threads that have exited no longer count, so an exit may complete the phase.
        first = cta.cluster[0]
        if "cluster barrier" in first.state:
            _advance(machine, cta, first.state["cluster barrier"])

    machine.on_cta_exit(exited)
