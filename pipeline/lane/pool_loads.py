"""The loads of a model's prefill and decode workers, as they report them, for `pipeline.lane.placement`.

All of it is measured at the workers, seconds ago. Where nothing was measured yet there are no loads, and requests go
the way of their workers' roles.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import orjson
import structlog

from pipeline.lane.placement import (
    DecodeLoad,
    LatencyTargets,
    Placement,
    PrefillLoad,
    RequestSize,
    TransferCost,
    estimate_prompt_tokens,
    forecast,
)
from pipeline.ports import Clock, Heartbeats
from pipeline.runtime.availability import ServiceUnavailable
from schemas.jobs.job import Tier
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL
from schemas.workers.lane import LaneRequest
from schemas.workers.metrics import HandoverMetrics, HistogramSample, WorkerMetrics

DEFAULT_BYTES_PER_SECOND: Final = 1e9
"""Of a link on which nothing was transferred yet."""

HANDOVER_SECONDS: Final = 0.02
"""What a hand-over takes beside its bytes: two ways over the lane."""

_REFRESH_SECONDS: Final = 2.0
_RECENT_SECONDS: Final = 30.0
_STALE_SECONDS: Final = 15.0
"""Loads that were read longer ago are not used."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolLoads:
    """The loads of one model's pools.

    Attributes:
        answer_tokens: mean length of the answers that have ended.
    """

    prefill: PrefillLoad
    decode: DecodeLoad
    transfer: TransferCost
    answer_tokens: float

    def best(
        self, request: RequestSize, targets: LatencyTargets, among: Iterable[Placement] = tuple(Placement)
    ) -> Placement | None:
        """Return the best of these placements (see `pipeline.lane.placement.place`); None: none is possible."""
        allowed = frozenset(among)
        found = [
            one
            for one in forecast(request, self.prefill, self.decode, self.transfer, targets)
            if one.placement in allowed
        ]
        best = min(found, key=lambda one: one.rank(targets), default=None)
        return None if best is None else best.placement


def pool_loads(workers: Iterable[WorkerMetrics]) -> PoolLoads | None:
    """Return the loads of one model's workers; None: there is no prefill worker, a pool has computed nothing, or no
    answer has ended yet."""
    by_role: dict[str, list[tuple[WorkerMetrics, HandoverMetrics]]] = {"prefill": [], "decode": []}
    for one in workers:
        if one.handover is not None:
            by_role[one.handover.role].append((one, one.handover))
    prefill, decode = by_role["prefill"], by_role["decode"]
    metrics = [one for one, _ in (*prefill, *decode)]
    tokens_per_second = _prompt_rate([one for one, _ in prefill])
    step_seconds = _step_seconds([one for one, _ in decode or prefill])
    usage = [tier.usage for one in metrics for tier in one.tiers.values()]
    answered = sum(tier.answered for one in metrics for tier in one.tiers.values())
    if not prefill or not tokens_per_second or not step_seconds or not answered:
        return None
    mean_prompt = sum(used.prompt for used in usage) / answered
    # A prompt's blocks are there as soon if they were held: predictions count all of them.
    received = sum(side.received_bytes + side.held_bytes for _, side in decode)
    seconds = sum(side.fetch_seconds for _, side in decode)
    answer_tokens = max(1.0, sum(used.completion for used in usage) / answered)
    return PoolLoads(
        PrefillLoad(
            workers=len(prefill),
            waiting_tokens=_waiting([one for one, _ in prefill]) * mean_prompt,
            tokens_per_second=tokens_per_second,
            min_step_seconds=step_seconds,
            row_step_seconds=_step_seconds([one for one, _ in prefill]),
        ),
        DecodeLoad(
            workers=len(decode),
            running_rows=sum(tier.running for one, _ in decode for tier in one.tiers.values()),
            waiting_rows=_waiting([one for one, _ in decode]),
            waiting_tokens=0.0,
            kv_tokens=sum(one.kv_blocks * side.block_tokens for one, side in decode),
            kv_tokens_used=sum(one.kv_blocks_used * side.block_tokens for one, side in decode),
            answer_tokens=answer_tokens,
            step_seconds=step_seconds,
            tokens_per_second=tokens_per_second,  # prefill's: decode workers compute hardly any prompts to measure
            step_tokens=min((side.step_tokens for _, side in decode), default=1),
            free_step_tokens=0.0,  # not measured, so a prompt beside rows is taken to delay them by all of its time
        ),
        TransferCost(
            kv_bytes_per_token=max(side.token_bytes for _, side in prefill),
            bytes_per_second=max(1.0, received / seconds) if seconds else DEFAULT_BYTES_PER_SECOND,
            latency_seconds=HANDOVER_SECONDS,
        ),
        answer_tokens=answer_tokens,
    )


