"""Measures a response's events, and compares two versions' responses to one request."""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import orjson

from schemas.releases import AnswerSample
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent


class AnswerTimer:
    """Measures one answer. Times are monotonic seconds.

    Attributes:
        end: its last event; None: it hasn't ended.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.end: EndEvent | ErrorEvent | None = None
        self._first: float | None = None
        self._last = began
        self._num_tokens = 0
        self._num_first = 0  # tokens of the first event

    def record(self, event: LaneEvent, now: float) -> None:
        """Record the next event."""
        if isinstance(event, TokensEvent):
            self._num_tokens += len(event.tokens)
            if self._first is None:
                self._first, self._num_first = now, len(event.tokens)
            self._last = now
        elif isinstance(event, EndEvent | ErrorEvent):
            self.end = event
            if self._first is None:
                self._first = self._last = now

    @property
    def has_begun(self) -> bool:
        """Whether an event has arrived."""
        return self._first is not None

    def seconds(self, now: float) -> float:
        """How long it has taken so far."""
        return now - self.began

    def sample(self) -> AnswerSample:
        """The sample of an answer that has ended; of none that is a failure."""
        if not isinstance(self.end, EndEvent) or self._first is None:
            return AnswerSample(failed=True)
        later = self._num_tokens - self._num_first
        return AnswerSample(
            ttft_seconds=self._first - self.began,
            itl_seconds=(self._last - self._first) / later if later > 0 else None,
            tokens=self._num_tokens,
        )


def agreement_of(stable: Mapping[str, Any], candidate: Mapping[str, Any]) -> float:
    """The similarity of two responses of one format, 0 to 1: the mean over their choices or vectors. Of texts the share
    of the longer one before the first different character, of vectors and scores the cosine."""
    if "choices" in stable and "choices" in candidate:
        was, now = _texts(stable["choices"]), _texts(candidate["choices"])
        pairs = [_text_likeness(*pair) for pair in zip(was, now, strict=False)]
        return sum(pairs) / max(len(was), len(now)) if pairs else float(was == now)
    old, new = _vectors(stable), _vectors(candidate)
    if not old or len(old) != len(new):
        return float(old == new)
    return fmean(_cosine(*pair) for pair in zip(old, new, strict=True))


def _texts(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_text(choice.get("message")) or str(choice.get("text") or "") for choice in choices]


def _text(message: Mapping[str, Any] | None) -> str:
    """What a message says: its thought, its text and its calls (their ids are random)."""
    if message is None:
        return ""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    parts = (message.get("reasoning_content"), message.get("content"), orjson.dumps(calls).decode() if calls else None)
    return "".join(part for part in parts if isinstance(part, str))


def _text_likeness(first: str, second: str) -> float:
    longer = max(len(first), len(second))
    return common_prefix(first, second) / longer if longer else 1.0


def common_prefix(first: str, second: str) -> int:
    """The number of equal characters at the beginning of both. Bisected, because texts may have a million."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _vectors(response: Mapping[str, Any]) -> list[list[float]]:
    """The numbers of a response: embeddings, probabilities of labels, scores (together one vector)."""
    rows = response.get("data") or response.get("results") or ()
    embeddings = [_floats(row.get("embedding", row.get("probs"))) for row in rows]
    if all(embeddings):
        return embeddings
    scores = [row.get("score", row.get("relevance_score")) for row in sorted(rows, key=lambda row: row.get("index", 0))]
    return [[float(score) for score in scores if isinstance(score, int | float)]]


def _floats(value: Any) -> list[float]:
    """A vector, which may be base64 of little-endian float32."""
    if isinstance(value, str):
        try:
            return list(array("f", base64.b64decode(value)))
        except (ValueError, binascii.Error):
            return []
    return [float(number) for number in value] if isinstance(value, list) else []


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    if len(first) != len(second) or not lengths:
        return float(list(first) == list(second))
    return max(0.0, min(1.0, sum(a * b for a, b in zip(first, second, strict=True)) / lengths))
