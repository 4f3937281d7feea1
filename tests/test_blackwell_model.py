"""The cost model explains the reference program's published times; what it says of ours is a prediction."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.blackwell_model import (
    BANDWIDTHS,
    OURS,
    PUBLISHED,
    REFERENCE,
    SMS,
    fit,
    is_short,
    main,
    reference_splits,
    rounds,
)
from benchmarks.rows import TILE_BYTES

ROWS = {row.name: row for row in PUBLISHED}


def test_published_rows_are_explained():
    """All but the short one, whose program is another."""
    model = fit()
    explained = [row for row in PUBLISHED if not is_short(row)]
    assert len(explained) == len(PUBLISHED) - 1
    for row in explained:
        assert model.reference_us(row, BANDWIDTHS[-1]) == pytest.approx(row.b200_us, abs=0.25), row.name
    assert 0.5 < model.efficiency < 1
    assert min(model.fixed_us, model.start_us, model.merge_us) > 0


def test_what_a_start_costs_is_no_more_than_filling_the_rings():
    """The reference program's ring holds 5.5 pages."""
    assert fit().start_us < 5.5 * SMS * TILE_BYTES / BANDWIDTHS[0] * 1e-6


@pytest.mark.parametrize(("name", "splits"), [
    ("tp1_b128_kv8k_q1", 1), ("tp1_b16_kv64k_q1", 2), ("tp1_b8_kv100k_q1", 4), ("tp1_b1_kv200k_q1", 8),
    ("tp4_b1_kv1m_q1", 8),
    ("tp1_b2_kv257_q1_tail", 1),
])
def test_reference_rule_gives_the_published_splits(name, splits):
    assert reference_splits(ROWS[name]) == splits


def test_rounds():
    assert rounds(512, 148) == [148, 148, 148, 68]
    assert rounds(148, 148) == [148]
    assert rounds(0, 148) == []


def test_predictions_are_not_slower_than_the_reference():
    model = fit()
    for row in PUBLISHED:
        ours = model.ours_us(row, min(BANDWIDTHS))
        assert ours <= row.b200_us, row.name
        assert is_short(row) or ours <= model.reference_us(row, min(BANDWIDTHS)), row.name
    assert model.ours_us(ROWS["tp1_b128_kv8k_q1"], max(BANDWIDTHS)) <= 32
    assert OURS.resources["shared memory"] <= 0.58 * REFERENCE.resources["shared memory"]


def test_output_says_that_it_is_a_prediction():
    result = CliRunner().invoke(main)
    assert result.exit_code == 0, result.output
    assert "PREDICTED" in result.output
