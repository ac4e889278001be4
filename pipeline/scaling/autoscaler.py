"""The autoscaler observes the pools, decides their sizes, and reports the decisions to its targets.

It is stateless: the policy's state is cached in the root. So several autoscalers may run, on one machine or many, one
after the other or concurrently; they report the same decisions, and none needs a lease. Of two concurrent writes of the
state one is lost, which costs a cooldown.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, Protocol

import structlog

from pipeline.lane.ports import AnswerCounts
from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.ports import Heartbeats, ObjectNotFound, PipelineError, World
from pipeline.scaling.backlog import BacklogMetrics, BacklogReader
from pipeline.scaling.fleet import PendingStart
from pipeline.scaling.goodput import GoodputWindow, observe_goodput
from pipeline.scaling.policy import Decision, PolicyState, PoolObservation, decide
from pipeline.scaling.pool_observer import FirstTokens, observe, observe_root, pools_of
from schemas.settings.autoscaling import AutoscaleOptions, PoolMemory, StoredScaling

SCALING_KEY: Final = "scaling/decided.json"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """The decision for a pool, and the observation that it is based on."""

    pool: str
    observed: PoolObservation
    decision: Decision

    @property
    def desired(self) -> int:
        """Workers that the pool should have."""
        return self.decision.desired

    @property
    def work_per_worker(self) -> float:
        """Seconds of work for each desired worker, or for one if none is desired."""
        return self.observed.work / max(1, self.desired)


class ScalingTarget(Protocol):
    """A receiver of decisions."""

    def put(self, metrics: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        """Report the decisions. Raises `PipelineError`."""


class Autoscaler:
    """Decides pool sizes for the root `world.store`. Not thread-safe.

    Args:
        reader: reads the open work.
        targets: receivers of the decisions.
        keep: store the policy's state in the root for the next decision; else only in this object.
    """

    def __init__(
        self,
        world: World,
        reader: BacklogReader,
        heartbeats: Heartbeats,
        options: AutoscaleOptions,
        targets: Sequence[ScalingTarget],
        *,
        keep: bool = True,
    ) -> None:
        self._world = world
        self._reader = reader
        self._heartbeats = heartbeats
        self._options = options
        self._targets = targets
        self._keep = keep
        self._state: StoredScaling | None = None

    def decide_once(self) -> list[PoolDecision]:
        """Decide once, and report to all targets. Raises `PipelineError` when the store or the heartbeats can't be
        read, since missing heartbeats don't mean that there are no workers; and, after all targets were called, the
        first error of a target."""
        now = self._world.clock.now()
        state = self._last_state()
        if state is not None:
            self._reader.remember(state.speeds)
        seen = observe_root(self._reader, self._heartbeats, now)
        pools: dict[str, PoolMemory] = {}
        decisions = []
        for pool in pools_of(self._options, {model.model for model in seen.backlog_metrics.models}):
            before = PoolMemory() if state is None else state.pools.get(pool.name, PoolMemory())
            observed, first = observe(pool, seen, FirstTokens(before.ttft_counts, before.ttft_since))
            goodput, window = observe_goodput(
                pool, seen.answers, _goodput_window(before), observed.live, now.timestamp()
            )
            observed = replace(observed, goodput=goodput)
            decision = decide(pool.limits, _memory(before), observed, now.timestamp())
            pools[pool.name] = _pool_memory(decision.memory, first, window)
            decisions.append(PoolDecision(pool.name, observed, decision))
        self._state = StoredScaling(as_of=now, speeds=self._reader.speeds, pools=pools)
        if self._keep:
            self._world.store.replace(SCALING_KEY, self._state.to_json())
        self._report(seen.backlog_metrics, decisions)
        return decisions

    def run(self, stop: threading.Event) -> None:
        """Decide at each interval until `stop` is set. A failure is logged, and the next interval retries."""
        while not stop.is_set():
            try:
                self.decide_once()
            except PipelineError as error:
                logger.warning("no decision about workers", reason=str(error))
            stop.wait(self._options.interval_seconds)

    def _report(self, metrics: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        failed: list[PipelineError] = []
        for target in self._targets:
            try:
                target.put(metrics, decisions)
            except PipelineError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _last_state(self) -> StoredScaling | None:
        """The stored state of the last decision, by any autoscaler. An unreadable one counts as missing."""
        if not self._keep and self._state is not None:
            return self._state
        try:
            return parse_stored(
                self._world.store.locate(SCALING_KEY), self._world.store.read(SCALING_KEY), StoredScaling
            )
        except ObjectNotFound:
            return None
        except LedgerError as error:
            logger.warning("the last scaling decision can't be read", reason=str(error))
            return None


def _memory(stored: PoolMemory) -> PolicyState:
    starting = tuple(PendingStart(count, since) for count, since in stored.starting)
    return PolicyState(stored.desired, stored.live, starting, stored.changed, stored.lower_since, stored.lower)


def _goodput_window(stored: PoolMemory) -> GoodputWindow:
    answers = AnswerCounts(*stored.answers[:3])  # a later version may have stored more
    return GoodputWindow(answers, stored.answers_since, stored.answers_live)


def _pool_memory(memory: PolicyState, first: FirstTokens, window: GoodputWindow) -> PoolMemory:
    return PoolMemory(
        desired=memory.desired,
        live=memory.live,
        starting=tuple((start.count, start.since) for start in memory.starting),
        changed=memory.changed,
        lower_since=memory.lower_since,
        lower=memory.lower,
        ttft_counts=first.counts,
        ttft_since=first.since,
        answers=astuple(window.answers),
        answers_since=window.since,
        answers_live=window.live,
    )
