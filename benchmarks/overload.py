"""A flood of several times the capacity, with refusal and steps of degradation and without, over real processes.

    python -m benchmarks.overload --model MODEL [--engine model|null] [--times 5] [--seconds 120] [--json FILE]

A gateway, a dispatcher, two workers and a Redis are processes of their own, new ones for each run. A bulk job runs all
the time. With `--engine model` the workers compute MODEL (a tiny one with random weights will do); with `null` only its
tokenizer is used, and each step takes `--step-ms`. In turn:

    capacity    1.5 callers for each row of all batches send chats one after the other: how many are answered a second
    flood       chats come at random moments, `--times` that rate, for `--seconds`; refused ones don't come again
    after       a fifth of that rate, until bulk work is seen to resume and the job has ended

    shed        TOKENMILL_OVERLOAD__SHED, and the step pause_bulk
    wait        neither

Then, with refusal, another gateway that refuses nothing fills the lane, and chats are sent to the first one until one
is admitted: how long that takes, beside the `retry-after-ms` of the first refusal.

A chat is good if its first token comes within 1 s and its tokens at intervals of at most 0.1 s in the mean (vLLM's
goodput), as its caller measures them. Without refusal callers leave after `--patience` seconds. What it doesn't show:
long prompts, and answers of very different lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from benchmarks.throughput import machine
from tests.cluster.cluster import NULL_WORKER
from tests.cluster.lane_cluster import LaneCluster, cluster_of
from tests.pipeline.observability.scrapes import Scrape, scrape
from tests.servers.redis import RedisServer
from tests.waiting import wait_for
from workers.model.loaded_model import model_path

NAME = "tiny"
TTFT_SECONDS = 1.0
ITL_SECONDS = 0.1
SETTLE_SECONDS = 4.0  # in which workers report their last metrics
SHED = {
    "TOKENMILL_OVERLOAD__SHED": "true",
    "TOKENMILL_OVERLOAD__STEPS": '["pause_bulk"]',
}


@dataclass
class Chat:
    """What a caller saw of one chat. `at`: seconds since the beginning of the flood."""

    at: float
    status: int = 0
    refused_seconds: float = 0.0
    retry_seconds: float = 0.0
    tokens: list[float] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.tokens[0] if self.tokens else float("inf")

    def is_good(self, count: int) -> bool:
        """Whether it kept the promise; `count`: its tokens."""
        mean = (self.tokens[-1] - self.tokens[0]) / max(1, count - 1) if self.tokens else float("inf")
        return self.ended and self.ttft <= TTFT_SECONDS and mean <= ITL_SECONDS


def body_of(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": NAME, "messages": [{"role": "user", "content": f"Question {number}: what follows?"}],
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip


async def ask(client: httpx2.AsyncClient, number: int, tokens: int, chat: Chat | None = None) -> Chat:
    """Send a chat and read its stream; what is seen goes into `chat`."""
    chat, begun = chat or Chat(0.0), time.monotonic()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body_of(number, tokens)) as response:
            chat.status = response.status_code
            if chat.status != 200:
                await response.aread()
                chat.refused_seconds = time.monotonic() - begun
                chat.retry_seconds = int(response.headers.get("retry-after-ms", 0)) / 1_000
                return chat
            async for line in response.aiter_lines():
                chat.ended |= line == "data: [DONE]"
                if '"error"' in line:
                    chat.error = line
                elif '"content"' in line or '"finish_reason":"' in line.replace(" ", ""):
                    chat.tokens.append(time.monotonic() - begun)
    except httpx2.HTTPError as error:
        chat.error = type(error).__name__
    return chat


async def capacity(url: str, callers: int, seconds: float, tokens: int) -> float:
    """Chats that are answered a second."""
    until, answered = time.monotonic() + seconds, 0
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=httpx2.Limits(max_connections=None)) as client:

        async def call(caller: int) -> None:
            nonlocal answered
            number = caller
            while time.monotonic() < until:
                number += callers
                chat = await ask(client, number, tokens)
                answered += chat.ended

        begun = time.monotonic()
        await asyncio.gather(*map(call, range(callers)))
        return answered / (time.monotonic() - begun)


async def arrive(url: str, rate: float, seconds: float, tokens: int, patience: float, first: int) -> list[Chat]:
    """Chats at random moments."""
    random, moments, at = Random(11), list[float](), 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        moments.append(at)
    begun = time.monotonic()
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=None)) as client:

        async def come(number: int, at: float) -> Chat:
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            chat = Chat(at)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await ask(client, first + number, tokens, chat)
            return chat

        return list(await asyncio.gather(*(come(number, at) for number, at in enumerate(moments))))


class Watch:
    """Samples of the gateway's metrics, each second: (seconds, rows of the bulk job that have ended, is it paused)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.begun = time.monotonic()
        self.samples: list[tuple[float, float, bool]] = []

    async def run(self) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(self.sample))
            await asyncio.sleep(1.0)

    def sample(self) -> tuple[float, float, bool]:
        seen = scrape(f"{self.url}/metrics")
        paused = sum(seen.all("tokenmill_degradation_step_active", step="pause_bulk").values()) > 0
        return time.monotonic() - self.begun, bulk_rows(seen), paused

    def report(self) -> dict[str, Any]:
        paused = [sample for sample in self.samples if sample[2]]
        if not paused:
            return {"paused": False}
        begin, end = paused[0][0], paused[-1][0]
        settled = [rows for at, rows, _ in self.samples if begin + 6 <= at <= end]
        after = [rows for at, rows, _ in self.samples if at > end]
        return {
            "paused": True,
            "from_second": round(begin, 1),
            "until_second": round(end, 1),
            "rows_ended_in_pause": int(settled[-1] - settled[0]) if settled else None,
            "rows_ended_after": int(after[-1] - after[0]) if after else 0,
        }


