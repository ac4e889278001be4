"""`tokenmill run` with a reranker and a classifier: one file, one table of scores and labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_given_a_file_for_two_models_when_run_then_each_row_has_its_scores_or_label(
    tokenmill: Cli, folder: Path, tiny_encoders: Any, write_lines: Any, results: Any
) -> None:
    ranks = tiny_encoders.make_classifier("bert", folder / "ranks")
    labels = tiny_encoders.make_classifier("roberta", folder / "labels", labels=("ham", "spam"))
    path = write_lines(
        line("score", "/v1/score", model="ranks", text_1="a river?", text_2=["a stream", "a fox"]),
        line("same", "/v1/score", model="ranks", queries="a river?", documents=["a stream", "a fox"], user="me"),
        line("rank", "/v1/rerank", model="ranks", query="a river?", documents=["a stream", "a fox"], top_n=1),
        line("label", "/v1/classify", model="labels", input="buy a river"),
        line("wrong", "/v1/score", model="labels", text_1="a", text_2="b"),
        line("bad", "/v1/score", model="ranks", text_1="a"),
    )
    models = [f"ranks={ranks}", f"labels={labels}"]
    ended = tokenmill("run", path, "--model", models[0], "--model", models[1], "--output", folder / "out", "--json")
    assert ended.code == 0, ended.err
    rows = {row["custom_id"]: row for row in results(folder / "out")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "score": "succeeded", "same": "succeeded", "rank": "succeeded", "label": "succeeded", "wrong": "failed",
        "bad": "failed",
    }  # fmt: skip
    scores = [data["score"] for data in json.loads(rows["score"]["response"])["data"]]
    assert json.loads(rows["same"]["response"])["data"] == json.loads(rows["score"]["response"])["data"]
    assert rows["same"]["cached_tokens"] == rows["score"]["prompt_tokens"]  # computed once
    (best,) = json.loads(rows["rank"]["response"])["results"]
    assert best["index"] == scores.index(max(scores))
    assert rows["label"]["text"] in ("ham", "spam")
    assert rows["score"]["text"] is None
    assert "use /v1/classify" in rows["wrong"]["error_message"]
    assert "text_2 is missing; add it" in rows["bad"]["error_message"]
    # The tokens of both sides are estimated
    short = write_lines(line("a", "/v1/score", model="ranks", text_1="a river?", text_2=["a stream", "a fox"]))
    estimated = tokenmill("estimate", short, "--model", models[0], "--exact", "--json")
    assert estimated.code == 0, estimated.err
    assert estimated.json()["prompt_tokens"] > 16


def test_given_tokens_and_a_template_when_run_then_a_model_that_generates_ranks(
    tokenmill: Cli, folder: Path, tiny_encoders: Any, write_lines: Any, results: Any
) -> None:
    model = tiny_encoders.make_reranker(folder / "model")
    body = {"model": "ranks", "query": "a river?", "documents": ["a stream", "a fox"]}
    path = write_lines(
        line("plain", "/v1/rerank", **body), line("dog", "/v1/rerank", **body, instruction="Find the dog")
    )
    template = "qwen3_reranker"
    given = ("run", path, "--model", f"ranks={model}", "--output", folder / "out", "--chat-template", template)
    wrong = tokenmill(*given, "--score-tokens", "yes")
    assert wrong.code == 1
    assert "--score-tokens yes: must be two tokens with a comma between them, such as no,yes" in wrong.err
    ended = tokenmill(*given, "--score-tokens", "no,yes", "--json")
    assert ended.code == 0, ended.err
    found = {row["custom_id"]: json.loads(row["response"])["results"] for row in results(folder / "out")}
    scores = {name: sorted(each["relevance_score"] for each in ranked) for name, ranked in found.items()}
    assert all(0 < score < 1 for each in scores.values() for score in each)
    assert scores["plain"] != scores["dog"]
