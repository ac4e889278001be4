"""Looks, decides, and tells: once, or again and again.

Nothing is kept in the process: what one decision leaves for the next lies in the root, as a cache. So several may run,
on one machine or many, in turn or at once; they tell the same, and none needs a lease. What two write at once one of
them has forgotten, which costs a cooldown.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.ports import Heartbeats, ObjectNotFound, PipelineError, World
from pipeline.scaling.backlog import BacklogMetrics, BacklogReader
from pipeline.scaling.fleet import PendingStart
from pipeline.scaling.observe import FirstTokens, observe, pools_of, see
from pipeline.scaling.policy import Decision, PolicyState, PoolObservation, decide
from schemas.settings.autoscaling import AutoscaleOptions, PoolMemory, StoredScaling

PAPER: Final = "scaling/decided.json"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """What was decided for a pool, from what."""

    pool: str
    observed: PoolObservation
    decision: Decision

    @property
    def desired(self) -> int:
        """Workers that it should have."""
        return self.decision.desired

    @property
    def work_per_worker(self) -> float:
        """Seconds of work for each of these, or for one where there are none."""
        return self.observed.work / max(1, self.desired)


class ScalingTarget(Protocol):
    """Where decisions are told."""

    def put(self, figures: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        """Tell them. Raises `PipelineError`."""


class Autoscaler:
    """Decides for the root that `world.store` is. Not for threads.

    Args:
        look: its open work.  targets: who is told.
        keep: what was decided is written down for the next decision; else only this object remembers it.
    """

    def __init__(
        self,
        world: World,
        look: BacklogReader,
        heartbeats: Heartbeats,
        options: AutoscaleOptions,
        targets: Sequence[ScalingTarget],
        *,
        keep: bool = True,
    ) -> None:
        self._world = world
        self._look = look
        self._heartbeats = heartbeats
        self._options = options
        self._targets = targets
        self._keep = keep
        self._paper: StoredScaling | None = None

    def once(self) -> list[PoolDecision]:
        """Decide, and tell. Raises `PipelineError` when the store or the heartbeats can't be read: a fleet that isn't
        heard is not a fleet of none; and the first of what targets raise, when all were told."""
        now = self._world.clock.now()
        paper = self._remembered()
        if paper is not None:
            self._look.remember(paper.speeds)
        seen = see(self._look, self._heartbeats, now)
        pools: dict[str, PoolMemory] = {}
        decisions = []
        for pool in pools_of(self._options, {model.model for model in seen.figures.models}):
            before = PoolMemory() if paper is None else paper.pools.get(pool.name, PoolMemory())
            observed, first = observe(pool, seen, FirstTokens(before.ttft_counts, before.ttft_since))
            decision = decide(pool.limits, _memory(before), observed, now.timestamp())
            pools[pool.name] = _kept(decision.memory, first)
            decisions.append(PoolDecision(pool.name, observed, decision))
        self._paper = StoredScaling(as_of=now, speeds=self._look.speeds, pools=pools)
        if self._keep:
            self._world.store.replace(PAPER, self._paper.to_json())
        self._tell(seen.figures, decisions)
        return decisions

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. What fails is logged, and the next decision comes in its turn."""
        while not stop.is_set():
            try:
                self.once()
            except PipelineError as error:
                logger.warning("no decision about workers", reason=str(error))
            stop.wait(self._options.every_seconds)

    def _tell(self, figures: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        failed: list[PipelineError] = []
        for target in self._targets:
            try:
                target.put(figures, decisions)
            except PipelineError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _remembered(self) -> StoredScaling | None:
        """What was decided last, by whomever. One that can't be read is as good as none."""
        if not self._keep and self._paper is not None:
            return self._paper
        try:
            return parse_stored(self._world.store.locate(PAPER), self._world.store.read(PAPER), StoredScaling)
        except ObjectNotFound:
            return None
        except LedgerError as error:
            logger.warning("what was decided before can't be read", reason=str(error))
            return None


def _memory(kept: PoolMemory) -> PolicyState:
    starting = tuple(PendingStart(count, since) for count, since in kept.starting)
    return PolicyState(kept.desired, kept.live, starting, kept.changed, kept.lower_since, kept.lower)


def _kept(memory: PolicyState, first: FirstTokens) -> PoolMemory:
    return PoolMemory(
        desired=memory.desired,
        live=memory.live,
        starting=tuple((start.count, start.since) for start in memory.starting),
        changed=memory.changed,
        lower_since=memory.lower_since,
        lower=memory.lower,
        ttft_counts=first.counts,
        ttft_since=first.since,
    )
