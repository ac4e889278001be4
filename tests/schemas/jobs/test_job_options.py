"""Amounts of time in a job's options."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from schemas.jobs.job_options import MAX_DAYS, JobOptions, parse_amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("6h", timedelta(hours=6)),
        (f"{MAX_DAYS}d", timedelta(days=MAX_DAYS)),
    ],
)
def test_given_an_amount_when_parsed_then_it_is_that_time(text: str, amount: timedelta) -> None:
    assert parse_amount(text) == amount


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{MAX_DAYS + 1}d", "more than 3650 days"),
        ("0s", "is no amount of time"),
        ("1.5h", "is no amount of time"),
        ("6 h", "is no amount of time"),
        ("", "is no amount of time"),
    ],
)
def test_given_no_amount_or_one_that_is_too_long_when_parsed_then_it_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_amount(text)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"deadline": "0128-03-13T14:58:25Z"}, "a deadline is a moment since 1970; correct its year"),
        ({"deadline": 7}, "a deadline is text: an amount such as 6h"),
        ({"deadline": "soon"}, "Invalid isoformat string: 'soon'"),
        ({"tier": "interactive"}, "a job is standard or bulk"),
        ({"refuse_late": True}, "refuse_late needs a deadline"),
    ],
)
def test_given_an_option_that_no_job_can_have_when_read_then_the_reason_says_why(
    option: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        JobOptions.model_validate(option)
    assert refused.value.errors()[0]["msg"].startswith(reason)
