"""Goodput: which answers to callers keep the latency promise of their tier (DistServe, Zhong et al. 2024, section 1).

Measured at the gateway, so all waiting counts. An answer is in time if its first token came within the promised TTFT,
and if the mean time between its tokens, from the first to the last, is within the promised ITL. That is the time per
output token by which DistServe (section 2.2) and vLLM (`vllm bench serve --goodput ttft:… tpot:…`) define goodput; the
engine's SLO control instead counts single gaps. Of an answer with several choices the slowest one decides.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.lane.ports import AnswerCounts
from pipeline.observability.metric_definitions import OTHER
from schemas.jobs.job import Tier
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL
from schemas.requests.policy_report import is_routed
from schemas.settings.lane import LatencyPromise
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest, TokensEvent

GENERATION_URLS: Final = frozenset((CHAT_URL, COMPLETIONS_URL))
REFUSED_STATUS: Final = 429
TIMEOUT_STATUS: Final = 408
"""Of an answer whose deadline passed: it was late before, or the caller had set a short one."""


class AnswerLatency(StrEnum):
    """Whether an answer kept its promise.

    LATE_FIRST_TOKEN comes before LATE_TOKENS where both hold. REFUSED: the lane was full. FAILED: an error of the
    server.
    """

    IN_TIME = "in_time"
    LATE_FIRST_TOKEN = "late_first_token"
    LATE_TOKENS = "late_tokens"
    REFUSED = "refused"
    FAILED = "failed"


_REPORTED: Final = {
    AnswerLatency.IN_TIME: AnswerCounts(in_time=1),
    AnswerLatency.LATE_FIRST_TOKEN: AnswerCounts(late_first_tokens=1),
    AnswerLatency.REFUSED: AnswerCounts(late_first_tokens=1),
    AnswerLatency.LATE_TOKENS: AnswerCounts(late_tokens=1),
}
"""What the autoscaler learns: more workers mend lateness, but not failures."""


@dataclass(slots=True)
class _Choice:
    """Tokens of one choice: when the first and the last came (seconds), and their number."""

    first_at: float
    last_at: float
    tokens: int = 0

    @property
    def mean_itl_seconds(self) -> float:
        return (self.last_at - self.first_at) / max(1, self.tokens - 1)


@dataclass(slots=True)
class _Answer:
    request: LaneRequest
    promise: LatencyPromise
    began: float
    choices: dict[int, _Choice] = field(default_factory=dict)

    def lateness(self, now: float) -> AnswerLatency | None:
        """What is late by now; None: nothing is."""
        first_at = min((choice.first_at for choice in self.choices.values()), default=now)
        if first_at - self.began > self.promise.ttft_seconds:
            return AnswerLatency.LATE_FIRST_TOKEN
        slowest = max((choice.mean_itl_seconds for choice in self.choices.values()), default=0.0)
        return AnswerLatency.LATE_TOKENS if slowest > self.promise.itl_seconds else None


class GoodputMetrics:
    """Counts answers by whether they keep their tier's promise. Written on the event loop, read by any thread.

    Counted are chats and completions, but not errors of the caller (4xx), nor answers that are cancelled, or reach
    their time limit, before anything is late.

    Args:
        promises: of the tiers whose answers are counted.
        max_tenants: most tenants that are counted by name; others are counted as `OTHER`.
    """

    def __init__(self, promises: Mapping[Tier, LatencyPromise], max_tenants: int) -> None:
        self._promises = promises
        self._max_tenants = max_tenants
        self._lock = threading.Lock()
        self._open: dict[str, _Answer] = {}
        self._tenants: set[str] = set()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._reports: dict[str, AnswerCounts] = {}

    def started(self, request: LaneRequest, now: float) -> None:
        """Start to measure a request. `now`: seconds, on one clock for all calls."""
        promise = self._promise(request)
        if promise is not None:
            self._open[request.id] = _Answer(request, promise, now)

    def record_tokens(self, event: TokensEvent, now: float) -> None:
        """Record the arrival of tokens."""
        answer = self._open.get(event.request)
        if answer is not None and event.tokens:
            choice = answer.choices.setdefault(event.choice, _Choice(now, now))
            choice.last_at, choice.tokens = now, choice.tokens + len(event.tokens)

    def ended(self, request_id: str, end: EndEvent | ErrorEvent | None, now: float) -> None:
        """Count a request unless it is counted already. `end`: None: the caller cancelled it."""
        answer = self._open.pop(request_id, None)
        if answer is None:
            return
        latency = _latency(answer, end, now)
        if latency is not None:
            # More workers of the model that was asked would not make the one faster that a content policy chose.
            is_own = not (isinstance(end, EndEvent) and is_routed(end.response))
            self._count(answer.request, latency, is_reported=is_own)

    def refused(self, request: LaneRequest) -> None:
        """Count a request that is refused because too many wait."""
        self._open.pop(request.id, None)
        if self._promise(request) is not None:
            self._count(request, AnswerLatency.REFUSED)

    def counts(self) -> dict[tuple[str, str, str], int]:
        """(tier, tenant, latency) -> number of answers; with zeros for all latencies of each tenant that has any."""
        with self._lock:
            counts = dict(self._counts)
        seen = {(tier, tenant) for tier, tenant, _ in counts}
        return {(*key, latency.value): 0 for key in seen for latency in AnswerLatency} | counts

    def take_reports(self) -> dict[str, AnswerCounts]:
        """Answers by model (`ModelPin.key`) since the last call."""
        with self._lock:
            reports, self._reports = self._reports, {}
            return reports

    def _promise(self, request: LaneRequest) -> LatencyPromise | None:
        return self._promises.get(request.tier) if request.url in GENERATION_URLS else None

    def _count(self, request: LaneRequest, latency: AnswerLatency, *, is_reported: bool = True) -> None:
        with self._lock:
            if len(self._tenants) < self._max_tenants:
                self._tenants.add(request.tenant)
            tenant = request.tenant if request.tenant in self._tenants else OTHER
            self._counts[request.tier.value, tenant, latency.value] += 1
            if is_reported and latency in _REPORTED:
                reported = self._reports.get(request.model, AnswerCounts())
                self._reports[request.model] = reported + _REPORTED[latency]


def _latency(answer: _Answer, end: EndEvent | ErrorEvent | None, now: float) -> AnswerLatency | None:
    """How an ended answer counts; None: not at all."""
    if isinstance(end, EndEvent):
        return (answer.lateness(now) or AnswerLatency.IN_TIME) if answer.choices else None
    if isinstance(end, ErrorEvent) and end.status >= 500:
        return AnswerLatency.FAILED
    if isinstance(end, ErrorEvent) and end.status == REFUSED_STATUS:
        return AnswerLatency.REFUSED
    is_callers_error = isinstance(end, ErrorEvent) and end.status != TIMEOUT_STATUS
    return None if is_callers_error else answer.lateness(now)
