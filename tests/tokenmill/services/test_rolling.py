"""New processes in place of old ones while clients stream: gateways and workers are stopped and started again one after
the other, and every stream has its whole text.

A proxy (Caddy) stands before the gateways and polls their /readyz. The clients are OpenAI's, as they are: they retry
when they are answered 503 with Retry-After, and notice nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from openai import AsyncOpenAI

from tests.cluster.lane_cluster import LaneCluster, lane_cluster, request
from tests.cluster.null_worker import ExpectedAnswers
from tests.servers.caddy import Caddy
from tests.servers.plugin import started
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

QUESTIONS = 500


@dataclass(slots=True)
class StreamResult:
    """A stream. `sent_at`, `first`: `time.monotonic` of its request and of its first event; `wrong`: what isn't as it
    must be."""

    number: int
    sent_at: float
    first: float = 0.0
    wrong: str = ""


@dataclass
class Traffic:
    """So many streams under way all the time: where one ends another begins.

    Attributes:
        seconds: what one takes; the first ones begin as far apart as that lets them, so that there are new ones always.
        refused: answers other than 200, as (status, code, Retry-After).
    """

    url: str
    streams: int
    seconds: float
    bodies: list[dict[str, Any]]
    texts: list[str]
    ended: list[StreamResult] = field(default_factory=list)
    refused: list[tuple[int, str, str | None]] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block ends, and the streams that are under way then."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            wait_for(lambda: len(self.ended) >= self.streams, "no streams come to their end")
            yield
        finally:
            self.enough.set()
            thread.join()

    async def _run(self) -> None:
        limits = httpx2.Limits(max_connections=None)
        http = httpx2.AsyncClient(event_hooks={"response": [self._note]}, timeout=HANG_SECONDS, limits=limits)
        async with AsyncOpenAI(
            base_url=f"{self.url}/v1", timeout=HANG_SECONDS, api_key="none", http_client=http
        ) as client:
            await asyncio.gather(*(self._one_after_the_other(client, index) for index in range(self.streams)))

    async def _one_after_the_other(self, client: AsyncOpenAI, index: int) -> None:
        await asyncio.sleep(self.seconds * index / self.streams)
        while not self.enough.is_set():
            one = StreamResult(next(self.numbers), time.monotonic())
            try:
                one.wrong = await self._read(client, one)
            except Exception as error:  # noqa: BLE001 - any failure of a stream is the test's finding
                one.wrong = f"{type(error).__name__}: {error}"
            self.ended.append(one)

    async def _read(self, client: AsyncOpenAI, one: StreamResult) -> str:
        body, text = self.bodies[one.number % QUESTIONS], self.texts[one.number % QUESTIONS]
        plain = {name: value for name, value in body.items() if name != "ignore_eos"}
        said, reason, last = "", None, ""
        api = client.chat.completions.with_streaming_response
        async with api.create(**plain, stream=True, extra_body={"ignore_eos": True}) as response:
            async for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                one.first = one.first or time.monotonic()
                last = line.removeprefix("data: ")
                if last == "[DONE]":
                    continue
                chunk = orjson.loads(last)
                if "error" in chunk:
                    return f"error {chunk['error']['code']} after {len(said)} of {len(text)} characters"
                said += chunk["choices"][0]["delta"].get("content") or ""
                reason = chunk["choices"][0]["finish_reason"]
        if said != text:
            return f"{len(said)} of {len(text)} characters, or others"
        return "" if (last, reason) == ("[DONE]", "length") else f"ends with {last[:200]}"

    async def _note(self, response: httpx2.Response) -> None:
        if response.status_code != 200:
            await response.aread()
            code = orjson.loads(response.content or b"{}").get("error", {}).get("code", "")
            self.refused.append((response.status_code, code, response.headers.get("retry-after")))

    def longest_wait(self) -> float:
        """Seconds from a request to its answer's first event, refusals and the client's pauses included."""
        return max(one.first - one.sent_at for one in self.ended)

    def summary(self) -> str:
        """The traffic's counts in one line."""
        return (
            f"{len(self.ended)} streams, {len(self.refused)} refused for a while, {self.longest_wait():.2f} s at most "
            "until the first event"
        )

    def assert_no_stream_failed(self) -> None:
        assert [(one.number, one.wrong) for one in self.ended if one.wrong] == []
        assert set(self.refused) <= {(503, "draining", "1")}


