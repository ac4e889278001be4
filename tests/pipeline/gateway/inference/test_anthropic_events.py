"""The events of a message's stream: blocks of reasoning, text and calls, one after another."""

from __future__ import annotations

from typing import Any

import orjson

from pipeline.gateway.inference.anthropic_events import AnthropicEvents
from pipeline.gateway.inference.request_builder import InferenceRequest
from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.parsing import parse_body
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest, TokensEvent

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def converter() -> AnthropicEvents:
    chat = parse_body(MESSAGES_URL, BODY)
    return AnthropicEvents(InferenceRequest(LaneRequest("http-1", "m", {}), MESSAGES_URL, chat, "m", "m"), 0)


def test_each_block_is_closed_before_the_next_begins() -> None:
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":1}'}}
    events = [
        TokensEvent("http-1", 1, 0, reasoning="hm"),
        TokensEvent("http-1", 1, 1, reasoning="!", text="so"),
        TokensEvent("http-1", 1, 2, tool_calls=[call]),
        TokensEvent("http-1", 1, 3, tool_calls=[more]),
        EndEvent("http-1", 1, 4, {"choices": [{"finish_reason": "tool_calls"}], "usage": USAGE}),
    ]
    made = converter()
    sent = [sent for event in events for sent in made.convert(event)]
    data: list[dict[str, Any]] = [orjson.loads(one.data) for one in sent]
    assert [one.name for one in sent] == [one["type"] for one in data]
    steps = [(one["type"].removeprefix("content_block_"), one.get("index")) for one in data]
    assert steps == [
        ("message_start", None), ("ping", None),
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("stop", 2),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert [one["delta"] for one in data if one["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "thinking_delta", "thinking": "!"},
        {"type": "text_delta", "text": "so"},
        {"type": "input_json_delta", "partial_json": '{"a":1}'},
    ]
    assert data[-2]["delta"]["stop_reason"] == "tool_use"
    assert (data[-2]["usage"]["input_tokens"], data[-2]["usage"]["cache_read_input_tokens"]) == (3, 2)


def test_a_further_thought_and_the_text_after_it_are_blocks_of_their_own() -> None:
    events = [
        TokensEvent("http-1", 1, 0, reasoning="one"),
        TokensEvent("http-1", 1, 1, text="a"),
        TokensEvent("http-1", 1, 2, reasoning="two"),
        TokensEvent("http-1", 1, 3, text="b"),
        EndEvent("http-1", 1, 4, {"choices": [{"finish_reason": "stop"}], "usage": USAGE}),
    ]
    made = converter()
    data: list[dict[str, Any]] = [orjson.loads(sent.data) for event in events for sent in made.convert(event)]
    blocks = [(one["index"], one["type"].removeprefix("content_block_")) for one in data if "index" in one]
    assert blocks == [(index, step) for index in range(4) for step in ("start", "delta", "stop")]
    started = [one["content_block"]["type"] for one in data if one["type"] == "content_block_start"]
    assert started == ["thinking", "text", "thinking", "text"]


def test_an_error_is_the_last_event() -> None:
    (sent,) = converter().convert(ErrorEvent("http-1", 1, 0, "engine_error", "it broke"))
    assert sent.name == "error"
    assert orjson.loads(sent.data)["error"]["type"] == "api_error"