class PoolObserver:
    """Reads the loads of models from the heartbeats' server. Thread-safe."""

    def __init__(self, clock: Clock, heartbeats: Heartbeats) -> None:
        self._clock = clock
        self._heartbeats = heartbeats
        self._lock = threading.Lock()
        self._loads: Mapping[str, PoolLoads | None] = {}
        self._earlier: dict[str, deque[tuple[float, WorkerMetrics]]] = {}  # by worker
        self._read_at = self._refresh_at = -math.inf

    def run(self, stop: threading.Event) -> None:
        """Keep the loads fresh until `stop` is set."""
        while True:
            self.refresh()
            if stop.wait(_REFRESH_SECONDS):
                return

    def refresh(self) -> None:
        """Read the metrics if they haven't been read for two seconds."""
        now = self._clock.monotonic()
        if now < self._refresh_at:
            return
        self._refresh_at = now + _REFRESH_SECONDS
        try:
            read = self._heartbeats.metrics()
        except ServiceUnavailable as error:
            logger.warning("the loads of prefill and decode workers are not known", reason=str(error))
            return
        metrics = [self._recent(name, one, now) for name, one in read.items() if one.handover is not None]
        self._earlier = {name: known for name, known in self._earlier.items() if name in read}
        names = {one.model for one in metrics if one.handover is not None}
        loads = {name: pool_loads(one for one in metrics if one.model == name) for name in names}
        with self._lock:
            self._loads, self._read_at = loads, self._clock.monotonic()

    def _recent(self, name: str, metrics: WorkerMetrics, now: float) -> WorkerMetrics:
        """A worker's metrics with its work of the last half a minute or less, if it did any then: what it did before
        says little about now."""
        known = self._earlier.setdefault(name, deque())
        if known and known[-1][1].seconds > metrics.seconds:
            known.clear()  # it serves another model since, or begins anew
        known.append((now, metrics))
        while len(known) > 2 and known[1][0] <= now - _RECENT_SECONDS:
            known.popleft()
        before = known[0][1]
        metrics = _with_recent_transfers(metrics, before)
        seconds = metrics.steps.seconds - before.steps.seconds
        steps = metrics.steps.samples - before.steps.samples
        prompt = metrics.prompt - before.prompt
        if steps <= 0 or seconds <= 0 or prompt < 0:
            return metrics
        if not prompt and metrics.handover is not None and metrics.handover.role == "prefill":
            return metrics  # these steps don't show how fast it computes prompts
        return metrics.model_copy(update={"steps": HistogramSample(counts=(steps,), seconds=seconds), "prompt": prompt})

    def prefers_decode(self, request: LaneRequest, targets: LatencyTargets) -> bool:
        """Whether a decode worker should compute the whole of a new request. Its prompt's tokens are estimated from the
        body's bytes."""
        limit = request.body.get("max_completion_tokens") or request.body.get("max_tokens")
        loads = self.loads(str(request.body.get("model")))
        if loads is None or request.url not in (CHAT_URL, COMPLETIONS_URL):
            return False
        answer = round(loads.answer_tokens)
        answer = min(limit, answer) if isinstance(limit, int) else answer
        prompt = estimate_prompt_tokens(len(orjson.dumps(request.body)))
        return loads.best(RequestSize(prompt, 0, max(1, answer)), targets) is Placement.WHOLE_ON_DECODE

    def loads(self, model: str) -> PoolLoads | None:
        """The loads of a model, by its name; None: they are not known."""
        with self._lock:
            if self._clock.monotonic() - self._read_at > _STALE_SECONDS:
                return None
            return self._loads.get(model)


def _with_recent_transfers(metrics: WorkerMetrics, before: WorkerMetrics) -> WorkerMetrics:
    """The metrics with the transfers since `before` alone. Where there were none the link counts as untried, so that
    one which was slow, or whose transfers all failed, is tried again."""
    now, then = metrics.handover, before.handover
    if now is None or then is None:
        return metrics
    recent = {
        "received_bytes": now.received_bytes - then.received_bytes,
        "held_bytes": now.held_bytes - then.held_bytes,
        "fetch_seconds": now.fetch_seconds - then.fetch_seconds,
    }
    if min(recent.values()) < 0:  # it began anew
        return metrics
    return metrics.model_copy(update={"handover": now.model_copy(update=recent)})


def _prompt_rate(workers: Iterable[WorkerMetrics]) -> float:
    """Prompt tokens a second that one of these computes, while it computes anything; 0: none did."""
    found = list(workers)
    seconds = sum(one.steps.seconds for one in found)
    return sum(one.prompt for one in found) / seconds if seconds else 0.0


def _step_seconds(workers: Iterable[WorkerMetrics]) -> float:
    """Mean duration of a step; 0: there was none."""
    found = list(workers)
    steps = sum(one.steps.samples for one in found)
    return sum(one.steps.seconds for one in found) / steps if steps else 0.0


def _waiting(workers: Iterable[WorkerMetrics]) -> int:
    """Interactive requests that wait at these."""
    return sum(one.tiers[Tier.INTERACTIVE].waiting for one in workers if Tier.INTERACTIVE in one.tiers)
