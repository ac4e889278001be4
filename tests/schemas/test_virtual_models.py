"""The rules of virtual models: what is refused, and windows of the day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.virtual_models import MAX_RULES, VirtualModel, is_within

CODE: dict[str, Any] = {"model": "coder", "when": {"tools": True}}
LAST: dict[str, Any] = {"model": "small"}


def virtual(*rules: dict[str, Any]) -> VirtualModel:
    return VirtualModel.model_validate({"name": "auto", "rules": rules})


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ((), "at least 1"),
        ((CODE,), "rule 1 is the last"),
        ((LAST, LAST), "rule 1 has no conditions"),
        (({"model": "coder", "when": {}}, LAST), "rule 1 has no conditions"),
        (({"model": "auto", "when": {"tools": True}}, LAST), "names itself"),
        (({"model": "x", "when": {"label": {"model": "auto", "labels": ["a"]}}}, LAST), "names itself"),
        ((CODE,) * MAX_RULES + (LAST,), "at most 32"),
        (({"model": "x", "when": {"prompt_tokens": {}}}, LAST), "min, max or both"),
        (({"model": "x", "when": {"prompt_tokens": {"min": 5, "max": 4}}}, LAST), "above max"),
        (({"model": "x", "when": {"languages": ["xx"]}}, LAST), "not recognized"),
        (({"model": "x", "when": {"hours": "24:00-25:00"}}, LAST), "pattern"),
        (({"model": "x", "when": {"max_price_per_million_tokens": float("nan")}}, LAST), "finite"),
        (({"model": "x", "when": {"label": {"model": "c", "labels": ["a"], "timeout_seconds": 60}}}, LAST), "10"),
        (({"model": "x", "when": {"tolls": True}}, LAST), "Extra inputs"),
        (({"model": "x" * 257, "when": {"tools": True}}, LAST), "256"),
    ],
)
def test_rules_that_can_not_be_followed_are_refused(rules: tuple[dict[str, Any], ...], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        virtual(*rules)


def test_the_models_that_may_answer_are_named_once() -> None:
    label = {"model": "y", "when": {"label": {"model": "classifier", "labels": ["a"]}}}
    made = virtual(CODE, label, CODE | {"when": {"tools": False}}, LAST)
    assert (made.models, made.classifiers) == (("coder", "y", "small"), ("classifier",))


@pytest.mark.parametrize(
    ("hours", "at", "is_in"),
    [
        ("06:00-22:30", "06:00", True),
        ("06:00-22:30", "22:29", True),
        ("06:00-22:30", "22:30", False),
        ("22:00-06:00", "23:59", True),
        ("22:00-06:00", "05:59", True),
        ("22:00-06:00", "06:00", False),
        ("08:00-08:00", "03:00", True),
    ],
)
def test_a_window_may_go_past_midnight(hours: str, at: str, is_in: bool) -> None:
    hour, minute = map(int, at.split(":"))
    assert is_within(hours, datetime(2026, 1, 1, hour, minute, tzinfo=UTC)) is is_in
