"""The steps of a cascade: rows that aren't accepted, the threshold, the sample, the saving."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.jobs.cascade import (
    LOGPROB,
    StepAnswers,
    choose_threshold,
    comparable,
    describe_step,
    equal,
    mean_logprob,
    outcome_of,
    reject_below,
    sample_rows,
    selection_of,
    wilson_lower_bound,
)
from schemas.jobs.cascade import Acceptance, CascadeSettings
from schemas.jobs.outcome import Counts, JobStatus, Manifest


def answers(*pairs: tuple[float, str]) -> StepAnswers:
    """Rows 0, 1, … with these mean log-probabilities and texts."""
    return StepAnswers(
        logprobs={row: value for row, (value, _) in enumerate(pairs)},
        texts={row: text for row, (_, text) in enumerate(pairs)},
        rows=len(pairs),
    )


def test_the_mean_is_of_the_first_choices_tokens() -> None:
    chat = {"choices": [{"logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}, {"logprobs": None}]}
    assert mean_logprob(chat) == -1.5
    text = {"choices": [{"logprobs": {"token_logprobs": [None, -0.5, -1.5]}}]}
    assert mean_logprob(text) == -1.0
    for nothing in ({}, {"choices": [{"logprobs": None}]}, {"choices": [{"logprobs": {"content": []}}]}):
        assert math.isnan(mean_logprob(nothing))


def test_answers_are_equal_as_json_or_apart_from_space_around_them() -> None:
    assert equal(" yes\n", "yes")
    assert equal('{"a": 1, "b": 2}', '{"b":2,"a":1}')
    assert not equal("yes", "no")
    assert not equal('{"a": 1}', "a")
    assert not equal("true", "1")
    assert not equal('{"a": 1}', '{"a": true}')
    deep = "[" * 900 + "]" * 900
    assert not equal(deep, deep.replace("[]", "[ ]")), "too deep to compare, but no error"


def test_tool_calls_are_part_of_an_answer() -> None:
    def answer(arguments: str) -> str:
        call = {"id": arguments, "function": {"name": "look_up", "arguments": arguments}}
        return comparable("", {"choices": [{"message": {"content": None, "tool_calls": [call]}}]})

    assert answer('{"city": "Rome"}') != answer('{"city": "Oslo"}')
    assert comparable("text", {"choices": [{"message": {"content": "text"}}]}) == "text"


def test_answers_below_the_threshold_or_without_one_are_rejected() -> None:
    small = answers((-0.1, "a"), (-0.5, "b"), (math.nan, "c"), (-0.6, "d"))
    reject_below(small, -0.5)
    assert small.rejected == {2: LOGPROB, 3: LOGPROB}
    reject_below(small, None)
    assert small.rejected.keys() == {0, 1, 2, 3}


def test_the_threshold_is_the_lowest_with_which_enough_answers_agree() -> None:
    # Given 100 answers, of which those below -0.8 are wrong
    small = answers(*((-at / 100, "x" if at <= 80 else "y") for at in range(100)))
    large = answers(*((0.0, "x") for _ in range(100)))
    # Then as many wrong ones are kept as the confidence bound allows: 98 of 100 equal has the bound 0.95.
    chosen = choose_threshold(small, large, 0.95)
    assert wilson_lower_bound(98, 100) >= 0.95 > wilson_lower_bound(97, 100)
    assert (chosen.value, chosen.agreement, chosen.sampled_rows) == (-0.82, 0.98, 100)
    assert choose_threshold(small, large, 0.7).value == -0.99, "all of them"


def test_equal_log_probabilities_are_accepted_together_or_not_at_all() -> None:
    small = answers(*(((-0.1, "x"),) * 50), *(((-0.2, "x"), (-0.2, "y")) * 25))
    large = answers(*((0.0, "x") for _ in range(100)))
    assert choose_threshold(small, large, 0.95).value == -0.1


def test_without_enough_samples_or_agreement_every_row_goes_on() -> None:
    small, large = answers(*(((-0.1, "y"),) * 10)), answers(*(((0.0, "x"),) * 10))
    assert choose_threshold(small, large, 0.9).value is None
    assert choose_threshold(StepAnswers(), StepAnswers(), 0.9).value is None
    few = answers(*(((-0.1, "x"),) * 20))
    assert choose_threshold(few, few, 0.95).value is None, "20 equal answers don't show 95 %"


@given(st.lists(st.tuples(st.floats(-5, 0), st.booleans()), max_size=60), st.floats(0.05, 0.95))
def test_the_kept_answers_have_the_stated_agreement_and_no_lower_threshold_has(
    pairs: list[tuple[float, bool]], agreement: float
) -> None:
    small = answers(*((value, "x" if is_equal else "y") for value, is_equal in pairs))
    large = answers(*((0.0, "x") for _ in pairs))
    chosen = choose_threshold(small, large, agreement).value

    def bound(least: float) -> float:
        wrong = sum(1 for value, is_equal in pairs if value >= least and not is_equal)
        return wilson_lower_bound(len(pairs) - wrong, len(pairs))

    assert chosen is None or bound(chosen) >= agreement
    assert all(bound(value) < agreement for value, _ in pairs if chosen is None or value < chosen)


def test_the_sample_is_the_same_each_time_and_no_larger_than_the_rows() -> None:
    small = answers(*((-0.1, "x") for _ in range(500)))
    drawn = sample_rows(small, 50)
    assert drawn == sample_rows(small, 50) == sorted(set(drawn))
    assert len(drawn) == 50
    assert max(drawn) > 250 > min(drawn)
    assert sample_rows(answers((-1.0, "x")), 50) == [0]


def test_a_selection_holds_the_rows() -> None:
    selection = selection_of([2, 5])
    assert selection is not None
    assert selection.mask().nonzero()[0].tolist() == [2, 5]
    assert selection_of([]) is None


def manifest(job: str, busy_seconds: float, cost: float | None) -> Manifest:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Manifest(
        job=job, status=JobStatus.COMPLETED, counts=Counts(), created_at=now, finished_at=now, wall_seconds=1.0,
        busy_seconds=busy_seconds, cost=cost,
    )  # fmt: skip


def test_the_saving_is_that_against_the_last_model_for_all_rows() -> None:
    first = StepAnswers(rejected=dict.fromkeys(range(25), "pattern"), rows=100)
    steps = [
        describe_step(manifest("a", 10.0, 1.0), "small", first),
        describe_step(manifest("b", 20.0, 5.0), "large", StepAnswers(rows=25)),
    ]
    assert (steps[0].accepted, steps[0].rejected) == (75, {"pattern": 25})
    outcome = outcome_of(steps, "large", None)
    assert (outcome.busy_seconds, outcome.cost) == (30.0, 6.0)
    assert (outcome.saved_busy_seconds, outcome.saved_cost) == (80.0 - 30.0, 20.0 - 6.0)
    unpriced = outcome_of([steps[0], steps[1].model_copy(update={"cost": None})], "large", None)
    assert (unpriced.cost, unpriced.saved_cost) == (None, None)
    assert outcome_of(steps[:1], "large", None).saved_busy_seconds is None, "the large model answered nothing"


@pytest.mark.parametrize(
    ("accept", "why"),
    [
        ({"sample_rows": 5}, "greater than or equal to 20"),
        ({"agreement": 0.9, "min_mean_logprob": -1.0}, "give one of them"),
        ({"min_chars": 5, "max_chars": 4}, "above max_chars"),
        ({"min_mean_logprob": 0.5}, "less than or equal to 0"),
        ({"json_schema": {"enum": ["x" * 70_000]}}, "65536 bytes"),
        ({"finish_reasons": ["content_filter"]}, "finish_reasons"),
    ],
)
def test_checks_that_make_no_sense_are_refused(accept: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Acceptance.model_validate(accept)


def test_agreement_is_with_one_model() -> None:
    with pytest.raises(ValidationError, match="one next model"):
        CascadeSettings(models=("a", "b"), accept=Acceptance(agreement=0.9))
