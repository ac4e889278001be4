"""Interim tests, and the quantiles that they use."""

from __future__ import annotations

import random

import pytest

from pipeline.sequential_test import difference_bounds, interim_tests, mean_bounds, student_quantile


def test_students_quantiles_are_those_of_the_tables() -> None:
    # Abramowitz and Stegun, table 26.10; R's qt for the small errors.
    for error, degrees, table in [
        (0.025, 1, 12.7062), (0.025, 2, 4.3027), (0.025, 3, 3.1824), (0.025, 7, 2.3646), (0.005, 7, 3.4995),
        (0.005, 15, 2.9467), (0.001, 31, 3.3749), (0.0005, 4, 8.6103), (0.025, 120, 1.9799),
    ]:  # fmt: skip
        assert student_quantile(error, degrees) == pytest.approx(table, rel=1e-4)


def test_tests_double_their_samples_and_share_the_error() -> None:
    assert list(interim_tests(8, 100)) == [(8, 1 / 2), (16, 1 / 4), (32, 1 / 8), (64, 1 / 16), (100, 1 / 32)]
    assert list(interim_tests(8, 4)) == [(8, 1 / 2)]
    assert sum(share for _, share in interim_tests(4, 4 << 40)) <= 1


@pytest.mark.slow
def test_a_mean_lies_beyond_its_bounds_as_often_as_the_error_says() -> None:
    draw = random.Random(1)
    found = [mean_bounds([draw.gauss(5, 2) for _ in range(6)], 0.05) for _ in range(2_000)]
    for beyond in ([one.low > 5 for one in found if one], [one.high < 5 for one in found if one]):
        assert sum(beyond) / 2_000 == pytest.approx(0.05, abs=0.015)


def test_a_difference_lies_beyond_its_bounds_as_often_as_the_error_says() -> None:
    draw = random.Random(2)

    def sample(count: int, spread: float) -> list[float]:
        return [draw.gauss(1, spread) for _ in range(count)]

    found = [difference_bounds(sample(4, 3.0), sample(9, 1.0), 0.05) for _ in range(2_000)]
    for beyond in ([one.low > 0 for one in found if one], [one.high < 0 for one in found if one]):
        assert sum(beyond) / 2_000 == pytest.approx(0.05, abs=0.015)


def test_one_sample_has_no_bounds() -> None:
    assert mean_bounds([1.0], 0.05) is None
    assert difference_bounds([1.0, 2.0], [1.0], 0.05) is None
    assert difference_bounds([2.0, 2.0], [1.0, 1.0], 0.05) is not None, "without any spread"
