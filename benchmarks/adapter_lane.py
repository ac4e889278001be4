"""Chats for many LoRA adapters in any order through `tokenmill serve`, against the model alone, in turn.

    python -m benchmarks.adapter_lane [--model demo] [--adapters 16] [--rank 16] [--chats 64] [--callers 32]
        [--rounds 5] [--max-loras 8] [--json FILE]

Two servers run, one without adapters and one with them. A round sends the same chats to both, one server after the
other (the order alternates): `--callers` callers stream a chat each, and the next when it has ended. Every chat has a
prompt of its own and `--max-tokens` tokens. With adapters, chats name them at random (a fixed seed), so that all are
in use at any moment; those without a place wait. The first round is not measured. Reported are output tokens per
second, as callers see them and of the server's processor time, and the shares of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx2

from benchmarks.adapters import CACHE, make_adapter
from benchmarks.process_meter import sample
from benchmarks.throughput import machine
from engine.models.load import open_model
from tests.waiting import wait_for
from tokenmill.models.sources import find


class Rates(NamedTuple):
    """Output tokens of a round, per second as callers see them, and per second of the server's processor time."""

    wall: float
    cpu: float


@contextmanager
def server(args: argparse.Namespace, data: Path, adapters: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """A server's address and process; it ends with the block."""
    log = data.with_suffix(".log")
    command = [
        sys.executable, "-m", "tokenmill", "serve", "--model", f"base={args.model}", "--data", str(data), "--port", "0",
        "--threads", str(args.threads), "--max-loras", str(args.max_loras), "--speculate", "off",
    ]  # fmt: skip
    for folder in adapters:
        command += ["--adapter", f"{folder.name}={folder}"]
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=os.environ)
        try:

            def address() -> str | None:
                assert process.poll() is None, log.read_text()
                found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
                return found.group() if found else None

            yield wait_for(address, "the server's address", seconds=300), process.pid
        finally:
            process.terminate()
            process.wait()


async def chat(client: httpx2.AsyncClient, model: str, number: int, tokens: int) -> int:
    """Stream a chat; return its tokens, which the usage at its end counts."""
    # The first block of a prompt is its own: what adapters can't share with each other is not what is measured.
    messages = [{"role": "system", "content": f"{number * 7919}"}, {"role": "user", "content": "What follows from it?"}]
    body = {
        "model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    used = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{model}: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                used = usage["completion_tokens"]
    assert used == tokens, f"{model} gave {used} tokens, not {tokens}"
    return used


async def send(url: str, models: Sequence[str], first: int, callers: int, tokens: int) -> int:
    """Send a chat to each of these models; return output tokens."""
    left = iter(enumerate(models, first))
    limits = httpx2.Limits(max_connections=callers)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def call() -> int:
            return sum([await chat(client, model, number, tokens) for number, model in left])

        return sum(await asyncio.gather(*(call() for _ in range(callers))))


def measure(at: tuple[str, int], models: Sequence[str], args: argparse.Namespace, first: int) -> Rates:
    """Send a round of chats; `first`: number of the first one."""
    url, pid = at
    before, begun = sample(pid), time.perf_counter()
    used = asyncio.run(send(url, models, first, args.callers, args.max_tokens))
    seconds, after = time.perf_counter() - begun, sample(pid)
    assert before is not None
    assert after is not None
    return Rates(used / seconds, used / (after.cpu - before.cpu))


def main() -> None:
    """Measure and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    for name, value in (
        ("adapters", 16), ("rank", 16), ("chats", 64), ("callers", 32), ("rounds", 5), ("max-loras", 8),
        ("max-tokens", 48), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = find(args.model, CACHE)
    assert source is not None, f"fetch the model first: tokenmill models pull {args.model}"
    decoder = open_model(source.path).decoder
    assert decoder is not None, "adapters need a model that the engine has code for"
    random, rates = Random(1), dict[str, list[Rates]](alone=[], adapters=[])
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        names = [f"a{i}" for i in range(args.adapters)]
        for i, name in enumerate(names):
            make_adapter(decoder, folder / name, i, args.rank)
        alone = stack.enter_context(server(args, folder / "alone", []))
        adapted = stack.enter_context(server(args, folder / "adapted", [folder / name for name in names]))
        for turn in range(args.rounds + 1):
            chosen = [names[i % len(names)] for i in range(args.chats)]
            random.shuffle(chosen)
            works = [("alone", alone, ["base"] * args.chats), ("adapters", adapted, chosen)]
            for kind, of, models in works if turn % 2 else works[::-1]:
                rate = measure(of, models, args, turn * args.chats)
                if turn:
                    rates[kind].append(rate)
    found: dict[str, Any] = {
        "settings": {name: value for name, value in vars(args).items() if name != "json"}, "machine": machine()
    }  # fmt: skip
    for number, kind in enumerate(Rates._fields):
        seen = {name: [round(rate[number], 1) for rate in of] for name, of in rates.items()}
        shares = [round(one / other, 3) for one, other in zip(seen["adapters"], seen["alone"], strict=True)]
        found[kind] = {
            "output_tokens_per_second": seen, "shares": shares, "share_of_the_model_alone": statistics.median(shares)
        }  # fmt: skip
    text = json.dumps(found, indent=1, default=str)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
