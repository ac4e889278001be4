"""The verdicts of content policies in HTTP responses, complete and streamed, in each format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipeline.gateway.openapi.anthropic_schemas import AnthropicEvent, AnthropicMessage
from pipeline.gateway.openapi.completion_schemas import ChatCompletion, ChatCompletionChunk, Embeddings, TextCompletion
from pipeline.gateway.openapi.responses_schemas import ResponseObject
from schemas.requests.policy_report import ContentVerdict, PolicyReport
from schemas.settings.answers import AnswerOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.waiting import wait_for

FLAG = ContentVerdict("rules", "odd", "flag", "answer")
UNJUDGED = ContentVerdict("guard", "not judged", "flag", "prompt", failed=True)
ROUTE = ContentVerdict("rules", "medical", "route", "prompt", "big")
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
GENERATING: list[tuple[str, dict[str, Any]]] = [
    CHAT,
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
]
COMPLETE: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/responses": ResponseObject,
    "/v1/messages": AnthropicMessage,
    "/v1/embeddings": Embeddings,
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path_factory.mktemp("verdicts"), cache=AnswerOptions()) as harness:
        yield harness


def post(harness: HttpHarness, url: str, body: dict[str, Any], **more: Any) -> str:
    answer = harness.http().post(url, json={"model": "tiny", **body, **more})
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize(("url", "body"), [*GENERATING, ("/v1/embeddings", {"input": "hello"})])
def test_given_a_flagged_request_then_the_response_has_the_verdict(
    harness: HttpHarness, url: str, body: dict[str, Any]
) -> None:
    harness.worker.report = PolicyReport()
    plain = json.loads(post(harness, url, body))
    harness.worker.report = PolicyReport((FLAG,), 5, 1)
    response = json.loads(post(harness, url, body))
    TypeAdapter(COMPLETE[url]).validate_python(response)
    assert "tokenmill" not in plain
    assert response["tokenmill"] == {"content_policies": harness.worker.report.fields}
    assert response.keys() - plain.keys() == {"tokenmill"}


@pytest.mark.parametrize(("url", "body"), GENERATING)
def test_given_a_flagged_stream_then_its_end_has_the_verdict(
    harness: HttpHarness, url: str, body: dict[str, Any]
) -> None:
    harness.worker.report = PolicyReport((FLAG,), 5, 1)
    lines = post(harness, url, body, stream=True).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for event in events:
        if url == "/v1/messages":
            AnthropicEvent.model_validate(event)
        elif "chat" in url:
            ChatCompletionChunk.model_validate(event)
    found = [event for event in (event.get("response", event) for event in events) if "tokenmill" in event]
    assert [event["tokenmill"] for event in found] == [{"content_policies": harness.worker.report.fields}]


@pytest.mark.slow
def test_given_a_routed_response_or_one_that_was_not_judged_then_it_is_not_cached(
    harness: HttpHarness,
) -> None:
    url, body = CHAT
    more = {"temperature": 0, "tokenmill": {"cache": True}}

    def is_cached(max_tokens: int) -> bool:
        response = json.loads(post(harness, url, body, **more, max_tokens=max_tokens))
        assert response["tokenmill"] == {"content_policies": harness.worker.report.fields}
        return "tokenmill_cached" in response["usage"]

    for number, verdict in enumerate((ROUTE, UNJUDGED)):
        harness.worker.report = PolicyReport((verdict,))
        assert not any(is_cached(5 + number) for _ in range(3))
    harness.worker.report = PolicyReport((FLAG,))
    wait_for(lambda: is_cached(4), "the response is not cached")
