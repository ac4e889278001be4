"""Token ids for a machine without a tokenizer: the project's own workload as words of four letters, and random lengths.

`mixed_job` keeps what makes `varied.jsonl` a job: how long its prompts and answers are, which share their beginnings,
and in what order they come. Each four letters of a prompt become one token by a hash of their own, so texts that begin
alike do so as tokens; each round of the file has tokens of its own.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from zlib import crc32

from benchmarks.peers.offline import Prompt

VARIED = Path(__file__).parent.parent / "workloads" / "varied.jsonl"

_LETTERS = 4
_SPECIAL = 3
"""The first token ids, which stand for what no text holds."""


def mixed_job(requests: int, vocab: int, path: Path = VARIED, *, most_tokens: int | None = None) -> list[Prompt]:
    """So many requests: the file, again and again.

    Args:
        most_tokens: of a prompt and of an answer, for models whose context is short.
    """
    lines = [json.loads(line)["body"] for line in path.read_text(encoding="utf-8").splitlines()]
    texts = ["\n".join(f"{each['role']}\n{each['content']}" for each in body["messages"]) for body in lines]
    prompts = []
    for number in range(requests):
        round_, at = divmod(number, len(lines))
        ids = tokens(texts[at], vocab, round_)[:most_tokens]
        answer = min(int(lines[at]["max_tokens"]), most_tokens or 1 << 30)
        prompts.append(Prompt(f"{round_}-{at}", ids, answer))
    return prompts


def tokens(text: str, vocab: int, salt: int) -> list[int]:
    """A token for every four letters."""
    pieces = (text[at : at + _LETTERS] for at in range(0, len(text), _LETTERS))
    return [_SPECIAL + crc32(f"{salt}:{piece}".encode()) % (vocab - _SPECIAL) for piece in pieces]


def random_job(requests: int, vocab: int, prompt: tuple[int, int], answer: tuple[int, int]) -> list[Prompt]:
    """Requests without anything in common; lengths are drawn evenly from these ranges, ends included."""
    draw = random.Random(23)
    return [
        Prompt(
            str(number),
            [draw.randrange(_SPECIAL, vocab) for _ in range(draw.randint(*prompt))],
            draw.randint(*answer),
        )
        for number in range(requests)
    ]
