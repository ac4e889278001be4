"""Brings the releases of a root to their end: compares what stands, promotes or rolls back, and writes down why.

Several may run: each computes the same verdict from the same objects, and the first outcome that is written counts.
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
from pipeline.models.evaluation import ShadowedShard, judge, standing_of
from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.models.shadow_results import ShadowComparison, ShadowCopies
from pipeline.ports import PipelineError, World
from schemas.releases import Release, ReleaseComparison, ReleaseOutcome

LOOK_SECONDS: Final = 2.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReleaseMetrics:
    """What a keeper saw last.

    Attributes:
        open: the releases that are not decided, by the model's name, and how they stand.
        ended: releases that this keeper saw end, by name and verdict.
        canaries: workers that failed their canary prompts, by the model's name; of all time.
    """

    open: dict[str, ReleaseComparison]
    ended: dict[tuple[str, str], int]
    canaries: dict[str, int]


class RolloutController:
    """A `Part`. One thread runs it; `figures` is for any."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._book = ModelRegistry(world.store)
        self._canaries = Canaries(world.store)
        self._compared: dict[str, dict[str, ShadowComparison | None]] = {}  # release -> copy's key -> what came of it
        self._ended: Counter[tuple[str, str]] = Counter()
        self.figures = ReleaseMetrics({}, {}, {})

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. What can't be read now is logged, and looked at again."""
        while not stop.is_set():
            try:
                self.look()
            except PipelineError as error:
                logger.warning("releases can't be looked at", reason=str(error))
            stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """One look at the last release of each model."""
        standing_open: dict[str, ReleaseComparison] = {}
        for standing in self._book.all_last():
            if standing.outcome is None:
                outcome, compared = self._look_at(standing.release)
                if outcome is None:
                    standing_open[standing.release.name] = compared
                    self._begin_to_count(standing.release.name)
                    continue
                standing = ReleaseState(standing.release, outcome)
            self._settle(standing)
        canaries = dict(self._canaries.failures())
        self.figures = ReleaseMetrics(standing_open, dict(self._ended), canaries)

    def _look_at(self, release: Release) -> tuple[ReleaseOutcome | None, ReleaseComparison]:
        shards, drift, rules = self._shards(release), self._book.drift(release), release.rules
        now = self._world.clock.now()
        compared = standing_of(shards, rules, drift)
        if release.mode == "shadow":
            return None, compared
        verdict = judge(shards, rules, drift)
        if verdict is not None:
            outcome = self._book.end(
                release, "promoted" if verdict.promote else "rolled_back", "comparison", now, verdict.reasons,
                verdict.comparison,
            )  # fmt: skip
        elif (now - release.started_at).total_seconds() >= rules.longest_seconds:
            why = f"not decided after {rules.longest_seconds:g} s: {len(shards)} shards were compared"
            outcome = self._book.end(release, "rolled_back", "time", now, (why,), compared)
        else:
            return None, compared
        self._ended[release.name, outcome.verdict] += 1
        logger.info(
            "release ended", model=release.name, release=release.number, verdict=outcome.verdict, by=outcome.by,
            candidate=release.candidate.pin.digest, reasons="; ".join(outcome.reasons),
        )  # fmt: skip
        return outcome, compared

    def _begin_to_count(self, name: str) -> None:
        """An end is seen by whoever watches only if none was told before it."""
        for verdict in ("promoted", "rolled_back"):
            self._ended[name, verdict] += 0

    def _settle(self, standing: ReleaseState) -> None:
        """Have the catalog follow, and remove the copies. A worker may finish one a moment after the end."""
        self._book.settle(standing)
        ShadowCopies(self._world.store, standing.release).remove()
        self._compared.pop(standing.release.id, None)

    def _shards(self, release: Release) -> list[ShadowedShard]:
        return _shards(self._world, release, self._compared.setdefault(release.id, {}))


def compared_now(world: World, release: Release) -> ReleaseComparison:
    """How an open release stands; reads all copies."""
    return standing_of(_shards(world, release, {}), release.rules, ModelRegistry(world.store).drift(release))


def _shards(world: World, release: Release, known: dict[str, ShadowComparison | None]) -> list[ShadowedShard]:
    """What was compared, in the order in which the copies were made: looks that are over see the same again. `known`:
    what came of each copy; grows."""
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
