"""Bodies of /v1/responses become chats, or are refused by the name of the field; chats become responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from schemas.requests.dialects.openai_responses import RESPONSES_URL
from schemas.requests.dialects.openai_responses.body import HINTS, NO_CHANGE, ResponsesBody
from schemas.requests.dialects.openai_responses.response import response_object, to_response
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.parsing import CHAT_URL, ChatBody, dump_body, load_body, parse_body
from schemas.requests.request_key import AnswerContext, request_key, stored_body
from schemas.requests.sampling_defaults import SamplingDefaults, fill_in

LOGPROBS = ["message.output_text.logprobs"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
FUNCTION = {"type": "function", "name": "f", "description": "does", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
}  # fmt: skip


EXTENSIONS: list[dict[str, Any]] = [
    {"stop_token_ids": [5], "include_stop_str_in_output": True, "skip_special_tokens": False},
    {"logit_bias": {"7": 5}, "allowed_token_ids": [7, 8], "bad_words": ["no"]},
    {"structured_outputs": {"regex": "[0-9]+"}},
    {"structured_outputs": {"json": SCHEMA}, "truncate_prompt_tokens": 9},
]


def respond(limits: Limits | None = None, **fields: Any) -> ChatBody:
    body = parse_body(RESPONSES_URL, {"model": "m", "input": "hi", **fields}, limits)
    assert isinstance(body, ChatBody)
    return body


def chat(**fields: Any) -> ChatBody:
    body = parse_body(CHAT_URL, {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    assert isinstance(body, ChatBody)
    return body


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {}),
        (dict.fromkeys(ResponsesBody.model_fields.keys() - {"model", "input"}), {}),
        ({"store": False, "background": False, "truncation": "disabled", "tools": [], "include": []}, {}),
        ({"max_output_tokens": 5, "temperature": 0.5}, {"max_completion_tokens": 5, "temperature": 0.5}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}, {}),
        ({"reasoning": {"summary": None}, "include": ["reasoning.encrypted_content", *LOGPROBS]}, {"logprobs": True}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [
                    {"type": "function", "function": {name: one for name, one in FUNCTION.items() if name != "type"}}
                ],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"include": LOGPROBS, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        *((extension, extension) for extension in EXTENSIONS),
        ({"seed": 3, "top_k": 4, "stop": "x"}, {"seed": 3, "top_k": 4, "stop": "x"}),
    ],
)  # fmt: skip
def test_a_body_is_the_same_chat(fields: dict[str, Any], same: dict[str, Any]) -> None:
    body = respond(**fields)
    assert dump_body(body) == dump_body(chat(**same))
    assert load_body(RESPONSES_URL, dump_body(body)) == body


def test_a_row_stores_what_its_response_repeats() -> None:
    marked = respond(metadata={"a": "b"}, user="u", safety_identifier="s")
    found = load_body(RESPONSES_URL, stored_body(RESPONSES_URL, marked))
    assert isinstance(found, ChatBody)
    assert (found.metadata, found.user, found.safety_identifier) == ({"a": "b"}, "u", None)
    response = response_object("resp_1", 1, found)
    assert (response["metadata"], response["user"]) == ({"a": "b"}, "u")
    # Rows with one key have one response.
    context, named = AnswerContext("weights", 10), chat(metadata={"a": "b"}, user="u")
    assert request_key(RESPONSES_URL, marked, context) != request_key(RESPONSES_URL, respond(), context)
    assert request_key(CHAT_URL, named, context) == request_key(CHAT_URL, chat(), context)
    assert stored_body(CHAT_URL, named) == stored_body(CHAT_URL, chat())


def test_null_leaves_a_parameter_to_the_models_own_default() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_k=3)
    filled = fill_in(respond(temperature=None, top_k=0), defaults)
    assert isinstance(filled, ChatBody)
    assert (filled.temperature, filled.top_k) == (0.5, 0)


def test_items_become_messages() -> None:
    """An assistant's reasoning, text and calls are one message, until something that can't follow in it."""
    body = respond(
        instructions="be short",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            REASONING,
            SAID,
            CALL,
            CALL | {"call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_2", "output": "2", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "1"}]},
            CALL | {"call_id": "call_3"},
            SAID,
            SAID,
            REASONING,
            {"type": "message", "role": "developer", "content": "c", "phase": None},
        ],
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [{"type": "text", "text": "b"}]
    assert json.loads(dump_body(body))["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant", "content": said, "reasoning_content": "hm",
            "tool_calls": [call | {"id": "call_1"}, call | {"id": "call_2"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_2"},
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "call_1"},
        {"role": "assistant", "tool_calls": [call | {"id": "call_3"}]},
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "developer", "content": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store is not supported: responses aren't stored here; set it to false, or remove it"),
        ({"max_tokens": 5}, "max_tokens is not supported: give max_output_tokens"),
        ({"return_token_ids": True}, "return_token_ids is not supported: a response has no field for them; use"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is not supported: a response has no field for them; use"),
        ({"guided_regex": "a"}, "guided_regex is not a parameter known here; remove it"),
        ({"truncation": "auto"}, "truncation is not supported: shorten the input, or set it to disabled"),
        ({"nonsense": 1}, "nonsense is not a parameter known here; remove it"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search', but only functions are supported"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0].defer_loading is not a parameter known here"),
        ({"include": [1]}, "include[0] is '1', but only 'message.output_text.logprobs' and 'reasoning."),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is not supported: reasoning is returned as text"),
        ({"text": {"verbosity": "high"}}, "text.verbosity is not supported"),
        ({"text": {"more": 1}}, "text.more is not known here; remove it"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference', but no items"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type is 'web_search_call', but only message,"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type is"),
        ({"input": [REASONING | {"encrypted_content": "x"}]}, "input[0].encrypted_content is not supported"),
        ({"input": [REASONING | {"content": [], "summary": [{}]}]}, "input[0].summary is given without content"),
        ({"input": [CALL | {"namespace": "x"}]}, "input[0].namespace is not known here; remove it"),
        ({"input": [SAID | {"content": [{"type": "output_text", "text": "b", "x": 1}]}]}, "input[0].content[0].x"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as refused:
        respond(**fields)
    assert refused.value.code is RowErrorCode.UNSUPPORTED_PARAMETER
    assert refused.value.message.startswith(message)
    assert refused.value.message.startswith(refused.value.param or "?")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input is empty; give some text"),
        ({"input": []}, "input is empty; give at least one item"),
        ({"input": 5}, "input must be a string or a list of items"),
        ({"input": [5]}, "input[0] must be an object"),
        ({"input": [{}]}, "input[0].type is missing; add it"),
        ({"input": [{"type": 5}]}, "input[0].type must be a string"),
        ({"input": [REASONING | {"content": []}]}, "input is empty; give at least one"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be one of user, assistant, system"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content is an empty list"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content must be a string or a list of text parts"),
        ({"input": [CALL | {"name": "a b"}]}, "input[0].name must have 1 to 64 letters"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments must be a string"),
        ({"input": [CALL | {"call_id": ""}]}, "input[0].call_id must have 1 to 256 characters"),
        ({"input": [{"type": "function_call_output", "call_id": "z", "output": ""}]}, "input[0].call_id is 'z'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0, but must be 1 or more"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens is -1, which leaves room for the answer, but "
         "max_output_tokens is not set; set it"),
        (
            {"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs and text.format are both set; remove one",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "tools": [FUNCTION]},
            "structured_outputs can't go with tools; use text.format",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens is 3, but max_output_tokens is 2; lower min_tokens"),
        ({"tools": [FUNCTION | {"parameters": {"type": "array"}}]}, 'tools[0].parameters must have the type "object"'),
        ({"tools": [FUNCTION, FUNCTION]}, "tools names the function 'f' twice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice must be none"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "messages"}},
            "tool_choice names the function 'messages', which is none of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format needs name: 1 to 64 letters, digits, _ or -"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": "b" * 99}}}}, "text.format has 12"),
        ({"text": "json"}, "text must be an object"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort is 'huge', but must be 'none', 'minimal'"),
        ({"top_logprobs": 2}, 'top_logprobs needs include: ["message.output_text.logprobs"]; add it'),
    ],
)  # fmt: skip
def test_an_invalid_body_is_refused_with_its_own_names(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as refused:
        respond(Limits(max_schema_bytes=100), **fields)
    assert refused.value.code is RowErrorCode.INVALID_REQUEST
    assert refused.value.message.startswith(message)


def test_each_unsupported_parameter_may_have_a_neutral_value() -> None:
    assert HINTS.keys() <= NO_CHANGE.keys()
    assert not NO_CHANGE.keys() & ResponsesBody.model_fields.keys()
    for name, neutral in NO_CHANGE.items():
        for value in (None, *neutral):
            assert dump_body(respond(**{name: value})) == dump_body(respond())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "role", "content", "text", "call_id", "output", "name", "arguments", "format", "effort", "x"]
    ), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KINDS = st.sampled_from(["message", "reasoning", "function_call", "function_call_output"])
ITEMS = st.lists(st.builds(lambda item, kind: {**item, "type": kind} if isinstance(item, dict) else item, JSON, KINDS))


@given(st.dictionaries(st.sampled_from([*ResponsesBody.model_fields, *NO_CHANGE, "x"]), JSON, max_size=3), ITEMS | JSON)
@pytest.mark.slow
def test_any_json_is_a_chat_or_a_row_error(fields: dict[str, Any], items: Any) -> None:
    try:
        body = parse_body(RESPONSES_URL, {"model": "m", "input": items, **fields})
    except RowError:
        return
    try:
        stored = dump_body(body)
    except ValueError:
        return  # half a surrogate pair
    assert load_body(RESPONSES_URL, stored) == body


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def set_by(response: Response) -> dict[str, Any]:
    return response.model_dump(exclude_unset=True, by_alias=True)


def completion(finish_reason: str, content: str | None, **message: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "refusal": None, **message}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }


def test_a_chat_response_becomes_a_response_with_items() -> None:
    tool_call = {"id": "call_8", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat_response = completion("tool_calls", "text", reasoning_content="hm", tool_calls=[tool_call])
    chat_response["usage"] = USAGE | {"completion_tokens_details": {"reasoning_tokens": 1}, "tokenmill_cached": True}
    body = respond(tools=[FUNCTION], max_output_tokens=9, metadata={"a": "b"}, text={"format": {"type": "json_object"}})
    response = to_response(chat_response, body)
    assert response["output"] == [
        {
            "id": "rs_7", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "id": "msg_7", "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "text", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_8", "type": "function_call", "status": "completed", "call_id": "call_8", "name": "f",
            "arguments": "{}",
        },
    ]  # fmt: skip
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 7,
        "tokenmill_cached": True,
    }
    assert (response["id"], response["created_at"], response["status"]) == ("resp_7", 5, "completed")
    assert (response["tools"], response["tool_choice"], response["store"]) == ([FUNCTION], "auto", False)
    assert (response["max_output_tokens"], response["metadata"]) == (9, {"a": "b"})
    assert response["text"] == {"format": {"type": "json_object"}}
    assert parse_body(RESPONSES_URL, {"model": "m", "input": response["output"]}), "its output is an input"
    del response["usage"]["tokenmill_cached"]
    assert set_by(Response.model_validate(response)) == response, "as OpenAI's client has it"


@pytest.mark.parametrize(
    ("finish_reason", "content", "status", "reason", "texts"),
    [
        ("stop", "", "completed", None, [""]),
        ("length", "te", "incomplete", "max_output_tokens", ["te"]),
        ("content_filter", None, "incomplete", "content_filter", []),
    ],
)
def test_an_incomplete_response_has_the_reason(
    finish_reason: str, content: str | None, status: str, reason: str | None, texts: list[str]
) -> None:
    response = to_response(completion(finish_reason, content), respond())
    assert (response["status"], (response["incomplete_details"] or {}).get("reason")) == (status, reason)
    assert [item["content"][0]["text"] for item in response["output"]] == texts
    assert {item["status"] for item in response["output"]} <= {status}
