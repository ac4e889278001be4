"""Answers that must have a form, from models of random weights: each that ends has the requested form."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai.types.chat
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SpeculationConfig
from pipeline.adapters.system_clock import SystemClock
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.requests.parsing import CHAT_URL, ChatBody, parse_body
from schemas.workers.lane import EndEvent, LaneRequest, TokensEvent
from tests.workers.structured import tool_templates
from workers.lane.requests import LaneReader
from workers.lane.responses import LaneAnswer
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.structured.tool_formats import find_tool_format
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer
from workers.translation.responses import Envelope, ResponseBuilder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["a", "b", None, 3]},
        "size": {"type": "integer", "minimum": -20, "maximum": 3000},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-f]{2,4}$"}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
SMALL = {
    "type": "object",
    "properties": {"t": {"$ref": "#/$defs/tag"}},
    "required": ["t"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-f]{2,4}$"}},
}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
NUMBER |= {"additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "tag_it", "description": "Tags it <end>.", "parameters": SMALL}},
    {"type": "function", "function": {"name": "count-it", "parameters": NUMBER, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
ARGUMENTS = {"tag_it": SMALL, "count-it": NUMBER, "stop": {"type": "object"}}
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=1024,
    cache=CacheConfig(block_size=16, num_blocks=700),
    schedule=ScheduleConfig(max_num_seqs=16),
)


def load(folder: Path, template: str | None = None, config: EngineConfig = CONFIG) -> LoadedModel:
    return LoadedModel.load(folder, name="tiny", config=config, chat=ChatOptions(template))


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, kit: Any) -> Path:
    """As `model_folder`, with room for longer conversations."""
    folder = tmp_path_factory.mktemp("structured") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=420, max_position_embeddings=1024)
    kit.byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def marked_folder(tmp_path_factory: pytest.TempPathFactory, long_folder: Path, kit: Any) -> Path:
    """The same model, with markers of calls that are tokens: ordinary ones as Qwen's are, and special ones."""
    folder = tmp_path_factory.mktemp("marked") / "tiny"
    shutil.copytree(long_folder, folder)
    tokenizer = kit.byte_level_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<|tool_call|>", "<turn>"]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(long_folder: Path) -> LoadedModel:
    return load(long_folder)


@pytest.fixture(scope="module")
def hermes(long_folder: Path) -> LoadedModel:
    return load(long_folder, tool_templates.HERMES)


def results_of(kit: Any, model: LoadedModel, bodies: Sequence[Any], **settings: Any) -> list[Any]:
    """The results of bodies that are computed as a shard's rows, in order."""
    sink = kit.MemorySink()
    job = kit.make_job(**settings).model_copy(update={"models": (model.pin(),)})
    ShardWorker(
        model, kit.ListSource([kit.make_work(bodies, job=job)]), sink, SystemClock(), helper=kit.InlineExecutor()
    ).run()
    return [sink.rows[row] for row in range(len(bodies))]


@pytest.fixture(scope="module")
def answer(kit: SimpleNamespace) -> Any:
    """Computes bodies as a shard's rows: their results, in order."""

    def answer(model: LoadedModel, bodies: Sequence[Any], **settings: Any) -> list[Any]:
        return results_of(kit, model, bodies, **settings)

    return answer


def choices_of(row: Any) -> list[Any]:
    """Checked with the official client's own model."""
    assert row.status is RowStatus.SUCCEEDED, row.error_message
    return openai.types.chat.ChatCompletion.model_validate_json(row.response).choices


@pytest.mark.slow
def test_every_answer_follows_its_schema(model: LoadedModel, answer: Any, kit: Any) -> None:
    bodies = [
        kit.chat(
            f"row {row}", response_format=FORMAT, seed=row, temperature=row % 3 * 0.75, max_tokens=500, n=1 + row % 2
        )
        for row in range(24)
    ]
    ended = 0
    for row in answer(model, bodies):
        for choice in choices_of(row):
            ended += choice.finish_reason == "stop"
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert ended >= 30  # of 36: models of random weights love blanks


