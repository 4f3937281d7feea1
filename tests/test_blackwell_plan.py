"""The Blackwell program's choices are pure functions; its machine code keeps within its budgets on every
target."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msa_cudacore.launch.compile import compile_cubin
from msa_cudacore.launch.device import DeviceFacts
from msa_cudacore.ptx import nvrtc

from benchmarks.blackwell_sass import REFERENCE, count, disassemble, disassembler
from msa_cudacore.blackwell import (
    ARCHITECTURES,
    ENTRY,
    SPLITS,
    BlackwellProgram,
    Configuration,
    choose_configuration,
    source,
)
from msa_cudacore.contract import Problem

SMS = 148


def device(capability=(10, 0), multiprocessors=SMS) -> DeviceFacts:
    return DeviceFacts(0, "test", capability, multiprocessors, 227 * 1024, 228 * 1024, True)


def problem(batch=1, seqlen_q=1, hkv=4, group=16, topk=16, max_pages=64) -> Problem:
    return Problem(batch, seqlen_q, hkv * group, hkv, topk, max_pages, num_pages=1)


def covered(problem: Problem, configuration: Configuration) -> list[tuple[int, int]]:
    """(item, parts it is cut into) of every CTA, walked as `Schedule` in the kernel walks them."""
    visits = []
    for cta in range(configuration.ctas):
        if configuration.splits == 1:
            visits += [(item, 1) for item in range(cta, problem.items, configuration.ctas)]
            continue
        visits += [(round_ * configuration.ctas + cta, 1) for round_ in range(configuration.unsplit_rounds)]
        item = configuration.unsplit_rounds * configuration.ctas + cta // configuration.splits
        if item < problem.items:
            visits.append((item, configuration.splits))
    return visits


@given(
    batch=st.integers(0, 200), seqlen_q=st.integers(1, 8), hkv=st.integers(1, 8), group=st.integers(1, 16),
    topk=st.integers(1, 64), max_pages=st.integers(0, 2000), splits=st.sampled_from((None, *SPLITS)),
    multiprocessors=st.sampled_from((1, 2, 7, 8, 20, 132, 148, 160)),
)
def test_every_item_is_computed_once_and_the_configuration_fits(
    batch, seqlen_q, hkv, group, topk, max_pages, splits, multiprocessors
):
    sizes = problem(batch, seqlen_q, hkv, group, topk, max_pages)
    chosen = choose_configuration(sizes, multiprocessors, splits)
    assert chosen.splits in SPLITS and (splits is None or chosen.splits == splits)
    assert chosen.ctas % chosen.splits == 0
    assert chosen.shared_bytes <= 227 * 1024
    shares: dict[int, list[int]] = {}
    for item, parts in covered(sizes, chosen):
        shares.setdefault(item, []).append(parts)
    assert set(shares) == set(range(sizes.items))
    assert all(parts == [parts[0]] * parts[0] for parts in shares.values())
    if splits is None:
        assert chosen.ctas <= multiprocessors
    else:
        assert chosen.unsplit_rounds == 0
    assert not chosen.short or (sizes.pages_per_item <= 4 and sizes.max_pages <= 32)


@pytest.mark.parametrize(
    ("sizes", "splits", "unsplit_rounds"),
    [
        (problem(batch=128), 2, 3),  # 512 items: three rounds of 148, the last 68 items in two
        (problem(batch=32), 1, 0),  # 128 items: one round, no room for a second half
        (problem(batch=16), 2, 0),
        (problem(batch=8), 4, 0),
        (problem(batch=1), 8, 0),
        (problem(batch=1, hkv=1), 8, 0),
        (problem(batch=32, seqlen_q=2), 1, 0),
        (problem(batch=2, max_pages=3), 1, 0),
    ],
)
def test_published_rows(sizes, splits, unsplit_rounds):
    chosen = choose_configuration(sizes, SMS)
    assert (chosen.splits, chosen.unsplit_rounds) == (splits, unsplit_rounds)


def test_short_requests_take_the_short_program():
    assert choose_configuration(problem(batch=2, max_pages=3), SMS).short
    assert choose_configuration(problem(batch=2, topk=4, max_pages=32), SMS).short
    assert not choose_configuration(problem(batch=2, topk=4, max_pages=33), SMS).short
    assert not choose_configuration(problem(batch=200, max_pages=5), SMS).short


@given(batch=st.integers(1, 300), other=st.integers(1, 300), splits=st.sampled_from(SPLITS[1:]))
def test_a_fixed_split_fixes_the_order_of_sums(batch, other, splits):
    one, two = (choose_configuration(problem(b), SMS, splits) for b in (batch, other))
    assert one.constants == two.constants and one.unsplit_rounds == two.unsplit_rounds == 0


@pytest.mark.parametrize("splits", [3, 5, 16, 64])
def test_factor_that_is_not_served_is_refused(splits):
    with pytest.raises(ValueError, match=f"splits is {splits}; backend 'blackwell' accepts 1, 2, 4, 8"):
        choose_configuration(problem(), SMS, splits)


def test_more_ctas_than_a_grid_holds_are_refused():
    with pytest.raises(ValueError, match="work items of 8 CTAs; accepted are at most 2147483647"):
        BlackwellProgram().plan(problem(batch=2**24, seqlen_q=16), device(), 8)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0), (12, 1)])
def test_other_devices_are_refused_with_the_reason(capability):
    refusal = BlackwellProgram().refusal(device(capability))
    assert f"this device has {capability[0]}.{capability[1]}" in refusal
    assert BlackwellProgram().refusal(device()) is None


CONFIGURATIONS = [
    choose_configuration(problem(batch=148), SMS, splits) for splits in SPLITS
] + [choose_configuration(problem(max_pages=2), SMS, 1)]


@pytest.mark.parametrize(
    ("arch", "configuration"),
    [("sm_100a", c) for c in CONFIGURATIONS]
    + [(arch, CONFIGURATIONS[i]) for arch in ARCHITECTURES.values() if arch != "sm_100a" for i in (0, 3)],
    ids=lambda value: value
    if isinstance(value, str)
    else f"{'short' if value.short else 'split'}{value.splits}",
)
def test_machine_code_has_no_spills_and_uses_the_tensor_cores(arch, configuration, assert_waits_first):
    cubin = compile_cubin(source(configuration.constants), arch, name="blackwell.cu", use_cache=False)
    (resources,) = cubin.resources().values()
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers * configuration.block <= 65536, "the CTA would not fit an SM's register file"
    assert configuration.shared_bytes + resources.static_shared_bytes <= 227 * 1024

    assert_waits_first(cubin.code, ENTRY, configuration)
    counts = opcodes(cubin.code)
    assert not counts.keys() & {"LDL", "STL"}, "local memory"
    # Two passes by two halves of the score MMA, for each page of a pair and for a page alone; eight output
    # MMAs at each of their places in the MMA role.
    assert counts["UTCOMMA"] == 3 * 4
    assert counts["UTCHMMA"] % 8 == 0 and counts["UTCHMMA"] > 0
    for opcode in ("UTCBAR", "UTCATOMSWS", "LDTM", "STTM", "LDSM", "UTMALDG", "ELECT"):
        assert counts.get(opcode), f"no {opcode}"


def opcodes(code: bytes) -> dict[str, int]:
    """SASS opcodes of a cubin, without modifiers, and how often each stands there."""
    if disassembler() is None:
        pytest.skip("nvdisasm is not installed (it comes with the test extra)")
    row = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)"
    found = re.findall(row, disassemble(code), re.MULTILINE)
    return dict(Counter(found))


def test_warp_instructions_of_a_page_are_within_the_target():
    """0.66 of the reference program's, and no role has crept up; counted for the compiler that the target is
    of."""
    if disassembler() is None or nvrtc.version() != (13, 5):
        pytest.skip("needs nvdisasm and NVRTC 13.5")
    counts = {one.role.name: one for one in count()}
    assert sum(one.all_warps for one in counts.values()) <= 0.66 * REFERENCE
    assert counts["values"].loop["conversions"] == 2 * 80 and counts["values"].loop["multiplies"] == 2 * 64
    assert counts["softmax"].loop["exponentials"] == 2 * 16
    # Origins are set once an item: 15 exchanges over the lanes and one more, 16 shifts of heads.
    assert counts["softmax"].item > 250
    assert counts["MMA"].loop["MMAs and commits"] <= 2 * (2 + 4 + 8 + 3) + 1
    assert counts["copy"].loop["copies"] == 4
