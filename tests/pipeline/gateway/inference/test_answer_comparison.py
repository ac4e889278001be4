"""How one answer is measured, and how alike two are."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.inference.answer_comparison import AnswerTimer, agreement_of, common_prefix
from schemas.workers.lane import EndEvent, ErrorEvent, TokensEvent


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text, **more}} for text in texts]}


def completion(*texts: str) -> dict[str, Any]:
    return {"choices": [{"text": text} for text in texts]}


def vectors(*rows: Any) -> dict[str, Any]:
    return {"data": [{"index": at, "embedding": row} for at, row in enumerate(rows)]}


def scores(*rows: float, name: str = "score") -> dict[str, Any]:
    return {"data": [{"index": at, name: row} for at, row in enumerate(rows)]}


def encoded(*numbers: float) -> str:
    return base64.b64encode(array("f", numbers).tobytes()).decode()


CALL = {"id": "call-1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("stable", "candidate", "expected"),
    [
        (chat("abcd"), chat("abcd"), 1.0),
        (chat("abcd"), chat("abxd"), 0.5),
        (chat("abcd", "abcd"), chat("abcd", "x"), 0.5),
        (chat("abcd", "abcd"), chat("abcd"), 0.5),
        (chat(""), chat(""), 1.0),
        (completion("abcd"), completion("ab"), 0.5),
        (chat("", reasoning_content="ab"), chat("", reasoning_content="ax"), 0.5),
        (chat("", tool_calls=[CALL]), chat("", tool_calls=[CALL | {"id": "call-2"}]), 1.0),
        (vectors([1.0, 0.0]), vectors([1.0, 0.0]), 1.0),
        (vectors([1.0, 0.0], [0.0, 1.0]), vectors([1.0, 0.0], [1.0, 0.0]), 0.5),
        (vectors(encoded(1.0, 0.0)), vectors(encoded(0.0, 1.0)), 0.0),
        (vectors([1.0]), vectors([1.0], [1.0]), 0.0),
        (vectors([1.0, 0.0]), vectors([1.0]), 0.0),
        (scores(0.9, 0.1), scores(0.9, 0.1), 1.0),
        (scores(1.0, 0.0), scores(0.0, 1.0), 0.0),
        ({"results": scores(1.0, 0.0, name="relevance_score")["data"]}, {"results": []}, 0.0),
    ],
)
def test_the_agreement_of_two_responses(stable: dict[str, Any], candidate: dict[str, Any], expected: float) -> None:
    assert agreement_of(stable, candidate) == pytest.approx(expected)


@given(st.text("ab"), st.text("ab"))
def test_the_common_prefix_is_where_both_part(first: str, second: str) -> None:
    found = common_prefix(first, second)
    assert first[:found] == second[:found]
    assert found in (len(first), len(second)) or first[found] != second[found]


def test_an_answer_is_measured_from_its_events() -> None:
    timer = AnswerTimer(10.0)
    assert not timer.has_begun
    timer.record(TokensEvent("r", 1, 0, 0, (1, 2)), 10.5)
    timer.record(TokensEvent("r", 1, 1, 0, (3,)), 11.0)
    timer.record(TokensEvent("r", 1, 2, 0, (4, 5, 6)), 12.5)
    timer.record(EndEvent("r", 1, 3, {}), 13.0)
    sample = timer.sample()
    assert (sample.ttft_seconds, sample.itl_seconds, sample.tokens) == (0.5, 0.5, 6)
    assert timer.has_begun


def test_an_answer_without_tokens_has_a_time_and_no_interval() -> None:
    timer = AnswerTimer(10.0)
    timer.record(EndEvent("r", 1, 0, {}), 11.0)
    assert (timer.sample().ttft_seconds, timer.sample().itl_seconds) == (1.0, None)


@pytest.mark.parametrize("events", [[], [ErrorEvent("r", 1, 0, "a", "b")]])
def test_no_answer_and_an_error_have_failed(events: list[ErrorEvent]) -> None:
    timer = AnswerTimer(10.0)
    for event in events:
        timer.record(event, 11.0)
    assert (timer.sample().failed, timer.sample().ttft_seconds) == (True, None)
