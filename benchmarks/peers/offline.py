"""What every peer's runner shares: its arguments, a warm-up that leaves no prefix behind, one timed pass, a JSON line.

A runner is a script that is started by the Python of the peer's own environment. So this file needs the standard
library alone, and knows nothing of tokenmill.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: prompt token ids and how many tokens to generate."""

    custom_id: str
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a runner is asked for; `options` are the peer's own settings, by the peer's names."""

    prompts: list[Prompt]
    model: Path
    threads: int
    options: dict[str, Any]
    warmup: int | None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return max(len(prompt.token_ids) + prompt.max_tokens for prompt in self.prompts)


Generate = Callable[[Sequence[Prompt]], list[list[int]]]
"""All prompts at once, greedy, end tokens ignored; gives the new token ids of each prompt, in order."""


def parse_task(description: str | None) -> Task:
    """Read the command line that all runners share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="token ids, from `compare.py` or `throughput.py --keep-prompts`")
    parser.add_argument("--model", type=Path, required=True, help="the model in the form that this peer reads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON; {} leaves everything to the peer")
    parser.add_argument("--warmup", type=int, default=None, help="requests in the warm-up; all of them if left out")
    args = parser.parse_args()
    prompts = [Prompt(**line) for line in json.loads(args.prompts.read_text(encoding="utf-8"))]
    return Task(prompts, args.model, args.threads, args.options, args.warmup)


def salted(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts with another first token.

    Prefix caches compare from the first token on, so none of what a warm-up leaves behind is found by the timed pass;
    what the prompts share among themselves they still share.
    """
    return [
        replace(prompt, token_ids=[prompt.token_ids[0] - 1 if prompt.token_ids[0] else 1, *prompt.token_ids[1:]])
        for prompt in prompts
    ]


def leaders(prompts: Sequence[Prompt], block: int) -> list[int]:
    """Indices of prompts that together hold every shared prefix, one prompt for each, in steps of `block` tokens.

    An engine that finds only finished blocks in its prefix cache computes a shared prefix once if one of its prompts
    goes ahead of the others. Of those that could lead, the one with the shortest answer does.
    """
    chains: list[list[int]] = []
    for prompt in prompts:
        links = [0]
        for begin in range(0, len(prompt.token_ids) - block, block):
            links.append(hash((links[-1], *prompt.token_ids[begin : begin + block])))
        chains.append(links[1:])
    holders = Counter(link for chain in chains for link in chain)
    held: set[int] = set()
    found = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i].max_tokens):
        shared = [link for link in chains[i] if holders[link] > 1]
        if shared and shared[-1] not in held:
            held.update(shared)
            found.append(i)
    return sorted(found)


def measure(engine: str, packages: Sequence[str], task: Task, generate: Generate, reset: Callable[[], Any]) -> None:
    """Warm up, `reset` the caches, time one pass over the whole workload, and print the JSON line."""
    begun = time.perf_counter()
    generate(salted(task.prompts[: task.warmup]))
    print(f"{engine}: warm-up {time.perf_counter() - begun:.2f} s", file=sys.stderr, flush=True)
    reset()
    begun = time.perf_counter()
    answers = generate(task.prompts)
    wall = time.perf_counter() - begun
    lengths = [len(answer) for answer in answers]
    rate = sum(lengths) / wall
    print(f"{engine}: {wall:.2f} s, {rate:.1f} output tok/s", file=sys.stderr, flush=True)
    line = {
        "engine": engine,
        "versions": {package: version(package) for package in packages},
        "options": task.options,
        "wall_seconds": wall,
        "output_lengths": lengths,
        "output_tokens_per_second": {"median": rate, "min": rate, "max": rate},
    }
    print(json.dumps(line), flush=True)