@pytest.mark.slow
def test_answers_of_a_sentencepiece_model_follow_their_schema(
    tmp_path: Path, tiny_models: Any, kit: Any, answer: Any
) -> None:
    """Whose decoder drops a blank at the beginning, and which has tokens for single bytes and for letters."""
    tiny_models.make_tiny_model("gemma3", tmp_path / "tiny", vocab_size=512)
    kit.sentencepiece_tokenizer().save_pretrained(tmp_path / "tiny")
    model = load(tmp_path / "tiny", config=replace(CONFIG, max_model_len=512))
    texts = {"type": "object", "properties": {"é 日": {"type": "string", "maxLength": 6}}, "required": ["é 日"]}
    texts |= {"additionalProperties": False}
    bodies = [
        kit.chat(f"{n}", seed=n, max_tokens=300, structured_outputs={"json": SCHEMA if n % 2 else texts})
        for n in range(16)
    ]
    ended = 0
    for n, row in enumerate(answer(model, bodies)):
        (choice,) = choices_of(row)
        if choice.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(choice.message.content), SCHEMA if n % 2 else texts)
    assert ended >= 12


def test_answers_follow_regexes_choices_and_grammars(model: LoadedModel, answer: Any, kit: Any) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]+/x{1,5}"}, "stop": None}, r"[0-9]{3}-[a-c]+/x{1,5}"),
        ({"structured_outputs": {"choice": ["ja", 'n"e\\in', "vielleicht 日本"]}}, r'ja|n"e\\in|vielleicht 日本'),
        ({"structured_outputs": {"grammar": 'start: ("a" | "b")~2..4 "!"'}}, r"[ab]{2,4}!"),
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
    ]
    bodies = [kit.chat(f"{n}", seed=n, max_tokens=300, **form) for form, _ in forms for n in range(4)]
    bodies += [kit.completion(f"{n}", seed=n, max_tokens=300, **form) for form, _ in forms for n in range(2)]
    patterns = [pattern for _, pattern in forms for _ in range(4)] + [p for _, p in forms for _ in range(2)]
    for row, pattern in zip(answer(model, bodies), patterns, strict=True):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        if row.finish_reason == "stop":
            assert re.fullmatch(pattern, row.text), row.text
    assert sum(r.finish_reason == "stop" for r in answer(model, bodies)) >= 20


@pytest.mark.slow
def test_any_object_will_do_where_no_schema_is_given(model: LoadedModel, answer: Any, kit: Any) -> None:
    bodies = [kit.chat(f"{n}", seed=n, response_format={"type": "json_object"}, max_tokens=150) for n in range(16)]
    for row in answer(model, bodies):
        (choice,) = choices_of(row)
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content, strict=True), dict)


def test_a_schema_that_can_not_be_compiled_fails_its_own_row(model: LoadedModel, answer: Any, kit: Any) -> None:
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}
    bodies = [
        kit.chat("a", temperature=0, max_tokens=5),
        kit.chat("b", response_format=broken),
        kit.chat("c", structured_outputs={"regex": "(" * 50}),
        kit.chat("d", tools=TOOLS),
        kit.chat("e", response_format=FORMAT, temperature=0, max_tokens=400),
    ]
    first, schema, regex, tools, last = answer(model, bodies)
    assert (first.status, last.status) == (RowStatus.SUCCEEDED, RowStatus.SUCCEEDED)
    assert schema.error_code is RowErrorCode.INVALID_REQUEST
    assert "response_format.json_schema.schema.properties.a" in schema.error_message
    assert regex.error_code is RowErrorCode.INVALID_REQUEST
    assert "structured_outputs" in regex.error_message
    assert tools.error_code is RowErrorCode.UNSUPPORTED_PARAMETER
    assert "chat template takes no tools" in tools.error_message


def test_a_tools_schema_that_can_not_be_enforced_is_named_unless_it_is_not_strict(
    hermes: LoadedModel, answer: Any, kit: Any
) -> None:
    def tools(strict: bool | None) -> list[Any]:
        parameters = {"properties": {"a": {"type": "integer", "not": {"const": 3}}}}
        return [TOOLS[0], {"type": "function", "function": {"name": "x", "strict": strict, "parameters": parameters}}]

    only = {"type": "function", "function": {"name": "x"}}
    bodies = [kit.chat("x", tools=tools(strict), tool_choice=only, max_tokens=90) for strict in (True, None, False)]
    strict, silent, free = answer(hermes, bodies)
    for row in (strict, silent):
        assert row.error_code is RowErrorCode.INVALID_REQUEST
        assert "tools can't be compiled: tools[1].function.parameters.properties.a: " in row.error_message
    assert free.status is RowStatus.SUCCEEDED


