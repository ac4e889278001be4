"""Interactive requests, through OpenAI's client and over raw HTTP: complete, streamed, interrupted, resumed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic._streaming
import openai
import openai._streaming
import pytest
from openai import AsyncOpenAI
from websockets.exceptions import InvalidStatus

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.request_builder import InferenceSettings
from pipeline.gateway.inference.responses import StreamSettings
from pipeline.gateway.inference.sse import KEEP_ALIVE
from schemas.jobs.job import Tier
from schemas.settings.gateway import GatewayOptions
from schemas.workers.lane import LaneRequest
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.waiting import HANG_SECONDS, wait_for

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path, inference=InferenceSettings(caps={Tier.INTERACTIVE: 100_000})) as harness:
        yield harness


def test_a_complete_response(harness: HttpHarness) -> None:
    client = harness.client()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, n=2)
    assert [choice.message.content for choice in answer.choices] == [words(4), words(4, 1)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    text = client.completions.create(model="tiny", prompt="Once", max_tokens=3)
    assert (text.choices[0].text, text.choices[0].finish_reason) == (words(3), "length")
    (first, _) = harness.worker.requests.values()
    assert (first.tier, first.tenant, first.url) == (Tier.INTERACTIVE, "default", CHAT)
    assert len(harness.bridge) == 0


def test_a_stream_has_openais_format(harness: HttpHarness) -> None:
    client = harness.client()
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=4, n=2, stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in mine) == words(4, index)
        assert [choice.finish_reason for choice in mine] == [None] * 5 + ["length"]
        assert all(choice.logprobs is not None for choice in mine[1:-1])
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    plain = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert all(chunk.usage is None for chunk in plain)
    texts = list(client.completions.create(model="tiny", prompt="Once", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in texts) == words(3)
    assert texts[-1].choices[0].finish_reason == "length"


@pytest.mark.slow
def test_concurrent_streams_lose_and_mix_no_events(harness: HttpHarness) -> None:
    import asyncio  # noqa: PLC0415

    async def read(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=20 + number % 7, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{harness.url}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(read(client, number) for number in range(100)))

    assert asyncio.run(all_of_them()) == [words(20 + number % 7) for number in range(100)]


def test_early_errors_are_plain_responses_and_later_ones_are_events(harness: HttpHarness) -> None:
    client = harness.client()
    refused: Any = [{"role": "user", "content": "refuse"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="tiny", messages=refused, stream=stream)
        assert error.value.code == "context_length_exceeded"
    broken: Any = [{"role": "user", "content": "break"}]
    said = ""
    stream = iter(client.chat.completions.create(model="tiny", messages=broken, stream=True))
    for _ in range(3):  # the role, and two words
        said += next(stream).choices[0].delta.content or ""
    assert said == words(2)
    with pytest.raises(openai.APIError, match="it broke"):
        next(stream)
    with harness.http() as http:
        text = http.post(CHAT, json={"model": "tiny", "messages": broken, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"max_tokens": 100_001}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options"),
        ({"tokenmill": {"timeout": 1e9}}, 400, "tokenmill.timeout"),
        ({"tokenmill": {"timeout": "5"}}, 400, "tokenmill"),
        ({"tokenmill": {"tier": "gold"}}, 400, "tokenmill"),
        ({"messages": []}, 400, "messages"),
        ({"nonsense": 1}, 400, "nonsense"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    shared: HttpHarness, body: dict[str, Any], status: int, param: str
) -> None:
    with shared.http() as http:
        answer = http.post(CHAT, json={"model": "tiny", "messages": HELLO, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpHarness]:
    with run_http_harness(
        tmp_path_factory.mktemp("shared"), inference=InferenceSettings(caps={Tier.INTERACTIVE: 100_000})
    ) as harness:
        yield harness


@pytest.mark.slow
def test_the_request_of_a_disconnected_client_is_cancelled(harness: HttpHarness) -> None:
    harness.worker.pause = 0.01
    client = harness.client()
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=50_000, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: harness.worker.unwanted, "the stream was not cancelled")
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=50_000, timeout=0.3)
    wait_for(lambda: len(harness.worker.unwanted) == 2, "the request was not cancelled")
    assert len(harness.bridge) == 0


@pytest.mark.slow
def test_a_request_is_cancelled_after_its_send_when_the_client_disconnects_meanwhile(
    harness: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, let, sent = harness.worker.lane, threading.Event(), list[LaneRequest]()
    send = lane.send

    def slow(request: LaneRequest) -> None:
        assert let.wait(HANG_SECONDS)
        send(request)
        sent.append(request)

    monkeypatch.setattr(lane, "send", slow)
    harness.worker.stop_taking()
    with pytest.raises(openai.APITimeoutError):
        harness.client().chat.completions.create(model="tiny", messages=HELLO, timeout=0.3)
    wait_for(lambda: len(harness.bridge) == 0, "it was not noticed")
    let.set()
    wait_for(lambda: sent, "it was not sent")
    wait_for(lambda: lane.lost(sent), "it was not cancelled")
    harness.worker.hold.clear()
    harness.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    assert len(harness.worker.requests) == 1


@pytest.mark.slow
def test_a_request_that_times_out_is_not_retried(harness: HttpHarness) -> None:
    harness.worker.pause = 0.02
    client = harness.client().with_options(max_retries=2)
    with pytest.raises(openai.APIStatusError) as late:
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=50_000, extra_body={"tokenmill": {"timeout": 0.3}}
        )
    assert late.value.status_code == 408
    assert late.value.response.headers["x-should-retry"] == "false"
    assert len(harness.worker.requests) == 1


@pytest.mark.slow
def test_a_slow_reader_ends_only_its_own_stream(tmp_path: Path) -> None:
    with run_http_harness(
        tmp_path,
        inference=InferenceSettings(caps={Tier.INTERACTIVE: 10**9}),
        streams=StreamSettings(buffer_bytes=64 * 1024),
    ) as harness:
        harness.worker.text, harness.worker.pause = "x" * 2_000, 0.001
        with request_and_read_little(harness, max_tokens=100_000) as slow:
            wait_for(lambda: harness.worker.unwanted, "the slow reader's request went on")
            harness.worker.text = None
            answer = harness.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
            assert answer.choices[0].message.content == words(4)
            received = b""
            slow.settimeout(HANG_SECONDS)
            while not received.endswith(b"0\r\n\r\n") and (data := slow.recv(1 << 20)):
                received += data
        assert b'"stream_overrun"' in received
        assert b"data: [DONE]" in received[-200:]
        assert len(received) < 400_000, "what had been written when its stream ended: the kernel took too much of it"


def request_and_read_little(harness: HttpHarness, **more: Any) -> socket.socket:
    """A connection that requests a stream, has a small receive buffer and reads nothing."""
    host, port = harness.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": True, **more}).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    slow.connect((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return slow


@pytest.mark.slow
def test_a_peer_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    inference = InferenceSettings(caps={Tier.INTERACTIVE: 10**9})
    large = StreamSettings(buffer_bytes=1 << 30)  # else the overrun may end a stream, and its connection stays
    with run_http_harness(
        tmp_path, inference=inference, streams=large, settings=GatewayOptions(write_timeout_seconds=0.5)
    ) as harness:
        harness.worker.text = "x" * 2_000
        url = harness.url.replace("http", "ws") + "/v1/stream"
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 100_000}
        with (
            request_and_read_little(harness, max_tokens=100_000),
            connect(url, max_queue=1, compression=None, close_timeout=0.1) as other,
        ):
            other.send(json.dumps({"type": "request", "url": CHAT, "body": body}))
            wait_for(lambda: harness.app.active == 2, "they did not begin")
            wait_for(lambda: harness.app.active == 0, "connections without a reader stay open")
        assert len(harness.worker.unwanted) == 2


@pytest.mark.slow
def test_a_slow_reader_that_makes_progress_is_not_disconnected(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, settings=GatewayOptions(write_timeout_seconds=0.5)) as harness:
        harness.worker.text = "x" * 20_000
        with request_and_read_little(harness, max_tokens=20) as slow:
            received = b""
            while not received.endswith(b"0\r\n\r\n") and (data := slow.recv(4_096)):
                received += data
                time.sleep(0.02)
        assert received.count(b"x" * 20_000) == 20


@pytest.mark.slow
def test_an_interrupted_stream_can_be_resumed(harness: HttpHarness) -> None:
    harness.worker.pause = 0.01
    body = {
        "model": "tiny", "messages": HELLO, "max_tokens": 60, "stream": True, "tokenmill": {"resume": 30},
    }  # fmt: skip
    with harness.http() as http:
        with http.stream("POST", CHAT, json=body) as first:
            name, seen = first.headers["x-stream-id"], ""
            for piece in first.iter_text():
                seen += piece
                if seen.count("data:") >= 5:
                    break
        time.sleep(0.1)
        assert not harness.worker.unwanted
        whole = seen[: seen.rindex("\n\n") + 2]
        last = whole.rsplit("id: ", 1)[1].split("\n")[0]
        rest = http.get(f"/v1/streams/{name}", headers={"Last-Event-ID": last}).text
        datas = [line.removeprefix("data: ") for line in (whole + rest).splitlines() if line.startswith("data: ")]
        numbers = [int(line.removeprefix("id: ")) for line in (whole + rest).splitlines() if line.startswith("id: ")]
        assert numbers == list(range(len(numbers)))
        assert datas[-1] == "[DONE]"
        said = "".join(json.loads(data)["choices"][0]["delta"].get("content") or "" for data in datas[:-1])
        assert said == words(60)
        assert http.get(f"/v1/streams/{name}").text.count("data:") == len(datas), "from the beginning, and again"
        assert http.get("/v1/streams/http-unknown").status_code == 404
        assert http.get(f"/v1/streams/{name}", headers={"Last-Event-ID": "x"}).status_code == 400
        _, other = harness.keys.create("other", tuple(Scope))
        answer = http.get(f"/v1/streams/{name}", headers={"Authorization": f"Bearer {other}"})
        assert answer.status_code == 404


@pytest.mark.slow
def test_a_resumable_stream_without_a_reader_is_cancelled(harness: HttpHarness) -> None:
    harness.worker.pause = 0.01
    body = {
        "model": "tiny", "messages": HELLO, "max_tokens": 50_000, "stream": True, "tokenmill": {"resume": 0.3},
    }  # fmt: skip
    with harness.http() as http:
        with http.stream("POST", CHAT, json=body) as first:
            next(first.iter_text())
            name = first.headers["x-stream-id"]
        wait_for(lambda: harness.worker.unwanted, "it was not cancelled")
        assert http.get(f"/v1/streams/{name}").status_code == 404


def test_clients_see_no_event_in_a_keep_alive() -> None:
    stream = [b"id: 1\ndata: {}\n\n", KEEP_ALIVE, KEEP_ALIVE, b"id: 2\ndata: {}\n\n"]
    for decoder in (openai._streaming.SSEDecoder(), anthropic._streaming.SSEDecoder()):
        assert [event.data for event in decoder.iter_bytes(iter(stream))] == ["{}", "{}"]


@pytest.mark.slow
def test_a_silent_stream_sends_keep_alives_and_times_out(tmp_path: Path) -> None:
    with (
        run_http_harness(
            tmp_path, streams=StreamSettings(keep_alive_seconds=0.1, first_event_timeout_seconds=0.2)
        ) as harness,
        harness.http() as http,
    ):
        harness.worker.stop_taking()
        body = {"model": "tiny", "messages": HELLO, "stream": True, "tokenmill": {"timeout": 0.8}}
        text = http.post(CHAT, json=body).text
        assert text.count(": keep-alive\n") >= 2
        assert '"request_timeout"' in text
        assert text.endswith("data: [DONE]\n\n")
        with pytest.raises(openai.APIStatusError) as late:
            harness.client().chat.completions.create(
                model="tiny", messages=HELLO, extra_body={"tokenmill": {"timeout": 0.2}}
            )
        assert late.value.status_code == 408


@pytest.mark.slow
def test_the_same_events_over_a_websocket(harness: HttpHarness) -> None:
    url = harness.url.replace("http", "ws") + "/v1/stream"
    request = {"type": "request", "url": CHAT, "body": {"model": "tiny", "messages": HELLO, "max_tokens": 4}}
    with connect(url) as client:
        for _ in range(2):  # one after the other
            client.send(json.dumps(request))
            assert json.loads(client.recv())["type"] == "begin"
            events = []
            while (message := json.loads(client.recv()))["type"] == "event":
                events.append(message)
            assert message == {"type": "done"}
            assert [event["id"] for event in events] == list(range(len(events)))
            text = "".join(event["data"]["choices"][0]["delta"].get("content") or "" for event in events)
            assert text == words(4)
        client.send(json.dumps({"type": "nonsense"}))
        assert json.loads(client.recv())["error"]["param"] == "type"
        client.send(json.dumps({**request, "body": {"model": "gpt-9", "messages": HELLO}}))
        assert json.loads(client.recv())["error"]["code"] == "model_not_found"
        client.send("not json")
        assert json.loads(client.recv())["error"]["code"] == "invalid_json"
        harness.worker.pause = 0.01
        long = {**request, "body": {**request["body"], "max_tokens": 50_000}}  # type: ignore[dict-item]
        client.send(json.dumps(long))
        assert json.loads(client.recv())["type"] == "begin"
        client.send(json.dumps(long))
        wait_for(lambda: "busy" in str(client.recv()), "a second stream was begun")
        client.send(json.dumps({"type": "cancel"}))
        wait_for(lambda: len(harness.worker.unwanted) == 1, "it was not cancelled")
        client.send(json.dumps(long))
        wait_for(lambda: len(harness.bridge) == 1, "it did not begin")
    wait_for(lambda: len(harness.worker.unwanted) == 2, "a disconnect cancels")
    with pytest.raises(InvalidStatus) as refused, connect(url, origin="http://evil.example"):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403
    harness.keys.create("other", tuple(Scope))
    with pytest.raises(InvalidStatus) as refused, connect(url):
        pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"


@pytest.mark.slow
def test_shutdown_drains_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, settings=GatewayOptions(drain_seconds=1.0)) as harness, harness.http() as http:
        harness.worker.pause = 0.02
        client, said = harness.client(), dict[int, Any]()

        def read(count: int) -> None:
            try:
                chunks = list(
                    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=count, stream=True)
                )
                said[count] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            except openai.APIError as error:
                said[count] = error.code

        threads = [threading.Thread(target=read, args=(count,)) for count in (25, 4_000)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(harness.worker.requests) == 2, "they did not begin")
        assert http.get("/readyz").status_code == 200
        harness.stop.set()
        wait_for(lambda: http.get("/readyz").status_code == 503, "it says that it is ready")
        assert http.get("/healthz").status_code == 200
        refused = http.post(CHAT, json={"model": "tiny", "messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        with pytest.raises(InvalidStatus) as socket_refused, connect(harness.url.replace("http", "ws") + "/v1/stream"):
            pass
        answer = socket_refused.value.response
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.body)["error"]["code"] == "draining"
        assert answer.headers["x-request-id"].startswith("req-")
        assert refused_at_length(harness.url).startswith(b"HTTP/1.1 503")
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert said == {25: words(25), 4_000: "draining"}


def refused_at_length(url: str) -> bytes:
    """The answer to a request whose body is larger than what is read of it before it is refused."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 900000\r\n\r\n".encode())
        client.sendall(b"x" * 900_000)
        answer = b""
        while data := client.recv(65_536):
            answer += data
    return answer


@pytest.mark.slow
def test_requests_cut_off_by_shutdown_are_cancelled_at_the_worker(tmp_path: Path) -> None:
    inference = InferenceSettings(caps={Tier.INTERACTIVE: 100_000})
    with run_http_harness(tmp_path, settings=GatewayOptions(drain_seconds=0.3), inference=inference) as harness:
        harness.worker.pause = 0.02
        codes = dict[bool, Any]()

        def read(stream: bool) -> None:
            try:
                made = harness.client().chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=50_000, stream=stream
                )
                codes[stream] = list(made) and None
            except openai.APIError as error:
                codes[stream] = error.code

        threads = [threading.Thread(target=read, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(harness.worker.requests) == 2, "they did not begin")
        harness.stop.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert codes == {False: "draining", True: "draining"}
        wait_for(lambda: len(harness.worker.unwanted) == 2, "they are still computed")
