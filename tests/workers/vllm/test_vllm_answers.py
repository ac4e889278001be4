"""Answers of rows through vLLM, as a worker makes them: forms, calls, and the same refusals as with our engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings
from pipeline.lane.client import answer as stream_answer
from pipeline.lane.memory import MemoryLane
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import TokensEvent
from tests.workers.lane.test_server import LaneWorker, alike, request, response, text_of
from tests.workers.structured import tool_templates
from tests.workers.structured.test_structured_output import FORMAT, SCHEMA, TOOLS, choices_of, forced_calls, results_of
from workers.model.loaded_model import LoadedModel
from workers.model.score_tokens import scores_by_tokens
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

CONFIG = EngineConfig(
    dtype="float32", max_model_len=1024, cache=CacheConfig(num_blocks=700), schedule=ScheduleConfig(max_num_seqs=16)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, kit: Any) -> Path:
    made = tmp_path_factory.mktemp("vllm") / "tiny"
    tiny_models.make_tiny_model(
        "llama", made, vocab_size=420, max_position_embeddings=1024, hidden_size=64, head_dim=32
    )
    kit.byte_level_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel.load(
        folder, name="tiny", config=CONFIG, chat=ChatOptions(tool_templates.HERMES), engine_name="vllm"
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def answer(kit: Any) -> Any:
    """Computes bodies as a shard's rows: their results, in order."""

    def answer(model: LoadedModel, bodies: Sequence[Any]) -> list[Any]:
        return results_of(kit, model, bodies)

    return answer


def test_answers_follow_schemas_regexes_choices_and_grammars(model: LoadedModel, answer: Any, kit: Any) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]+/x{1,5}"}}, r"[0-9]{3}-[a-c]+/x{1,5}"),
        ({"structured_outputs": {"choice": ["ja", 'n"e\\in', "vielleicht 日本"]}}, r'ja|n"e\\in|vielleicht 日本'),
        ({"structured_outputs": {"grammar": 'start: ("a" | "b") ("a" | "b") "!"'}}, r"[ab]{2}!"),
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
    ]
    bodies = [kit.chat(f"{n}", seed=n, max_tokens=300, **form) for form, _ in forms for n in range(4)]
    bodies += [kit.chat(f"{n}", response_format=FORMAT, seed=n, max_tokens=500, n=1 + n % 2) for n in range(12)]
    patterns = [pattern for _, pattern in forms for _ in range(4)]
    rows = answer(model, bodies)
    for row, pattern in zip(rows, patterns, strict=False):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        if row.finish_reason == "stop":
            assert re.fullmatch(pattern, row.text), row.text
    assert sum(row.finish_reason == "stop" for row in rows[:16]) >= 12
    ended = 0
    for row in rows[16:]:
        for choice in choices_of(row):
            if choice.finish_reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert ended >= 12  # of 18


def test_calls_that_must_come_do(model: LoadedModel, answer: Any, kit: Any) -> None:
    one = {"type": "function", "function": {"name": "count-it"}}
    bodies = [
        kit.chat(f"{n}", seed=n, tool_choice=one if n % 2 else "required", tools=TOOLS[:2], max_tokens=300)
        for n in range(8)
    ]
    ended = 0
    for n, row in enumerate(answer(model, bodies)):
        (choice,) = choices_of(row)
        if choice.finish_reason == "length":
            continue
        ended += 1
        made = forced_calls(choice)
        assert choice.finish_reason == "tool_calls"
        assert made
        assert not n % 2 or made[0][0] == "count-it"
    assert ended >= 6


def test_a_grammar_that_grows_too_large_fails_its_own_row_as_with_our_engine(
    model: LoadedModel, folder: Path, answer: Any, kit: Any
) -> None:
    options = " | ".join(f'"{at:x}"' for at in range(70_000, 73_000))
    (found,) = model.tokenizer.encode_batch(["b"], add_special_tokens=False)
    large = {"structured_outputs": {"grammar": f'start: "a" | "b" ({options})'}, "logit_bias": {str(found[0]): 99}}
    bodies = [kit.chat("x", max_tokens=20, **large), kit.chat("y", max_tokens=5, temperature=0)]
    ours = LoadedModel.load(folder, name="tiny", config=CONFIG, chat=ChatOptions(tool_templates.HERMES))
    for loaded in (ours, model):
        failed, other = answer(loaded, bodies)
        assert failed.error_code is RowErrorCode.INVALID_REQUEST, failed.error_message
        assert "structured_outputs" in failed.error_message
        assert other.status is RowStatus.SUCCEEDED
    ours.close()


