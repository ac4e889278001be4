"""Counts the verdicts of content policies, for metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from schemas.workers.metrics import PolicyMetrics

PASS: Final = "pass"
"""The word for a text that simply passes, beside `PolicyAction`."""


class PolicyCounts:
    """Counts of a worker's policies, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, PolicyMetrics] = {}

    def add(self, policy: str, action: str | None, prompt_tokens: int, completion_tokens: int, failed: bool) -> None:
        """Count a verdict. A text that could not be judged counts as a failure, and under the action taken, if any."""
        with self._lock:
            old = self._counts.get(policy, PolicyMetrics())
            texts = dict(old.texts)
            if action is not None or not failed:
                texts[action or PASS] = texts.get(action or PASS, 0) + 1
            self._counts[policy] = PolicyMetrics.model_construct(
                texts=texts,
                failures=old.failures + failed,
                prompt_tokens=old.prompt_tokens + prompt_tokens,
                completion_tokens=old.completion_tokens + completion_tokens,
            )

    def read(self) -> dict[str, PolicyMetrics]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)


def counted_since(before: Mapping[str, PolicyMetrics], now: Mapping[str, PolicyMetrics]) -> dict[str, PolicyMetrics]:
    """What was counted between two readings."""
    found = {}
    for name, counts in now.items():
        old = before.get(name, PolicyMetrics())
        found[name] = PolicyMetrics(
            texts={action: count - old.texts.get(action, 0) for action, count in counts.texts.items()},
            failures=counts.failures - old.failures,
            prompt_tokens=counts.prompt_tokens - old.prompt_tokens,
            completion_tokens=counts.completion_tokens - old.completion_tokens,
        )
    return found
