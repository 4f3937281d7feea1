"""The portable program in the emulator, with every checker on: each configuration, every order of events.

`python tests/test_portable_emulated.py [problems] [seed]` runs the long sweep: random problems over all
configurations, and all hard problems.

One long file, because all its parts (problems, planted faults, the comparison with a device, the sweep) share
the programs, the way to launch them and the judge.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_cudacore import emulated
from msa_cudacore.cases import BF16, Case, random_case
from msa_cudacore.contract import Problem, validate
from msa_cudacore.exact_cases import exact_cases, fixture, odd_stride_cases
from msa_cudacore.hard_cases import HARD, few_pages
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.nvfp4 import as_bytes, dequantize, swizzle_v_scales, unswizzle_v_scales
from msa_cudacore.portable import (
    ENTRY, Configuration, choose_configuration, exact_arch, kernel_arguments, source,
)
from msa_cudacore.reference import Report, compare

pytest.importorskip("numba")

EXACT = {case.name: case for case in (*exact_cases(), *odd_stride_cases())}
SCHEDULES = (("eager", 0), ("late", 0), ("random", 1))


# ---- Programs


@dataclass(frozen=True)
class Program:
    """A configuration compiled for an architecture; `multiprocessors` spreads items where they have slots."""

    configuration: Configuration
    arch: str
    multiprocessors: int = 2
    fits: bool = True
    """With leftovers, as many multiprocessors as items need, whatever is said here."""

    def __str__(self) -> str:
        c = self.configuration
        merge = "" if c.splits == 1 else "-cluster" if c.cluster_merge else "-workspace"
        kind = "-table" if c.table else "-cooperative" if c.cooperative else ""
        kind += f"-pieces{c.pieces}on{c.piece_slots}" if c.pieces else ""
        kind += "-pairs" if c.pairs else ""
        kind += "-many" if c.many_items else ""
        kind += "-shared" if c.shared_item else ""
        kind += f"-last{c.last_splits}" if c.last_splits > 1 else ""
        return (
            f"{self.arch}-items{c.item_slots}-pages{c.page_slots}x{c.warps_per_page}-splits{c.splits}"
            f"{merge}{kind}-ids{32 * c.ids_per_lane}"
        )

    @property
    def sharers(self) -> int:
        """Item slots with whole items for each item that has no slot of its own, where there are any."""
        c = self.configuration
        if c.last_splits > 1:
            return 3 * c.last_splits
        return c.item_slots if c.shared_item else c.pieces // max(c.piece_slots, 1)

    def fitted(self, items: int) -> Program:
        """With as many item slots as it takes for the parts of all items without a slot of their own."""
        c, sharers = self.configuration, self.sharers
        if not sharers or not self.fits:
            return self
        slots = -(-items * sharers // (sharers + 1))
        multiprocessors = -(-slots // c.whole_slots)
        return replace(self, multiprocessors=-(-multiprocessors // c.cluster) * c.cluster)


def device(capability: tuple[int, int], multiprocessors: int) -> DeviceFacts:
    shared = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) * 1024
    return DeviceFacts(0, "a part", capability, multiprocessors, shared, shared + 1024, capability[0] >= 9)


DEVICES = [
    device(*part)
    for part in (
        ((8, 0), 108), ((8, 6), 84), ((8, 9), 128), ((9, 0), 132), ((9, 0), 78), ((10, 0), 148),
        ((12, 0), 170),
    )
]


@functools.lru_cache(maxsize=None)
def choices() -> dict[Configuration, tuple[str, ...]]:
    """Every configuration that a problem on some part comes to, and the architectures on which it does."""
    found: dict[Configuration, set[str]] = {}
    topks, pages, splits = (1, 2, 3, 5, 9, 64), (1, 2, 3, 5, 9), (None, 1, 2, 4, 8)
    items = (
        1, 2, 5, 8, 9, 16, 17, 24, 33, 40, 60, 64, 72, 80, 100, 128, 140, 160, 180, 200, 270, 280, 300, 400,
        440, 600, 700, 800, 850,
    )
    for facts, topk, max_pages, count, factor in itertools.product(DEVICES, topks, pages, items, splits):
        problem = Problem(count, 1, 4, 1, topk, max_pages, 1)
        choice = choose_configuration(problem, facts, factor)
        found.setdefault(choice, set()).add(exact_arch(facts.compute_capability))
    return {choice: tuple(sorted(found[choice])) for choice in sorted(found, key=str)}


def families() -> list[Program]:
    """Each choice once but for the id width and the architecture, which change from one to the next."""
    kinds = dict.fromkeys(replace(choice, ids_per_lane=1) for choice in choices())
    programs = []
    for number, kind in enumerate(kinds):
        chosen = replace(kind, ids_per_lane=1 + number % 2)
        if chosen not in choices():  # some have room for 32 ids alone, some serve more alone
            chosen = replace(kind, ids_per_lane=2 - number % 2)
        archs = choices()[chosen]
        programs.append(Program(chosen, archs[number % len(archs)]))
    return programs


FAMILIES = families()

KINDS = [
    Program(Configuration(1, 1, False, 1), "sm_80"),
    Program(Configuration(2, 1, False, 1, item_slots=2, table=True), "sm_90a"),
    Program(Configuration(1, 1, False, 1, item_slots=4, table=True), "sm_90a"),
    Program(Configuration(1, 1, False, 1, item_slots=8, warps_per_page=2, table=True), "sm_90a"),
    Program(Configuration(4, 1, False, 1, table=True), "sm_90a"),
    Program(Configuration(2, 2, True, 1), "sm_100a"),
    Program(Configuration(1, 2, True, 1, cooperative=True), "sm_90a"),
    Program(Configuration(1, 2, False, 1, cooperative=True), "sm_86"),
    Program(Configuration(1, 4, True, 1, warps_per_page=8, cooperative=True), "sm_90a"),
    Program(Configuration(4, 1, False, 1, table=True, cooperative=True), "sm_90a"),
    Program(Configuration(4, 2, True, 1, table=True, cooperative=True), "sm_90a"),
    Program(Configuration(1, 4, False, 1), "sm_89"),
]
"""One program for each way through the kernel, for problems that try its arithmetic."""


@given(
    facts=st.sampled_from(DEVICES), batch=st.integers(1, 600), kv_heads=st.integers(1, 8),
    topk=st.integers(1, 64), max_pages=st.integers(1, 500), splits=st.sampled_from((None, 1, 2, 4, 8)),
)
def test_every_choice_is_among_the_programs_here(facts, batch, kv_heads, topk, max_pages, splits):
    problem = Problem(batch, 1, 4 * kv_heads, kv_heads, topk, max_pages, 1)
    choice = choose_configuration(problem, facts, splits)
    assert exact_arch(facts.compute_capability) in choices()[choice]


@functools.lru_cache(maxsize=None)
def module(text: str, arch: str) -> Any:
    from msa_cudacore.ptx import emulator
    from msa_cudacore.ptx.nvrtc import compile_ptx

    return emulator.load(compile_ptx(text, arch, name="portable.cu", lineinfo=True))


def launch(
    case: Case, program: Program, schedule: str = "random", seed: int = 0, text: str | None = None,
    checks: Any = True, arrivals: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Run once into poisoned outputs, from a poisoned workspace: (out, lse). `text` replaces the source,
    `arrivals` are counters that launches before this one have used."""
    call = validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False)
    out, lse = call.out.owner, call.lse.owner
    out[...], lse[...] = np.nan, np.nan
    configuration, items = program.configuration, call.problem.items
    program = program.fitted(items)
    workspace = np.full(configuration.workspace_bytes(call.problem, program.multiprocessors), 0xFF, np.uint8)
    named = kernel_arguments(call, 0, pointer=emulated.pointer_argument)
    if arrivals is None:
        arrivals = counters_of(case, program)
    own = {"workspace": workspace, "arrivals": arrivals}
    named |= {name: array if array.size else None for name, array in own.items()}
    ctas = configuration.ctas(items, program.multiprocessors)
    module(text or source(configuration), program.arch).launch(
        ENTRY,
        (ctas,),
        (configuration.block,),
        list(named.values()),
        cluster=(configuration.cluster,) if configuration.cluster > 1 else None,
        shared_bytes=configuration.shared_bytes,
        schedule=schedule,
        seed=seed,
        checks=checks,
        # What CTAs tell each other through memory can be checked between CTAs that are there together.
        concurrent_clusters=ctas if arrivals.size else 1,
        memory=emulated.memory_of(call),
    )
    return out, lse


