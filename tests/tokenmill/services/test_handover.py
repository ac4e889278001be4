"""One prefill and two decode workers as processes on a real Redis: answers are those of one worker, through faults of
all kinds."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from openai import OpenAI

from schemas.settings.kv_transfer import KVTransferOptions
from tests.cluster.handover_cluster import HandoverCluster, handover_cluster
from tests.servers.faulty_tcp import AnswerFault
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.services.handover import _with_address

CALLERS = 12
"""Requests at a time."""

WORKERS = ("prefill-1", "decode-1", "decode-2")


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisServer, model_folder: Path) -> Iterator[HandoverCluster]:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1, "--max-num-seqs", 16)
    with handover_cluster(
        tmp_path / "cluster", engine, redis_server, TOKENMILL_KV_BLOCK_SIZE="8", TOKENMILL_GATEWAY__AUTH="off"
    ) as cluster:
        yield cluster


def bodies(count: int) -> list[dict[str, Any]]:
    """Prompts of 20 to 160 words; a third begins alike; greedy and seeded."""
    words = ["message", "from", "the", "user", "to", "assistant", "and", "back", "again"]
    found = []
    for number in range(count):
        chosen = Random(number)
        text = " ".join(chosen.choices(words, k=chosen.randint(20, 160)))
        messages = [{"role": "user", "content": text}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "You send a message back and again. " * 8})
        found.append(
            {
                "model": "tiny",
                "messages": messages,
                "max_tokens": chosen.randint(1, 40),
                **({"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number, "top_p": 0.95}),
            }
        )
    return found


def answers_of_one_worker(
    requested: list[dict[str, Any]], model: Path, folder: Path, tokenmill: Any, results: Any
) -> list[str]:
    source = folder / "requests.jsonl"
    lines = [
        {
            "custom_id": f"{number:05}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, "ignore_eos": True},
        }
        for number, body in enumerate(requested)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = ("--model", f"tiny={model}", "--dtype", "float32", "--threads", "1")
    assert tokenmill("run", source, "--output", "alone", *engine).code == 0
    return [row["text"] for row in sorted(results(folder / "alone"), key=lambda row: row["custom_id"])]


def answer(url: str, number: int, body: dict[str, Any]) -> str:
    """The text of an answer; of every other request as a stream."""
    body = {**body, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS) as client:
        if number % 2:
            whole: Any = client.chat.completions.create(**body)
            assert whole.usage.completion_tokens == body["max_tokens"]
            return str(whole.choices[0].message.content)
        chunks: list[Any] = list(client.chat.completions.create(**body, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def answers(
    cluster: HandoverCluster, requested: list[dict[str, Any]], during: Callable[[Callable[[int], None]], None]
) -> list[str]:
    """The answers to all requests, while `during` runs on this thread. It lets so many more be sent at a time, and at
    its end the rest is sent."""
    permits = threading.Semaphore(0)

    def call(number: int, body: dict[str, Any]) -> str:
        permits.acquire()
        return answer(cluster.url, number, body)

    with ThreadPoolExecutor(CALLERS) as callers:
        sent = [callers.submit(call, number, body) for number, body in enumerate(requested)]
        try:
            during(permits.release)
        finally:
            permits.release(len(requested))
        return [one.result() for one in sent]


class Faults:
    """Faults in a seeded order, until so many have happened."""

    def __init__(self, cluster: HandoverCluster, seed: int, kinds: dict[str, int]) -> None:
        self._cluster = cluster
        self._random = Random(seed)
        self._kinds = [kind for kind, count in kinds.items() for _ in range(count)]
        self._random.shuffle(self._kinds)
        self.done: Counter[str] = Counter()

    def cause(self, requests: int, send: Callable[[int], None]) -> None:
        """Cause all of them, one after the other; each meets its share of the requests."""
        for kind in self._kinds:
            send(requests // len(self._kinds))
            getattr(self, f"_{kind}")()
            self.done[kind] += 1
            threading.Event().wait(self._random.uniform(0.05, 0.3))

    def _kill(self) -> None:
        name = self._random.choice(WORKERS)
        self._cluster.kill(name)
        self._cluster.start(name)

    def _stop(self) -> None:
        name = self._random.choice(WORKERS)
        self._cluster.send(name, signal.SIGSTOP)
        threading.Event().wait(self._random.uniform(0.1, 1.5))
        self._cluster.send(name, signal.SIGCONT)

    def _cut(self) -> None:
        self._cluster.blocks.cut()

    def _truncate(self) -> None:
        self._cluster.blocks.spoiled.append(AnswerFault("cut", self._random.randrange(1, 20_000)))

    def _damage(self) -> None:
        self._cluster.blocks.spoiled.append(AnswerFault("invert", self._random.randrange(0, 20_000)))

    def _refuse(self) -> None:
        self._cluster.blocks.refuse()
        threading.Event().wait(self._random.uniform(0.1, 0.5))
        self._cluster.blocks.restore()

    def _silence(self) -> None:
        self._cluster.blocks.silence()
        threading.Event().wait(self._random.uniform(0.1, 0.5))
        self._cluster.blocks.restore()


def check(
    cluster: HandoverCluster, count: int, kinds: dict[str, int], model: Path, folder: Path, tokenmill: Any, results: Any
) -> Counter[str]:
    requested = bodies(count)
    expected = answers_of_one_worker(requested, model, folder, tokenmill, results)
    cluster.start("gateway", *WORKERS)
    faults = Faults(cluster, seed=count, kinds=kinds)
    found = answers(cluster, requested, lambda send: faults.cause(count, send))
    assert found == expected
    # The last ones may find no transfer any more.
    assert len(cluster.blocks.spoiled) <= (kinds["truncate"] + kinds["damage"]) / 2, "faults met transfers"
    return faults.done


@pytest.mark.slow
def test_answers_are_those_of_one_worker_and_each_role_is_a_pool(
    cluster: HandoverCluster,
    model_folder: Path,
    folder: Path,
    tokenmill: Any,
    results: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"truncate": 4, "damage": 4, "cut": 2, "stop": 1}
    check(cluster, 48, kinds, model_folder, folder, tokenmill, results)

    def handovers(name: str, outcome: str) -> float:
        return cluster.metric(name, "tokenmill_handovers_total", f'outcome="{outcome}"')

    wait_for(lambda: handovers("prefill-1", "sent") >= 10, "requests are handed over")
    # Not by each of the two: on a slow machine one may take all that wait.
    wait_for(lambda: sum(handovers(name, "received") for name in WORKERS[1:]), "their blocks are used")
    failed = "tokenmill_kv_transfers_failed_total"
    wait_for(
        lambda: sum(cluster.metric(name, failed, 'reason="broken"') for name in WORKERS[1:]), "transfers meet faults"
    )

    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    pools = {name: {"models": ["tiny"], "role": name} for name in ("prefill", "decode")}
    monkeypatch.setenv("TOKENMILL_AUTOSCALE__POOLS", json.dumps(pools))
    decided = json.loads(tokenmill("autoscale", "--once", "--dry-run", "--json").out)["pools"]
    assert {pool["pool"]: pool["live"] for pool in decided} == {"prefill": 1, "decode": 2}


@pytest.mark.exhaustive
def test_a_hundred_faults_lose_double_and_change_nothing(
    cluster: HandoverCluster, model_folder: Path, folder: Path, tokenmill: Any, results: Any
) -> None:
    kinds = {"kill": 12, "stop": 18, "cut": 15, "truncate": 20, "damage": 20, "refuse": 8, "silence": 7}
    done = check(cluster, 500, kinds, model_folder, folder, tokenmill, results)
    assert done.total() == 100


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"host": "192.0.2.7"}, None),
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "0.0.0.0", "advertised_host": "worker.example"}, "worker.example"),
    ],
)
def test_a_worker_that_listens_everywhere_is_reached_by_its_address_towards_redis(
    options: dict[str, str], expected: str | None
) -> None:
    found = _with_address(KVTransferOptions.model_validate(options), "redis://127.0.0.1:6379/0")
    assert found.advertised_host == expected
