"""/v1/responses, through OpenAI's client and over raw HTTP; and the events of its streams."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.request_builder import InferenceRequest, InferenceSettings
from pipeline.gateway.inference.responses import StreamSettings
from pipeline.gateway.inference.responses_events import ResponsesEvents
from schemas.jobs.job import Tier
from schemas.requests.dialects.openai_responses import RESPONSES_URL
from schemas.requests.parsing import parse_body
from schemas.settings.answers import AnswerOptions
from schemas.workers.lane import EndEvent, LaneEvent, LaneRequest, TokensEvent
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
HELLO: Any = {"model": "tiny", "input": "hello"}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    inference = InferenceSettings(caps={Tier.INTERACTIVE: 100_000})
    with run_http_harness(tmp_path, inference=inference) as harness:
        yield harness


@pytest.mark.slow
def test_a_complete_response_of_a_chat(harness: HttpHarness) -> None:
    response = harness.client().responses.create(**HELLO, max_output_tokens=4, instructions="count")
    assert (response.output_text, response.status) == (words(4), "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 4, 7)
    assert (response.model, response.model_dump()["store"]) == ("tiny", False)
    (request,) = harness.worker.requests.values()
    assert request.url == "/v1/chat/completions", "the lane carries chats"
    assert request.body["messages"][0] == {"role": "system", "content": "count"}


def test_a_stream_has_openais_events(harness: HttpHarness) -> None:
    more: Any = {"include": ["message.output_text.logprobs"]}
    events = list(harness.client().responses.create(**HELLO, max_output_tokens=3, stream=True, **more))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == words(3)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == words(3)
    (message,) = last.response.output
    assert message.type == "message"
    assert len(message.content[0].logprobs or ()) == 3
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == 6
    ids = {event.response.id for event in events if "response" in event.model_fields_set}
    assert len(ids) == 1, "one response"


def test_each_event_is_named_and_an_interrupted_stream_is_resumed(harness: HttpHarness) -> None:
    with harness.http() as http:
        answer = http.post(RESPONSES_URL, json=HELLO | {"stream": True, "tokenmill": {"resume": 30}})
        parts = re.findall(r"id: (\d+)\nevent: (\S+)\ndata: (.*)\n\n", answer.text)
        assert "".join(f"id: {n}\nevent: {name}\ndata: {data}\n\n" for n, name, data in parts) == answer.text
        assert all(json.loads(data)["type"] == name for _, name, data in parts)
        rest = http.get(f"/v1/streams/{answer.headers['x-stream-id']}", headers={"Last-Event-ID": "3"})
    assert rest.text == answer.text.partition("id: 4\n")[1] + answer.text.partition("id: 4\n")[2]


@pytest.mark.parametrize("resume", [0, 5])
@pytest.mark.slow
def test_the_last_events_may_be_larger_than_the_streams_buffer(tmp_path: Path, resume: float) -> None:
    with run_http_harness(tmp_path, streams=StreamSettings(buffer_bytes=64 << 10)) as harness:
        harness.worker.text = "x" * 2_000
        more: Any = {"extra_body": {"tokenmill": {"resume": resume}}}
        events = list(harness.client().responses.create(**HELLO, max_output_tokens=20, stream=True, **more))
        assert events[-1].type == "response.incomplete"
        assert len(events[-1].response.output_text) == 40_000, "which the last four events have, and the deltas once"


@pytest.mark.slow
def test_errors_before_and_during_a_stream(harness: HttpHarness) -> None:
    client = harness.client()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", input="refuse", stream=stream)
        assert refused.value.code == "context_length_exceeded"
    events = client.responses.create(model="tiny", input="break", stream=True)
    types: list[str] = []
    with pytest.raises(openai.APIError, match="it broke"):
        types.extend(event.type for event in events)
    with harness.http() as http:
        text = http.post(RESPONSES_URL, json={"model": "tiny", "input": "break", "stream": True}).text
    last, failed = [json.loads(data) for data in re.findall(r"^data: (.*)$", text, re.MULTILINE)][-2:]
    assert (last["type"], last["code"], last["error"]["type"]) == ("error", "engine_error", "server_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"][0]["content"][0]["text"] == words(2), "what came before"
    assert "[DONE]" not in text
    assert [EVENT.validate_python(event).type for event in (last, failed)] == ["error", "response.failed"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"max_output_tokens": 100_001}, 400, "max_output_tokens"),
        ({"store": True}, 400, "store"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"stream": True, "stream_options": {"include_usage": True}}, 400, "stream_options.include_usage"),
        ({"input": "a \ud800"}, 400, None),
    ],
)
@pytest.mark.slow
def test_a_refusal_names_the_field(
    harness: HttpHarness, fields: dict[str, Any], status: int, param: str | None
) -> None:
    with harness.http() as http:
        answer = http.post(
            RESPONSES_URL, content=json.dumps(HELLO | fields), headers={"Content-Type": "application/json"}
        )
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.slow
def test_a_keys_cap_has_the_name_of_the_api_and_responses_are_not_kept(harness: HttpHarness) -> None:
    _, key = harness.keys.create("acme", tuple(Scope), max_tokens=7)
    client = harness.client(key, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=r"max_output_tokens is 8, but this API key allows at most 7"):
        client.responses.create(**HELLO, max_output_tokens=8)
    made = client.responses.create(**HELLO)
    assert made.output_text == words(7)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_cached_response_is_that_of_the_same_chat(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, cache=AnswerOptions(always=True)) as harness:
        client = harness.client()
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=4, temperature=0
        )
        fields: Any = HELLO | {"max_output_tokens": 4, "temperature": 0}
        made = client.responses.create(**fields)
        assert (made.output_text, len(harness.worker.requests)) == (chat.choices[0].message.content, 1)
        assert made.usage is not None
        assert made.usage.model_extra == {"tokenmill_cached": True}
        *_, last = client.responses.create(**fields, stream=True)
        assert last.type == "response.incomplete"
        assert (last.response.output_text, len(harness.worker.requests)) == (made.output_text, 1)


# -- events that the words of the harness's worker don't have


class Stream:
    """The events of a response with these events of the lane."""

    def __init__(self, *events: LaneEvent, **fields: Any) -> None:
        body = parse_body(RESPONSES_URL, {"model": "m", "input": "hi", **fields})
        lane = LaneRequest("http-7", "m", {})
        converter = ResponsesEvents(InferenceRequest(lane, RESPONSES_URL, body, "m", "m", stream=True), 5)
        sent = [one for event in events for one in converter.convert(event)]
        self.events: list[dict[str, Any]] = [json.loads(one.data) for one in sent]
        assert [one.name for one in sent] == self.types
        assert [event["sequence_number"] for event in self.events] == list(range(len(sent)))

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def output(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.events[-1]["response"]["output"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def check(self) -> Stream:
        """Each event is one of OpenAI's; deltas add up to what is done, and items that are done to the output."""
        for event in self.events:
            assert EVENT.validate_python(event).type == event["type"]
        for part, whole in (
            ("output_text", "text"),
            ("reasoning_text", "text"),
            ("function_call_arguments", "arguments"),
        ):
            for done in self.of(f"response.{part}.done"):
                deltas = [one for one in self.of(f"response.{part}.delta") if one["item_id"] == done["item_id"]]
                assert "".join(one["delta"] for one in deltas) == done[whole]
        done = {event["output_index"]: event["item"] for event in self.of("response.output_item.done")}
        assert [done[index] for index in sorted(done)] == self.output
        added = [event["output_index"] for event in self.of("response.output_item.added")]
        assert added == list(range(len(self.output)))
        return self


