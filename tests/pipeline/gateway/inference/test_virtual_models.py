"""Virtual models over HTTP: which model answers, and where that is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect

from pipeline.lane.ports import LaneQueue
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import VirtualModels
from schemas.models import CatalogEntry
from schemas.virtual_models import VirtualModel
from schemas.workers.lane import HandBackEvent, Route
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.made_jobs import PIN
from tests.waiting import wait_for

HEADER = "x-tokenmill-model"
RULES: list[dict[str, Any]] = [
    {"model": "größe/7b", "when": {"prompt_tokens": {"min": 100}}},
    {"model": "versioned", "when": {"tools": True}},
    {"model": PIN.name},
]
AUTO = VirtualModel.model_validate({"name": "auto", "rules": RULES})
SHORT: list[Any] = [{"role": "user", "content": "hello"}]
LONG: list[Any] = [{"role": "user", "content": "word " * 200}]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    """A gateway with three models, which the same worker answers."""
    with run_http_harness(tmp_path) as harness:
        catalog = Catalog(harness.world.store)
        for name in ("größe/7b", "versioned"):
            entry = CatalogEntry(pin=PIN.model_copy(update={"name": name}), max_model_len=512)
            catalog.publish(entry.model_copy(update={"published_at": harness.world.clock.now()}))
        VirtualModels(harness.world.store).publish(AUTO)
        yield harness


def body(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": messages, "max_tokens": 2, **more}


def test_the_header_names_the_model_that_answers_and_the_body_the_requested_one(harness: HttpHarness) -> None:
    with harness.http() as http:
        for messages, served_by in ((SHORT, "tiny"), (LONG, "gr%C3%B6%C3%9Fe/7b")):
            whole = http.post("/v1/chat/completions", json=body(messages))
            assert (whole.headers[HEADER], whole.json()["model"]) == (served_by, "auto")
            streamed = http.post("/v1/chat/completions", json=body(messages, stream=True))
            assert streamed.headers[HEADER] == served_by
            first = json.loads(streamed.text.split("data: ", 1)[1].split("\n", 1)[0])
            assert first["model"] == "auto"
        plain = http.post("/v1/chat/completions", json=body(SHORT, model="versioned"))
        assert (plain.headers[HEADER], plain.json()["model"]) == ("versioned", "versioned")
        message = http.post("/v1/messages", json=body(LONG))
        assert (message.headers[HEADER], message.json()["model"]) == ("gr%C3%B6%C3%9Fe/7b", "auto")
        response = http.post("/v1/responses", json={"model": "auto", "input": "hello", "max_output_tokens": 16})
        assert (response.headers[HEADER], response.json()["model"]) == ("tiny", "auto")
        vectors = http.post("/v1/embeddings", json={"model": "auto", "input": "hello"})
        assert (vectors.headers[HEADER], vectors.json()["model"]) == ("tiny", "auto")
    asked = [request.body["model"] for request in harness.worker.requests.values()]
    assert asked == ["tiny", "tiny", "größe/7b", "größe/7b", "versioned", "größe/7b", "tiny", "tiny"]


def test_a_resumed_stream_and_a_websocket_name_it_too(harness: HttpHarness) -> None:
    with harness.http() as http:
        streamed = http.post("/v1/chat/completions", json=body(LONG, stream=True, tokenmill={"resume": 30}))
        name = streamed.headers["x-stream-id"]
        assert http.get(f"/v1/streams/{name}").headers[HEADER] == "gr%C3%B6%C3%9Fe/7b"
    with connect(harness.url.replace("http", "ws") + "/v1/stream") as socket:
        socket.send(json.dumps({"type": "request", "url": "/v1/chat/completions", "body": body(LONG)}))
        begin = json.loads(socket.recv())
    assert (begin["type"], begin["model"]) == ("begin", "größe/7b")


def test_virtual_models_are_listed(harness: HttpHarness) -> None:
    client = harness.client()
    assert {model.id for model in client.models.list()} == {"tiny", "größe/7b", "versioned", "auto"}
    found = client.models.retrieve("auto").model_dump()
    assert found["tokenmill"] == {"models": ["größe/7b", "versioned", "tiny"]}
    assert found["max_model_len"] == 512, "what any of its models can take"


@pytest.mark.slow
def test_only_a_models_own_name_has_a_tokenizer(harness: HttpHarness) -> None:
    with harness.http() as http:
        refused = http.post("/tokenize", json={"model": "auto", "prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        counted = http.post("/v1/messages/count_tokens", json={"model": "auto", "messages": LONG})
        assert counted.headers[HEADER] == "gr%C3%B6%C3%9Fe/7b", "a chat is counted by the model that would answer it"
    with pytest.raises(openai.NotFoundError, match="auto"):
        harness.client().chat.completions.create(**body(SHORT, model="other"))


@pytest.mark.slow
def test_a_served_model_takes_precedence_over_a_virtual_one_of_its_name(harness: HttpHarness) -> None:
    entry = CatalogEntry(pin=PIN.model_copy(update={"name": "auto"}), max_model_len=512)
    Catalog(harness.world.store).publish(entry.model_copy(update={"published_at": harness.world.clock.now()}))
    with harness.http() as http:
        assert http.post("/v1/chat/completions", json=body(LONG)).headers[HEADER] == "auto"
    assert [model.id for model in harness.client().models.list()].count("auto") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_to_which_a_content_policy_sends_the_request_is_the_one_that_answers(
    harness: HttpHarness, stream: bool
) -> None:
    harness.worker.stop_taking()
    side = harness.worker.lane.worker("judge")
    with harness.http() as http, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(http.post, "/v1/chat/completions", json=body(SHORT, stream=stream))
        (request,) = wait_for(lambda: side.take([LaneQueue(PIN.key)], 1, 0.1))
        side.emit([HandBackEvent(request.id, 1, 0, route=Route(PIN.key, "versioned"))])
        side.close()
        harness.worker.hold.clear()
        assert sent.result().headers[HEADER] == "versioned"
