"""Rows that ask for scores, rankings and labels, from the body to the result, in shards and on the lane, on the real
engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.config import EngineConfig, ScheduleConfig
from engine.errors import UnsupportedModel
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowError
from schemas.requests.parsing import RerankBody, parse_body
from schemas.settings.releases import WarmupOptions
from schemas.workers.lane import LaneRequest
from workers.lane.requests import LaneReader, LaneRules
from workers.model.loaded_model import LoadedModel, check_vllm, model_digest
from workers.model.warmup import answer_canaries, warm_up
from workers.policies.policy import Policies
from workers.policies.rules import Rules
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import JobRules, RowHints
from workers.translation.scoring import ScoringReader

CONFIG = EngineConfig(dtype="float32", threads=1, schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=128))
QUERY = "what is a river?"
DOCUMENTS = ["A stream.", "The quick brown fox jumps over the lazy dog.", "0123456789", "a river? A stream of water"]
CLASSIFY = "/v1/classify"


@pytest.fixture(scope="module")
def reranker(tiny_encoders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_encoders.make_classifier("bert", tmp_path_factory.mktemp("models") / "reranker")
    return folder


@pytest.fixture(scope="module")
def scores(reranker: Path) -> LoadedModel:
    return LoadedModel.load(reranker, name="tiny", config=CONFIG)


@pytest.fixture
def answer(kit: Any) -> Callable[..., dict[int, Any]]:
    """The results of these bodies, each by its row, from one shard."""

    def answer(model: LoadedModel, *bodies: Any, **settings: Any) -> dict[int, Any]:
        sink = kit.MemorySink()
        named = [body if isinstance(body, int) else (url_of(body), {"model": "tiny", **body}) for body in bodies]
        work: ShardWork = kit.make_work(named, job=kit.make_job(**settings))
        ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
        rows: dict[int, Any] = sink.rows
        return rows

    return answer


def url_of(body: dict[str, Any]) -> str:
    names = {"messages": "/v1/chat/completions", "query": "/v1/rerank", "input": CLASSIFY}
    return next((url for name, url in names.items() if name in body), "/v1/score")


def scores_of(row: Any) -> list[float]:
    assert row.status is RowStatus.SUCCEEDED, row.error_message
    return [data["score"] for data in json.loads(row.response)["data"]]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert", "distilbert"])
def test_scores_are_those_of_a_cross_encoder(family: str, tiny_encoders: Any, tmp_path: Path, answer: Any) -> None:
    # Given rows with one pair and with several; the first family's tokenizer tells the texts of a pair apart
    folder = tiny_encoders.make_classifier(family, tmp_path, has_types=family == "bert")
    theirs = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in DOCUMENTS])
    model = LoadedModel.load(folder, name="tiny", config=CONFIG)
    rows = answer(
        model,
        {"text_1": QUERY, "text_2": DOCUMENTS},
        *({"queries": QUERY, "documents": text} for text in DOCUMENTS),
        {"queries": [QUERY] * 4, "items": DOCUMENTS, "use_activation": False},
        1,
    )
    np.testing.assert_allclose(scores_of(rows[0]), theirs, atol=1e-5)
    np.testing.assert_allclose([scores_of(rows[1 + at])[0] for at in range(4)], theirs, atol=1e-5)
    logits = np.array(scores_of(rows[5]))
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), theirs, atol=1e-5)
    assert np.abs(logits - theirs).max() > 0.01
    response = json.loads(rows[1].response)
    tokens = rows[1].prompt_tokens
    assert response["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (response["object"], response["model"], response["data"][0]["index"]) == ("list", "tiny", 0)
    assert (rows[1].text, rows[1].finish_reason, rows[1].completion_tokens) == (None, None, 0)
    assert rows[0].prompt_tokens == sum(rows[1 + at].prompt_tokens for at in range(4))
    # A copy has the same answer under an id of its own
    copy = json.loads(rows[6].response)
    assert copy["data"] == response["data"]
    assert copy["id"] != response["id"]
    assert rows[6].cached_tokens == tokens


def test_a_ranking_begins_with_the_best_document(scores: LoadedModel, answer: Any) -> None:
    rows = answer(
        scores,
        {"queries": QUERY, "documents": DOCUMENTS},
        {"query": QUERY, "documents": DOCUMENTS},
        {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False},
    )
    want = scores_of(rows[0])
    order = sorted(range(4), key=lambda at: -want[at])
    ranked = json.loads(rows[1].response)
    assert [each["index"] for each in ranked["results"]] == order
    assert [each["document"]["text"] for each in ranked["results"]] == [DOCUMENTS[at] for at in order]
    np.testing.assert_allclose([each["relevance_score"] for each in ranked["results"]], sorted(want)[::-1], atol=1e-6)
    assert ranked.keys() == {"id", "created", "model", "results", "usage"}
    best = json.loads(rows[2].response)["results"]
    assert [each.keys() for each in best] == [{"index", "relevance_score"}] * 2
    assert [each["index"] for each in best] == order[:2]
    np.testing.assert_allclose([each["relevance_score"] for each in best], sorted(want)[:1:-1], atol=1e-6)


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_labels_are_those_of_transformers(problem: str | None, tiny_encoders: Any, tmp_path: Path, answer: Any) -> None:
    folder = tiny_encoders.make_classifier("roberta", tmp_path, labels=("bad", "fair", "good"), problem_type=problem)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    made = {None: lambda x: x.softmax(-1), "multi_label_classification": torch.sigmoid, "regression": lambda x: x}
    ids = tokenizer(DOCUMENTS[0])["input_ids"]
    rows = answer(
        LoadedModel.load(folder, name="tiny", config=CONFIG),
        *({"input": text} for text in DOCUMENTS),
        {"input": [*DOCUMENTS, ids], "use_activation": False},
    )
    several = json.loads(rows[4].response)["data"]
    for at, text in enumerate(DOCUMENTS):
        with torch.inference_mode():
            (logits,) = reference(**tokenizer(text, return_tensors="pt")).logits
        (data,) = json.loads(rows[at].response)["data"]
        np.testing.assert_allclose(data["probs"], made[problem](logits), atol=1e-5)
        np.testing.assert_allclose(several[at]["probs"], logits, atol=1e-5)
        assert data["label"] == rows[at].text == ("bad", "fair", "good")[int(logits.argmax())]
        assert data["num_classes"] == 3
    assert rows[4].text is None
    assert several[4]["probs"] == pytest.approx(several[0]["probs"], abs=1e-6)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_labels_of_pairs_are_those_of_a_cross_encoder(
    family: str, tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    # Given a model that tells contradiction, entailment and neutral apart
    folder = tiny_encoders.make_classifier(family, tmp_path, labels=("no", "yes", "maybe"), has_types=family == "bert")
    pairs = [(QUERY, text) for text in DOCUMENTS]
    cross_encoder = CrossEncoder(str(folder), device="cpu")
    logits, probabilities = cross_encoder.predict(pairs), cross_encoder.predict(pairs, apply_softmax=True)
    rows = answer(
        LoadedModel.load(folder, name="tiny", config=CONFIG),
        {"input": pairs},
        {"input": [*pairs, QUERY, [5, 6]], "use_activation": False},
        {"input": [[QUERY, "fox dog " * 40]], "truncate_prompt_tokens": 20},
    )
    assert rows[0].status is RowStatus.SUCCEEDED, rows[0].error_message
    data = json.loads(rows[0].response)["data"]
    np.testing.assert_allclose([each["probs"] for each in data], probabilities, atol=1e-5)
    assert [each["label"] for each in data] == [("no", "yes", "maybe")[at] for at in logits.argmax(axis=1)]
    both = json.loads(rows[1].response)["data"]
    np.testing.assert_allclose([each["probs"] for each in both[:4]], logits, atol=1e-5)
    assert len(both) == 6
    assert rows[2].prompt_tokens == 20


def test_given_a_limit_then_texts_are_cut_as_by_transformers(reranker: Path) -> None:
    mine, theirs = Tokenizer.load(reranker), AutoTokenizer.from_pretrained(reranker)
    pairs = [("a b c d e f g", "h"), ("a", "b c d e f g h"), ("a b c d e f g", "h i j k l m n o"), ("a b", "c d")]
    for limit in range(4, 20):
        for pair in pairs:
            want = theirs(*pair, truncation=True, max_length=limit)
            (got,) = mine.encode_texts([pair], [limit])
            assert (got.ids.tolist(), got.types.tolist()) == (want["input_ids"], want["token_type_ids"]), (limit, pair)
        want = theirs(pairs[2][1], truncation=True, max_length=limit)
        assert mine.encode_texts([(pairs[2][1],)], [limit])[0].ids.tolist() == want["input_ids"]


def test_long_inputs_are_refused_or_cut_by_request(scores: LoadedModel, answer: Any) -> None:
    long = "fox dog " * 40
    rows = answer(
        scores,
        {"queries": QUERY, "documents": ["a", long]},
        {"queries": QUERY, "documents": ["a", long], "truncate_prompt_tokens": -1},
        {"input": long, "truncate_prompt_tokens": 10},
        {"input": long},
        {"input": [[5] * 70], "truncate_prompt_tokens": 64},
        {"input": "a", "truncate_prompt_tokens": 65},
        {"input": "a", "truncate_prompt_tokens": 2},
        {"input": [[5, 400]]},
    )
    assert rows[0].error_code == "context_length_exceeded"
    assert re.search(
        r"documents\[1\] has (at least )?\d+ tokens, but the model takes at most 64; shorten", rows[0].error_message
    )
    assert rows[1].status is RowStatus.SUCCEEDED
    assert rows[1].prompt_tokens > 64
    assert rows[2].prompt_tokens == 10
    assert rows[3].error_code == "context_length_exceeded"
    assert rows[4].prompt_tokens == 64
    assert "truncate_prompt_tokens is 65, but the model takes at most 64" in rows[5].error_message
    assert "truncate_prompt_tokens is 2, but the tokenizer itself adds 2 tokens" in rows[6].error_message
    assert rows[7].error_message == "line 8 of the input: input holds token 400, but the model's ids end at 399"


def test_a_request_that_the_model_can_not_answer_says_which_it_can(
    scores: LoadedModel, embedding_model: Path, tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    rows = answer(scores, {"messages": [{"role": "user", "content": "x"}]}, {"input": "x"})
    assert rows[0].error_code == "unsupported_url"
    assert "makes scores and generates nothing; use /v1/score, /v1/rerank, /v1/classify" in rows[0].error_message
    assert rows[1].status is RowStatus.SUCCEEDED
    (row,) = answer(LoadedModel.load(embedding_model, name="tiny", config=CONFIG), {"input": "x"}).values()
    assert (row.error_code, "no head for labels" in row.error_message) == ("unsupported_url", True)
    several = LoadedModel.load(tiny_encoders.make_classifier("bert", tmp_path, labels="ab"), name="tiny", config=CONFIG)
    rows = answer(several, {"queries": "a", "documents": "b"}, {"queries": "a", "documents": "b"})
    assert "tells 2 labels apart and gives no score; use /v1/classify" in rows[0].error_message


def test_the_total_is_bounded(scores: LoadedModel, answer: Any) -> None:
    rows = answer(scores, {"query": QUERY, "documents": DOCUMENTS}, limits={"max_embedding_tokens": 20})
    assert re.search(r"documents makes \d+ tokens, but at most 20 are allowed", rows[0].error_message)


def test_a_query_counts_with_each_document_before_anything_is_encoded(
    scores: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode_texts = scores.tokenizer.encode_texts

    def recorded(texts: Any, *limits: Any) -> Any:
        encoded.extend(text for one in texts for text in one)
        return encode_texts(texts, *limits)

    monkeypatch.setattr(scores.tokenizer, "encode_texts", recorded)
    reader = ScoringReader(scores.tokenizer, scores.limits, JobRules(max_embedding_tokens=1_000))

    def prepare(**fields: Any) -> list[int]:
        body = parse_body("/v1/rerank", {"model": "tiny", **fields})
        assert isinstance(body, RerankBody)
        (found,) = reader.encode([(body, reader.inputs_of(body))])
        request = reader.request("r", body, found, RowHints(0))
        return [len(ids) for ids in (member.prompt_token_ids for member in request.members)]

    long = "fox dog " * 250  # 2,000 characters
    with pytest.raises(
        RowError, match=r"documents makes 20010 characters, the query with each of them, but at most 16000"
    ):
        prepare(query=long, documents=["x"] * 10)
    assert not encoded
    # Cut, the same pairs are few tokens, and most of a long text is never encoded
    assert prepare(query=long, documents=["x"] * 10, truncate_prompt_tokens=10) == [10] * 10
    assert max(map(len, encoded)) == 640


def test_a_text_of_many_pairs_is_encoded_once(reranker: Path) -> None:
    mine = Tokenizer.load(reranker)
    pairs = [(QUERY, text) for text in (*DOCUMENTS, QUERY, "", "<s>")]
    given: list[str] = []
    backend = mine._backend  # pyright: ignore[reportPrivateUsage]

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            given.extend(texts)
            return backend.encode_batch_fast(texts, **options)

    mine._backend = Recorder()  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage]
    found = mine.encode_texts(pairs)
    assert sorted(given) == sorted({QUERY, *DOCUMENTS, "", "<s>"})
    for pair, one in zip(pairs, found, strict=True):
        want = backend.encode(*pair)
        assert one.types is not None
        assert (one.ids.tolist(), one.types.tolist()) == (want.ids, want.type_ids), pair


def test_texts_are_lowered_and_bounded_where_the_files_say_so(tiny_encoders: Any, tmp_path: Path, answer: Any) -> None:
    files = {"sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True}}
    folder = tiny_encoders.make_classifier("bert", tmp_path, files=files)
    model = LoadedModel.load(folder, name="tiny", config=CONFIG)
    rows = answer(model, {"input": "A FOX"}, {"input": "a fox"}, {"input": "fox dog " * 20})
    (one,), (two,) = (json.loads(rows[at].response)["data"] for at in range(2))
    assert one["probs"] == pytest.approx(two["probs"], abs=1e-6)
    assert "takes at most 12" in rows[2].error_message
    seen = model_digest(folder)
    path = folder / "sentence_bert_config.json"
    path.write_text(path.read_text() + "\n")
    assert model_digest(folder) != seen


def test_policies_judge_each_text(scores: LoadedModel, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nname = 'secrets'\nkeywords = ['secret']\n")
    reader = LaneReader(scores, LaneRules(policies=Policies((("rules", Rules(rules)),))))
    for at, body in enumerate(
        ({"query": "a", "documents": ["b", "a secret"]}, {"queries": "secret", "documents": "b"})
    ):
        request = LaneRequest(id=f"r{at}", model="tiny", url=url_of(body), body={"model": "tiny", **body})
        with pytest.raises(RowError) as refused:
            reader.prepare(request)
        assert refused.value.code == "content_filter"


def test_the_lane_prepares_the_same_request(scores: LoadedModel, kit: Any) -> None:
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
    row = LaneReader(scores).prepare(LaneRequest(id="r", model="tiny", url="/v1/rerank", body=body))
    pairs = scores.tokenizer.encode_texts([(QUERY, text) for text in DOCUMENTS])
    members = row.request.members
    assert [member.prompt_token_ids.tolist() for member in members] == [pair.ids.tolist() for pair in pairs]
    assert [member.token_type_ids.tolist() for member in members] == [pair.types.tolist() for pair in pairs]


def test_a_classifier_warms_up_and_answers_canaries(scores: LoadedModel) -> None:
    warm_up(scores, WarmupOptions(rows=(1, 4), prompt_tokens=16))
    answers = answer_canaries(scores)
    assert len({answer.vector for answer in answers}) == len(answers)
    assert {len(answer.vector) for answer in answers} == {1}


def test_vllm_does_not_take_it(reranker: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is a classifier"):
        check_vllm(reranker, CONFIG, {})


@pytest.mark.parametrize("labels", [("relevant",), ("bad", "fair", "good")])
def test_a_decoder_with_a_score_head_gives_transformers_numbers(
    labels: tuple[str, ...], tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    folder = tiny_encoders.make_classifier("qwen3", tmp_path, labels=labels, has_types=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model = LoadedModel.load(folder, name="tiny", config=CONFIG)
    wants = []
    for text in DOCUMENTS:
        given = (
            tokenizer(QUERY, text, return_tensors="pt") if len(labels) == 1 else tokenizer(text, return_tensors="pt")
        )
        with torch.inference_mode():
            wants.append(reference(**given).logits[0].numpy())
    if len(labels) == 1:
        rows = answer(model, {"query": QUERY, "documents": DOCUMENTS}, {"queries": QUERY, "documents": DOCUMENTS})
        np.testing.assert_allclose(scores_of(rows[1]), 1 / (1 + np.exp(-np.concatenate(wants))), atol=1e-5)
        best = json.loads(rows[0].response)["results"][0]["index"]
        assert best == int(np.concatenate(wants).argmax())
    else:
        (row,) = answer(model, {"input": DOCUMENTS, "use_activation": False}).values()
        np.testing.assert_allclose([data["probs"] for data in json.loads(row.response)["data"]], wants, atol=1e-5)
    assert answer_canaries(model)
    warm_up(model, WarmupOptions(rows=(2,), prompt_tokens=16))
