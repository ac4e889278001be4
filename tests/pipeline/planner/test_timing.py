"""How long a job takes, worked out by hand beside what is said."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner.timing import MOST_PLAYED, StepTimes, Work, seconds_of

TIMES = StepTimes({1: 1.0, 4: 4.0}, looked_at=0.0, prompt_token=0.0)
"""A step takes a second for each row."""

FLAT = StepTimes({1: 1.0, 64: 1.0}, looked_at=0.0, prompt_token=0.0)
"""A step takes a second, whatever is in it."""


def answers(*lengths: int) -> Work:
    return Work(lengths=Counter(lengths))


def test_a_step_between_two_that_were_measured_lies_on_the_line_between_them_and_beyond_goes_on() -> None:
    times = StepTimes({1: 10.0, 3: 14.0, 5: 15.0}, 0.0, 0.0)
    assert [times.step(rows) for rows in (1, 2, 3, 4, 5, 7)] == [10.0, 12.0, 14.0, 14.5, 15.0, 16.0]


def test_prompts_take_their_tokens_and_the_pairs_that_they_look_at() -> None:
    work = Work.of(np.array([10, 30], np.int32), np.array([1, 1], np.int32), np.array([1, 1]), 20, 1)
    assert (work.prompts, work.prompt_pairs) == (20.0, (100 + 900) / 2 * (1 - 0.5**2))
    times = StepTimes({1: 1.0}, 0.0, prompt_token=2.0, pair=0.01)
    assert seconds_of(work, times, 8) == pytest.approx(40 + 0.01 * 375), "first tokens come with their prompts"


def test_given_more_slots_than_answers_then_it_takes_as_many_steps_as_the_longest() -> None:
    assert seconds_of(answers(5, 3, 2), FLAT, 8) == 4.0
    assert seconds_of(answers(5, 3, 2), TIMES, 8) == 4 + 2 + 1, "a step is as dear as its rows"


def test_given_fewer_slots_then_the_longest_start_first_and_the_tail_is_short() -> None:
    assert seconds_of(answers(9, 5, 5), FLAT, 2) == 8.0, "the two short ones one after the other"
    assert seconds_of(answers(9, 9, 9), FLAT, 2) == 16.0


def test_answers_behind_long_prompts_take_what_looking_at_these_takes() -> None:
    work = Work.of(np.array([100], np.int32), np.array([11], np.int32), np.array([1]), 0, 0)
    times = StepTimes({1: 1.0}, looked_at=5.0, prompt_token=0.0, answer_pair=0.1)
    assert seconds_of(work, times, 1) == pytest.approx(10 + 0.1 * (11 * 105.5 - 10 * 5))


def test_given_several_workers_then_each_has_its_part_and_none_ends_before_the_longest_answer() -> None:
    work = Work(prompts=100.0, lengths=Counter({11: 8}))
    times = StepTimes({1: 1.0, 8: 1.0}, 0.0, prompt_token=1.0)
    assert seconds_of(work, times, 8) == 110.0
    assert seconds_of(work.divided(4), times, 8) == 25 + 10


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=300), slots=st.integers(1, 64))
def test_no_estimate_is_below_the_two_bounds_or_above_twice_them(lengths: list[int], slots: int) -> None:
    """Graham 1969: a list schedule takes less than its two lower bounds together."""
    steps = [length - 1 for length in lengths]
    seconds = seconds_of(answers(*lengths), FLAT, slots)
    least = max(max(steps), sum(steps) / slots)
    assert least <= seconds <= max(steps) + sum(steps) / slots


def test_given_very_many_answers_then_a_sample_stands_for_them() -> None:
    many = Work(lengths=Counter({100: 50 * MOST_PLAYED, 50: 50 * MOST_PLAYED}))
    tokens = 50 * MOST_PLAYED * (99 + 49)
    assert seconds_of(many, FLAT, 64) == pytest.approx(tokens / 64, rel=0.01)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50))
def test_lengths_are_told_apart_by_a_sixteenth_of_an_octave(lengths: list[int]) -> None:
    work = Work.of(np.ones(len(lengths), np.int32), np.array(lengths, np.int32), np.ones(len(lengths), np.int64), 0, 0)
    assert work.lengths.total() == len(lengths)
    assert sum(length * count for length, count in work.lengths.items()) == pytest.approx(sum(lengths), rel=1 / 32)