def forced_calls(choice: Any) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a choice, each with arguments that follow its schema."""
    made = []
    for call in choice.message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, ARGUMENTS[call.function.name])
        made.append((call.function.name, arguments))
    return made


ONE = {"tools": TOOLS[:2], "max_tokens": 300}
NAMED = {"type": "function", "function": {"name": "count-it"}}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", ["HERMES", "LLAMA", "MISTRAL", "BARRED"])
@pytest.mark.slow
def test_calls_that_must_come_do_in_each_familys_way(
    long_folder: Path, marked_folder: Path, answer: Any, kit: Any, family: str, marked: bool
) -> None:
    model = load(marked_folder if marked else long_folder, getattr(tool_templates, family))
    bodies = [
        kit.chat(f"{n}", seed=n, tool_choice=NAMED if n % 2 else "required", **ONE, parallel_tool_calls=n % 3 > 0)
        for n in range(12)
    ]
    ended = 0
    for n, row in enumerate(answer(model, bodies)):
        (choice,) = choices_of(row)
        if choice.finish_reason == "length":
            continue
        ended += 1
        assert choice.finish_reason == row.finish_reason == "tool_calls"
        assert choice.message.content is None
        made = forced_calls(choice)
        assert len(made) >= 1
        if n % 2 or n % 3 == 0 or family == "LLAMA":
            assert len(made) == 1
        if n % 2:
            assert made[0][0] == "count-it"
        assert row.text == ""
    assert ended >= 9


@pytest.mark.parametrize(
    ("family", "marker", "bias"),
    [("HERMES", "<tool_call>", 6), ("MISTRAL", "[TOOL_CALLS]", 5), ("BARRED", "<|tool_call|>", 4), ("LLAMA", "{", 99)],
)
@pytest.mark.slow
def test_calls_may_come_and_then_follow_their_schemas(
    marked_folder: Path, answer: Any, kit: Any, family: str, marker: str, bias: int
) -> None:
    """Given a model of random weights, when its calls' marker is made likely, then calls come, behind text or not, and
    what follows the marker is a call."""
    model = load(marked_folder, getattr(tool_templates, family))
    (found,) = model.tokenizer.encode_batch([marker], add_special_tokens=False)
    (token,) = found.tolist()
    likely = {str(token): bias}
    base = {"tools": TOOLS[:2], "max_tokens": 250}
    bodies = [kit.chat(f"{n}", seed=n, logit_bias=likely, parallel_tool_calls=n % 4 > 0, **base) for n in range(16)]
    bodies += [kit.chat(f"{n}", seed=n, **{**base, "max_tokens": 30}) for n in range(4)]
    texts = [choices_of(row)[0] for row in answer(model, bodies)]

    called = [choice for choice in texts if choice.finish_reason == "tool_calls"]
    assert len(called) >= 6
    assert any(choice.message.content for choice in called) == (family != "LLAMA")
    assert any(len(choice.message.tool_calls) > 1 for choice in called) == (family != "LLAMA")
    for choice in called:
        assert forced_calls(choice)
    assert all(len(choice.message.tool_calls or []) <= 1 for choice in texts[:16:4])
    assert any(choice.message.content and not choice.message.tool_calls for choice in texts)
    for choice in texts:
        assert marker not in (choice.message.content or "") or family == "LLAMA"


@pytest.mark.slow
def test_an_answer_is_the_same_with_drafts_and_without(
    long_folder: Path, hermes: LoadedModel, answer: Any, kit: Any
) -> None:
    bodies = [
        kit.chat("a b a b", response_format=FORMAT, temperature=0, max_tokens=200),
        kit.chat("a b a b c", response_format=FORMAT, seed=3, max_tokens=200, n=2),
        kit.chat("x", tools=TOOLS[:2], tool_choice="required", temperature=0, max_tokens=200),
        *(
            kit.chat(f"copy {n}", structured_outputs={"regex": "(ab|cd){40}"}, temperature=0, max_tokens=90)
            for n in range(4)
        ),
    ]
    config = replace(CONFIG, speculation=SpeculationConfig("ngram"))
    drafting = load(long_folder, tool_templates.HERMES, config)
    plain, drafted = answer(hermes, bodies), answer(drafting, bodies)
    assert [json.loads(row.response)["choices"] for row in plain] == [
        json.loads(row.response)["choices"] for row in drafted
    ]
    assert drafting.engine.stats().speculation.sources  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_preempted_answer_resumes_in_its_grammar(
    long_folder: Path, model: LoadedModel, answer: Any, kit: Any
) -> None:
    """Given too few blocks for all, when sequences are preempted, then each one's grammar is led to where it was."""
    bodies = [kit.chat(f"row {n}", response_format=FORMAT, seed=n, max_tokens=200) for n in range(8)]
    tight = load(long_folder, config=replace(CONFIG, cache=CacheConfig(block_size=16, num_blocks=28)))
    squeezed = answer(tight, bodies)
    assert tight.engine.stats().preemptions > 0
    assert [row.text for row in squeezed] == [row.text for row in answer(model, bodies)]