def test_a_choice_that_vllm_ends_before_its_grammar_does_is_an_error(
    model: LoadedModel, answer: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a vLLM that has lost a grammar, which then allows the end token alone."""
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar  # noqa: PLC0415 - only where it is installed

    def end(grammar: Any, bitmask: Any, at: int) -> None:
        bitmask[at].fill_(0)
        bitmask[at, 0] = 1 << 2  # <end>

    (eos,) = model.limits.end_token_ids
    assert eos == 2
    monkeypatch.setattr(GuidanceGrammar, "fill_bitmask", end)
    monkeypatch.setattr(GuidanceGrammar, "accept_tokens", lambda grammar, request, tokens: True)
    body = kit.chat("x", response_format=FORMAT, temperature=0, max_tokens=20)
    (row,) = answer(model, [body])
    assert row.status is RowStatus.FAILED
    assert row.error_code is RowErrorCode.ENGINE_ERROR
    assert "vLLM ended the answer before its grammar does" in row.error_message


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "max_tokens": 12, "logprobs": 2},
        {"temperature": 1.1, "seed": 7, "max_tokens": 12, "stop": ["e", "th"]},
        {"temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 1},
    ],
)
def test_each_of_several_prompts_is_answered_as_if_it_were_sent_alone(
    model: LoadedModel, folder: Path, answer: Any, kit: Any, body: dict[str, Any]
) -> None:
    prompts: list[Any] = ["The quick brown", [5, 6, 7, 8, 9], "naïve 日本語"]
    bodies = [kit.completion(prompt, n=2, **body) for prompt in (prompts, *prompts)]
    whole, *single = answer(model, bodies)
    assert whole.status is RowStatus.SUCCEEDED, whole.error_message
    found = json.loads(whole.response)["choices"]
    assert [choice["index"] for choice in found] == list(range(6))
    alone = [choice for row in single for choice in json.loads(row.response)["choices"]]
    assert found == [kit.rounded(choice | {"index": at}) for at, choice in enumerate(alone)]
    for count in ("prompt_tokens", "completion_tokens"):
        assert getattr(whole, count) == sum(getattr(row, count) for row in single)
    if body["temperature"] == 0:
        ours = LoadedModel.load(folder, name="tiny", config=CONFIG)
        assert found == kit.rounded(json.loads(answer(ours, bodies[:1])[0].response)["choices"])
        ours.close()


def test_each_of_several_prompts_streams_its_own_choices(model: LoadedModel, answer: Any, kit: Any) -> None:
    prompts: list[Any] = ["The quick brown", [5, 6, 7, 8, 9], "naïve 日本語"]
    body = kit.completion(prompts, n=2, temperature=0, max_tokens=300, ignore_eos=True)
    (row,) = answer(model, [body])
    lane, clock = MemoryLane(SystemClock(), LaneSettings()), SystemClock()
    worker = LaneWorker(kit, model, lane, "w1", (), of_lane=LaneSettings())
    try:
        events = list(stream_answer(lane, request(model, body), clock, CallSettings()))
    finally:
        worker.end()
    assert worker.error is None
    found = alike(response(events))
    assert found == kit.rounded(alike(json.loads(row.response)))
    assert len(found["choices"]) == 6
    for choice in found["choices"]:
        assert text_of(events, choice["index"]) == choice["text"]
        assert sum(isinstance(event, TokensEvent) and event.choice == choice["index"] for event in events) > 1


def test_one_bad_prompt_of_several_fails_its_row_by_its_name(model: LoadedModel, answer: Any, kit: Any) -> None:
    bodies = [kit.completion(["a", [3, 99_999], "b"], n=2), kit.completion(["a", "b"], temperature=0, max_tokens=4)]
    failed, other = answer(model, bodies)
    assert failed.error_code is RowErrorCode.INVALID_REQUEST
    assert "prompt[1] holds token 99999" in failed.error_message
    assert other.status is RowStatus.SUCCEEDED


def test_labels_of_choices_are_those_of_our_engine(model: LoadedModel, folder: Path, answer: Any, kit: Any) -> None:
    texts = ["The quick brown fox jumps over the lazy dog. What is a river?", "0123456789 a stream", "query: passage"]
    labels = [" a", " fox jumps", " the lazy dog", "0"]
    how = {"model": "tiny", "choices": labels}
    talk = [{"role": "user", "content": "Is a fox a dog?"}]
    bodies = [
        *({"input": text, "normalize": normalize, **how} for text in texts for normalize in ("sum", "mean")),
        {"input": texts, **how},
        {"messages": talk, **how, "choices": ["yes", "no"]},
        {"input": [[5] * 1023], **how, "choices": ["0"]},  # fills the context
    ]
    rows = [("/v1/classify", body) for body in bodies]
    ours = LoadedModel.load(folder, name="tiny", config=CONFIG, chat=ChatOptions(tool_templates.HERMES))
    expected, found = answer(ours, rows), answer(model, rows)
    ours.close()
    for own, row in zip(expected[:-1], found, strict=False):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        assert json.loads(row.response)["data"] == kit.rounded(json.loads(own.response)["data"])
        assert (row.text, row.prompt_tokens, row.completion_tokens) == (own.text, own.prompt_tokens, 0)
    assert len({row.text for row in found[:6]}) > 1
    assert expected[-1].status is RowStatus.SUCCEEDED
    assert found[-1].error_code is RowErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "input: prompt of 1024 tokens and max_tokens 1 need 1025, but the context" in found[-1].error_message


def test_scores_by_tokens_are_those_of_our_engine(model: LoadedModel, folder: Path, answer: Any, kit: Any) -> None:
    template = "{% for m in messages %}{% if m.role in ('query', 'document') %}{{ m.content }}\n{% endif %}{% endfor %}"
    chat = ChatOptions(template)
    tokenizer = Tokenizer.load(folder, chat)
    settings = scores_by_tokens(folder, tokenizer, replace(chat, score_tokens=("n", "y")))
    ours = LoadedModel.load(folder, name="tiny", config=CONFIG, chat=replace(chat, score_tokens=("n", "y")))
    theirs = replace(model, tokenizer=tokenizer, limits=replace(model.limits, classifier=settings))
    documents = ["The quick brown fox jumps over the lazy dog.", "0123456789 a stream", "query: passage"]
    rows = [("/v1/rerank", {"model": "tiny", "query": "What is a river?", "documents": documents})]
    (own,), (row,) = answer(ours, rows), answer(theirs, rows)
    ours.close()
    assert row.status is RowStatus.SUCCEEDED, row.error_message
    assert json.loads(row.response)["results"] == kit.rounded(json.loads(own.response)["results"])
    assert row.prompt_tokens == own.prompt_tokens


def test_bad_rows_have_the_codes_of_our_engine(model: LoadedModel, folder: Path, answer: Any, kit: Any) -> None:
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}
    bodies = [
        kit.chat("long " * 400, max_tokens=900),
        kit.chat("a", response_format=broken),
        kit.chat("b", structured_outputs={"regex": "(" * 50}),
        kit.chat("c", logit_bias={"99999": 1}),
        kit.chat("d", structured_outputs={"grammar": "start: ("}),
        kit.chat("e", tools=[{"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}]),
        kit.completion([1, 2, 9999], max_tokens=3),
        {"model": "tiny", "input": "no vectors here"},
        kit.chat("good", max_tokens=3, temperature=0),
    ]
    ours = LoadedModel.load(folder, name="tiny", config=CONFIG, chat=ChatOptions(tool_templates.HERMES))
    expected, found = answer(ours, bodies), answer(model, bodies)
    ours.close()
    assert [row.error_code for row in found] == [row.error_code for row in expected]
    assert [row.error_message for row in found] == [row.error_message for row in expected]
    assert sum(row.error_code is not None for row in found) >= 7
    assert found[-1].text == expected[-1].text


@pytest.mark.slow
def test_a_model_refuses_settings_before_it_is_loaded(folder: Path) -> None:
    from workers.model.loaded_model import check_vllm  # noqa: PLC0415

    check_vllm(folder, CONFIG, {"enforce_eager": True})
    with pytest.raises(Exception, match="no option frobnicate"):
        check_vllm(folder, CONFIG, {"frobnicate": 1})
    with pytest.raises(Exception, match="--quantize"):
        check_vllm(folder, replace(CONFIG, quantize="int8"), {})
