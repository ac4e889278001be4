"""`tokenmill run` with a model that makes embeddings: one file, one Parquet column of vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Cli = Callable[..., Any]


def embedding_row(custom_id: str, given: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": given, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


@pytest.mark.slow
def test_given_a_file_of_texts_when_run_then_each_row_has_its_vector_and_bad_rows_have_reasons(
    tokenmill: Cli, folder: Path, embedding_model: Path, chat: Any, write_lines: Any, results: Any
) -> None:
    lines = [embedding_row(f"text-{number}", f"text number {number}") for number in range(20)]
    lines += [embedding_row("again", "text number 3"), embedding_row("several", ["text number 3", "text number 4"])]
    lines += [embedding_row("long", "word " * 40), chat("talk")]
    path = write_lines(*lines)

    ended = tokenmill("run", path, "--model", f"tiny={embedding_model}", "--output", folder / "out", "--json")

    assert ended.code == 0, ended.err
    rows = results(folder / "out")
    assert [row["status"] for row in rows] == ["succeeded"] * 22 + ["failed"] * 2
    assert [row["error_code"] for row in rows[22:]] == ["context_length_exceeded", "unsupported_url"]
    vectors = np.array([row["embedding"] for row in rows[:21]], dtype=np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors[20], vectors[3])  # computed once
    assert rows[21]["embedding"] is None
    several = [data["embedding"] for data in json.loads(rows[21]["response"])["data"]]
    np.testing.assert_allclose(several, vectors[3:5], atol=1e-6)
    schema = pq.read_schema(next((folder / "out" / "results").glob("*.parquet")))
    assert schema.field("embedding").type == pa.list_(pa.float32())
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["usage"]["completion"] == 0
    assert manifest["usage"]["prompt"] == sum(row["prompt_tokens"] for row in rows[:22]) - rows[3]["prompt_tokens"]
    assert manifest["models"][0]["dtype"] == "float32"
    # and as lines, as OpenAI gives them
    exported = tokenmill("jobs", "export", folder / "out", "--to", folder / "out.jsonl", "--in-input-order")
    assert exported.code == 0, exported.err
    first = json.loads((folder / "out.jsonl").read_text().splitlines()[0])
    np.testing.assert_array_equal(np.float32(first["response"]["body"]["data"][0]["embedding"]), vectors[0])


@pytest.mark.slow
def test_given_parquet_with_a_column_of_inputs_when_run_then_it_is_embedded(
    tokenmill: Cli, folder: Path, embedding_model: Path, results: Any
) -> None:
    pq.write_table(pa.table({"custom_id": ["a", "b"], "input": ["one", "two"], "kept": [1, 2]}), folder / "in.parquet")
    ended = tokenmill("run", folder / "in.parquet", "--model", f"tiny={embedding_model}", "--output", folder / "out")
    assert ended.code == 0, ended.err
    rows = results(folder / "out")
    assert [(row["status"], len(row["embedding"]), row["kept"]) for row in rows] == [
        ("succeeded", 32, 1), ("succeeded", 32, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--quantize", "int8"), "quantize int8 is not supported for encoders"),
        (("--kv-dtype", "int8"), "kv_dtype int8 means nothing to an encoder"),
        (("--speculate", "ngram"), "nothing can be drafted"),
    ],
)
def test_given_an_option_that_an_encoder_can_not_follow_when_run_then_nothing_is_begun(
    tokenmill: Cli, folder: Path, embedding_model: Path, write_lines: Any, options: tuple[str, str], says: str
) -> None:
    path = write_lines(embedding_row("a", "x"))
    ended = tokenmill("run", path, "--model", f"tiny={embedding_model}", "--output", folder / "out", *options)
    assert ended.code == 1
    assert says in ended.error
    assert not (folder / "out").exists()


def test_given_an_encoder_without_pooling_when_run_then_the_error_is_one_line(
    tokenmill: Cli, folder: Path, tiny_encoders: Any, write_lines: Any
) -> None:
    model = tiny_encoders.make_embedding_model("bert", folder / "plain", pooling=None)
    ended = tokenmill(
        "run", write_lines(embedding_row("a", "x")), "--model", f"tiny={model}", "--output", folder / "out"
    )
    assert ended.code == 1
    assert "is an encoder without pooling settings (modules.json)" in ended.error


def test_given_a_file_of_texts_when_estimated_then_tokens_are_counted(
    tokenmill: Cli, embedding_model: Path, write_lines: Any
) -> None:
    path = write_lines(
        embedding_row("a", "one text"),
        embedding_row("b", "one text"),
        embedding_row("c", ["two", "texts"]),
        embedding_row("d", [5, 6, 7]),
    )
    ended = tokenmill("estimate", path, "--model", f"tiny={embedding_model}", "--exact", "--json")
    assert ended.code == 0, ended.err
    amount = ended.json()
    assert (amount["rows"], amount["unique"], amount["rejected"], amount["expected_tokens"]) == (4, 3, 0, 0)
    assert amount["prompt_tokens"] > 8


def test_given_a_model_in_the_cache_when_listed_then_its_purpose_is_shown(
    tokenmill: Cli, folder: Path, embedding_model: Path, model_folder: Path, tiny_encoders: Any
) -> None:
    labels = tiny_encoders.make_classifier("bert", folder / "labels")
    for name, model in (("a--embeds", embedding_model), ("b--talks", model_folder), ("c--labels", labels)):
        snapshot = folder / "cache" / "hub" / f"models--{name}" / "snapshots" / ("0" * 40)
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(model)
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
    listed = tokenmill("models", "list", "--json")
    assert listed.code == 0, listed.err
    assert {model["name"]: model["for"] for model in listed.json()["models"]} == {
        "a/embeds": "embeddings", "b/talks": "text", "c/labels": "scores, labels",
    }  # fmt: skip
