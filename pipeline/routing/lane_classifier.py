"""Labels of texts from served classification models, over the lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import structlog

from pipeline.lane.client import CallSettings, answer
from pipeline.lane.ports import Lane
from pipeline.ports import Clock, PipelineError, Randomness
from schemas.jobs.job import Tier
from schemas.models import ModelPin
from schemas.requests.parsing import CLASSIFY_URL
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest

_POLL_SECONDS: Final = 0.02
MAX_CONCURRENT: Final = 8
"""Requests of one process that wait for labels; more would occupy all threads of a gateway. Further ones fail."""

logger = structlog.get_logger(__name__)


class LaneClassifier:
    """Asks the workers of classification models. Thread-safe.

    Args:
        find: the pin of a served model, by its name; None: it isn't served.
    """

    def __init__(
        self, lane: Lane, find: Callable[[str], ModelPin | None], clock: Clock, random: Randomness, tier: Tier
    ) -> None:
        self._lane = lane
        self._find = find
        self._clock = clock
        self._random = random
        self._tier = tier
        self._slots = threading.BoundedSemaphore(MAX_CONCURRENT)

    def classify(
        self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str
    ) -> list[tuple[str, float]] | None:
        """See `Classifier`. Why there is no answer is logged."""
        if not self._slots.acquire(blocking=False):
            labels: list[tuple[str, float]] | str = f"{MAX_CONCURRENT} requests for labels wait already"
        else:
            try:
                labels = self._ask(model, list(texts), timeout_seconds, tenant)
            except PipelineError as error:
                labels = str(error)
            finally:
                self._slots.release()
        if isinstance(labels, str):
            logger.warning("a classification model gave no label", model=model, reason=labels)
            return None
        return labels

    def _ask(self, model: str, texts: list[str], timeout_seconds: float, tenant: str) -> list[tuple[str, float]] | str:
        """The labels, or why there are none."""
        pin = self._find(model)
        if pin is None:
            return "it is not served"
        request = LaneRequest(
            id=f"label-{self._random.token(16).hex()}",
            model=pin.key,
            url=CLASSIFY_URL,
            body={"model": model, "input": texts, "truncate_prompt_tokens": -1},
            tier=self._tier,
            tenant=tenant,
            deadline=self._clock.now() + timedelta(seconds=timeout_seconds),
        )
        settings = CallSettings(
            attempts=1, unavailable_timeout_seconds=timeout_seconds, poll_interval_seconds=_POLL_SECONDS
        )
        last = list(answer(self._lane, request, self._clock, settings))[-1]
        if isinstance(last, EndEvent):
            return _read_labels(last.response, len(texts))
        return last.message if isinstance(last, ErrorEvent) else "no answer"


def _read_labels(response: dict[str, Any], count: int) -> list[tuple[str, float]] | str:
    """The labels in a response, which any client of the lane's server could have written."""
    data = response.get("data")
    if not isinstance(data, list) or len(data) != count:
        return "its response holds another number of labels"
    found = []
    for entry in data:
        label, scores = (entry.get("label"), entry.get("probs")) if isinstance(entry, dict) else (None, None)
        if not isinstance(label, str) or not isinstance(scores, list) or not scores:
            return "its response holds no labels"
        if not all(isinstance(score, int | float) for score in scores):
            return "its response holds no probabilities"
        found.append((label, float(max(scores))))
    return found
