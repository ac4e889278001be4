"""Callers' time between tokens while long prompts arrive: one prefill and one decode worker, against two workers that
compute whole requests with chunked prefill, in turn, as processes on a real Redis.

    python -m benchmarks.handover --model MODEL [--callers 4] [--prompt-tokens 1500] [--seconds 40] [--rounds 3]

Each worker has one thread. Callers stream answers of `--answer-tokens` to short prompts, each a new one when the last
has ended. Meanwhile every `--every` seconds a request with a long prompt, of its own, asks for eight tokens. Reported
are the times between two arrivals of text at a caller, the times to first token of both kinds, and the callers' tokens
a second. Arrivals are as far apart as a worker's emissions (20 ms and a little), at least.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.throughput import machine
from tests.cluster.handover_cluster import HandoverCluster, handover_cluster
from tests.servers.redis import RedisServer
from tokenmill.config.job_options import choose_model
from tokenmill.settings import read_settings
from workers.model.loaded_model import model_path

FORMS = {"split": ("prefill-1", "decode-1"), "chunked": ("both-1", "both-2")}
WORDS = ["river", "stone", "light", "paper", "garden", "winter", "music", "window", "bridge", "letter"]


@dataclass(slots=True)
class Seen:
    """What callers saw: seconds between arrivals, and to first tokens."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    first_long: list[float] = field(default_factory=list)
    tokens: int = 0


def stream(url: str, body: dict[str, Any]) -> tuple[list[float], int]:
    """The times at which text of an answer arrived, the sending first, and the tokens of the answer."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=300)
    times = [time.monotonic()]
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**body, **options}), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"error: {response.status}: {response.read()[:500]!r}")
    tokens = 0
    for line in response:
        if line.startswith(b"data: {"):
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise SystemExit(f"error: {chunk['error']}")
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                times.append(time.monotonic())
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    return times, tokens


def request(number: int, words: int, tokens: int) -> dict[str, Any]:
    text = " ".join(Random(number).choices(WORDS, k=words))
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def measure(cluster: HandoverCluster, args: argparse.Namespace, seed: int) -> Seen:
    """One run of the load on a cluster that is up."""
    seen, lock, numbers = Seen(), threading.Lock(), count(seed * 100_000)
    stream(cluster.url, request(next(numbers), args.prompt_tokens, 8))  # warm-up
    until = time.monotonic() + args.seconds

    def caller() -> None:
        while time.monotonic() < until:
            times, tokens = stream(cluster.url, request(next(numbers), 20, args.answer_tokens))
            with lock:
                seen.first.append(times[1] - times[0])
                seen.gaps += [after - before for before, after in pairwise(times[1:])]
                seen.tokens += tokens

    def long_prompt() -> None:
        times, _ = stream(cluster.url, request(next(numbers), args.prompt_tokens, 8))
        with lock:
            seen.first_long.append(times[1] - times[0])

    with ThreadPoolExecutor(args.callers + 16) as threads:
        running = [threads.submit(caller) for _ in range(args.callers)]
        while time.monotonic() < until:
            running.append(threads.submit(long_prompt))
            time.sleep(args.every)
        for one in running:
            one.result()
    return seen


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in seconds."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, len(ordered) * 99 // 100)
    return {"p50": round(statistics.median(ordered), 4), "p99": round(ordered[at], 4), "max": round(ordered[-1], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="words of a long prompt, about as many tokens")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hand-over", choices=["always", "auto"], default="always", help="of the split workers")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    model = model_path(Path(choose_model(args.model, read_settings().model_cache).source.path)).resolve()
    engine = ("--model", f"m={model}", "--threads", 1, "--dtype", args.dtype)
    results: list[dict[str, Any]] = []
    for turn in range(args.rounds):
        for form, workers in FORMS.items():
            with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as redis:
                variables = {
                    "TOKENMILL_KV_TRANSFER__SHARED_MEMORY": "true",
                    "TOKENMILL_GATEWAY__AUTH": "off",
                    "TOKENMILL_KV_TRANSFER__HAND_OVER": args.hand_over,
                    "TOKENMILL_KV_TRANSFER__HELP_AFTER_SECONDS": "1",
                }
                with handover_cluster(Path(folder) / "c", engine, redis, **variables) as cluster:
                    cluster.start("gateway", *workers)
                    begun = time.time()
                    seen = measure(cluster, args, turn)
                    found: dict[str, Any] = {
                        "form": form,
                        "gaps": quantiles(seen.gaps),
                        "first": quantiles(seen.first),
                        "first_long": quantiles(seen.first_long),
                        "long_prompts": len(seen.first_long),
                        "tokens_per_second": round(seen.tokens / (time.time() - begun), 1),
                    }
                    if form == "split":
                        seconds, size = "tokenmill_kv_fetch_seconds_total", "tokenmill_kv_transfer_bytes_total"
                        found["fetch_seconds"] = cluster.metric("decode-1", seconds, 'model="m"')
                        found["fetched_bytes"] = cluster.metric("decode-1", size, 'direction="received"')
            results.append(found)
            print(json.dumps(found), flush=True)
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "model")}
        document = {"machine": machine(), "model": model.name, "settings": settings, "runs": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
