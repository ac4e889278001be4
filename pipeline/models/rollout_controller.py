"""The rollout controller decides open releases: it begins their canary stage, promotes or rolls back, and stores why.

Several may run: each computes the same verdict from the same objects, and the first stored outcome counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.models.canaries import Canaries
from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.models.release_evidence import KnownComparisons, read_evidence
from pipeline.models.request_samples import StoredSamples
from pipeline.models.shadow_results import ShadowCopies
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
        self._known: dict[str, KnownComparisons] = {}  # by release
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
        evidence = read_evidence(self._world, release, self._known.setdefault(release.id, KnownComparisons()))
        now = self._world.clock.now()
        compared = evidence.compare()
        if release.mode == "shadow":
            return None, compared
        verdict = evidence.verdict()
        if verdict is not None and verdict.promote and release.rules.canary and not evidence.canary_began:
            self._registry.begin_canary(release, now, verdict.reasons)
            logger.info(
                "canary stage began", model=release.name, release=release.number, share=release.rules.canary,
                candidate=release.candidate.pin.digest,
            )  # fmt: skip
            verdict = None
        if verdict is not None:
            outcome = self._registry.end(
                release, "promoted" if verdict.promote else "rolled_back", "comparison", now, verdict.reasons,
                verdict.comparison,
            )  # fmt: skip
        elif (now - release.started_at).total_seconds() >= release.rules.longest_seconds:
            why = f"not decided after {release.rules.longest_seconds:g} s: {_counts(compared)} were compared"
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
        StoredSamples(self._world.store, standing.release).remove()
        self._known.pop(standing.release.id, None)


def compare_release(world: World, release: Release) -> ReleaseComparison:
    """The comparison of an open release; reads all copies and samples."""
    return read_evidence(world, release, KnownComparisons()).compare()


def _counts(compared: ReleaseComparison) -> str:
    """What was compared, for people."""
    requests = [part.rows for part in (compared.mirror, compared.canary) if part is not None]
    return f"{compared.shards} shards" + (f" and {sum(requests)} requests" if requests else "")