def counters_of(case: Case, program: Program) -> np.ndarray:
    items = case.batch * case.seqlen_q * case.num_kv_heads
    return np.zeros(program.configuration.counters(items, program.fitted(items).multiprocessors), np.uint32)


def judge(case: Case, out: np.ndarray, lse: np.ndarray) -> Report:
    exact = (case.expected_out, case.expected_lse) if case.expected_out is not None else case.exact()
    return compare(out, lse, *exact)


def check(case: Case, program: Program, schedule: str = "random", seed: int = 0) -> Report:
    report = judge(case, *launch(case, program, schedule, seed))
    assert report, f"{case}, {program}, {schedule} {seed}: {report}"
    return report


def bits(results: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    return tuple(array.tobytes() for array in results)


# ---- Every configuration


def fitting_case(rng: np.random.Generator, program: Program, most_ctas: int = 8, **options: Any) -> Case:
    """A hostile random problem of few CTAs, with a top-k that the program's id width serves."""
    wide, sharers = program.configuration.ids_per_lane == 2, program.sharers
    options.setdefault("topk", int(rng.choice([33, 40, 64] if wide else [1, 2, 3, 7, 8, 15, 16, 16, 17, 32])))
    most = max(most_ctas // program.configuration.splits, 1)
    kv_heads = int(rng.choice([n for n in (1, 2, 3) if n <= most]))
    seqlen_q = int(rng.choice([n for n in (1, 1, 2, 3, 5) if n * kv_heads <= most]))
    options = {"num_kv_heads": kv_heads, "seqlen_q": seqlen_q, "work": 30} | options
    if sharers:  # one or two leftovers
        batch = sharers + int(rng.integers(1, 3)) if sharers > 2 else int(rng.integers(3, 8))
        options |= {"num_kv_heads": 1, "seqlen_q": 1, "group": int(rng.choice([1, 3, 16])), "work": 100}
        options["lengths"] = rng.integers(0, 128 * options.get("max_pages", 10), batch)
        return random_case(rng, **options)
    case = random_case(rng, **options)
    while case.batch * case.seqlen_q * case.num_kv_heads > most or case.page_table.size > 40:
        case = random_case(rng, **options)
    return case


@pytest.mark.parametrize("slots", [4, 8])
def test_a_slot_without_an_item_copies_nothing(slots, rng):
    """Its warps end at once; late copies would land in the shared memory of a CTA that has ended."""
    program = Program(
        Configuration(1, 1, False, 1, item_slots=slots, warps_per_page=16 // slots, table=True), "sm_90a",
        multiprocessors=2,
    )
    # The second CTA's only item sees nothing, so that nothing there waits for copies.
    lengths = np.array([300, 0])
    case = random_case(
        rng, batch=2, seqlen_q=1, num_kv_heads=1, group=4, topk=4, lengths=lengths, hostile=False
    )
    check(case, program, "late")


MANY = Program(Configuration(1, 1, False, 1, item_slots=4, many_items=True, table=True), "sm_90a", 1)


def many_items(rng: np.random.Generator) -> Case:
    """Ten items for the four slots of one CTA, of different lengths, and one of them sees nothing."""
    lengths = np.array([300, 0, 700, 130, 1])
    return random_case(
        rng, batch=5, seqlen_q=1, num_kv_heads=2, group=16, topk=6, lengths=lengths, hostile=False
    )


def test_a_slot_takes_one_item_after_the_other(rng):
    case = many_items(rng)
    results = {bits(launch(case, MANY, schedule, seed)) for schedule, seed in SCHEDULES}
    # One item a slot, in CTAs of their own: not a bit is different.
    one_round = replace(MANY, configuration=replace(MANY.configuration, many_items=False))
    assert results == {bits(launch(case, one_round))}
    check(case, MANY)


def test_a_slot_waits_for_all_its_warps_before_the_next_item(rng):
    from msa_cudacore.ptx import emulator

    original = "item_sync(place.item_slot);  // nobody reads what the next item replaces"
    text = source(MANY.configuration)
    assert text.count(original) == 1
    with pytest.raises(emulator.Fault, match="race"):
        launch(many_items(rng), MANY, text=text.replace(original, ""))


@pytest.mark.parametrize("schedule", ["random", "late"])
@pytest.mark.parametrize("slots", [1, 4, 8])
def test_the_next_page_waits_for_the_values_of_one_that_a_warp_skips(slots, schedule, rng):
    """Three of four warps see nothing of the first page, and refill the stage that it may still come into.
    They ask for their second page where they would have scored the first. With eight slots it is one of two
    warps, and both see nothing of its other half.
    """
    from msa_cudacore.ptx import emulator

    kind = Configuration(4 // slots or 1, 1, False, 1, slots, warps_per_page=min(16 // slots, 4), table=True)
    program = Program(kind, "sm_90a", multiprocessors=1)
    case = random_case(
        rng, batch=1, seqlen_q=1, num_kv_heads=1, group=16, topk=12, lengths=[11 * 128 + 5], hostile=False
    )
    case.q2k_indices[...] = np.arange(12)[::-1]  # the page of five tokens comes first
    case = replace(case, expected_out=None, expected_lse=None)
    check(case, program, schedule)
    wait, text = "request_second(rank, begins);\n        wait_for_values();", source(program.configuration)
    assert text.count(wait) == 1
    with pytest.raises(emulator.Fault, match="race"):
        launch(case, program, schedule, text=text.replace(wait, "request_second(rank, begins);"))


@pytest.mark.parametrize("program", FAMILIES, ids=str)
def test_random_problems(program, rng):
    case = fitting_case(rng, program)
    spread = replace(program, multiprocessors=int(rng.integers(1, 9)))
    schedule = str(rng.choice(["random", "random", "eager", "late"]))
    check(case, spread, schedule, int(rng.integers(2**31)))


@pytest.mark.parametrize("program", FAMILIES, ids=str)
def test_every_order_of_events_gives_the_same_bits(program, rng):
    kv_heads = 3 if program.configuration.item_slots > 1 else 1
    case = fitting_case(rng, program, num_kv_heads=kv_heads, seqlen_q=1, lengths=[700], max_pages=7)
    results = {bits(launch(case, program, schedule, seed)) for schedule, seed in SCHEDULES}
    assert len(results) == 1
    check(case, program, "random", 2)


@pytest.mark.parametrize(("number", "name"), list(enumerate(EXACT)), ids=list(EXACT))
def test_exact_answers(number, name):
    narrow = [p for p in FAMILIES if p.configuration.splits <= 4]
    case = EXACT[name]
    fitting = [p for p in narrow if 32 * p.configuration.ids_per_lane >= case.q2k_indices.shape[-1]]
    check(case, fitting[number % len(fitting)], seed=number)


@pytest.mark.parametrize("facts", [device((8, 0), 108), device((9, 0), 132)], ids=("workspace", "cluster"))
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_with_fixed_splits_a_row_is_the_same_in_every_batch(facts, splits, rng):
    case = random_case(rng, batch=3, seqlen_q=1, num_kv_heads=1, topk=6, lengths=[300, 520, 7], max_pages=6)
    together = launch(case, fixed(case, facts, splits))
    for request in range(case.batch):
        alone = replace(
            case,
            q=case.q[request : request + 1],
            q2k_indices=case.q2k_indices[:, request : request + 1],
            page_table=case.page_table[request : request + 1],
            seqused_k=case.seqused_k[request : request + 1],
        )
        results = launch(alone, fixed(alone, facts, splits))
        assert bits(results) == bits(tuple(array[request : request + 1] for array in together))


def fixed(case: Case, facts: DeviceFacts, splits: int | None) -> Program:
    problem = validate(**case.arguments(), out=None, lse=None, bf16_as_uint16=False).problem
    choice = choose_configuration(problem, facts, splits)
    return Program(choice, exact_arch(facts.compute_capability), facts.multiprocessors)


LEFTOVERS = [
    Program(Configuration(4, 1, False, 1, table=True, pieces=8, piece_slots=1), "sm_90a"),
    Program(Configuration(4, 1, False, 1, table=True, pieces=4, piece_slots=2), "sm_90a"),
    Program(Configuration(2, 1, False, 1, item_slots=2, table=True, pieces=4, piece_slots=1), "sm_90a"),
    Program(Configuration(4, 1, False, 1, table=True, pieces=4, piece_slots=2, pairs=True), "sm_90a"),
    Program(Configuration(1, 1, False, 1, item_slots=4, table=True, shared_item=True), "sm_90a"),
    Program(Configuration(1, 1, False, 1, item_slots=4, table=True, last_splits=4), "sm_90a"),
    Program(
        Configuration(1, 1, False, 1, item_slots=8, warps_per_page=2, table=True, last_splits=2), "sm_90a"
    ),
]
COUNTED = [
    Program(Configuration(1, 2, False, 1, cooperative=True), "sm_86"),
    Program(Configuration(4, 4, False, 1, cooperative=True), "sm_90a"),
    *LEFTOVERS,
]


def leftover_case(rng: np.random.Generator, program: Program, pages: int, **options: Any) -> Case:
    """One item more than there are slots: the last, of that many pages. The others have 16, enough for slots
    with pieces to take some of them.
    """
    lengths = [*rng.integers(15 * 128, 16 * 128, program.sharers), max(128 * pages - 5, 0)]
    case = random_case(rng, seqlen_q=1, num_kv_heads=1, topk=16, lengths=lengths, hostile=False, **options)
    case.q2k_indices[...] = np.arange(16)
    return replace(case, expected_out=None, expected_lse=None)


@pytest.mark.parametrize("pages", [0, 1, 3, 5, 12])
@pytest.mark.parametrize("program", LEFTOVERS, ids=str)
def test_a_leftover_of_few_pages(program, pages, rng):
    """Some of its pieces, or all of them, are empty."""
    check(leftover_case(rng, program, pages), program, "random", pages)


@pytest.mark.parametrize("topk", [29, 30, 31, 32, 62])
@pytest.mark.parametrize("program", LEFTOVERS, ids=str)
def test_a_leftover_of_more_pages_than_the_table_is_wide(program, topk, rng):
    """Repeated ids: pieces are longer than the turns that other page slots deal without them. They begin
    before their page slot's list, only just behind the end of the one before it.
    """
    if (program.configuration.pairs or program.configuration.item_slots == 8) and topk > 32:
        pytest.skip("pairs and eight slots have lists of 32 pages")
    c = replace(program.configuration, ids_per_lane=1 if topk <= 32 else 2)
    pieces = c.pieces or c.item_slots
    lengths = np.full(program.sharers + 1, pieces * 128)
    case = random_case(rng, seqlen_q=1, num_kv_heads=1, topk=topk, lengths=lengths, group=5, hostile=False)
    ids = rng.integers(0, pieces, case.q2k_indices.shape).astype(np.int32)
    case = replace(
        case, q2k_indices=ids, page_table=case.page_table[:, :pieces], expected_out=None, expected_lse=None
    )
    check(case, replace(program, configuration=c), "random", topk)


@pytest.mark.parametrize("program", LEFTOVERS, ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_length_of_a_leftover(program, rng):
    case = leftover_case(rng, program, 12)
    shorter = replace(case, seqused_k=np.array([*case.seqused_k[:-1], 200], np.int32))
    (out, lse), (short_out, short_lse) = launch(case, program), launch(shorter, program)
    assert out[:-1].tobytes() == short_out[:-1].tobytes() and lse[:-1].tobytes() == short_lse[:-1].tobytes()
    assert out[-1].tobytes() != short_out[-1].tobytes()


@pytest.mark.parametrize("ctas", [4, 6])
@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
def test_pairs_with_and_without_a_leftover(ctas, schedule, rng):
    """The last clusters have none; their items have the same bits as those of a pair with one."""
    lengths = [*rng.integers(0, 20 * 128, ctas), *rng.integers(0, 20 * 128, ctas // 2 - 1)]
    case = random_case(rng, seqlen_q=1, num_kv_heads=1, topk=19, lengths=lengths, group=16)
    program = replace(PAIRS, multiprocessors=ctas, fits=False)
    check(case, program, schedule, ctas)
    out, lse = launch(case, program)
    assert bits((out[:ctas], lse[:ctas])) == bits(launch(case.requests(0, ctas), program))


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
@pytest.mark.parametrize("multiprocessors, items", [(2, 9), (3, 13), (2, 10), (1, 9)])
def test_ctas_with_and_without_a_shared_item(multiprocessors, items, schedule, rng):
    """The last ones have none, be they of the same round or of the next; all slots' own items have the same
    bits as those of slots that share nothing.
    """
    case = random_case(
        rng, seqlen_q=1, num_kv_heads=1, topk=13, lengths=rng.integers(0, 20 * 128, items), group=16
    )
    program = replace(SHARED, multiprocessors=multiprocessors, fits=False)
    check(case, program, schedule, items)
    own = 4 * program.configuration.ctas(items, multiprocessors)
    assert 0 < items - own <= multiprocessors
    out, lse = launch(case, program)
    assert bits((out[:own], lse[:own])) == bits(launch(case.requests(0, own), FOUR_ITEMS))


@pytest.mark.parametrize("schedule", ["random", "eager", "late"])
@pytest.mark.parametrize(
    "slots, multiprocessors, items, splits",
    [
        (4, 2, 7, 2), (4, 5, 17, 2), (4, 9, 28, 4), (4, 9, 28, 8), (8, 1, 7, 2), (8, 3, 20, 2), (8, 3, 19, 4),
        # Two rounds of CTAs.
        (4, 2, 13, 4), (4, 3, 20, 2), (8, 1, 13, 4),
    ],
)
def test_last_item_slots_with_and_without_splits(slots, multiprocessors, items, splits, schedule, rng):
    """The last ones have none. Whole items have the bits that they have without those that are split, and
    these the same ones however long the others are.
    """
    case = random_case(
        rng, seqlen_q=1, num_kv_heads=1, topk=13, lengths=rng.integers(0, 20 * 128, items), group=16
    )
    whole = FOUR_ITEMS if slots == 4 else EIGHT_ITEMS
    kind = replace(whole.configuration, last_splits=splits)
    program = Program(kind, "sm_90a", multiprocessors, fits=False)
    own = kind.whole_slots * kind.ctas(items, multiprocessors)
    assert own < items
    check(case, program, schedule, items)
    others = replace(
        case, seqused_k=np.array([*np.roll(case.seqused_k[:own], 1), *case.seqused_k[own:]]),
        expected_out=None, expected_lse=None,
    )
    results, others_results = launch(case, program), launch(others, program)
    assert bits(tuple(array[:own] for array in results)) == bits(launch(case.requests(0, own), whole))
    for array, other_array in zip(results, others_results):
        assert array[own:].tobytes() == other_array[own:].tobytes()


@pytest.mark.parametrize("program", COUNTED, ids=str)
def test_launches_after_one_another_leave_the_counters_at_zero(program, rng):
    """Whichever CTA comes last, and whatever was in the workspace."""
    if program.sharers:
        case = leftover_case(rng, program, 7)
    else:
        case = random_case(rng, seqlen_q=1, num_kv_heads=1, topk=6, lengths=[700, 0], hostile=False)
    arrivals, results = counters_of(case, program), set()
    for seed in range(4):
        results.add(bits(launch(case, program, seed=seed, arrivals=arrivals)))
        assert not arrivals.any()
    assert len(results) == 1


@pytest.mark.parametrize("program", LEFTOVERS, ids=str)
def test_every_piece_of_a_leftover_arrives_however_few_pages_it_has(program, rng):
    case = leftover_case(rng, program, 16)
    arrivals = counters_of(case, program)
    for pages in range(17):
        case.seqused_k[-1] = 128 * pages
        out, _ = launch(case, program, seed=pages, arrivals=arrivals)
        assert not arrivals.any() and out[-1].astype(np.float32).any() == (pages > 0)


@pytest.mark.parametrize("program", [*KINDS, *COUNTED, MANY], ids=str)
def test_a_selection_that_changes_during_a_launch_does_not_spoil_the_next(program, rng):
    """Each warp finds another one. Results are nobody's business then, and a ring may be read that nothing
    was copied into; but warps meet, lists are complete, and the counters come back to zero.
    """
    from msa_cudacore.ptx import emulator

    checks = emulator.Checks(uninitialised=False)
    if program.sharers:
        case = leftover_case(rng, program, 16)
    else:
        case = random_case(rng, seqlen_q=1, num_kv_heads=1, topk=16, lengths=[2048] * 3, hostile=False)
        case.q2k_indices[...] = np.arange(16)
        case = replace(case, expected_out=None, expected_lse=None)
    text, place = source(program.configuration), "if (j < args.topk)"
    assert text.count(place) == 1
    arrivals = counters_of(case, program)
    for factor, seed in itertools.product((3, 7), range(2)):
        pages = f"(threadIdx.x / 32 * {factor} + blockIdx.x * 5 + 1) % 17"
        changed = text.replace(place, f"if (j < {pages} && j < args.topk)")
        launch(case, program, seed=seed, text=changed, checks=checks, arrivals=arrivals)
        assert not arrivals.any()
    assert judge(case, *launch(case, program, arrivals=arrivals))


# ---- Hard arithmetic


# Two kinds for each problem; the sweep tries all.
@pytest.mark.parametrize(
    "name, program",
    [(name, KINDS[(number + more) % len(KINDS)]) for number, name in enumerate(HARD) for more in (0, 3)],
    ids=str,
)
def test_hard_arithmetic(name, program, rng):
    check(HARD[name](rng), program)


@pytest.mark.parametrize(
    "name, program", [(name, LEFTOVERS[number % len(LEFTOVERS)]) for number, name in enumerate(HARD)], ids=str
)
def test_hard_arithmetic_of_a_leftover(name, program, rng):
    """Every request as often as it takes for some to be cut into pieces."""
    case, n = HARD[name](rng), program.sharers + 1
    times = {"q": (n, 1, 1), "q2k_indices": (1, n, 1), "page_table": (n, 1), "seqused_k": (n,)}
    arrays = {array: np.tile(getattr(case, array), often) for array, often in times.items()}
    case = replace(case, **arrays, expected_out=None, expected_lse=None)
    items = case.batch * case.seqlen_q * case.num_kv_heads
    program = program.fitted(items)
    assert program.configuration.leftovers(items, program.multiprocessors) > 0
    check(case, program)


@pytest.mark.parametrize("program", KINDS, ids=str)
def test_every_scale_byte_of_live_tokens(program):
    """One token for each scale byte but the NaNs, sign included, on the K and on the V side."""
    case = fixture(seqused=(128,), num_q_heads=16, num_kv_heads=1)
    scales = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    page = int(case.page_table[0, 0])
    q = np.linspace(-1, 1, case.q.size).reshape(case.q.shape).astype(BF16)
    for start in (0, len(scales) - 128):
        tokens = np.repeat(scales[start : start + 128][:, None], 8, axis=1)
        case.k_scale[page, 0], case.v_scale[page, 0] = tokens, swizzle_v_scales(tokens[::-1])
        check(replace(case, q=q, softmax_scale=0.002, expected_out=None, expected_lse=None), program)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("program", KINDS, ids=str)
def test_a_query_that_is_not_finite_spoils_its_own_head_alone(program, value, rng):
    case = few_pages(rng, [0.25, 0.25])
    clean = launch(case, program)
    q = case.q.copy()
    q[0, 1, 77] = value
    out, lse = launch(replace(case, q=q), program)
    for head in (0, 2):
        assert out[0, head].tobytes() == clean[0][0, head].tobytes() and lse[0, head] == clean[1][0, head]


def test_an_empty_pool():
    case = fixture(seqused=(5,))
    empty = {name: getattr(case, name)[:0] for name in ("k", "v", "k_scale", "v_scale")}
    for program in KINDS:
        out, lse = launch(replace(case, **empty), program)
        assert not out.view(np.uint16).any() and (lse == -np.inf).all()


# ---- Planted faults


PLAIN = Program(Configuration(1, 1, False, 1), "sm_80")
TABLE = Program(Configuration(2, 1, False, 1, item_slots=2, table=True), "sm_90a")
FOUR_ITEMS = Program(Configuration(1, 1, False, 1, item_slots=4, table=True), "sm_90a")
EIGHT_ITEMS = Program(Configuration(1, 1, False, 1, item_slots=8, warps_per_page=2, table=True), "sm_90a")
FOUR_PAGES = Program(Configuration(4, 1, False, 1, table=True), "sm_90a")
CLUSTER = Program(Configuration(1, 2, True, 1), "sm_90a")
COOPERATIVE = Program(Configuration(1, 2, True, 1, cooperative=True), "sm_90a")
EIGHT_WARPS = Program(Configuration(1, 4, True, 1, warps_per_page=8, cooperative=True), "sm_90a")
SIDE_BY_SIDE = Program(Configuration(2, 1, False, 1, cooperative=True), "sm_90a")
MANY_PAGES = Program(Configuration(2, 2, True, 1, table=True, cooperative=True), "sm_90a")
WORKSPACE = Program(Configuration(1, 2, False, 1), "sm_86")

ONE_PIECE, TWO_PIECES, TWO_ITEMS, PAIRS, SHARED, LAST_SPLITS, TWO_LAST_SPLITS = LEFTOVERS

ARRIVAL = "ptx::atom_inc_acq_rel_gpu_u32(counter, kStored - 1)"

WAIT_FOR_KEYS = "ptx::cp_async_wait_group<kPageGroups*(kStages - idle) - 1>();"
WAIT_FOR_VALUES = "ptx::cp_async_wait_group<kPageGroups*(kStages - idle) - 2>();"

# What each line is for, seen by breaking it: (program, text, replacement).
FAULTS = {
    "a page has arrived before it is read": (PLAIN, WAIT_FOR_KEYS, ""),
    "the last page has arrived before it is read": (
        PLAIN, WAIT_FOR_KEYS, WAIT_FOR_KEYS.replace(" - 1>", ">")
    ),
    "keys have arrived before they are read": (TABLE, WAIT_FOR_KEYS, WAIT_FOR_KEYS.replace(" - 1>", ">")),
    "values have arrived before they are read": (
        TABLE, WAIT_FOR_VALUES, WAIT_FOR_VALUES.replace(" - 2>", " - 1>")
    ),
    "the second page is requested": (FOUR_PAGES, "if (!begins) return;", "return;"),
    "the second page is requested before the values are awaited": (
        FOUR_PAGES, "scored();\n  wait_for_values();", "wait_for_values();\n  scored();"),
    "a page goes into the stage that is free": (
        PLAIN, "request_listed(lanes, stage, slot, rank + kAhead",
        "request_listed(lanes, stage ^ kStageBytes, slot, rank + kAhead"),
    "the list of pages is complete": (PLAIN, "__syncthreads();\n  } else {", "} else {"),
    "the table is complete": (TABLE, "__syncthreads();\n  } else {", "} else {"),
    "a page's warps have published before they merge": (
        TABLE, "page_sync(place.item_slot * kPageSlots + page_slot);", ""),
    "the warps of a page have published before they merge their shares": (
        FOUR_PAGES, "page_sync(place.item_slot * kPageSlots + page_slot);", ""),
    "a warp merges its own share": (FOUR_PAGES, "from = page_ring + part * 2048", "from = page_ring + 2048"),
    "shares of four page slots have merged before they do": (
        FOUR_PAGES, "item_sync(place.item_slot);", ""),
    "the second page lies in the second stage": (
        FOUR_ITEMS, "kStageNow = kFirstApart ? kStageBytes : 0;", "kStageNow = 0;"),
    "a warp asks for the second part of a page": (
        EIGHT_ITEMS, "part), turn_of(kStageBytes));", "part), 0);"),
    "and for that of the next one": (EIGHT_ITEMS, "part), turn_of(stage));", "part), 0);"),
    "the tokens of the second part begin behind the first": (
        EIGHT_ITEMS, "part + turn_of(stage) * kWarpsPerPage", "part"),
    "two warps of a page have published before they merge": (EIGHT_ITEMS, "item_sync(place.item_slot);", ""),
    "queries leave the table alone": (EIGHT_ITEMS, "? smem + 128 +", "? smem +"),
    "page slots have merged before they do": (TABLE, "item_sync(place.item_slot);", ""),
    "warps have published before they merge": (PLAIN, "item_sync(place.item_slot);", ""),
    "tokens behind the last one are hidden": (
        PLAIN, "if (visible < kWarpTokens) hide_tail", "if (false) hide_tail"),
    "origins move": (PLAIN, "if (__any_sync(~0u, (largest + 0x08000800u) & 0x80008000u))", "if (0)"),
    "every partial has arrived": (
        CLUSTER, "while (!ptx::mbarrier_try_wait_parity_cluster(arrival, 0)) {\n  }", ""),
    "all partials are announced": (
        CLUSTER, "kReceived * (kHeadDim * 4 + (kDirectSlices ? 0 : 8)));", "kReceived * (kHeadDim * 4));"),
    "entries of the page table are brought from its row alone": (
        MANY_PAGES, "if (entry < args.max_pages)", "if (true)"),
    "a copy of the page table comes before the second page": (
        MANY_PAGES, "place.ring + kStageBytes + lane * 4", "place.ring + lane * 4"),
    "only the other half is announced": (CLUSTER, "kHalves ? kHeads / 2 : kHeads;", "kHeads;"),
    "a thread keeps its own half": (
        CLUSTER, "part.head / kOwned != static_cast<int>(split)) return;",
        "part.head / kOwned == static_cast<int>(split)) return;"),
    "inboxes are open before slices are sent": (
        COOPERATIVE, "ptx::barrier_cluster_wait();  // every inbox is open\n    if (first", "if (first"),
    "inboxes are open before halves are sent": (
        CLUSTER, "if constexpr (kClusterMerge) ptx::barrier_cluster_wait();", ""),
    "sums that go ahead have arrived": (
        COOPERATIVE, "wait_for_inbox(slot + (kDirectSlices ? kSlotStatsArrival : kSlotArrival));", ""),
    "slices have arrived": (
        COOPERATIVE, "if constexpr (kDirectSlices) wait_for_inbox(slot + kSlotArrival);\n    const", "const"),
    "a CTA stays until the slices of all heads have arrived": (
        COOPERATIVE, "if constexpr (kDirectSlices) wait_for_inbox(slot + kSlotArrival);\n}", "}"),
    "sums that go ahead are announced": (COOPERATIVE, "kHeads * 8);", "kHeads * 4);"),
    "sums that go ahead are complete": (
        COOPERATIVE, "page_sync(page_slot);\n  if (kDirectSlices && last) push_sums();",
        "if (kDirectSlices && last) push_sums();\n  page_sync(page_slot);"),
    "eight warps wait for those that asked for their page": (
        EIGHT_WARPS, "if (kEightWarps && rank == first) page_sync(page_slot);", ""),
    "cooperating warps wait for their values": (COOPERATIVE, "  await_values();\n", ""),
    "cooperating warps have all maxima": (
        COOPERATIVE, "page_sync(page_slot);  // also: every warp's values have arrived", ""),
    "cooperating warps have all probabilities": (
        COOPERATIVE, "page_sync(page_slot);\n  if (kDirectSlices && last) push_sums();",
        "if (kDirectSlices && last) push_sums();"),
    "cooperating warps wait for readers": (
        COOPERATIVE, "page_sync(page_slot);  // also: every warp's values have arrived\n  refill();",
        "refill();\n  page_sync(page_slot);"),
    "cooperating warps clear the value scales of hidden tokens": (
        COOPERATIVE, "clear_value_scales(at.ring, stage, own_visible, lane);", ""),
    "slices are complete before they merge": (SIDE_BY_SIDE, "item_sync(place.item_slot);", ""),
    "a slice replaces a ring that nobody reads": (
        SIDE_BY_SIDE, "page_sync(page_slot);  // nobody reads this warp's ring any more", ""),
    "a split writes its own part of the workspace": (
        WORKSPACE, "store_partial(args, part, blockIdx.x / kSplits, split);",
        "store_partial(args, part, blockIdx.x / kSplits, 0);"),
    "partials are released and acquired": (WORKSPACE, "atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "partials are released": (WORKSPACE, "atom.acq_rel.gpu", "atom.acquire.gpu"),
    "partials are acquired": (WORKSPACE, "atom.acq_rel.gpu", "atom.release.gpu"),
    "the last one merges": (WORKSPACE, "!= kStored - 1) return;", "!= 0) return;"),
    "counters are zero again": (WORKSPACE, ARRIVAL, ARRIVAL.replace("kStored - 1", "~0u")),
    "pieces are released and acquired": (ONE_PIECE, "atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "counters of pieces are zero again": (ONE_PIECE, ARRIVAL, ARRIVAL.replace("kStored - 1", "~0u")),
    "a piece without pages arrives": (TWO_ITEMS, "max(pages, 1)", "pages"),
    "a piece without pages has no tokens": (
        TWO_PIECES, "if (!only_piece && pages == 0) ptx", "if (false) ptx"),
    "a piece without pages asks for no values": (
        ONE_PIECE, "(!kLeftovers || ptx::ld_shared_u32(slot.fixed + kSlotVisible + first * 4) != 0)", "true"),
    "a piece goes to its own place": (
        TWO_PIECES, "store_partial(args, part, leftover, piece);", "store_partial(args, part, leftover, 0);"),
    "a piece's warps have published": (
        TWO_ITEMS, "page_sync(item_slot * kPageSlots + page_slot);\n  const auto", "const auto"),
    "a piece has left the stage": (
        ONE_PIECE, "page_sync(item_slot * kPageSlots + page_slot);  // nobody reads", "// nobody reads"),
    "an item begins with sums of its own": (ONE_PIECE, "begin_item();\n      at.queries", "at.queries"),
    "only a warp's first page of an item sets origins": (TWO_PIECES, "begins = false;", ""),
    "an item has its own queries": (ONE_PIECE, "at.queries -= kQueryBytes;", ""),
    "an item has its own scales": (TWO_PIECES, "at.scales -= kScaleBytes;", ""),
    "a piece ends where it does": (
        ONE_PIECE, "only_piece ? kNoPiece : end);", "only_piece ? kNoPiece : first);"),
    "pairs: a page slot that has nothing but a piece has its end": (
        PAIRS, "if (only_piece) ptx::st_shared_u32(slot.fixed + kSlotEnds + page_slot * 8, end);", ""),
    "pairs: a piece without pages has no tokens": (
        PAIRS, "if (!only_piece && pages == 0) ptx", "if (false) ptx"),
    "pairs: an item begins with sums of its own": (PAIRS, "begin_item();\n      at.queries", "at.queries"),
    "pairs: a kept piece is complete": (
        PAIRS, "ptx::barrier_cta_sync(kPieceBarrier, kPieceThreads);", ""),
    "pairs: warps have published before they merge": (
        PAIRS, "page_sync(place.item_slot * kPageSlots + page_slot);\n      if constexpr (kPairs)",
        "if constexpr (kPairs)"),
    "pairs: the partner's inbox is open": (
        PAIRS, "ptx::barrier_cluster_wait();  // the partner's inbox is open", ""),
    "pairs: the partner's sums have arrived": (
        PAIRS, "wait_for_inbox(slot.fixed + kSlotArrival);\n  const float2 sent", "const float2 sent"),
    "pairs: all that the partner sends is announced": (
        PAIRS, "kPairHeads * (kHeadDim * 4 + kWarpsPerPage * 8)", "kPairHeads * kHeadDim * 4"),
    "pairs: a CTA gets the heads that it finishes": (
        PAIRS, "rank == 0 ? merged[1][half] : merged[0][half];\n    ptx",
        "rank == 0 ? merged[0][half] : merged[1][half];\n    ptx"),
    "pairs: page slots have merged before they do": (PAIRS, "item_sync(place.item_slot);", ""),
    "shared: the first page of an item has arrived": (
        SHARED, "ptx::cp_async_wait_group<kPageGroups - 1>();\n    if (rank", "if (rank"),
    "shared: behind an odd number of pages is a place without tokens": (
        SHARED, "if (lane >= pages && first + lane < kOwnPlace)", "if (false)"),
    "shared: every slot has the scales": (SHARED, "if (index < kItemSlots)", "if (index == 0)"),
    "shared: an item has its own scales": (
        SHARED, "at.scales -= kScaleBytes;\n    }\n    return true;", "}\n    return true;"),
    "shared: an item begins with sums of its own": (SHARED, "begin_item();\n      at.queries", "at.queries"),
    "shared: a part has left the stage": (
        SHARED, "page_sync(item_slot * kPageSlots + page_slot);  // nobody reads", "// nobody reads"),
    "shared: a part goes to its own place": (
        SHARED, "warp, lane, blockIdx.x, item_slot);", "warp, lane, blockIdx.x, 0);"),
    "shared: all parts are told": (
        SHARED, "if (warp == 0 && lane == 0) ptx::mbarrier_arrive(smem + kSharedArrival);", ""),
    "shared: all parts are there before they merge": (
        SHARED, "ptx::mbarrier_wait_parity(smem + kSharedArrival, 0);", ""),
    "shared: the wait is for all slots": (
        SHARED, "ptx::mbarrier_init(smem + kSharedArrival, kItemSlots);",
        "ptx::mbarrier_init(smem + kSharedArrival, 1);"),
    "last slots: they share their items": (LAST_SPLITS, "whole_slots)) / sharers;", "whole_slots));"),
    "last slots: only their items are split": (
        LAST_SPLITS, "return kLastSplit && item_slot >= kWholeSlots;", "return kLastSplit;"),
    "last slots: splits have different pages": (
        TWO_LAST_SPLITS, "keep_split<kLastSplits>(selection, last_split(place.item_slot) % kLastSplits)",
        "keep_split<kLastSplits>(selection, 0)"),
    "last slots: a split has every splits-th page": (
        LAST_SPLITS, "s.rank[w] % splits == split ?", "s.rank[w] / splits == split ?"),
    "last slots: a split goes to its own place": (
        TWO_LAST_SPLITS, "store_partial(args, part, index, split % kLastSplits);",
        "store_partial(args, part, index, 0);"),
    "last slots: the last split to arrive merges": (
        LAST_SPLITS, "!= kStored - 1) return;\n  constexpr", "!= 0) return;\n  constexpr"),
    "last slots: a warp merges what its fellows have stored": (
        TWO_LAST_SPLITS, "first + i * 32,", "thread + i * kItemThreads,"),
    "last slots: splits are released and acquired": (LAST_SPLITS, "atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "last slots: counters are zero again": (
        TWO_LAST_SPLITS, ARRIVAL, ARRIVAL.replace("kStored - 1", "~0u")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, rng):
    from msa_cudacore.ptx import emulator

    program, original, replacement = FAULTS[fault]
    text = source(program.configuration)
    assert text.count(original) >= 1, "the line stands no more in the source"
    if program.sharers:
        case = leftover_case(rng, program, 3, group=16)
        # A head's scale is a power of two by its largest query: no two items have the same ones.
        case.q[...] = case.q.astype(np.float32) * 2.0 ** rng.integers(-2, 3, (*case.q.shape[:2], 1))
    else:
        # An origin that is found with the first page moves where later scores are far larger.
        case = few_pages(rng, [0.25] * 3 + [1.0] if fault == "origins move" else [0.25] * 7)
        # Tokens that nobody sees.
        case.k_scale[-1, :, -3:] = 0x7F
        dead = unswizzle_v_scales(case.v_scale[-1, 0])
        dead[-3:] = 0x7F
        case.v_scale[-1, 0] = swizzle_v_scales(dead)
    counters = counters_of(case, program)
    for schedule, seed in SCHEDULES:
        check(case, program, schedule, seed)
        try:
            results = launch(
                case, program, schedule, seed, text.replace(original, replacement), arrivals=counters
            )
        except emulator.Fault:
            return
        if not judge(case, *results) or counters.any():
            return
    pytest.fail("nothing noticed")


@pytest.mark.parametrize("program", KINDS, ids=str)
def test_lanes_of_a_warp_exchange_data_only_behind_a_common_instruction(program, rng):
    from msa_cudacore.ptx import emulator

    # Each CTA of four splits has a page that follows another one.
    case, checks = few_pages(rng, [0.25] * 9), emulator.Checks(warp_races=True)
    text = source(program.configuration)
    # Every lane waits for its own copies and reads those of the others.
    place = "wait_for_keys();\n    __syncwarp();"
    mutated = text.replace(place, place.replace("__syncwarp();", ""))
    launch(case, program, checks=checks)
    launch(case, program, "late", checks=checks)
    assert mutated != text
    with pytest.raises(emulator.Fault, match="no instruction that both lanes execute together"):
        launch(case, program, "late", text=mutated, checks=checks)


@pytest.mark.parametrize("program", [*LEFTOVERS, MANY], ids=str)
def test_lanes_exchange_the_sums_of_pieces_and_of_items_in_turn_behind_a_common_instruction(program, rng):
    from msa_cudacore.ptx import emulator

    case = many_items(rng) if program is MANY else leftover_case(rng, program, 5, group=16)
    checks = emulator.Checks(warp_races=True)
    for schedule in ("random", "late"):
        assert judge(case, *launch(case, program, schedule, checks=checks))
    # The origins of a row belong to one of its four lanes.
    text = source(program.configuration)
    place = "__syncwarp();  // the row's four lanes have read"
    assert text.count(place) == 1
    far = replace(case, q=(case.q.astype(np.float32) * 2.0**20).astype(BF16))
    assert judge(far, *launch(far, program, checks=checks))
    with pytest.raises(emulator.Fault, match="no instruction that both lanes execute together"):
        launch(far, program, text=text.replace(place, ""), checks=checks)


# ---- The emulator and a device


def differences(case: Case, program: Program, device_results: tuple, emulated_results: tuple) -> list[str]:
    """Where two runs of the same program differ by more than their ex2 and lg2 may.

    PTX ISA: ex2.approx has a relative error of at most 2^-22, lg2.approx an absolute one of 2^-22; the
    emulator rounds the exact values. So a weight P may come to lie on the other side of a rounding boundary
    of binary16, which moves it by at most d = 2^-10 of itself (a subnormal one by 2^-24, of a row's sum of at
    least 2^7). A row is sum(P v) / sum(P), so it moves by at most 2 d max|v|, and its logarithm by d; what
    FP32 sums of other weights round differently is below a tenth of that. Then results are rounded: to
    bfloat16, which may part them by one unit in the last place, and lse to FP32. Boundaries are met rarely:
    nearly all elements agree to the bit.
    """
    (out, lse), (near_out, near_lse) = (
        [array.astype(np.float64) for array in results] for results in (device_results, emulated_results)
    )
    weight = 1.1 * 2.0**-10
    values = np.array([np.abs(largest_values(case, head)) for head in range(case.num_kv_heads)]).max()
    out_bound = 2 * weight * values + 2.0**-7 * np.abs(near_out)
    seen = np.isfinite(near_lse)
    lse_bound = weight + 2.0**-21 + 2.0**-22 * np.abs(near_lse[seen])
    problems = []
    if not (np.abs(out - near_out) <= out_bound).all():
        problems.append(f"out differs by up to {np.abs(out - near_out).max():.3g}")
    if (np.isfinite(lse) != seen).any() or not (np.abs(lse[seen] - near_lse[seen]) <= lse_bound).all():
        problems.append("lse differs")
    same = float((out == near_out).mean())
    if same < 0.95:
        problems.append(f"only {same:.1%} of the elements of out are the same to the bit")
    return problems


def largest_values(case: Case, head: int) -> np.ndarray:
    """The largest V element of every page that holds no NaN scale, for one KV head."""
    values = [
        dequantize(case.v[page, head], unswizzle_v_scales(as_bytes(case.v_scale)[page, head]))
        for page in range(case.k.shape[0])
    ]
    return np.nan_to_num(np.abs(values)).max(axis=(1, 2)) * case.v_global_scale


def comparable_case(rng: np.random.Generator) -> Case:
    return random_case(rng, hostile=False, batch=2, seqlen_q=2, num_kv_heads=2, topk=6, lengths=[700, 130])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 4, 8])
def test_a_device_gives_what_the_emulator_gives(splits, portable_target, rng):
    from msa_cudacore.launch import device as device_module

    facts = device_module.facts(0)
    case = comparable_case(rng)
    program = fixed(case, facts, splits)
    assert not differences(case, program, portable_target.run(case, splits=splits), launch(case, program))

    # Scores of zero: every ex2 is of an integer, so nothing is approximate but the logarithm.
    flat = replace(case, q=np.zeros_like(case.q))
    (out, lse), (near_out, near_lse) = portable_target.run(flat, splits=splits), launch(flat, program)
    assert out.tobytes() == near_out.tobytes()
    seen = np.isfinite(near_lse)
    np.testing.assert_array_equal(lse[~seen], near_lse[~seen])
    assert (np.abs(lse[seen] - near_lse[seen]) <= 2.0**-21 + 2.0**-22 * np.abs(near_lse[seen])).all()


EX2 = 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));'


@pytest.mark.parametrize(("ulps", "agrees"), [(2, True), (20_000, False)])
def test_what_two_runs_may_differ_by(ulps, agrees, rng):
    """The comparison with a device, on a twin whose ex2 is off by as much as hardware's may be or more."""
    case = comparable_case(rng)
    for program in (PLAIN, COOPERATIVE):
        text = source(program.configuration)
        off = (
            "d = __uint_as_float(__float_as_uint(d) + (d > 1e-30f && d < 1e30f && a != floorf(a) ? "
            f"(__float_as_uint(a) & 1 ? {ulps} : -{ulps}) : 0));"
        )
        assert EX2 in text
        twin = launch(case, program, text=text.replace(EX2, EX2 + off))
        assert (not differences(case, program, twin, launch(case, program))) == agrees


# ---- The long run


def sweep(problems: int, seed: int) -> None:
    """Random problems over every configuration, its architecture by the seed, then hard ones on every kind.

    Prints one line for each, and the worst row.
    """
    start, worst, findings = time.monotonic(), 0.0, 0
    programs = [
        Program(choice, archs[(seed + number) % len(archs)])
        for number, (choice, archs) in enumerate(choices().items())
    ]
    hard = list(itertools.product(HARD.values(), KINDS))
    for number in range(problems + len(hard)):
        rng = np.random.default_rng([seed, number])
        if number < problems:
            program = programs[number * len(programs) // problems]
            program = replace(program, multiprocessors=int(rng.integers(1, 9)))
            case = fitting_case(rng, program, most_ctas=16)
        else:
            make, program = hard[number - problems]
            case = make(rng)
        schedule = str(rng.choice(["random", "random", "eager", "late"]))
        try:
            report = check(case, program, schedule, number)
        except Exception as finding:
            findings += 1
            print(f"{number} FOUND, {case}, {program}, {schedule}: {finding}", flush=True)
            continue
        worst = max(worst, report.worst_ratio)
        print(f"{number}: {case}; {program}, {schedule}: {report.worst_ratio:.3f}", flush=True)
    print(
        f"{problems} random problems on {len(programs)} programs and {len(hard)} hard ones, "
        f"{findings} findings; worst row {worst:.3f} of its floor; {time.monotonic() - start:.0f} s"
    )
    sys.exit(findings > 0)


if __name__ == "__main__":
    sweep(*([int(argument) for argument in sys.argv[1:]] + [200, 1][len(sys.argv) - 1 :]))
