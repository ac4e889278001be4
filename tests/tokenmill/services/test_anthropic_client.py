"""What Anthropic's own client does, with nothing changed but `base_url` and `api_key`, against `tokenmill serve`.

The tests run on one process. Each answer is also validated against its OpenAPI document.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, DefaultHttpxClient
from pydantic import BaseModel

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.gateway.http.api_keys import ApiKeys, Scope
from pipeline.ports import World
from schemas.requests.limits import RateLimits
from tests.pipeline.gateway.witness import Witness
from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for
from tests.workers.structured import tool_templates

pytestmark = pytest.mark.slow

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


LONG = 3_500
"""Requests that take many seconds, so that a cancellation comes before their end."""


class Order(BaseModel):
    """The form of a structured answer."""

    colour: Literal["red", "green"]


@dataclass
class ServedModel:
    """A server, its keys, and a client."""

    url: str
    keys: dict[str, str]
    client: Anthropic

    def with_key(self, name: str) -> Anthropic:
        return Anthropic(base_url=self.url, api_key=self.keys.get(name, name), max_retries=0, timeout=HANG_SECONDS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_folder: Any) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("served")
    template = folder / "tools.jinja"
    template.write_text(tool_templates.HERMES.replace("{{ t | tojson }}", "{{ t.function.name }}"))
    with FolderStore(folder / "data") as store:
        made = ApiKeys(World(store, SystemClock(), SystemRandomness(), store.scratch))
        keys = {
            "all": made.create("acme", tuple(Scope))[1],
            "slow": made.create("acme", tuple(Scope), limits=RateLimits(requests_per_minute=1))[1],
            "files": made.create("acme", (Scope.FILES,))[1],
        }
    processes = Processes(folder)
    with closing(processes):
        number = processes.start(
            "-m", "tokenmill", "serve", "--data", folder / "data", "--port", 0, "--threads", 1, "--dtype", "float32",
            "--model", f"tiny={model_folder}", "--chat-template", template,
        )  # fmt: skip
        url = processes.url(number)
        witness = Witness(httpx2.get(f"{url}/openapi.json", timeout=HANG_SECONDS).json())
        seen = DefaultHttpxClient(event_hooks={"response": [lambda answer: judge(witness, answer)]})
        yield ServedModel(
            url, keys, Anthropic(base_url=url, api_key=keys["all"], timeout=HANG_SECONDS, http_client=seen)
        )
        assert not witness.untrue, "\n".join(witness.untrue)
        processes.running[number].send_signal(signal.SIGTERM)
        assert processes.running[number].wait(HANG_SECONDS) == 0


def judge(witness: Witness, answer: httpx2.Response) -> None:
    request = answer.request
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    body = None if streamed else answer.read()
    answer.headers.pop("content-encoding", None)  # the client has decoded the body
    witness.look(request.method, request.url.path, answer.status_code, answer.headers, body)


def ask(number: int = 0, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"number {number}"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "extra_body": {"temperature": 0}, **more}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_stream_gives_the_message(served: ServedModel) -> None:
    whole = served.client.messages.create(**ask(), system="be brief")
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "tiny", "max_tokens")
    assert whole.usage.output_tokens == 8
    with served.client.messages.stream(**ask(), system=[{"type": "text", "text": "be brief"}]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert "content_block_delta" in kinds
    assert text_of(message) == text_of(whole)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    seen, given = message.usage, whole.usage
    assert seen.input_tokens + (seen.cache_read_input_tokens or 0) == (
        given.input_tokens + (given.cache_read_input_tokens or 0)
    )


def test_a_stop_sequence_ends_the_message_and_is_named(served: ServedModel) -> None:
    text = text_of(served.client.messages.create(**ask(1)))
    stop = text[2:4]
    message = served.client.messages.create(**ask(1), stop_sequences=["not there", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]
    with served.client.messages.stream(**ask(1), stop_sequences=[stop]) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_tools_are_called_and_their_results_sent_back(served: ServedModel) -> None:
    question = ask(2, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
    message = served.client.messages.create(**question)
    (call,) = message.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, message.stop_reason) == ("weather", "tool_use")
    assert call.input["city"] in ("Oslo", "Rome")
    with served.client.messages.stream(**question) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == call.input
    answer = served.client.messages.create(
        **{
            **question,
            "messages": [
                *question["messages"],
                message.to_param(),
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
            ],
            "tool_choice": {"type": "none"},
            "max_tokens": 8,
        }
    )
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.output_tokens


def test_tokens_are_counted_as_a_message_has_them(served: ServedModel) -> None:
    for prompt in ({"system": "be brief"}, {"tools": [WEATHER]}):
        asked = ask(8, **prompt)
        usage = served.client.messages.create(**asked).usage
        given = {name: asked[name] for name in ("model", "messages", *prompt)}
        counted = served.client.messages.count_tokens(**given).input_tokens
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is not a parameter known here"):
        served.client.messages.count_tokens(**given, extra_body={"max_tokens": 5})


def test_a_marked_prefix_is_written_once_and_read_from_the_cache(served: ServedModel) -> None:
    instructions: Any = [
        {"type": "text", "text": "Answer in rivers. " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    first = served.client.messages.create(**ask(41), system=instructions).usage
    again = served.client.messages.create(**ask(42), system=instructions).usage
    assert first.cache_creation_input_tokens
    assert again.cache_read_input_tokens
    assert again.cache_creation_input_tokens == 0
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens
    counted = served.client.messages.count_tokens(model="tiny", messages=ask(42)["messages"], system=instructions)
    assert again.input_tokens + again.cache_read_input_tokens == counted.input_tokens
    # Without a mark nothing is said to be written; the last turn alone is marked by the client's shortest form.
    assert served.client.messages.create(**ask(43)).usage.cache_creation_input_tokens == 0
    long = ask(messages=[{"role": "user", "content": "Name a lake. " * 20}], cache_control={"type": "ephemeral"})
    assert served.client.messages.create(**long).usage.cache_creation_input_tokens
    with served.client.messages.stream(**long) as stream:
        usage = stream.get_final_message().usage
    assert (usage.cache_creation_input_tokens, bool(usage.cache_read_input_tokens)) == (0, True)


def test_a_streams_options_are_refused_by_name(served: ServedModel) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(anthropic.BadRequestError, match="stream_options is not supported"):
            served.client.messages.create(**ask() | more | {"extra_body": {"stream_options": {"include_usage": False}}})


def test_a_structured_answer_is_parsed(served: ServedModel) -> None:
    message = served.client.messages.parse(**ask(3, max_tokens=64), output_format=Order)
    assert message.parsed_output is not None
    assert message.parsed_output.colour in ("red", "green")


def test_the_assistants_last_turn_is_continued(served: ServedModel) -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the message"}]
    whole = served.client.messages.create(**ask(messages=begun[:1], max_tokens=1))
    continued = served.client.messages.create(**ask(messages=begun))
    assert continued.usage.output_tokens == 8
    given = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert continued.usage.input_tokens + (continued.usage.cache_read_input_tokens or 0) > given


@pytest.mark.parametrize(
    ("key", "fields", "error", "kind", "code"),
    [
        ("wrong", {}, anthropic.AuthenticationError, "authentication_error", "invalid_api_key"),
        ("files", {}, anthropic.PermissionDeniedError, "permission_error", "missing_scope"),
        ("all", {"model": "none"}, anthropic.NotFoundError, "not_found_error", "model_not_found"),
        ("all", {"extra_body": {"n": 2}}, anthropic.BadRequestError, "invalid_request_error", "unsupported_parameter"),
        ("all", {"max_tokens": 5_000}, anthropic.BadRequestError, "invalid_request_error", "context_length_exceeded"),
    ],
)
def test_errors_are_those_that_the_client_knows(
    served: ServedModel, key: str, fields: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, code: str
) -> None:
    for send in (served.with_key(key).messages.create, streamed(served.with_key(key))):
        with pytest.raises(error) as refused:
            send(**ask(**fields))
        found = refused.value
        body: Any = found.body
        assert (found.type, found.error_code, body["type"]) == (kind, code, "error")
        assert found.request_id
        assert body["request_id"] == found.request_id


def streamed(client: Anthropic) -> Any:
    def send(**fields: Any) -> None:
        with client.messages.stream(**fields) as stream:
            stream.until_done()

    return send


def test_a_key_as_a_bearer_token_is_the_same(served: ServedModel) -> None:
    with Anthropic(base_url=served.url, auth_token=served.keys["all"], timeout=HANG_SECONDS) as client:
        assert client.messages.create(**ask()).role == "assistant"


def test_too_many_requests_are_a_rate_limit_error(served: ServedModel) -> None:
    client = served.with_key("slow")
    client.messages.create(**ask())
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages.create(**ask())
    assert refused.value.type == "rate_limit_error"
    assert int(refused.value.response.headers["retry-after"]) > 0


def request(name: str, number: int, **params: Any) -> Any:
    asked = ask(number, **params)
    extra = asked.pop("extra_body")
    return {"custom_id": name, "params": {**asked, **extra}}


def ended(client: Anthropic, batch_id: str) -> Any:
    def find() -> Any:
        batch = client.messages.batches.retrieve(batch_id)
        return batch if batch.processing_status == "ended" else None

    return wait_for(find, "the batch did not end")


def test_a_batch_gives_the_messages_of_single_requests(served: ServedModel) -> None:
    batches = served.client.messages.batches
    made = batches.create(
        requests=[
            request("first", 4), request("second", 5, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=200),
            request("wrong", 6, max_tokens=0), request("unserved", 7, model="none"),
        ]
    )  # fmt: skip
    assert (made.type, made.results_url, made.ended_at) == ("message_batch", None, None)
    batch = ended(served.client, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled, counts.expired) == (2, 2, 0, 0, 0)
    results: dict[str, Any] = {line.custom_id: line.result for line in batches.results(batch.id)}
    assert {name: result.type for name, result in results.items()} == {
        "first": "succeeded", "second": "succeeded", "wrong": "errored", "unserved": "errored"
    }  # fmt: skip
    assert text_of(results["first"].message) == text_of(served.client.messages.create(**ask(4)))
    assert results["second"].message.content[0].name == "weather"
    assert "max_tokens" in results["wrong"].error.error.message
    assert results["unserved"].error.error.type == "not_found_error"


def test_batches_are_listed_in_pages(served: ServedModel) -> None:
    batches = served.client.messages.batches
    made = [batches.create(requests=[request("a", number)]).id for number in range(3)]
    page = batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
    assert page.get_next_page().data[0].id == made[0]
    back = batches.list(limit=2, before_id=made[0])
    assert [batch.id for batch in back.data] == [made[2], made[1]]
    assert [batch.id for batch in batches.list(limit=1)][:3] == made[::-1], "and the rest by itself"


def test_a_cancelled_batch_ends_and_a_deleted_one_has_no_results(served: ServedModel) -> None:
    batches = served.client.messages.batches
    made = batches.create(requests=[request(f"r{number}", number, max_tokens=100) for number in range(LONG)])
    wait_for(lambda: sum(batches.retrieve(made.id).request_counts.model_dump().values()), "it is not planned")
    cancelled = batches.cancel(made.id)
    assert cancelled.processing_status == "canceling"
    assert cancelled.cancel_initiated_at is not None
    counts = ended(served.client, made.id).request_counts
    assert counts.canceled
    assert counts.canceled + counts.succeeded == LONG
    assert {line.result.type for line in batches.results(made.id)} <= {"canceled", "succeeded"}
    assert batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.AnthropicError, match="batch"):
        batches.results(made.id)
    assert batches.retrieve(made.id).archived_at is not None


def test_batches_refuse_what_no_result_could_show(served: ServedModel) -> None:
    batches = served.client.messages.batches
    with pytest.raises(anthropic.BadRequestError, match="as is that of another request"):
        batches.create(requests=[request("same", 1), request("same", 2)])
    with pytest.raises(anthropic.BadRequestError, match="custom_id"):
        batches.create(requests=[request("no blanks", 1)])
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve("job-none")
