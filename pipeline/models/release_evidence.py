"""What an open release is judged by: shadow copies of shards, and callers' requests that both versions answered.

What comes first decides whether the candidate may answer callers: copies of their requests where the release has these
(`ReleaseRules.mirror`), else copies of shards. The callers that it answers then, if there are to be any
(`ReleaseRules.canary`), decide whether it is promoted. A limit that is broken anywhere rolls it back, and so does one
request that its workers lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from pipeline.ledger.ledger import LedgerError
from pipeline.models.evaluation import ReleaseVerdict, ShadowedShard, compare_so_far, judge
from pipeline.models.registry import ModelRegistry
from pipeline.models.request_samples import StoredSamples, grouped
from pipeline.models.shadow_results import ShadowComparison, ShadowCopies
from pipeline.ports import World
from schemas.releases import LogprobDrift, Release, ReleaseComparison, RequestSamples, Traffic

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class KnownComparisons:
    """A cache of what was read of one release, by key: comparisons of shadow copies, and samples of requests."""

    shards: dict[str, ShadowComparison | None] = field(default_factory=dict)
    requests: dict[str, RequestSamples | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReleaseEvidence:
    """What an open release is judged by.

    Attributes:
        shards: in order of their copies' creation.
        mirror, canary: samples of requests that the stable version answered, and that the candidate did.
        canary_began: whether the candidate answers callers.
    """

    release: Release
    shards: list[ShadowedShard]
    mirror: list[RequestSamples]
    canary: list[RequestSamples]
    drift: LogprobDrift | None
    canary_began: bool

    def verdict(self) -> ReleaseVerdict | None:
        """The verdict of what is compared now; None: not yet. Where the canary stage is still to come, a candidate that
        is to be promoted has come so far, and no further."""
        rules = self.release.rules
        lost = sum(sample.lost for batch in (*self.mirror, *self.canary) for sample in batch.samples)
        if lost:
            return ReleaseVerdict(False, (f"its workers lost {lost} of the callers' requests",), self.compare())
        sequences = 1 + bool(rules.mirror) + bool(rules.canary)
        shards = judge(self.shards, rules, self.drift, sequences)
        mirror = judge(grouped(self.mirror, only_full=True), rules, self.drift, sequences)
        canary = judge(grouped(self.canary, only_full=True), rules, self.drift, sequences)
        broken = [found for found in (shards, mirror, canary) if found is not None and not found.promote]
        decides = canary if self.canary_began else mirror if rules.mirror else shards
        verdict = broken[0] if broken else decides
        if verdict is None:
            return None
        if verdict is shards:
            return ReleaseVerdict(verdict.promote, verdict.reasons, self._with_requests(verdict.comparison))
        return ReleaseVerdict(verdict.promote, verdict.reasons, self.compare())

    def compare(self) -> ReleaseComparison:
        """The comparison of all that there is so far."""
        return self._with_requests(compare_so_far(self.shards, self.release.rules, self.drift))

    def _with_requests(self, compared: ReleaseComparison) -> ReleaseComparison:
        return compared.model_copy(
            update={"mirror": self._requests(self.mirror), "canary": self._requests(self.canary)}
        )

    def _requests(self, batches: list[RequestSamples]) -> ReleaseComparison | None:
        if not batches:
            return None
        return compare_so_far(grouped(batches, only_full=False), self.release.rules, None).model_copy(
            update={
                "lost": sum(sample.lost for batch in batches for sample in batch.samples),
                "dropped": sum(batch.dropped for batch in batches),
            }
        )


def read_evidence(world: World, release: Release, known: KnownComparisons) -> ReleaseEvidence:
    """All that the release is judged by. `known`: what is new is added."""
    registry, stored = ModelRegistry(world.store), StoredSamples(world.store, release)

    def requests(traffic: Traffic, share: float) -> list[RequestSamples]:
        return stored.read(traffic, known.requests) if share else []

    return ReleaseEvidence(
        release=release,
        shards=_shards(world, release, known.shards),
        mirror=requests("mirror", release.rules.mirror),
        canary=requests("canary", release.rules.canary),
        drift=registry.drift(release),
        canary_began=bool(release.rules.canary) and registry.canary(release) is not None,
    )


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
