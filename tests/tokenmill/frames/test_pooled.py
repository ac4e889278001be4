"""`tokenmill.embed`, `classify` and `score` with small models of random weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Required, get_origin, get_type_hints

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

import tokenmill as tm
from tests import tiny_encoders
from tokenmill.errors import InvalidCall
from tokenmill.frames.options import ClassifyKeywords, EmbedKeywords, MapKeywords, PreviewKeywords, ScoreKeywords

BODIES = ["A stream.", None, "A tree by a river.", "A stream."]
LABELS = ("ham", "spam", "neither")


@pytest.fixture
def folder(folder: Path) -> Iterator[Path]:
    """A working folder of its own, and logs as they are without a run."""
    yield folder
    structlog.reset_defaults()  # as the fixture `tokenmill` does


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pooled") / "embedder"
    prompts = {"query": "query: ", "none": ""}
    return str(tiny_encoders.make_embedding_model("bert", folder, normalize=True, prompts=prompts))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_encoders.make_classifier("bert", tmp_path_factory.mktemp("pooled") / "labels", labels=LABELS))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_encoders.make_classifier("bert", tmp_path_factory.mktemp("pooled") / "ranks"))


def results(job: Path) -> list[dict[str, Any]]:
    return pq.read_table(job / "results").sort_by("row").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_given_a_table_of_every_kind_when_embedded_then_vectors_are_those_of_the_job_with_the_librarys_type(
    embedder: str, folder: Path
) -> None:
    table = pa.table({"id": [1, 2, 3, 4], "the body": BODIES})
    pq.write_table(table, folder / "bodies.parquet")
    arguments: Any = {"column": "the body", "model": embedder, "output_dir": folder / "job"}

    found = tm.embed(table, **arguments)

    assert found.select(table.column_names).equals(table)
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), 32)
    assert found.column_names[2:] == [
        "embedding", "embedding_error", "embedding_prompt_tokens", "embedding_cached_tokens", "embedding_key",
        "embedding_reused",
    ]  # fmt: skip
    rows = found.to_pylist()
    assert [row["embedding"] for row in rows] == [row["embedding"] for row in results(folder / "job")]
    assert rows[0]["embedding"] == rows[3]["embedding"] != rows[2]["embedding"]
    assert np.linalg.norm(rows[0]["embedding"]) == pytest.approx(1, abs=1e-5)
    assert rows[1]["embedding"] is None
    assert rows[1]["embedding_error"] == "invalid_request: row 1: input is empty; give some text or token ids"
    assert [row["embedding_error"] for row in rows[::2]] == [None, None]
    assert rows[0]["embedding_prompt_tokens"] > 0

    polars = tm.embed(pl.DataFrame(pl.from_arrow(table)), **arguments)
    assert polars.schema["embedding"] == pl.Array(pl.Float32, 32)
    pandas = tm.embed(table.to_pandas(), **arguments)
    assert pandas["embedding"][0].dtype == np.float32
    relation = tm.embed(duckdb.sql("select * from 'bodies.parquet'"), **arguments)
    assert str(dict(zip(relation.columns, relation.types, strict=True))["embedding"]) == "FLOAT[32]"
    vectors = {
        "polars": polars["embedding"].to_list(),
        "pandas": [one if one is None else one.tolist() for one in pandas["embedding"]],
        "duckdb": relation.to_arrow_table()["embedding"].to_pylist(),
        "dicts": [row["embedding"] for row in tm.embed(table.to_pylist(), **arguments)],
        "path": tm.embed(folder / "bodies.parquet", **arguments)["embedding"].to_pylist(),
    }
    assert all(one == [row["embedding"] for row in rows] for one in vectors.values())


def test_given_options_of_embeddings_when_embedded_then_requests_have_them(embedder: str, folder: Path) -> None:
    rows = [{"title": "a", "body": "river"}]

    found = tm.embed(
        rows, text="{{ title }} {{ body }}", model=embedder, dimensions=8, prompt_name="query", output_column="v",
        output_dir=folder / "job",
    )  # fmt: skip

    line = json.loads((folder / "job/requests.jsonl").read_text())
    assert line["url"] == "/v1/embeddings"
    assert line["body"] == {"model": embedder, "input": "a river", "dimensions": 8, "prompt_name": "query"}
    assert len(found[0]["v"]) == 8
    assert not found[0]["v_reused"]


def test_given_a_table_without_rows_when_embedded_then_it_has_the_new_columns(embedder: str, folder: Path) -> None:
    found = tm.embed(pl.DataFrame({"a": pl.Series([], dtype=pl.String)}), column="a", model=embedder)

    assert found.schema["embedding"] == pl.Array(pl.Float32, 32)
    assert found.schema["embedding_reused"] == pl.Boolean


@pytest.mark.slow
def test_given_a_classifier_when_texts_and_pairs_are_classified_then_labels_are_an_enum_with_probabilities(
    classifier: str, folder: Path
) -> None:
    frame = pl.DataFrame({"body": BODIES, "other": ["x", "y", "z", "x"]})

    found = tm.classify(frame, column="body", model=classifier, output_dir=folder / "job")

    assert found.schema["label"] == pl.Enum(LABELS)
    assert found.schema["label_probabilities"] == pl.Struct(dict.fromkeys(LABELS, pl.Float64))
    rows, wanted = found.to_dicts(), results(folder / "job")
    for row, result in zip(rows, wanted, strict=True):
        assert row["label"] == result["text"]
        if row["label"] is None:
            assert (row["label_probability"], row["label_probabilities"]) == (None, None)
            assert row["label_error"].startswith("invalid_request: ")
            continue
        probs = json.loads(result["response"])["data"][0]["probs"]
        assert row["label_probabilities"] == dict(zip(LABELS, probs, strict=True))
        assert row["label_probability"] == max(probs) == row["label_probabilities"][row["label"]]

    tm.classify(frame, text="{{ body }}", text_pair="{{ other }}", model=classifier, output_dir=folder / "pairs")
    lines = [json.loads(line) for line in (folder / "pairs/requests.jsonl").read_text().splitlines()]
    assert lines[2]["body"] == {"model": classifier, "input": [["A tree by a river.", "z"]]}


@pytest.mark.slow
def test_given_labels_when_a_model_that_generates_classifies_then_they_are_its_choices(
    model_folder: Path, folder: Path
) -> None:
    rows = [{"body": "a message", "n": n} for n in range(2)]

    found = tm.classify(
        rows, text="{% fields n, body %}Spam?", system="Be brief.", labels=["no", "yes"], normalize="mean",
        model=f"tiny={model_folder}", output_dir=folder / "job",
    )  # fmt: skip

    line = json.loads((folder / "job/requests.jsonl").read_text().splitlines()[1])
    assert line["body"] == {
        "model": "tiny", "choices": ["no", "yes"], "normalize": "mean",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "body: a message\nn: 1\nSpam?"},
        ],
    }  # fmt: skip
    assert {row["label"] for row in found} <= {"no", "yes"}
    assert sum(found[0]["label_probabilities"].values()) == pytest.approx(1)
    assert found[0]["label_prompt_tokens"] > 0


@pytest.mark.slow
def test_given_a_reranker_when_pairs_are_scored_then_scores_are_those_of_the_job(ranker: str, folder: Path) -> None:
    frame = pd.DataFrame({"body": BODIES, "n": range(4)}, index=[5, 6, 7, 8])

    found = tm.score(
        frame, query="what is a river?", document="{{ body }}", model=ranker, truncate_prompt_tokens=20,
        output_dir=folder / "job",
    )  # fmt: skip

    line = json.loads((folder / "job/requests.jsonl").read_text().splitlines()[0])
    assert line["body"] == {
        "model": ranker, "queries": "what is a river?", "documents": "A stream.", "truncate_prompt_tokens": 20,
    }  # fmt: skip
    scores = [
        None if row["response"] is None else json.loads(row["response"])["data"][0]["score"]
        for row in results(folder / "job")
    ]
    assert found["score"].dtype == np.float64
    assert found["score"].astype(object).where(found["score"].notna(), None).tolist() == scores
    assert scores[1] is None
    assert found["score_error"][6].startswith("invalid_request: ")
    assert scores[0] == scores[3] != scores[2]
    assert found.index.tolist() == frame.index.tolist()


def test_given_a_reranker_that_generates_when_scored_then_tokens_and_template_are_those_given(folder: Path) -> None:
    model = str(tiny_encoders.make_reranker(folder / "reranker"))
    arguments: Any = {
        "data": [{"body": "A stream."}], "query": "what is a river?", "document": "{{ body }}", "model": model,
        "chat_template": "qwen3_reranker",
    }  # fmt: skip

    (row,) = tm.score(**arguments, score_tokens=("no", "yes"))
    (opposite,) = tm.score(**arguments, score_tokens=("yes", "no"))

    assert 0 < row["score"] < 1
    assert row["score"] + opposite["score"] == pytest.approx(1, abs=1e-5)
    with pytest.raises(InvalidCall, match=r"and no tokens for them; choose a reranker, such as .* score_tokens of one"):
        tm.score(**arguments)
    arguments["output_dir"] = folder / "job"
    with pytest.raises(InvalidCall, match=r"give one as chat_template .* or qwen3_reranker"):
        tm.score(**{**arguments, "chat_template": None}, score_tokens=("no", "yes"))
    with pytest.raises(InvalidCall, match=r"chat_template: qwen: can't be read: .*, or one of qwen3_reranker"):
        tm.score(**{**arguments, "chat_template": "qwen"}, score_tokens=("no", "yes"))
    assert not (folder / "job").exists()
    with pytest.raises(InvalidCall, match="dry_run: takes no score_tokens"):
        tm.score(**arguments, dry_run=True)
    with pytest.raises(InvalidCall, match="score_tokens: must be two tokens"):
        tm.score(**arguments, score_tokens="no,yes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embed", "classify", "score"])
def test_given_former_answers_when_reused_then_only_new_texts_are_computed(
    kind: str, request: pytest.FixtureRequest, folder: Path
) -> None:
    model = {"embed": "embedder", "classify": "classifier", "score": "ranker"}[kind]
    column = {"embed": "embedding", "classify": "label", "score": "score"}[kind]
    arguments: Any = {"model": request.getfixturevalue(model)}
    arguments |= {"query": "a river?", "document": "{{ body }}"} if kind == "score" else {"text": "{{ body }}"}
    call = getattr(tm, kind)
    frame = pl.DataFrame({"body": ["A stream.", "", "A tree."]})
    first = call(frame, **arguments, output_dir=folder / "first")
    more = pl.concat([pl.DataFrame({"body": ["new"]}), frame])

    for name, former in (("folder", folder / "first"), ("polars", first), ("pandas", first.to_pandas())):
        found = call(more, **arguments, output_dir=folder / name, reuse=former)

        assert found[f"{column}_reused"].to_list() == [False, True, False, True], name
        assert json.loads((folder / name / "manifest.json").read_text())["reused"] == 2
        same = [one for one in first.columns if one.startswith(column) and not one.endswith(("tokens", "_reused"))]
        assert found[1:].drop(f"{column}_error").select(same[:1]).equals(first.select(same[:1])), name
        assert (
            found.filter(pl.col("body") == "A tree.")
            .select(same)
            .equals(first.filter(pl.col("body") == "A tree.").select(same))
        ), name
        assert found[f"{column}_prompt_tokens"][1] == 0
        assert found.schema == first.schema


def test_given_a_dry_run_when_made_then_nothing_is_computed(embedder: str, folder: Path) -> None:
    found = tm.embed([{"body": body} for body in BODIES], text="a {{ body }}", model=embedder, dry_run=True)

    assert (found.rows, found.computed, found.max_tokens) == (4, 3, 0)
    assert found.prompt_tokens > 0
    assert "rows" in str(found)


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("embed", {"model": "labels"}, "so it makes no embeddings; choose a model made for them, such as"),
        ("embed", {"model": "embedder", "column": "body"}, "text: give either text, such as"),
        ("embed", {"model": "embedder", "text": None}, "text: give either text, such as"),
        ("embed", {"model": "embedder", "text": None, "column": "bdy"}, "column: the data has no column 'bdy'"),
        ("embed", {"model": "embedder", "text": "{% fields body %}"}, "is of prompts; write the columns' names"),
        ("embed", {"model": "embedder", "dimensions": 33}, "dimensions: is 33, but the model's vectors have 32"),
        ("embed", {"model": "embedder", "dimensions": 0}, "dimensions"),
        ("embed", {"model": "embedder", "prompt_name": "q"}, "the model's prompts are none, query"),
        ("embed", {"model": "embedder", "dimension": 3}, "dimension: is no parameter; did you mean dimensions"),
        ("embed", {"model": "embedder", "temperature": 3}, "temperature: is no parameter"),
        ("embed", {"model": "embedder", "output_column": "body"}, "already; give another one, such as 'body_2'"),
        ("classify", {"model": "embedder"}, "has no head for labels"),
        ("classify", {"model": "labels", "labels": ["a", "b"]}, "generates nothing; leave them out"),
        ("classify", {"model": "labels", "labels": "ab"}, "labels: must be a list of texts"),
        ("classify", {"model": "labels", "labels": ["a", "a"]}, "choices holds a string twice"),
        ("classify", {"model": "labels", "labels": ["a"], "text_pair": "b"}, "text_pair: a model that generates reads"),
        ("classify", {"model": "labels", "system": "b"}, "system: a classifier reads no system message"),
        ("classify", {"model": "labels", "normalize": "mean"}, "normalize needs choices"),
        ("score", {"model": "labels"}, "tells 3 labels apart and gives no score; use classify"),
        ("score", {"model": "embedder"}, "has no head for scores"),
        ("score", {"model": "ranks", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_given_wrong_arguments_when_called_then_nothing_runs_and_the_message_has_the_fix(
    call: str, given: dict[str, Any], message: str, embedder: str, classifier: str, ranker: str, folder: Path
) -> None:
    models = {"embedder": embedder, "labels": classifier, "ranks": ranker}
    texts = {"query": "a", "document": "b"} if call == "score" else {"text": "{{ body }}"}
    arguments = {"output_dir": folder / "job", **texts, **given, "model": models[given["model"]]}

    with pytest.raises(InvalidCall) as raised:
        getattr(tm, call)([{"body": "a"}], **arguments)

    assert message in str(raised.value)
    assert not (folder / "job").exists()


@pytest.mark.parametrize(
    ("call", "keywords"),
    [
        (tm.map, MapKeywords), (tm.preview, PreviewKeywords), (tm.embed, EmbedKeywords),
        (tm.classify, ClassifyKeywords), (tm.score, ScoreKeywords),
    ],
)  # fmt: skip
def test_the_keywords_of_overloads_are_those_of_the_signature(call: Any, keywords: Any) -> None:
    parameters = inspect.signature(call).parameters
    passed_on = get_type_hints(call)["options"].__args__[0]

    assert (
        get_type_hints(keywords).keys()
        == parameters.keys() - {"data", "prompt", "dry_run", "options"} | get_type_hints(passed_on).keys()
    )
    hints = get_type_hints(keywords, include_extras=True)
    assert {name for name, kind in hints.items() if get_origin(kind) is Required} == {
        name
        for name, one in parameters.items()
        if one.default is one.empty and name not in ("data", "prompt", "options")
    }
