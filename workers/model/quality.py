"""Measures the quality loss of quantizing a model: the same text is scored before and after.

The text is read from a file: JSON lines with `text`, with a request's `body` or with `prompt` or `messages`; or plain
text. It is cut into windows of tokens, and each window is scored by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.engine import Engine
from engine.request import Request, SamplingParams
from workers.errors import WorkerError
from workers.text.tokenizer import TokenIds, Tokenizer

_MAX_LINE_CHARS = 10 << 20
_MAX_TEXT_CHARS = 64 << 20


@dataclass(frozen=True, slots=True)
class QualityComparison:
    """The scores of one text by two models.

    Attributes:
        tokens: number of scored tokens.
        before, after: perplexities.
        distance: the mean absolute difference of a token's log-probability (natural logarithm).
        same_greedy: share of tokens for which both models' likeliest token is the same.
    """

    tokens: int
    before: float
    after: float
    distance: float
    same_greedy: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """float64 [tokens]: each token's log-probability; int32 [tokens]: the model's likeliest token instead."""

    logprobs: NDArray[np.float64]
    greedy: NDArray[np.int32]


def read_windows(path: Path, tokenizer: Tokenizer, length: int, max_windows: int) -> list[TokenIds]:
    """Up to `max_windows` windows of `length` tokens from a file of text; the incomplete last one is left out. Each
    begins with the tokens that the tokenizer prepends to every text: models trained with them need them.

    Raises `WorkerError` when the file can't be read, or fills no window.
    """
    found: list[TokenIds] = []
    start = tokenizer.encode_batch([""], add_special_tokens=True)[0]
    length -= len(start)
    left = np.empty(0, dtype=np.int32)
    for text in _texts(path):
        left = np.concatenate([left, tokenizer.encode_batch([text], add_special_tokens=False)[0]])
        while len(left) >= length and len(found) < max_windows:
            found.append(np.concatenate([start, left[:length]]))
            left = left[length:]
        if len(found) == max_windows:
            break
    if not found:
        raise WorkerError(f"{path} holds {len(left)} tokens of text; at least {length} are needed")
    return found


def token_scores(engine: Engine, windows: Sequence[TokenIds]) -> TokenScores:
    """Score all tokens of all windows but each window's first.

    Raises `WorkerError` when the engine can't compute one.
    """
    params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=1)
    found: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for done in engine.run(Request(str(at), ids, params) for at, ids in enumerate(windows)):
        if done.prompt_logprobs is None or done.error is not None:
            raise WorkerError(f"window {done.request_id} can't be scored: {done.error}")
        found[int(done.request_id)] = done.prompt_logprobs.chosen[1:], done.prompt_logprobs.top_ids[1:, 0]
    ordered = [found[at] for at in range(len(windows))]
    logprobs = np.concatenate([chosen for chosen, _ in ordered]).astype(np.float64)
    return TokenScores(logprobs, np.concatenate([top for _, top in ordered]).astype(np.int32))


def compare(before: TokenScores, after: TokenScores) -> QualityComparison:
    """Compare two models' scores of the same tokens."""
    return QualityComparison(
        tokens=len(before.logprobs),
        before=math.exp(-float(before.logprobs.mean())),
        after=math.exp(-float(after.logprobs.mean())),
        distance=float(np.abs(after.logprobs - before.logprobs).mean()),
        same_greedy=float((before.greedy == after.greedy).mean()),
    )


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix not in (".jsonl", ".json"):
                yield file.read(_MAX_TEXT_CHARS)
                return
            number = 0
            while line := file.readline(_MAX_LINE_CHARS):
                number += 1
                if line.strip():
                    yield _text_of(line, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkerError(f"{path} can't be read as text: {error}") from error


def _text_of(line: str, path: Path, number: int) -> str:
    """The text of a line; the contents of messages are joined as paragraphs."""
    try:
        value = json.loads(line)
        body = value.get("body", value)
        if isinstance(text := body.get("text", body.get("prompt")), str):
            return text
        return "\n\n".join(str(message["content"]) for message in body["messages"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wanted = "a JSON object with text, prompt, messages, or a body with one of them"
        raise WorkerError(f"{path}:{number} is not {wanted}") from error
