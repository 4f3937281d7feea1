"""Turns codes and states into words: faults of the compiled loop, races, deadlocks and livelocks."""

from __future__ import annotations

from . import layout as L
from .diagnostics import Fault
from .places import not_started


def describe_cell(machine, cell: int) -> str:
    """Who made the access recorded in a shadow cell."""
    slot = (cell >> 24) & 0xFFF
    if slot < machine.warp_slots:
        cta = machine.ctas.get(slot // machine.warps_per_cta)
        warp = slot % machine.warps_per_cta
        earlier = (cell >> 36) < machine.clocks.K[slot, 0]
        who = f"warp {warp} of {'an earlier CTA' if earlier or cta is None else f'CTA {cta.index}'}"
    elif slot < machine.warp_slots + machine.copies.count:
        who = machine.copies.describe(slot)
    else:
        who = machine.labels.get(slot, "asynchronous work")
    return f"access by {who}{describe_place(machine, cell)}"


def describe_place(machine, cell: int) -> str:
    """The instruction of the access recorded in a shadow cell."""
    pc = (cell >> 5) & 0x7FFFF
    instruction = machine.decoded.instructions[pc] if pc < len(machine.decoded.instructions) else None
    return f" at PTX line {instruction.line}: {instruction.text}" if instruction is not None else ""


def loop_fault(machine) -> Fault:
    """The fault that the compiled loop reported in OUT."""
    out = machine.OUT
    slot, pc, code = int(out[L.OUT_SLOT]), int(out[L.OUT_PC]), int(out[L.OUT_CODE])
    if out[L.OUT_AGENT]:
        slot, pc = machine.copies.issuer(int(out[L.OUT_AGENT]) - 1)
    cta = machine.ctas[int(machine.W[slot, L.W_CTA])]
    instruction = machine.decoded.instructions[pc]
    address = int(out[L.OUT_ADDRESS]) & 0xFFFFFFFFFFFFFFFF
    aux, aux2, size = int(out[L.OUT_AUX]), int(out[L.OUT_AUX2]), int(out[L.OUT_SIZE])
    message, where = explain(machine, code, address, aux, aux2, size)
    return machine.fault_at(L.FAULTS[code], message, instruction, cta, int(machine.W[slot, L.W_INDEX]),
                         int(out[L.OUT_LANE]), where)


def explain(machine, code: int, address: int, aux: int, aux2: int, size: int) -> tuple[str, int | None]:
    spaces = {L.SPACE_GLOBAL: "global", L.SPACE_LOCAL: "local", L.SPACE_FRAME: "local"}
    space = spaces.get(aux, "shared") if code in (1, 2, 3, 6, 12, 14) else ""
    if code == L.F_BOUNDS:
        if space == "global":
            return f"{size} bytes at global address {address:#x}: {machine.memory.describe(address)}", address
        if space == "shared":
            return (f"{size} bytes at shared address {address:#x}: a CTA's shared memory is "
                    f"{L.SHARED_RESERVED:#x}..{machine.shared_end:#x}"), address
        return f"{size} bytes at local address {address:#x}: a thread has {machine.local_size}", address
    if code == L.F_ALIGN:
        return f"address {address:#x} is not a multiple of {size}", address
    if code == L.F_UNINITIALISED:
        return f"read of {space} memory at {address:#x} that nobody wrote", address
    if code in (L.F_RACE_WRITE, L.F_RACE_READ):
        place = (f"shared memory at {address:#x}" if address < 1 << 32 else
                 f"{machine.memory.describe(address)} ({address:#x})")
        what = "write" if code == L.F_RACE_WRITE else "read"
        return (f"{place}: not ordered with an earlier {what}, "
                f"{describe_cell(machine, aux & 0xFFFFFFFFFFFFFFFF)}"), address
    if code == L.F_WARP_RACE:
        cell = aux & 0xFFFFFFFFFFFFFFFF
        what = "read" if aux2 else "wrote"
        # Cells of lanes hold clocks of their own: of them only lane and place are told.
        return (f"shared memory at {address:#x}: lane {cell & 31} of the same warp {what} it"
                f"{describe_place(machine, cell)}, and no instruction that both lanes execute together came "
                f"in between"), address
    if code == L.F_READ_ONLY:
        return f"write to read-only memory at {address:#x}: {machine.memory.describe(address)}", address
    if code == L.F_DIVERGED:
        return "an .aligned instruction is executed by a part of the warp" + converged(address, aux), None
    if code == L.F_GUARD_DIVERGED:
        return "the guard of an .aligned instruction differs between lanes" + converged(address, aux), None
    if code == L.F_MEMBER:
        if aux2:
            return (
                f"lanes {address & ~aux:#010x} are in the member mask {address:#010x} but predicated off"
            ), None
        return (
            f"a lane executes with member mask {address:#010x} that does not name it (executing {aux:#010x})",
            None,
        )
    if code == L.F_ABSENT:
        return f"shfl reads lane {address}, which does not execute it (executing {aux:#010x})", None
    if code == L.F_BARRIER_COUNT:
        return (
            f"barrier {address}: thread count {aux if aux >= 0 else 'of the whole CTA'}, but earlier "
            f"arrivals of this phase gave {aux2 if aux2 >= 0 else 'the whole CTA'}"
        ), None
    if code == L.F_BARRIER_NUMBER:
        return f"barrier {address} with thread count {aux}: 0..15 and positive multiples of 32 exist", None
    if code == L.F_SPACE and aux2 < 0:
        return f"address {address:#x} is not in shared memory", address
    if code == L.F_SPACE:
        return (
            f"shared address {address:#x} lies in CTA {aux2} of the cluster; this instruction reaches only "
            "the executing CTA's own shared memory"
        ), address
    if code == L.F_CLUSTER_EXIT:
        return f"shared address {address:#x}: CTA {aux2} of the cluster has exited", address
    if code == L.F_CLUSTER_START:
        return not_started(address, aux2), address
    if code == L.F_BRX:
        return f"brx.idx index {address}, the table has {aux} entries", None
    if code == L.F_STACK:
        return (f"indirect call to {address:#x}, which is no function of fitting signature" if aux else
                f"call stack deeper than {address + 1} frames"), None
    if code == L.F_OPERAND:
        return (f"src-size {address} exceeds cp-size {aux}" if aux2 else
                f"cp-size {aux}: .ca takes 4, 8 or 16 bytes, .cg takes 16"), None
    if code == L.F_OVERLAP:
        return f"{aux} bytes to shared {address:#x} overwrite the mbarrier at {aux2:#x}", aux2
    if code == L.F_TRAP:
        return "trap executed", None
    return "breakpoint executed", None


def converged(alive: int, mask: int) -> str:
    return f": executing lanes {mask & 0xFFFFFFFF:#010x}, live lanes of the warp {alive & 0xFFFFFFFF:#010x}"


def standing(machine) -> list[str]:
    """What every unfinished warp does or waits for."""
    lines = []
    for cta in machine.ctas.values():
        for warp in range(machine.warps_per_cta):
            slot = cta.slot * machine.warps_per_cta + warp
            if machine.W[slot, L.W_STATUS] in (L.WARP_DONE, L.WARP_FREE):
                continue
            for f in range(L.FRAGMENTS):
                state = machine.FR[slot, f]
                if state[L.FR_STATE] != L.FRAG_FREE:
                    lines.append(f"  CTA {cta.index} warp {warp} lanes {int(state[L.FR_MASK]):#010x}: "
                                 + waiting_for(machine, cta, slot, f, state))
    return lines


def waiting_for(machine, cta, slot: int, f: int, state) -> str:
    instruction = machine.decoded.instructions[int(state[L.FR_PC])]
    at = f" at PTX line {instruction.line}: {instruction.text}" if instruction is not None else ""
    if instruction is not None and instruction.source is not None:
        at += f" ({instruction.source})"
    kind = int(state[L.FR_STATE])
    if kind == L.FRAG_BARRIER:
        number = int(state[L.FR_KEY])
        row = machine.B[cta.slot * 16 + number]
        expected = int(row[L.B_EXPECTED])
        expected = (
            f"{32 * int(machine.C[cta.slot, L.C_ALIVE])} (all live warps)" if expected < 0 else str(expected)
        )
        return f"barrier {number}, {int(row[L.B_ARRIVED])} of {expected} threads arrived{at}"
    if kind == L.FRAG_KEY:
        wait = machine.waits.get((slot, f))
        text = wait.text() if wait is not None and callable(wait.text) else getattr(wait, "text", "?")
        return f"{text}{at}"
    if kind == L.FRAG_COPY:
        return f"earlier copies{at}"
    if kind == L.FRAG_MEMBERS:
        return f"the other lanes of the member mask{at}"
    if kind == L.FRAG_RECONVERGE:
        return f"the other lanes of a divergent branch{at}"
    return f"running{at}"


def first_instruction(machine):
    for cta in machine.ctas.values():
        for warp in range(machine.warps_per_cta):
            slot = cta.slot * machine.warps_per_cta + warp
            for f in range(L.FRAGMENTS):
                if machine.FR[slot, f, L.FR_STATE] not in (L.FRAG_FREE, L.FRAG_RECONVERGE):
                    return machine.decoded.instructions[int(machine.FR[slot, f, L.FR_PC])], cta, warp
    return None, None, None


def deadlock(machine) -> Fault:
    instruction, cta, warp = first_instruction(machine)
    lines = standing(machine)
    return machine.fault_at(
        "deadlock",
        "no warp can run and no asynchronous work is in flight\n" + "\n".join(lines),
        instruction,
        cta,
        warp,
    )


def limit(machine) -> Fault:
    instruction, cta, warp = first_instruction(machine)
    return machine.fault_at(
        "livelock",
        f"{int(machine.G[L.G_STEPS])} instructions executed without an end (a spin on "
        "something that never comes, possibly on a CTA that is not resident: see "
        "concurrent_clusters and instruction_limit)\n" + "\n".join(standing(machine)),
        instruction,
        cta,
        warp,
    )