def tokens(text: str = "", reasoning: str = "", **more: Any) -> LaneEvent:
    return TokensEvent("http-7", 1, 0, 0, (), text, reasoning=reasoning, **more)


def end(finish_reason: str, content: str | None = None, **message: Any) -> EndEvent:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choice = {"message": {"content": content, **message}, "finish_reason": finish_reason, "logprobs": None}
    return EndEvent("http-7", 1, 0, {"id": "chatcmpl-1", "created": 1, "choices": [choice], "usage": usage})


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


TOOLS = {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]}
LOGPROBS = [{"token": f"t{n}", "logprob": -0.5, "bytes": [], "top_logprobs": []} for n in range(4)]


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    stream = Stream(
        tokens(reasoning="so"),
        tokens(reasoning=" it is"),
        tokens("I call"),
        tokens(tool_calls=[call(0, "", "f")]),
        tokens(tool_calls=[call(0, '{"a"'), ]),
        tokens(tool_calls=[call(0, ": 1}"), call(1, "{}", "g")]),
        end("tool_calls", "I call"),
        **TOOLS,
    ).check()  # fmt: skip
    assert [item["type"] for item in stream.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in stream.output] == ["completed"] * 4
    assert stream.output[0]["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in stream.output[2:]] == [
        ("call_0", "f", '{"a": 1}'),
        ("call_1", "g", "{}"),
    ]
    assert stream.types[-1] == "response.completed"
    types = stream.types
    assert types.index("response.reasoning_text.done") < types.index("response.output_text.delta")
    first_call = types.index("response.function_call_arguments.done")
    assert types[first_call + 1 : first_call + 3] == ["response.output_item.done", "response.output_item.added"]