def bulk_rows(seen: Scrape) -> float:
    """Rows of bulk jobs that have ended at workers."""
    return sum(seen.all("tokenmill_requests_total", tier="bulk").values())


@contextmanager
def cluster(args: argparse.Namespace, folder: Path, variables: dict[str, str]) -> Iterator[LaneCluster]:
    """All processes, and a Redis."""
    rows = ("--max-num-seqs", str(args.rows))
    if args.engine == "null":
        worker = (*NULL_WORKER, "--model", f"{NAME}={args.model}", *rows, "--step-ms", str(args.step_ms))
    else:
        worker = (
            "-m", "tokenmill", "worker", "--model", f"{NAME}={args.model}", *rows, "--threads", "1",
            "--kv-cache-memory", "64MB", "--log-format", "text",
        )  # fmt: skip
    with RedisServer(folder / "redis") as server, cluster_of(folder / "c", worker, server, **variables) as made:
        made.folder.mkdir(exist_ok=True)
        made.start("worker-1", "worker-2", "gateway-1", "dispatcher")
        yield made


def submit(url: str, rows: int, tokens: int) -> str:
    """Submit the bulk job; returns its id."""
    body = {"model": NAME, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": f"row-{row}", "method": "POST", "url": "/v1/completions",
            "body": body | {"prompt": f"Item {row}: describe it in one line."},
        }
        for row in range(rows)
    ]  # fmt: skip
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with httpx2.Client(base_url=url, timeout=60) as client:
        file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        made = client.post(
            "/v1/batches",
            json={
                "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
                "tokenmill": {"tier": "bulk"},
            },
        )  # fmt: skip
        made.raise_for_status()
        job: str = made.json()["id"]
        return job


def results(url: str, job: str, seconds: float) -> dict[str, Any]:
    """Wait for the job's end; its counts."""
    with httpx2.Client(base_url=url, timeout=60) as client:

        def ended() -> Any:
            found = client.get(f"/v1/batches/{job}").json()
            return found if found["status"] in ("completed", "failed", "expired", "cancelled") else None

        batch = wait_for(ended, "the bulk job did not end", seconds=seconds)
        text = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    ids = [json.loads(line)["custom_id"] for line in text.splitlines()]
    return {"status": batch["status"], **batch["request_counts"], "distinct_rows": len(set(ids))}