def test_a_template_is_given_tools_and_calls_without_special_tokens(long_folder: Path) -> None:
    tokenizer = Tokenizer.load(long_folder, ChatOptions(tool_templates.HERMES))
    assert find_tool_format(tokenizer) is not None
    call = {"id": "call_1", "type": "function", "function": {"name": "tag_it", "arguments": '{"t": "<end>ab"}'}}
    body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "fine"},
        ],
        "tools": TOOLS,
    }
    parsed = parse_body(CHAT_URL, body)
    assert isinstance(parsed, ChatBody)
    text = tokenizer.render_chat(parsed.messages, parsed.offered_tools)
    (ids,) = tokenizer.encode_chats([text])
    assert ids.tolist().count(2) == 4  # the template's own ends: none that a description or an argument spells
    shown = tokenizer.decode(ids)
    assert '"description": "Tags it <end>."' in shown
    assert '<tool_call>\n{"name": "tag_it", "arguments": {"t": "<end>ab"}}\n</tool_call>' in shown
    assert '"strict"' not in shown
    assert "fine" in shown


@pytest.mark.parametrize("template", ["FUNCTION_TAGS", "NAMES_AND_PARAMETERS", "UNKNOWN"])
def test_unknown_tool_formats_are_refused(long_folder: Path, answer: Any, kit: Any, template: str) -> None:
    (row,) = answer(load(long_folder, getattr(tool_templates, template)), [kit.chat("x", tools=TOOLS)])
    assert row.error_code is RowErrorCode.UNSUPPORTED_PARAMETER
    assert "in a form that is not known here" in row.error_message


def stream_events(
    model: LoadedModel, body: dict[str, Any], every: int, tokens: Any = (), attempt: int = 1, url: str = CHAT_URL
) -> list[Any]:
    """The events of an answer that is emitted every few tokens, resumed after `tokens`."""
    request = LaneRequest("r1", "tiny", body, url, tokens=tokens, attempt=attempt)
    row = LaneReader(model).prepare(request)
    lane_answer = LaneAnswer(request, row, model.tokenizer)
    events: list[Any] = []
    given = {partial.index: len(partial.token_ids) for partial in row.request.partial}
    model.engine.add(row.request)
    while model.engine.has_work:
        for completion in model.engine.step():
            envelope = Envelope("/lane/r1", SystemClock().now(), attempt, lambda s: SystemClock().now())
            events += lane_answer.end(row, completion, ResponseBuilder(model.tokenizer), envelope)
            return events
        new = [
            p for p in model.engine.partial(row.request, given) if p.finish_reason is None and len(p.token_ids) >= every
        ]
        for partial in new:
            given[partial.index] = given.get(partial.index, 0) + len(partial.token_ids)
        events += lane_answer.grow(new)
    return events


def assemble_answer(events: Sequence[Any], choice: int) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls, assembled as by OpenAI's client."""
    text, calls = "", []
    for event in events:
        if isinstance(event, TokensEvent) and event.choice == choice:
            text += event.text
            for delta in event.tool_calls or []:
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
                else:
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return text, calls


@pytest.mark.parametrize(
    ("family", "every"),
    [
        ("HERMES", 1),
        ("LLAMA", 3),
        ("MISTRAL", 1),
        ("MISTRAL", 50),
        *(
            pytest.param(family, every, marks=pytest.mark.exhaustive)
            for family, every in (("HERMES", 3), ("HERMES", 50), ("LLAMA", 1), ("LLAMA", 50), ("MISTRAL", 3))
        ),
    ],
)
@pytest.mark.slow
def test_a_stream_emits_the_calls_of_the_response(marked_folder: Path, kit: Any, family: str, every: int) -> None:
    model = load(marked_folder, getattr(tool_templates, family))
    body = kit.chat("x", seed=5, tool_choice="required", n=2, **ONE)
    events = stream_events(model, body, every)
    assert isinstance(events[-1], EndEvent)
    for choice in openai.types.chat.ChatCompletion.model_validate(events[-1].response).choices:
        text, calls = assemble_answer(events, choice.index)
        assert calls == [call.model_dump() for call in choice.message.tool_calls or []]
        assert text == (choice.message.content or "")
    # and an attempt that resumes after some of the tokens emits the rest, under the same ids
    whole = assemble_answer(events, 0)[1]
    known = [t for event in events[:-1] if event.choice == 0 for t in event.tokens][: 30 if every == 1 else 12]
    more = stream_events(model, body, every, (tuple(known),), 2)
    assert more[-1].response["choices"][0]["message"]["tool_calls"] == whole