def test_text_after_a_call_goes_on_with_the_text_item() -> None:
    stream = Stream(
        tokens("a"), tokens(tool_calls=[call(0, "{}", "f")]), tokens("b"), end("stop", "ab"), **TOOLS
    ).check()
    assert [item["type"] for item in stream.output] == ["message", "function_call"]
    assert stream.output[0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_each_thought_is_an_item_and_the_text_goes_on(reason: str) -> None:
    stream = Stream(
        tokens(reasoning="one"), tokens("a"), tokens(reasoning="two"), tokens(reasoning="!"), tokens("b"),
        tokens(reasoning="three"), tokens("c"), end(reason, "abc", reasoning_content="onetwo!three"),
    ).check()  # fmt: skip
    kinds = ["reasoning", "message", "reasoning", "reasoning"]
    assert [(item["type"], item["content"][0]["text"]) for item in stream.output] == list(
        zip(kinds, ["one", "abc", "two!", "three"], strict=True)
    )
    assert len({item["id"] for item in stream.output}) == 4
    cut_off = "incomplete" if reason == "length" else "completed"
    assert [item["status"] for item in stream.output] == ["completed", cut_off, "completed", "completed"]
    closed: set[int] = set()
    for event in stream.events:
        if event["type"].endswith(".delta"):
            assert event["output_index"] not in closed, "an item that is done doesn't grow"
        if event["type"] == "response.output_item.done":
            closed.add(event["output_index"])


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    stream = Stream(tokens("a"), tokens(tool_calls=[call(0, '{"a', "f")]), end("length", "a"), **TOOLS).check()
    assert [item["status"] for item in stream.output] == ["completed", "incomplete"]
    assert stream.events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_empty_answer_is_an_empty_text_and_a_withheld_one_nothing() -> None:
    empty = Stream(end("stop", "")).check()
    assert empty.output[0]["content"][0]["text"] == ""
    withheld = Stream(end("content_filter")).check()
    assert (withheld.output, withheld.types[-1]) == ([], "response.incomplete")


def test_the_text_has_the_log_probabilities_of_all_tokens() -> None:
    """A text's delta also has those of tokens whose text was held back before it."""
    stream = Stream(
        tokens(logprobs={"content": LOGPROBS[:1]}),
        tokens("a", logprobs={"content": LOGPROBS[1:2]}),
        tokens("b", logprobs={"content": LOGPROBS[2:3]}),
        tokens(logprobs={"content": LOGPROBS[3:]}),
        end("stop", "ab"),
        include=["message.output_text.logprobs"],
    ).check()
    assert stream.output[0]["content"][0]["logprobs"] == LOGPROBS
    assert [event["logprobs"] for event in stream.of("response.output_text.delta")] == [LOGPROBS[:2], LOGPROBS[2:3]]


def test_an_items_cost_does_not_grow_with_the_items_before_it() -> None:
    body = parse_body(RESPONSES_URL, {"model": "m", "input": "hi", **TOOLS})
    inference = InferenceRequest(LaneRequest("http-7", "m", {}), RESPONSES_URL, body, "m", "m", stream=True)
    converter = ResponsesEvents(inference, 5)
    costs: list[int] = []
    for at in range(200):
        calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            converter.convert(tokens(reasoning="a"))
            converter.convert(tokens("b", tool_calls=[call(at, "{}", "f")]))
        finally:
            sys.setprofile(None)
        costs.append(calls)
    assert min(costs[10:30]) == min(costs[-20:]), "the least: a garbage collection may call something in between"