def flood(args: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """One run in new processes."""
    with cluster(args, folder, SHED if kind == "shed" else {}) as made:
        url = made.url("gateway-1")
        wait_for(lambda: sum(scrape(f"{url}/metrics").all("tokenmill_workers").values()) == 2, "workers don't report")
        job = submit(url, args.bulk_rows, args.tokens)
        wait_for(lambda: bulk_rows(scrape(f"{url}/metrics")) > 0, "the bulk job has not begun")
        per_second = asyncio.run(capacity(url, 3 * args.rows, 12, args.tokens))
        time.sleep(SETTLE_SECONDS)
        watch = Watch(url)

        async def load() -> list[Chat]:
            watching = asyncio.ensure_future(watch.run())
            chats = await arrive(url, args.times * per_second, args.seconds, args.tokens, args.patience, 100_000)
            await arrive(url, per_second / 5, args.after, args.tokens, args.patience, 900_000)
            watching.cancel()
            return chats

        chats = asyncio.run(load())
        found = report(chats, args) | {"capacity": round(per_second, 2), "bulk": watch.report()}
        found["job"] = results(url, job, 600)
        if kind == "shed":
            time.sleep(SETTLE_SECONDS)
            found["retry_after"] = retries(args, made, per_second)
    return {"run": kind} | found


def report(chats: Sequence[Chat], args: argparse.Namespace) -> dict[str, Any]:
    """What the flood's callers saw."""
    refused = [chat for chat in chats if chat.status == 429]
    admitted = [chat for chat in chats if chat.status != 429]
    good = [chat for chat in admitted if chat.is_good(args.tokens)]
    late = sorted(chat.refused_seconds for chat in refused)
    ttfts = sorted(chat.ttft for chat in admitted if chat.tokens)
    gaps = sorted(
        (chat.tokens[-1] - chat.tokens[0]) / (args.tokens - 1) for chat in admitted if chat.ended and chat.tokens
    )
    return {
        "chats": len(chats),
        "refused": len(refused),
        "admitted": len(admitted),
        "answered": sum(chat.ended for chat in admitted),
        "errors": sorted({chat.error[:80] for chat in admitted if chat.error}),
        "good": len(good),
        "good_of_admitted": round(len(good) / len(admitted), 4),
        "good_per_second": round(len(good) / args.seconds, 2),
        "ttft_p50": round(statistics.median(ttfts), 3),
        "ttft_p95": round(ttfts[len(ttfts) * 95 // 100], 3),
        "itl_p95": round(gaps[len(gaps) * 95 // 100], 4),
        "refused_ms": None if not late else {
            "p50": round(1_000 * statistics.median(late), 1), "p99": round(1_000 * late[len(late) * 99 // 100], 1),
            "max": round(1_000 * late[-1], 1), "over_100": sum(one > 0.1 for one in late),
        },
    }  # fmt: skip


def retries(args: argparse.Namespace, made: LaneCluster, per_second: float) -> list[dict[str, float]]:
    """For lanes that another gateway has filled: the time of the first refusal's retry-after-ms, and how long it was
    until a chat was admitted."""
    made.variables["TOKENMILL_OVERLOAD__SHED"] = "false"
    made.start("gateway-2")
    found = []
    for backlog_seconds in (4.0, 6.0, 9.0):
        count = round(per_second * backlog_seconds)

        async def fill(count: int = count) -> dict[str, float]:
            limits = httpx2.Limits(max_connections=None)
            async with (
                httpx2.AsyncClient(base_url=made.url("gateway-2"), timeout=120, limits=limits) as other,
                httpx2.AsyncClient(base_url=made.url("gateway-1"), timeout=120, limits=limits) as own,
            ):
                waiting = [asyncio.ensure_future(ask(other, number, args.tokens)) for number in range(count)]
                await asyncio.sleep(1.5)
                begun = time.monotonic()
                chat = first = await ask(own, 1, args.tokens)
                while chat.status == 429:
                    await asyncio.sleep(0.02)
                    admitted_at = time.monotonic()
                    chat = await ask(own, 1, args.tokens)
                    # An admitted chat is answered to its end before this returns, so the time is taken before it.
                took = admitted_at - begun if first.status == 429 else 0.0
                await asyncio.gather(*waiting)
                return {"backlog": count, "retry_after": first.retry_seconds, "true": round(took, 3)}

        found.append(asyncio.run(fill()))
        time.sleep(SETTLE_SECONDS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder or a GGUF file")
    parser.add_argument("--engine", choices=("model", "null"), default="model")
    parser.add_argument("--step-ms", type=float, default=30.0, help="of the null engine")
    parser.add_argument("--rows", type=int, default=4, help="of each worker's batch")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--times", type=float, default=5.0, help="the flood, over the capacity")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the flood")
    parser.add_argument("--after", type=float, default=30.0, help="seconds after it")
    parser.add_argument("--patience", type=float, default=20.0, help="of callers, in seconds")
    parser.add_argument("--bulk-rows", type=int, default=400)
    parser.add_argument("--only", nargs="*", choices=("shed", "wait"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = model_path(args.model).resolve()
    names = ("engine", "step_ms", "rows", "tokens", "times", "seconds", "patience", "bulk_rows")
    runs: list[dict[str, Any]] = []
    facts = {"machine": machine(), "settings": {name: getattr(args, name) for name in names}, "runs": runs}
    for kind in args.only or ("shed", "wait"):
        with tempfile.TemporaryDirectory(prefix="overload-") as folder:
            runs.append(flood(args, kind, Path(folder)))
        print(json.dumps(runs[-1], indent=1), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
