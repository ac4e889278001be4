"""Time to first token behind a system prompt that an earlier process has computed: with its blocks in a folder
(`--kv-cache-dir`), and without, each time in a new process, in turn.

    python benchmarks/second_tier.py --model MODEL [--tokens 4096] [--pairs 5] [--set …] [--json FILE]

A first process answers two requests that begin alike, which fills the folder (`filling`). Then come pairs of processes
that answer one request each, with two more tokens. Each process answers a short request of another prompt first.
`cold`: the folder's files were dropped from the system's page cache before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from engine_settings import parse_overrides, with_overrides
from throughput import machine

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, as_token_ids
from workers.model.loaded_model import model_digest


def answer(engine: Engine, name: str, prompt: list[int]) -> dict[str, Any]:
    """Time and counts of one request with an answer of one token."""
    before, begun = engine.stats(), time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    (done,) = engine.run([Request(name, as_token_ids(prompt), params)])
    seconds, after = time.perf_counter() - begun, engine.stats()
    token = done.choices[0].token_ids.tolist()
    return {"seconds": seconds, "computed": after.prompt - before.prompt, "cached": done.cached_tokens, "token": token}


def run_process(args: argparse.Namespace) -> None:
    """One process: prints its answers as a line of JSON."""
    cache = CacheConfig(sequences=4, tokens_per_sequence=args.tokens + 64, tier_folder=args.folder)
    config = with_overrides(EngineConfig(cache=cache), parse_overrides(args.set))
    path = Path(args.model)
    engine = Engine.load(path, config, model_digest=lambda: model_digest(path))
    chance = np.random.default_rng(1)
    prefix = chance.integers(1000, min(40_000, engine.spec.vocab_size), args.tokens).tolist()
    answer(engine, "warm-up", prefix[-64:])
    answers = [answer(engine, f"r{end}", [*prefix, end, end]) for end in range(100, 100 + args.requests)]
    begun = time.perf_counter()
    engine.close()
    tier = engine.stats().tier
    print(
        json.dumps(
            {
                "answers": answers,
                "close_seconds": time.perf_counter() - begun,
                "bytes_read": 0 if tier is None else tier.bytes_read,
                "bytes_written": 0 if tier is None else tier.bytes_written,
                "attention": engine.attention_name,
            }
        )
    )


def measure(args: argparse.Namespace, folder: str | None, requests: int = 1) -> dict[str, Any]:
    """Run one process."""
    command = [sys.executable, __file__, "--model", args.model, "--tokens", str(args.tokens), "--set", args.set]
    command += ["--requests", str(requests), *(["--folder", folder] if folder else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def drop_pages(folder: str) -> None:
    """Drop the folder's files from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a GGUF file")
    parser.add_argument("--tokens", type=int, default=4096, help="of the system prompt")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--set", default="", help="engine settings, as key:value,…")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=0, help="run as one of the processes")
    parser.add_argument("--folder", default=None, help="of that process")
    args = parser.parse_args()
    if args.requests:
        run_process(args)
        return
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        filling = measure(args, folder, 2)
        for i in range(args.pairs):
            kinds: dict[str, dict[str, Any]] = {"without": measure(args, None), "with": measure(args, folder)}
            drop_pages(folder)
            kinds["cold"] = measure(args, folder)
            tokens = [kind["answers"][0]["token"] for kind in kinds.values()]
            assert tokens.count(tokens[0]) == len(tokens), f"answers differ: {tokens}"
            rounds.append(kinds)
            seconds = {name: round(kind["answers"][0]["seconds"], 3) for name, kind in kinds.items()}
            print(f"pair {i}: {seconds}", file=sys.stderr, flush=True)
    report = {
        "model": Path(args.model).name,
        "prefix_tokens": args.tokens,
        "settings": args.set,
        "machine": machine(),
        "seconds_to_first_token": {
            name: {"median": statistics.median(times), "min": min(times), "max": max(times)}
            for name in rounds[0]
            for times in [[one[name]["answers"][0]["seconds"] for one in rounds]]
        },
        "filling": filling,
        "rounds": rounds,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["seconds_to_first_token"]))


if __name__ == "__main__":
    main()
