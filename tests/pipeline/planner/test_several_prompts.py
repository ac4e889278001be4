"""Rows with several prompts in the plan: estimates for all of them, one context for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.planner.ports import SourceBatch, SourceRow
from pipeline.planner.seen_ids import SeenIds
from pipeline.planner.tokens import TokenEstimator
from pipeline.planner.validate import CheckedBatch, Validator

PROMPTS: list[Any] = [[1] * 30, "word " * 8, [2] * 20]
"""Of 30, 8 and 20 tokens."""


@pytest.fixture
def check(tools: Any, tmp_path: Path) -> Any:
    def check(*bodies: dict[str, Any], **settings: Any) -> CheckedBatch:
        lines = [
            {"custom_id": f"{row}", "method": "POST", "url": "/v1/completions", "body": {"model": "demo"} | body}
            for row, body in enumerate(bodies)
        ]
        rows = [SourceRow(row, row + 1, line) for row, line in enumerate(lines)]
        estimator = TokenEstimator(lambda text: len(text.split()), exact=True)
        validator = Validator(tools.job(**settings), SeenIds(tmp_path), estimator, max_model_len=64)
        return validator.check(SourceBatch(0, len(rows), rows))

    return check


def test_the_estimates_are_for_all_prompts(check: Any) -> None:
    (row,) = check({"prompt": PROMPTS, "max_tokens": 10, "n": 2}).valid
    assert (row.prompt_tokens, row.choices, row.expected_tokens, row.max_tokens) == (58, 6, 5, 60)


def test_each_prompt_has_the_context_to_itself(check: Any) -> None:
    checked = check({"prompt": PROMPTS, "max_tokens": 34}, {"prompt": PROMPTS, "max_tokens": 35})
    assert [row.row for row in checked.valid] == [0]
    assert checked.rejected[0].error.code == "context_length_exceeded"


def test_a_prompt_that_is_cut_fits(check: Any) -> None:
    long = {"prompt": [[1] * 99, [2] * 5], "max_tokens": 34}
    cuts = [long | {"truncate_prompt_tokens": most} for most in (30, -1, 31)]
    checked = check(*cuts, long)
    assert [row.row for row in checked.valid] == [0, 1]
    assert len({row.request_key for row in checked.valid}) == 2


def test_a_prompt_that_the_job_cuts_fits(check: Any) -> None:
    long = {"prompt": [[1] * 99, [2] * 5]}
    bodies = [long | {"max_tokens": 34}, long, long | {"max_tokens": 64}, long | {"truncate_prompt_tokens": 63}]
    checked = check(*bodies, truncate_prompt="right")
    assert [(row.row, row.prompt_tokens, row.max_tokens) for row in checked.valid][:2] == [(0, 60, 68), (1, 96, 32)]
    assert [row.row for row in checked.valid] == [0, 1, 3]
    assert [row.row for row in check(*bodies).valid] == [3]


def test_equal_lists_are_one_request(check: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 4}
    rows = check(
        {"prompt": ["a", "b"]} | greedy, {"prompt": ["a", "b"]} | greedy, {"prompt": ["b", "a"]} | greedy
    ).valid
    assert rows[0].request_key == rows[1].request_key != rows[2].request_key
    assert all(row.shareable for row in rows)


def test_rows_share_the_prefix_of_their_first_prompts(check: Any) -> None:
    first = "shared " * 60
    rows = check({"prompt": [first + "a", "x"]}, {"prompt": [first + "b", "y"]}, {"prompt": ["x", first]}).valid
    assert rows[0].chain.hashes[0] == rows[1].chain.hashes[0]
    assert not rows[2].chain.hashes
