"""Formats, grammars and tools in a body: accepted, refused by name, and stored."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipeline.planner.prefix_chain import prompt_bytes
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.parsing import CHAT_URL, ChatBody, dump_body, load_body, parse_body
from schemas.requests.request_key import AnswerContext, request_key

INVALID, UNSUPPORTED = RowErrorCode.INVALID_REQUEST, RowErrorCode.UNSUPPORTED_PARAMETER
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
CONTEXT = AnswerContext("weights", 10)
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks.", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"b": 1}'}}
MESSAGES = [{"role": "user", "content": "x"}]
CALLED = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def chat(**fields: Any) -> ChatBody:
    body = parse_body(
        CHAT_URL, {"model": "m", "messages": MESSAGES, **fields}, Limits(max_tools=3, max_schema_bytes=900)
    )
    assert isinstance(body, ChatBody)
    return body


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        {"tools": [TOOL], "response_format": FORMAT},
        {"messages": [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]},
    ],
)
def test_the_options_of_a_body_reach_the_worker_unchanged(fields: dict[str, Any]) -> None:
    body = chat(**fields)
    read = load_body(CHAT_URL, dump_body(body))
    assert read == body
    assert body != chat()
    # and it counts when requests are compared
    assert request_key(CHAT_URL, body, CONTEXT) != request_key(CHAT_URL, chat(), CONTEXT)


def test_the_order_of_a_schemas_properties_is_preserved() -> None:
    body = load_body(CHAT_URL, dump_body(chat(response_format=FORMAT)))
    assert isinstance(body, ChatBody)
    assert body.response_format is not None
    assert list(body.response_format.schema_of_answer["properties"]) == ["b", "a"]
    assert chat(response_format={"type": "json_object"}).response_format.schema_of_answer == {"type": "object"}  # type: ignore[union-attr]


def test_neutral_values_are_as_if_absent() -> None:
    for neutral in (
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": "none"},
        {"structured_outputs": None, "guided_json": None},
    ):
        found = chat(**neutral)
        assert not found.constrained
        if neutral.get("tool_choice") != "none":
            assert request_key(CHAT_URL, found, CONTEXT) == request_key(CHAT_URL, chat(), CONTEXT)
    assert chat(tools=[TOOL], tool_choice="auto") == chat(tools=[TOOL])
    assert chat(tools=[TOOL], tool_choice="none").offered_tools == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_vllms_older_names_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert chat(**old) == chat(structured_outputs=new)


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({"response_format": "json"}, INVALID, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, INVALID, "response_format", "'xml', but must have one of text"),
        ({"response_format": {"type": "json_schema"}}, INVALID, "response_format", 'needs "json_schema"'),
        ({"response_format": {"type": "json_object", "x": 1}}, INVALID, "response_format", "'x', which is not known"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            INVALID, "response_format", "1 to 64 letters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
            INVALID, "response_format", "schema that is not an object",
        ),
        ({"structured_outputs": {}}, INVALID, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, INVALID, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "a"}}, INVALID, "structured_outputs", "'structural_tag', but only"),
        ({"structured_outputs": {"choice": ["a", ""]}}, INVALID, "structured_outputs", "none of them empty"),
        ({"structured_outputs": {"json": "{"}}, INVALID, "structured_outputs", "is not JSON"),
        ({"guided_regex": "a", "guided_json": {}}, INVALID, "guided_json", "keep one"),
        ({"guided_regex": "a", "response_format": FORMAT}, INVALID, "structured_outputs", "remove one"),
        ({"guided_regex": "a" * 901}, INVALID, "structured_outputs", "has 901 bytes of schema, but at most 900"),
        ({"guided_regex": "a", "ignore_eos": True}, INVALID, "ignore_eos", "its end decides"),
        ({"tools": [TOOL], "min_tokens": 1}, INVALID, "min_tokens", "its end decides"),
        ({"tools": [{"type": "function"}]}, INVALID, "tools[0].function", "is missing"),
        ({"tools": [{"type": "retrieval"}]}, INVALID, "tools[0].type", "'retrieval', but must be 'function'"),
        ({"tools": [TOOL, TOOL]}, INVALID, "tools", "'look_up' twice"),
        (
            {"tools": [{"type": "function", "function": {"name": str(n)}} for n in range(4)]},
            INVALID, "tools", "holds 4, but at most 3",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a.b"}}]},
            INVALID, "tools[0].function.name", "'a.b'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            INVALID, "tools[0].function.parameters", 'type "object"',
        ),
        ({"tools": [TOOL], "tool_choice": "maybe"}, INVALID, "tool_choice", "must be none, auto, required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            INVALID, "tool_choice", "'other', which is none of the tools",
        ),
        ({"tool_choice": "required"}, INVALID, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": False}, INVALID, "parallel_tool_calls", "needs tools"),
        ({"tools": [TOOL], "guided_regex": "a"}, INVALID, "structured_outputs", "can't go with tools"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            INVALID, "messages[0].tool_calls", "are an assistant's",
        ),
        (
            {"messages": [*CALLED, {"role": "tool", "content": "42"}]},
            INVALID, "messages[2].tool_call_id", "is missing",
        ),
        (
            {"messages": [*CALLED, {"role": "tool", "tool_call_id": "call_9", "content": "42"}]},
            INVALID, "messages[2].tool_call_id", "'call_9', which no call",
        ),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            INVALID, "messages[0].content", "must be a string",
        ),
        ({"functions": [TOOL["function"]]}, UNSUPPORTED, "functions", "not supported"),
    ],
)  # fmt: skip
def test_unsupported_parameters_are_refused_by_name(
    fields: dict[str, Any], code: RowErrorCode, param: str, message: str
) -> None:
    with pytest.raises(RowError, match=re.escape(message)) as refused:
        chat(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_requests_with_other_tools_or_calls_begin_otherwise() -> None:
    """The planner sorts by the prompts' prefixes: tools come first, and a call is part of its message."""
    other = {"type": "function", "function": {"name": "other"}}
    prompts = [
        prompt_bytes(chat(**fields))[0]
        for fields in ({}, {"tools": [TOOL]}, {"tools": [other]}, {"tools": [TOOL], "tool_choice": "none"})
    ]
    assert prompts[0] == prompts[3]
    assert len(set(prompts)) == 3
    assert prompts[1].endswith(prompts[0])
    assert b"look_up" in prompt_bytes(chat(messages=CALLED))[0]
