"""Planning is a stream: memory follows a segment, not the job."""

from __future__ import annotations

import pytest

from benchmarks.planning import plan_in_child

SEGMENT_ROWS = 5_000
FEW, MANY = 20_000, 100_000
ALLOWED_BYTES_PER_ROW = 250
"""Planning stores a digest and a number for each row (some 150 bytes as Python has them; beyond 131,072 ids they lie in
files). A request held as text or parsed would be 1,000 and more."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_five_times_the_rows_when_planned_in_segments_of_the_same_size_then_memory_hardly_grows() -> None:
    few, many = (plan_in_child(rows, SEGMENT_ROWS) for rows in (FEW, MANY))
    assert many["segments"] > 4 * few["segments"] > 4
    grown = 1e6 * (many["peak_mb"] - few["peak_mb"])
    assert grown < ALLOWED_BYTES_PER_ROW * (MANY - FEW), (few, many)
