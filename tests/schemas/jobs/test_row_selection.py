"""Row selections are small, survive a round trip, and differ from each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.jobs.job import JobSettings
from schemas.jobs.row_selection import RowSelection


@given(st.sets(st.integers(0, 500), min_size=1))
def test_a_selection_comes_back_with_its_job(rows: set[int]) -> None:
    chosen = np.zeros(max(rows) + 20, dtype=np.bool_)
    chosen[list(rows)] = True
    selection = RowSelection.of(chosen)
    assert selection is not None
    again = JobSettings.model_validate_json(JobSettings(rows=selection).model_dump_json()).rows
    assert again == selection
    assert set(np.flatnonzero(again.mask()).tolist()) == rows
    assert (again.count, again.end) == (len(rows), max(rows) + 1)


def test_no_rows_are_no_selection() -> None:
    assert RowSelection.of(np.zeros(9, dtype=np.bool_)) is None


def test_a_tenth_of_a_million_rows_is_some_tens_of_kilobytes() -> None:
    chosen = np.random.default_rng(0).random(1_000_000) < 0.1
    selection = RowSelection.of(chosen)
    assert selection is not None
    assert len(selection.bitmap) < 100_000
    assert len(str(selection)) < 60, "messages show its digest"


@pytest.mark.parametrize("changes", [{"count": 3}, {"end": 8}, {"bitmap": "no"}, {"bitmap": "AAAA"}, {"end": 0}])
def test_a_damaged_selection_is_refused(changes: dict[str, object]) -> None:
    good = RowSelection.of(np.array([True, False] * 6))
    assert good is not None
    with pytest.raises(ValidationError):
        RowSelection(**(good.model_dump() | changes))
