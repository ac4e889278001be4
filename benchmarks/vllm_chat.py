"""Chat beside a batch on vLLM: through one tokenmill worker, and through vLLM's own server with its priorities.

    .venv-vllm/bin/python benchmarks/vllm_chat.py --model FOLDER [--chats 40] [--rate 0.5] [--rows 400] [--json FILE]

For each in turn: a server with 64 rows a step, a batch of `--rows` long answers that fills it, and chats of 16 tokens
at random times (a Poisson process with a fixed seed). tokenmill gets the batch as a file; vLLM's server as that many
requests at once, of a lower priority. What is measured is the time from a chat's request to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from throughput import machine

from engine.vllm.process import ENVIRONMENT, preload_variable

ROWS_AT_ONCE = 64
BULK_TOKENS = 200
CHAT_TOKENS = 16
START_SECONDS = 600.0


def bulk_body(row: int) -> dict[str, Any]:
    """A long answer."""
    return {
        "model": "m", "prompt": f"Story {row} begins on a", "max_tokens": BULK_TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


async def batch_as_file(client: AsyncOpenAI, rows: int) -> None:
    """Submit the batch to tokenmill."""
    lines = [
        json.dumps({"custom_id": str(row), "method": "POST", "url": "/v1/completions", "body": bulk_body(row)})
        for row in range(rows)
    ]
    file = await client.files.create(file=("bulk.jsonl", "\n".join(lines).encode()), purpose="batch")
    await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def batch_as_requests(client: AsyncOpenAI, rows: int) -> None:
    """Send the batch to vLLM's server, behind the chats by priority."""

    async def send(row: int) -> None:
        body = bulk_body(row)
        extra = {"ignore_eos": body.pop("ignore_eos"), "priority": 10}
        await client.completions.create(**body, extra_body=extra)

    await asyncio.gather(*(send(row) for row in range(rows)))


async def first_token(client: AsyncOpenAI, number: int) -> float:
    """Seconds until a chat's first token."""
    messages: Any = [{"role": "user", "content": f"Hello, I am number {number}. How are you?"}]
    begun, first = time.perf_counter(), None
    stream = await client.chat.completions.create(
        model="m", messages=messages, max_tokens=CHAT_TOKENS, temperature=0, stream=True
    )
    async for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - begun
    return time.perf_counter() - begun if first is None else first


async def measure(
    url: str, begin_batch: Callable[[AsyncOpenAI, int], Awaitable[None]], rows: int, chats: int, rate: float
) -> dict[str, Any]:
    """First tokens of chats while the batch runs."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=0) as client:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                await first_token(client, 0)
                break
            except (APIConnectionError, APIStatusError):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(1)
        batch = asyncio.create_task(begin_batch(client, rows))  # type: ignore[arg-type]
        await asyncio.sleep(20)
        chance = random.Random(1)
        tasks = []
        for number in range(chats):
            await asyncio.sleep(chance.expovariate(rate))
            tasks.append(asyncio.create_task(first_token(client, number + 1)))
        times = sorted(await asyncio.gather(*tasks))
        batch.cancel()
        return {
            "p50": round(statistics.median(times), 3),
            "p95": round(times[int(0.95 * (len(times) - 1))], 3),
            "longest": round(times[-1], 3),
            "chats": len(times),
        }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def served(command: list[str], port: int, measured: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Start the server, measure, end it."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    own = {"VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_CPU_KVCACHE_SPACE": "4"}
    preload = preload_variable(Path(sys.prefix))
    environment = os.environ | ENVIRONMENT | own | ({} if preload is None else {"LD_PRELOAD": preload})
    if "vllm" in command[2]:
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the server's default is a process for its engine
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        return measured(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "rows": args.rows, "rate": args.rate}
    with tempfile.TemporaryDirectory() as data:
        for name in ("tokenmill", "vllm"):
            port = free_port()
            if name == "tokenmill":
                command = [
                    sys.executable, "-m", "tokenmill", "serve", "--model", f"m={args.model}", "--engine", "vllm",
                    "--data", data, "--port", str(port), "--max-num-seqs", str(ROWS_AT_ONCE), "--dtype", "bfloat16",
                ]  # fmt: skip
            else:
                command = [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model),
                    "--served-model-name", "m", "--port", str(port), "--max-num-seqs", str(ROWS_AT_ONCE),
                    "--max-num-batched-tokens", "2048", "--scheduling-policy", "priority", "--enforce-eager",
                    "--max-model-len", "2048", "--dtype", "bfloat16",
                ]  # fmt: skip
            begin: Any = batch_as_file if name == "tokenmill" else batch_as_requests
            report[name] = served(
                command,
                port,
                lambda url, begin=begin: asyncio.run(measure(url, begin, args.rows, args.chats, args.rate)),
            )
            print(name, report[name], flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
