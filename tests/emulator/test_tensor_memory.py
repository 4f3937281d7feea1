"""Tensor memory: allocation rules and the layouts of loads, copies and MMA operands."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import tensor_memory as tm


def test_allocation_hands_out_aligned_columns_until_none_are_left():
    memory = tm.TensorMemory()
    assert memory.free_bases(256) == [0, 256]
    memory.allocate(256, 256)
    assert memory.free_bases(256) == [0] and memory.free_bases(128) == [0, 128]
    memory.allocate(256, 0)
    assert memory.free_bases(32) == []
    memory.release(256, 256)
    assert memory.free_bases(256) == [256]


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_column_counts_that_are_no_power_of_two_from_32_to_512_are_refused(columns):
    with pytest.raises(tm.TensorMemoryError, match="power of two"):
        tm.TensorMemory().allocate(columns, 0)


def test_sizes_must_not_grow():
    memory = tm.TensorMemory()
    memory.allocate(64, 0)
    with pytest.raises(tm.TensorMemoryError, match="must not grow"):
        memory.allocate(128, 128)


def test_no_allocation_after_the_permit_is_given_up():
    memory = tm.TensorMemory()
    memory.relinquished = True
    with pytest.raises(tm.TensorMemoryError, match="relinquish"):
        memory.allocate(32, 0)


@pytest.mark.parametrize("address, columns", [(0, 32), (32, 64), (1 << 16, 64)])
def test_only_a_live_allocation_can_be_given_back(address, columns):
    memory = tm.TensorMemory()
    memory.allocate(64, 0)
    with pytest.raises(tm.TensorMemoryError, match="no allocation"):
        memory.release(address, columns)
    memory.release(0, 64)


def test_access_must_stay_inside_one_allocation():
    memory = tm.TensorMemory()
    memory.allocate(64, 0)
    memory.allocate(32, 64)
    lanes = np.arange(32)
    memory.check_cells(lanes, np.arange(64))
    for columns, message in (
        (np.arange(60, 70), "cross"),
        (np.arange(90, 100), "column 96 is not allocated"),
        (np.arange(500, 520), "reach outside"),
    ):
        with pytest.raises(tm.TensorMemoryError, match=message):
            memory.check_cells(lanes, columns)
    with pytest.raises(tm.TensorMemoryError, match="lanes"):
        memory.check_cells(lanes + 100, np.arange(3))


def cute_layout(shape, stride):
    """All offsets of a CuTe layout in colexicographic order; an independent way to write a figure of the ISA.
    """
    offsets = np.zeros(1, int)
    for extent, step in zip(shape, stride):
        offsets = (offsets[None, :] + step * np.arange(extent)[:, None]).ravel()
    return offsets


@pytest.mark.parametrize(
    "shape, num, threads, values",
    [
        # bit offsets in a [lanes][columns] array, as CuTe's copy traits state them, for .x2
        ("16x64b", 2, ((2, 2, 8), (1024, 32, 128)), ((2,), (64,))),
        ("16x128b", 2, ((4, 8), (32, 256)), ((2, 2), (2048, 128))),
        ("16x256b", 2, ((4, 8), (64, 512)), ((2, 2, 2), (32, 4096, 256))),
        ("32x32b", 2, ((32,), (64,)), ((2,), (32,))),
    ],
)
def test_register_layout_agrees_with_the_copy_traits_of_cute(shape, num, threads, values):
    lanes, columns = tm.register_cells(shape, num)
    width = int(columns.max()) + 1
    got = (lanes[0] * width + columns[0]) * 32
    expected = cute_layout(*values)[:, None] + cute_layout(*threads)[None, :]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "shape, num", [(s, n) for s in ("32x32b", "16x64b", "16x128b", "16x256b") for n in (1, 4, 32)]
)
def test_every_cell_of_a_load_belongs_to_one_register(shape, num):
    for packed in (False, True):
        lanes, columns = tm.register_cells(shape, num, packed)
        cells = set(zip(lanes.ravel().tolist(), columns.ravel().tolist()))
        assert len(cells) == lanes.size
        assert len(cells) == (lanes.max() + 1) * (columns.max() + 1)


def test_the_two_halves_of_16x32bx2_are_apart_by_the_immediate():
    lanes, columns = tm.register_cells("16x32bx2", 4, second_half=(16 << 16) | 8)
    assert lanes[0, 3].tolist() == list(range(32))
    assert columns[0, 3].tolist() == [3] * 16 + [11] * 16


@pytest.mark.parametrize("shape, num", [("16x128b", 128), ("16x256b", 64), ("32x32b", 3)])
def test_repetitions_that_do_not_exist_are_refused(shape, num):
    with pytest.raises(ValueError, match="does not exist"):
        tm.register_cells(shape, num)


@pytest.mark.parametrize(
    "shape, times",
    [
        ("128x256b", 1),
        ("128x128b", 1),
        ("64x128b.warpx2::02_13", 2),
        ("64x128b.warpx2::01_23", 2),
        ("32x128b.warpx4", 4),
    ],
)
def test_copies_reach_every_lane_once(shape, times):
    rows, lanes = tm.copy_lanes(shape)
    assert sorted(lanes.tolist()) == list(range(128))
    assert np.bincount(rows).tolist() == [times] * (128 // times)


def test_copy_pairs_of_quarters_are_named_by_their_suffix():
    placed = {
        s: dict(zip(tm.copy_lanes(s)[1].tolist(), tm.copy_lanes(s)[0].tolist())) for s in tm.COPY_SHAPES
    }
    first = placed["64x128b.warpx2::02_13"]
    assert all(first[lane] == first[lane + 64] for lane in range(64)) and first[33] == 33
    second = placed["64x128b.warpx2::01_23"]
    assert (
        all(second[lane] == second[lane + 32] for lane in (*range(32), *range(64, 96))) and second[64] == 32
    )


@pytest.mark.parametrize(
    "m, n, group, ws",
    [
        (256, 64, 2, False),
        (128, 64, 2, False),
        (128, 24, 1, False),
        (64, 64, 1, True),
        (64, 16, 1, False),
        (32, 128, 1, True),
    ],
)
def test_accumulator_layouts_place_each_element_once(m, n, group, ws):
    cta, lane, column = tm.accumulator_cells(m, n, group, ws)
    cells = (cta * 128 + lane) * 512 + column
    assert len(np.unique(cells)) == m * n
    assert lane.max() < 128 and cta.max() == group - 1


def test_half_height_accumulators_leave_sixteen_lanes_of_each_quarter_free():
    _, lane, _ = tm.accumulator_cells(64, 8)
    assert sorted(np.unique(lane).tolist()) == [q * 32 + i for q in range(4) for i in range(16)]


def test_scales_are_repeated_in_every_quarter():
    _, lane, column = tm.scale_cells_a(128)
    assert (lane[:, 37].tolist(), column[:, 37].tolist()) == ([5, 37, 69, 101], [1] * 4)
    lane, column = tm.scale_cells_b(128, 96)
    assert (lane[:, 95].tolist(), column[:, 95].tolist()) == ([31, 63, 95, 127], [2] * 4)
    lane, column = tm.scale_cells_b(128, 64, cta_group=2)
    assert (lane[:, 33].tolist(), column[:, 33].tolist()) == ([65, 97], [0, 0])


def test_no_layout_for_other_heights():
    with pytest.raises(ValueError, match="no accumulator layout"):
        tm.accumulator_cells(48, 8)
