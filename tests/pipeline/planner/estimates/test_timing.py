"""Estimated durations of jobs, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.planner.estimates.timing import StepTimes, estimate_worker_seconds


def steps(*of: tuple[float, float, float, float]) -> NDArray[np.float64]:
    """(tokens, logits, reads, pairs) of each."""
    return np.array(of, dtype=np.float64).reshape(-1, 4)


def of_sizes(times: StepTimes, *tokens: int) -> list[float]:
    found: list[float] = times.of(steps(*((size, 0, 0, 0) for size in tokens))).tolist()
    return found


def test_a_step_between_two_that_were_measured_lies_on_the_line_between_them_and_beyond_goes_on() -> None:
    times = StepTimes({2: 10.0, 4: 14.0, 6: 15.0})
    assert of_sizes(times, 1, 2, 3, 4, 5, 6, 8) == [10.0, 10.0, 12.0, 14.0, 14.5, 15.0, 16.0]
    assert of_sizes(StepTimes({8: 2.0}), 1, 8, 16) == [2.0, 2.0, 4.0], "one size says nothing of smaller ones"


def test_each_quantity_of_a_step_has_its_price() -> None:
    times = StepTimes({1: 1.0, 2: 2.0}, logit=10.0, read=100.0, pair=1000.0)
    assert times.of(steps((2, 0, 0, 0), (2, 3, 0, 0), (1, 0, 4, 0), (1, 0, 0, 5))).tolist() == [2, 32, 401, 5001]


def test_prices_are_found_again_from_runs_that_differ_enough() -> None:
    truth = StepTimes({1: 3e-3, 16: 6e-3, 128: 4e-2, 2048: 0.6}, logit=7e-5, read=8e-7, pair=5e-8)
    runs = [
        steps((1, 1, 60, 60)), steps(*[(16, 16, 1000, 1000)] * 9), steps((16, 16, 9000, 9000), (16, 16, 80, 80)),
        steps((128, 128, 8000, 8000)), steps((128, 1, 0, 8256)), steps((2048, 8, 0, 2.7e5)), steps((2048, 1, 0, 2e6)),
    ]  # fmt: skip
    found = StepTimes.fit([(run, float(truth.of(run).sum())) for run in runs], [1, 16, 128, 2048])
    assert dict(found.by_tokens) == pytest.approx(dict(truth.by_tokens))
    assert (found.logit, found.read, found.pair) == pytest.approx((truth.logit, truth.read, truth.pair))


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 300), st.integers(0, 9000), st.integers(1, 99)), min_size=1,
        max_size=9,
    )
)  # fmt: skip
def test_no_price_is_below_nothing(found: list[tuple[int, int, int, int]]) -> None:
    runs = [(steps((tokens, logits, reads, reads)), seconds / 7) for tokens, logits, reads, seconds in found]
    times = StepTimes.fit(runs, [1, 64, 300])
    assert min(*times.by_tokens.values(), times.logit, times.read, times.pair) >= 0


def test_rows_beyond_the_dry_run_take_as_long_as_full_batches_and_the_end_comes_once() -> None:
    times = StepTimes({1: 1.0, 10: 1.0})
    run = steps((10, 10, 0, 0), (10, 10, 0, 0), (4, 4, 0, 0), (1, 1, 0, 0))
    waiting, progress = np.array([True, True, False, False]), np.array([10.0, 20.0, 24.0, 25.0])
    assert estimate_worker_seconds(run, waiting, progress, times, 1.0) == 4.0
    assert estimate_worker_seconds(run, waiting, progress, times, 3.0) == 4 + 50 / 10, (
        "ten tokens a second while others wait"
    )
    assert estimate_worker_seconds(run, waiting, progress, times, 0.5) == 2.0, (
        "the dry run has more rows than there are to do"
    )
    assert estimate_worker_seconds(steps(), waiting[:0], progress[:0], times, 1.0) == 0.0
