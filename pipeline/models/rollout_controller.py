"""The rollout controller decides open releases: it compares shadow copies, promotes or rolls back, and stores why.

Several may run: each computes the same verdict from the same objects, and the first stored outcome counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.ledger.ledger import LedgerError
from pipeline.models.canaries import Canaries
from pipeline.models.evaluation import ShadowedShard, compare_so_far, judge
from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.models.shadow_results import ShadowComparison, ShadowCopies
from pipeline.ports import PipelineError, World
from schemas.releases import Release, ReleaseComparison, ReleaseOutcome

POLL_INTERVAL_SECONDS: Final = 2.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReleaseMetrics:
    """A snapshot of the rollout controller's metrics.

    Attributes:
        open: model name -> comparison of its open release.
        ended: (model name, verdict) -> releases that this controller has ended.
        canaries: model name -> workers that failed their canary prompts, of all time.
    """

    open: dict[str, ReleaseComparison]
    ended: dict[tuple[str, str], int]
    canaries: dict[str, int]


class RolloutController:
    """A `Part`. One thread runs it; any thread may read `metrics`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._registry = ModelRegistry(world.store)
        self._canaries = Canaries(world.store)
        self._compared: dict[str, dict[str, ShadowComparison | None]] = {}  # release -> copy's key -> what came of it
        self._ended: Counter[tuple[str, str]] = Counter()
        self.metrics = ReleaseMetrics({}, {}, {})

    def run(self, stop: threading.Event) -> None:
        """Refresh the releases until `stop` is set. Read errors are logged and retried."""
        while not stop.is_set():
            try:
                self.poll()
            except PipelineError as error:
                logger.warning("releases can't be read", reason=str(error))
            stop.wait(POLL_INTERVAL_SECONDS)

    def poll(self) -> None:
        """Refresh the last release of each model once."""
        open_comparisons: dict[str, ReleaseComparison] = {}
        for standing in self._registry.all_last():
            if standing.outcome is None:
                outcome, compared = self._decide(standing.release)
                if outcome is None:
                    open_comparisons[standing.release.name] = compared
                    self._begin_to_count(standing.release.name)
                    continue
                standing = ReleaseState(standing.release, outcome)
            self._settle(standing)
        canaries = dict(self._canaries.failures())
        self.metrics = ReleaseMetrics(open_comparisons, dict(self._ended), canaries)

    def _decide(self, release: Release) -> tuple[ReleaseOutcome | None, ReleaseComparison]:
        shards, drift, rules = self._shards(release), self._registry.drift(release), release.rules
        now = self._world.clock.now()
        compared = compare_so_far(shards, rules, drift)
        if release.mode == "shadow":
            return None, compared
        verdict = judge(shards, rules, drift)
        if verdict is not None:
            outcome = self._registry.end(
                release, "promoted" if verdict.promote else "rolled_back", "comparison", now, verdict.reasons,
                verdict.comparison,
            )  # fmt: skip
        elif (now - release.started_at).total_seconds() >= rules.longest_seconds:
            why = f"not decided after {rules.longest_seconds:g} s: {len(shards)} shards were compared"
            outcome = self._registry.end(release, "rolled_back", "time", now, (why,), compared)
        else:
            return None, compared
        self._ended[release.name, outcome.verdict] += 1
        logger.info(
            "release ended", model=release.name, release=release.number, verdict=outcome.verdict, by=outcome.by,
            candidate=release.candidate.pin.digest, reasons="; ".join(outcome.reasons),
        )  # fmt: skip
        return outcome, compared

    def _begin_to_count(self, name: str) -> None:
        """Start the counters at zero: Prometheus sees an increase only after a zero."""
        for verdict in ("promoted", "rolled_back"):
            self._ended[name, verdict] += 0

    def _settle(self, standing: ReleaseState) -> None:
        """Update the catalog, and remove the shadow copies. A worker may still write one just after the end."""
        self._registry.settle(standing)
        ShadowCopies(self._world.store, standing.release).remove()
        self._compared.pop(standing.release.id, None)

    def _shards(self, release: Release) -> list[ShadowedShard]:
        return _shards(self._world, release, self._compared.setdefault(release.id, {}))


def compare_release(world: World, release: Release) -> ReleaseComparison:
    """The comparison of an open release; reads all copies."""
    return compare_so_far(_shards(world, release, {}), release.rules, ModelRegistry(world.store).drift(release))


def _shards(world: World, release: Release, known: dict[str, ShadowComparison | None]) -> list[ShadowedShard]:
    """The compared shards, in order of their copies' creation, so that repeated interim tests see the same shards.
    `known`: cache of comparisons by copy; new ones are added."""
    copies = ShadowCopies(world.store, release)
    for key in copies.standing():
        if key not in known:
            try:
                known[key] = copies.compare(key)
            except LedgerError as error:
                known[key] = None
                logger.warning("a shadow copy can't be compared", reason=str(error))
    return [one.shard for one in _in_order(known.values()) if one.shard is not None]


def _in_order(compared: Iterable[ShadowComparison | None]) -> list[ShadowComparison]:
    found = [one for one in compared if one is not None]
    return sorted(found, key=lambda one: (one.head.finished_at, one.head.job, one.head.shard))
