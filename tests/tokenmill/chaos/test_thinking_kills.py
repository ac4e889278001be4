"""Thoughts with budgets, in a run with drafts that is killed in the middle: each budget is kept, and the answers are
those of an unbroken run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest

from schemas.settings.settings import load_settings
from tests.tokenmill.chaos.killing import attack, run_undisturbed
from tests.tokenmill.chaos.running import Setup
from tests.workers.structured.thinking_templates import OPENED
from tokenmill.models.sources import find

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "count"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def write_thinking_requests(path: Path, rows: int) -> list[dict[str, Any]]:
    """Requests with any budget from 0 to 64; every other one wants a form behind the thought."""
    bodies: list[dict[str, Any]] = []
    for row in range(rows):
        content = f"Think, then say the numbers from 1 to {row % 20 + 5} again and again."
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 110}
        body |= {"thinking_token_budget": row * 64 // (rows - 1), "seed": row, "temperature": row % 3 / 2}
        bodies.append(body | ({"response_format": FORM} if row % 2 else {}))
    lines = [
        {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for row, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return bodies


@pytest.fixture(scope="module")
def demo() -> Path:
    source = find("demo", load_settings().model_cache)
    if source is None:
        pytest.skip("NOT TESTED HERE: the demo model, which is not in the cache: tokenmill models pull demo")
    return source.path


def test_given_a_kill_when_started_again_then_thoughts_go_on_within_their_budgets(demo: Path, folder: Path) -> None:
    template = folder / "thinks.jinja"
    template.write_text(OPENED.replace("<turn>", "<|im_start|>").replace("<end>", "<|im_end|>"))
    options = ("--chat-template", str(template), "--speculate", "ngram", "--max-num-seqs", "4", "--threads", "1")
    setup = Setup(f"demo={demo}", folder, options, (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8"),))
    bodies = write_thinking_requests(folder / "requests.jsonl", 33)

    baseline = run_undisturbed(setup, folder / "requests.jsonl", folder / "calm")

    ended = 0
    for row, body in zip(sorted(rows_of(folder / "calm"), key=lambda row: row["row"]), bodies, strict=True):
        assert row["status"] == "succeeded", row["error_message"]
        usage = json.loads(row["response"])["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] <= body["thinking_token_budget"]
        assert "think>" not in row["text"] + (row["reasoning"] or "")
        if "response_format" in body and row["finish_reason"] == "stop":
            jsonschema.validate(json.loads(row["text"]), SCHEMA)
            ended += 1
    assert ended >= 12  # of 16
    # and the same answers, thoughts too, when it is killed
    report = attack(setup, folder / "requests.jsonl", baseline, random.Random(5), 2, signal.SIGKILL)
    assert report["kills"] == 2


def rows_of(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out / "results").to_pylist()
