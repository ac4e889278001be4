"""The third workload has the properties of its description, and can be served as it is."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from schemas.requests.parsing import ChatBody, load_body

WORKLOADS = Path(__file__).parents[2] / "benchmarks" / "workloads"
VARIED = WORKLOADS / "varied.jsonl"


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in VARIED.read_text(encoding="utf-8").splitlines()]


def test_given_the_file_when_it_is_read_then_every_line_is_a_valid_request_of_certain_length(
    lines: list[dict[str, Any]],
) -> None:
    assert len(lines) == len({line["custom_id"] for line in lines}) == 500
    assert VARIED.stat().st_size < 3 << 20
    for line in lines:
        body = load_body(line["url"], json.dumps(line["body"]))
        assert isinstance(body, ChatBody)
        assert body.ignore_eos
        assert body.temperature == 0
        assert body.output_limit is not None
        assert 1 <= body.output_limit <= 1000
    assert len({json.dumps(line["body"]["messages"]) for line in lines}) == 500, "equal requests are computed once"


def test_given_the_answers_when_their_lengths_are_looked_at_then_they_have_a_long_tail(
    lines: list[dict[str, Any]],
) -> None:
    lengths = sorted(line["body"]["max_tokens"] for line in lines)

    assert (lengths[0], lengths[-1]) == (1, 1000)
    assert sum(lengths) / len(lengths) > 1.5 * lengths[len(lengths) // 2]


def test_given_the_prompts_when_their_beginnings_are_counted_then_groups_lie_inside_groups(
    lines: list[dict[str, Any]],
) -> None:
    systems = Counter(line["body"]["messages"][0]["content"] for line in lines if len(line["body"]["messages"]) > 1)
    exams = [line["body"]["messages"] for line in lines if line["custom_id"].startswith("exam-")]
    examples = Counter(json.dumps(messages[:-1]) for messages in exams)

    assert len(systems) == 4
    assert min(systems.values()) > 40
    assert len({messages[0]["content"] for messages in exams}) == 1
    assert sorted(len(json.loads(head)) for head in examples) == [5, 9, 13, 19]
    assert set(examples.values()) == {45}


def test_given_the_order_when_neighbours_are_compared_then_groups_are_mixed(lines: list[dict[str, Any]]) -> None:
    kinds = [line["custom_id"].split("-")[0] for line in lines]

    assert sum(a == b for a, b in pairwise(kinds)) < 250