class Harness:
    """Two gateways behind a proxy, two workers, and the traffic that is to be let in."""

    def __init__(
        self, cluster: LaneCluster, proxy: Caddy, model: Path, streams: int, tokens: int, step_ms: int
    ) -> None:
        self.cluster = cluster
        bodies = [request(number, tokens) for number in range(QUESTIONS)]
        seconds = tokens * step_ms / 1000
        self.traffic = Traffic(proxy.url, streams, seconds, bodies, ExpectedAnswers(model).texts(bodies))

    def replace(self, name: str) -> None:
        """Stop it in order, and start it again."""
        assert self.cluster.end(name, 90) == 0
        self.cluster.start(name)

    def kill(self, name: str) -> None:
        """Kill it, and start it again when others have what it had. That takes until its lease ends; requests
        that come meanwhile are served by others at once."""
        self.cluster.kill(name)
        answer = httpx2.post(f"{self.traffic.url}/v1/chat/completions", json=request(0, 5), timeout=HANG_SECONDS)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)
        wait_for(lambda: self.sent_again("lost"), "nothing was sent again")
        self.cluster.start(name)

    def sent_again(self, why: str) -> int:
        """Requests that the gateways sent again, for this reason."""
        return sum(self.cluster.log(name).count(f"why='{why}'") for name in ("gateway-1", "gateway-2"))


MakeHarness = Callable[..., AbstractContextManager[Harness]]


@pytest.fixture
def make_harness(
    tmp_path: Path, redis_server: RedisServer, model_folder: Path, pytestconfig: pytest.Config
) -> MakeHarness:
    @contextmanager
    def make(streams: int, tokens: int, step_ms: int, **variables: str) -> Iterator[Harness]:
        engine = ("--model", f"null={model_folder}", "--max-num-seqs", streams, "--step-ms", step_ms)
        with lane_cluster(tmp_path / "cluster", engine, redis_server, **variables) as cluster:
            cluster.start("gateway-1", "gateway-2", "worker-1", "worker-2")
            proxy = Caddy(tmp_path / "caddy", [cluster.url("gateway-1"), cluster.url("gateway-2")])
            with contextmanager(started)(proxy, pytestconfig):
                yield Harness(cluster, proxy, model_folder, streams, tokens, step_ms)

    return make


HANDED_BACK = "handed back by its worker"


@pytest.mark.exhaustive
def test_streams_survive_a_rolling_restart_of_gateways_and_a_worker(make_harness: MakeHarness) -> None:
    with make_harness(20, 60, 30, TOKENMILL_LANE__DRAIN_SECONDS="0.2") as harness:
        with harness.traffic.running():
            assert_gateway_drains(harness, "gateway-1")
            harness.cluster.start("gateway-1")
            for name in ("gateway-2", "worker-1"):
                harness.replace(name)
        harness.traffic.assert_no_stream_failed()
        assert harness.sent_again(HANDED_BACK)


def assert_gateway_drains(harness: Harness, name: str) -> None:
    """Stop a gateway that has streams. `Harness.traffic` records how these ended."""
    url = harness.cluster.url(name)
    assert httpx2.get(f"{url}/readyz", timeout=HANG_SECONDS).status_code == 200
    wait_for(lambda: streams_at(url) > 5, "it gets no streams")
    harness.cluster.processes[name].send_signal(signal.SIGTERM)
    wait_for(lambda: httpx2.get(f"{url}/readyz", timeout=HANG_SECONDS).status_code == 503, "it is still ready")
    refused = httpx2.post(f"{url}/v1/chat/completions", json=harness.traffic.bodies[0], timeout=HANG_SECONDS)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    assert streams_at(url) > 0, "what it had was cut off"
    assert harness.cluster.processes[name].wait(HANG_SECONDS) == 0


def streams_at(url: str) -> int:
    """How many a gateway has."""
    found = re.search(
        r"^tokenmill_inference_requests{state=\"open\"} (\S+)",
        httpx2.get(f"{url}/metrics", timeout=HANG_SECONDS).text,
        re.MULTILINE,
    )
    assert found is not None
    return int(float(found[1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("grace", [0, 20])
def test_two_hundred_streams_survive_a_rolling_restart_and_killed_workers(
    make_harness: MakeHarness, grace: int
) -> None:
    """With a grace of 20 s workers complete their requests; without, they hand all of them back."""
    with make_harness(200, 250, 40, TOKENMILL_LANE__DRAIN_SECONDS=str(grace)) as harness:
        with harness.traffic.running():
            for name in ("gateway-1", "gateway-2", "worker-1", "worker-2"):
                harness.replace(name)
            harness.kill("worker-1")
            harness.kill("worker-2")
        harness.traffic.assert_no_stream_failed()
        assert (harness.sent_again(HANDED_BACK) > 100) == (grace == 0)
        assert harness.sent_again("lost") > 50
        print(harness.traffic.summary())
