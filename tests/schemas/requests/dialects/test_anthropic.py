"""Requests to Anthropic's Messages API become chats, and chat responses become its messages."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest

from schemas.requests.dialects.anthropic.body import ANTHROPIC, MESSAGES_URL, MessagesBody, _add, _with_content
from schemas.requests.dialects.anthropic.response import usage_of
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, dump_body, load_body, parse_body
from schemas.requests.request_key import AnswerContext, request_key, stored_body

HELLO = [{"role": "user", "content": "hi"}]
CACHED = {"type": "ephemeral"}
MARK: Any = {"cache_control": CACHED}
TOOL = {"name": "weather", "description": "tells it", "input_schema": {"type": "object"}}
INVALID, UNSUPPORTED = RowErrorCode.INVALID_REQUEST, RowErrorCode.UNSUPPORTED_PARAMETER


def read(**fields: Any) -> ChatBody:
    body = parse_body(MESSAGES_URL, {"model": "m", "max_tokens": 4_096, "messages": HELLO, **fields})
    assert isinstance(body, ChatBody)
    assert load_body(MESSAGES_URL, dump_body(body)) == body, "a shard holds it as it is"
    return body


def dumped(body: ChatBody) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(dump_body(body))
    return found


def text(given: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": given, **more}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", **fields}


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"at": "Oslo"}}]}


def test_plain_fields_are_those_of_a_chat() -> None:
    body = read(
        system="be short", temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"], metadata={"user_id": "u"},
        service_tier="auto",
    )  # fmt: skip
    assert dumped(body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
        "max_tokens": 4_096,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["END"],
        "user": "u",
    }


def test_blocks_become_parts_and_turns_of_one_role_one_message() -> None:
    body = read(
        system=[text("a", cache_control=CACHED), text("b")],
        messages=[*HELLO, {"role": "user", "content": [text("one"), text("two", citations=None)]}],
    )
    assert [message.text for message in body.messages] == ["a\nb", "hi\none\ntwo"]


def test_marks_become_places_in_the_chat() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}

    def places(**fields: Any) -> list[tuple[int, int, int]]:
        return [(mark.messages, mark.parts, mark.ttl) for mark in read(**fields).cache_breakpoints]

    both = [text("a", cache_control=hour), text("b", cache_control=CACHED)]
    assert places(system=both) == [(0, 1, 3_600), (1, 0, 300)]
    # turns of one role are one message; a mark on its last part ends behind it
    turns = [{"role": "user", "content": [text("a"), text("b", cache_control=CACHED)]}]
    assert places(messages=turns) == [(1, 0, 300)]
    assert places(messages=[*turns, *HELLO]) == [(0, 2, 300)]
    # of one place the longest time counts; nothing is marked twice
    assert places(messages=turns, cache_control=hour) == [(1, 0, 3_600)]
    # tools stand before the messages, or behind the system's text
    marked = [{**TOOL, "cache_control": CACHED}]
    assert places(tools=marked) == [(0, 0, 300)]
    assert places(tools=marked, system="s") == [(1, 0, 300)]
    # a call ends its message, a result is one
    call = {"role": "assistant", "content": [text("hm", cache_control=hour), {**CALL["content"][0], **MARK}]}
    answer = {"role": "user", "content": [result(content=[text("a", **MARK), text("b")], **MARK), text("so?")]}
    assert places(messages=[*HELLO, call, answer]) == [(1, 1, 3_600), (2, 0, 300), (2, 1, 300), (3, 0, 300)]
    stored = dump_body(read(system=both))
    assert load_body(MESSAGES_URL, stored) == read(system=both)


def test_marks_change_no_answer_and_are_stored() -> None:
    plain, marked, context = read(), read(**MARK), AnswerContext("weights", 10)
    assert request_key(MESSAGES_URL, plain, context) == request_key(MESSAGES_URL, marked, context)
    assert b"cache_breakpoints" in stored_body(MESSAGES_URL, marked)
    assert b"cache_breakpoints" not in stored_body(MESSAGES_URL, plain)


def test_the_usage_is_split_by_what_the_cache_had() -> None:
    details = {"cached_tokens": 32, "cache_write_tokens": 64}
    usage = usage_of({"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": details})
    assert usage == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 64,
        "cache_read_input_tokens": 32,
        "output_tokens": 5,
    }


def test_a_tools_round_trip_is_that_of_a_chat() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"role": "assistant", "content": [thinking, text("let me see"), *CALL["content"]]}
    results = {"role": "user", "content": [result(content=[text("rain")]), text("and tomorrow?")]}
    body = dumped(read(messages=[*HELLO, said, results], tools=[TOOL]))
    function = {"name": "weather", "arguments": '{"at":"Oslo"}'}
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t", "content": "rain"},
        {"role": "user", "content": "and tomorrow?"},
    ]
    named = {"name": "weather", "description": "tells it", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": named}]


def test_the_model_sees_that_a_tool_failed() -> None:
    turn = {"role": "user", "content": [result(content="no network", is_error=True)]}
    assert read(messages=[*HELLO, CALL, turn]).messages[-1].text == "Error: no network"
    turn = {"role": "user", "content": [result()]}
    assert read(messages=[*HELLO, CALL, turn]).messages[-1].text == ""


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tool_choices(choice: dict[str, Any], fields: dict[str, Any]) -> None:
    body = dumped(read(tools=[TOOL], tool_choice=choice))
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == fields


def test_a_conversation_that_ends_with_the_assistant_is_continued() -> None:
    body = read(messages=[*HELLO, {"role": "assistant", "content": "The sun is"}])
    assert (body.continue_final_message, body.add_generation_prompt) == (True, False)
    assert not read().continue_final_message


@pytest.mark.parametrize(
    ("thinking", "fields"),
    [
        ({"type": "enabled", "budget_tokens": 1_024}, {"enable_thinking": True, "thinking_token_budget": 1_024}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking(thinking: dict[str, Any], fields: dict[str, Any]) -> None:
    body = dumped(read(thinking=thinking))
    assert {name: body[name] for name in ("enable_thinking", "thinking_token_budget") if name in body} == fields


def test_the_form_of_the_answer_and_the_effort() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    body = read(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert body.reasoning_effort == "low"
    assert body.response_format is not None
    assert body.response_format.schema_of_answer == schema


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({"max_tokens": None}, INVALID, "max_tokens", "is null"),
        ({"max_tokens": 0}, INVALID, "max_tokens", "must be 1 or more"),
        ({"temperature": 1.5}, INVALID, "temperature", "must be 1 or less"),
        ({"n": 2}, UNSUPPORTED, "n", "not a parameter known here"),
        ({"mcp_servers": [{}]}, UNSUPPORTED, "mcp_servers", "offer tools of your own"),
        ({"container": "c"}, UNSUPPORTED, "container", "no tools run on this server"),
        ({"service_tier": "priority"}, UNSUPPORTED, "service_tier", "standard_only"),
        ({"output_format": {}}, UNSUPPORTED, "output_format", "use output_config.format"),
        ({"stop_sequences": ["a"] * 17}, INVALID, "stop_sequences", "stop_sequences asks for 17"),
        ({"system": [{"type": "image"}]}, UNSUPPORTED, "system", "read text only"),
        ({"messages": []}, INVALID, "messages", "is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, INVALID, "messages[0].content", "a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            UNSUPPORTED, "messages[0].content", "has the type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            UNSUPPORTED, "messages[0].content", "give the document's text",
        ),
        (
            {"messages": [{"role": "user", "content": [text("a", citations=[{}])]}]},
            UNSUPPORTED, "messages[0].content[0].text.citations", "models here cite nothing",
        ),
        ({"messages": [{"role": "user", "content": CALL["content"]}]}, INVALID, "messages[0].content[0]", "assistant"),
        (
            {"messages": [*HELLO, CALL, {"role": "user", "content": [text("a"), result()]}]},
            INVALID, "messages[2].content[1]", "put results first",
        ),
        ({"messages": [{"role": "user", "content": [result()]}]}, INVALID, "messages[0]", "no tool_use before it"),
        ({"messages": [*HELLO, CALL]}, INVALID, "messages[1]", "tool_result"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, UNSUPPORTED, "tools", "a tool of your own"),
        ({"tools": [TOOL, TOOL]}, INVALID, "tools", "twice"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "string"}}]},
            INVALID, "tools[0].input_schema", "tools[0].input_schema must have the type",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": ""}]},
            INVALID, "messages[1].content", "messages[1].content needs text",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]},
            INVALID, "messages[1].content", "messages[1].content needs text",
        ),
        ({"tools": [{**TOOL, "defer_loading": True}]}, UNSUPPORTED, "tools[0].defer_loading", "no search for tools"),
        ({"tools": [{**TOOL, "defer_loading": 0}]}, UNSUPPORTED, "tools[0].defer_loading", "no search for tools"),
        ({"tool_choice": {"type": "tool"}}, INVALID, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "any"}}, INVALID, "tool_choice", "needs tools"),
        ({"thinking": {"type": "enabled"}}, INVALID, "thinking.budget_tokens", "is missing"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, INVALID, "thinking.budget_tokens", "enabled only"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 4_096}},
            INVALID, "thinking.budget_tokens", "less than max_tokens",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, INVALID, "cache_control.ttl", "'5m' or '1h'"),
        ({"system": [text("a", cache_control=CACHED)] * 5}, INVALID, "cache_control", "5 times, but at most 4"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_fix(
    fields: dict[str, Any], code: RowErrorCode, param: str, message: str
) -> None:
    with pytest.raises(RowError) as refused:
        read(**fields)
    assert (refused.value.code, refused.value.param) == (code, param), refused.value.message
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("param", "fields", "message", "named", "said"),
    [
        ("stop", None, "stop holds stop", "stop_sequences", "stop_sequences holds stop"),
        ("messages", None, "the template says: please stop here", "messages", "the template says: please stop here"),
        (None, None, "stop is no model", None, "stop is no model"),
        ("stop_token_ids", None, "stop_token_ids asks for 5", "stop_token_ids", "stop_token_ids asks for 5"),
        (
            "tools", ["tools", "tools[0].function.parameters"],
            "tools can't be compiled: tools[0].function.parameters.properties.stop: stop is wrong",
            "tools", "tools can't be compiled: tools[0].input_schema.properties.stop: stop is wrong",
        ),
        (
            "response_format", ["response_format", "response_format.json_schema.schema"],
            "response_format can't be compiled: response_format.json_schema.schema.items: bad",
            "output_config.format", "output_config.format can't be compiled: output_config.format.schema.items: bad",
        ),
        (
            None, ["stop", "reasoning_effort"], "'a' and stop and reasoning_effort are set; remove stop",
            None, "'a' and stop_sequences and output_config.effort are set; remove stop",
        ),
    ],
)  # fmt: skip
def test_the_names_of_the_fields_that_a_message_names_are_changed_and_nothing_else(
    param: str | None, fields: list[str] | None, message: str, named: str | None, said: str
) -> None:
    error = ANTHROPIC.translate(RowError(INVALID, message, param=param, fields=fields))
    assert (error.param, error.message) == (named, said)
    assert all(name in said for name in error.fields)


def test_a_turn_without_text_may_follow_one_with_text() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "so"}, {"role": "assistant", "content": []}]
    assert read(messages=turns).continue_final_message


def chat_response(**choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "hello", "refusal": None, **choice.pop("message", {})}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    made = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", **choice}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [made], "usage": usage}


def test_a_message_is_one_for_the_official_client() -> None:
    made = ANTHROPIC.response(chat_response(message={"reasoning_content": "hm"}), read())
    message = anthropic.types.Message.model_validate(made, strict=True)
    thinking, said = message.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert isinstance(said, anthropic.types.TextBlock)
    assert (message.id, thinking.thinking, said.text, message.stop_reason) == ("msg_1", "hm", "hello", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 3, 4)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 2


def test_tool_calls_become_blocks_that_can_be_sent_back() -> None:
    call = {"id": "t", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Oslo"}'}}
    response = chat_response(message={"content": None, "tool_calls": [call]}, finish_reason="tool_calls")
    message = ANTHROPIC.response(response, read())
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == CALL["content"]
    turns = [*HELLO, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result()]}]
    MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": turns})


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
    ],
)
def test_stop_reasons(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = ANTHROPIC.response(chat_response(**choice), read())
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_arguments_that_were_cut_off_are_empty() -> None:
    call = {"id": "t", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Os'}}
    message = ANTHROPIC.response(chat_response(message={"tool_calls": [call]}, finish_reason="length"), read())
    assert message["content"][-1]["input"] == {}


def test_turns_of_one_role_are_collected_in_the_same_lists() -> None:
    """Copying them for each turn would make the whole quadratic."""
    made: list[dict[str, Any]] = []
    found: list[list[int]] = []
    for at in range(3):
        turn = {"role": "assistant", "tool_calls": [{"id": f"c{at}"}], "reasoning_content": [f"t{at}", ""]}
        _add(made, turn, ())
        found.append([id(made[0][name]) for name in ("content", "tool_calls", "reasoning_content")])
    assert found[0] == found[1] == found[2]
    (message,) = map(_with_content, made)
    assert message["reasoning_content"] == "t0\nt1\nt2"
    assert [call["id"] for call in message["tool_calls"]] == ["c0", "c1", "c2"]
