"""The model registry stores a root's releases: numbered per model, each with immutable objects: its begin, the begin of
its canary stage, and its outcome.

    releases/NAME/NNNNN/release.json   canary.json   outcome.json   drift.json   shadow/…   requests/…

NAME is a hash of the model's name. A release can begin once the previous one has its outcome. Of two that begin with
the same number one wins; of two outcomes the first counts. So the served version of a model's name follows from stored
objects and can't flip back and forth: it is the candidate of the last release if that was promoted, else its stable
version. The catalog's entry follows it; before the first release it is the version that a worker published last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeVar

from pipeline.ledger.ledger import parse_stored
from pipeline.models.catalog import Catalog
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError
from schemas.models import CatalogEntry
from schemas.releases import CanaryStage, LogprobDrift, Release, ReleaseComparison, ReleaseOutcome
from schemas.settings.releases import ReleaseRules
from schemas.stored import StoredModel

RELEASES: Final = "releases/"
SomeModel = TypeVar("SomeModel", bound=StoredModel)


class ReleaseError(PipelineError):
    """Raised when a release can't be begun or ended as requested; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """A release, and its outcome once there is one."""

    release: Release
    outcome: ReleaseOutcome | None

    @property
    def served(self) -> CatalogEntry:
        """The version that the model's name selects."""
        promoted = self.outcome is not None and self.outcome.verdict == "promoted"
        return self.release.candidate if promoted else self.release.stable


class ModelRegistry:
    """The releases of the root in `store`. Stateless."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._catalog = Catalog(store)

    def last(self, name: str) -> ReleaseState | None:
        """The last release of the model; None: there was none."""
        return self._last(_folder(name))

    def all_last(self) -> Iterator[ReleaseState]:
        """The last release of each model that has one."""
        for folder in list(self._store.folders(RELEASES)):
            standing = self._last(folder)
            if standing is not None:
                yield standing

    def history(self, name: str) -> list[ReleaseState]:
        """All releases of the model, the first one first."""
        found = (self._read(_folder(name), number) for number in sorted(self._numbers(_folder(name))))
        return [standing for standing in found if standing is not None]

    def begin(
        self,
        name: str,
        candidate: CatalogEntry,
        rules: ReleaseRules,
        at: datetime,
        mode: Literal["canary", "shadow", "direct"] = "canary",
    ) -> Release:
        """Begin a release. `candidate`: the catalog's entry under its digest. Raises `ReleaseError`."""
        last = self.last(name)
        if last is not None and last.outcome is None:
            raise ReleaseError(
                f"release {last.release.number} of {name} is not decided yet; wait, or promote it or roll it back"
            )
        stable = self._catalog.find(name) if last is None else last.served
        if stable is None:
            raise ReleaseError(f"no worker has served {name} yet, so there is nothing to compare with; start one first")
        if stable.pin.key == candidate.pin.key:
            raise ReleaseError(f"{name} is {candidate.pin.digest} already, as it would be computed; nothing is new")
        number = 1 if last is None else last.release.number + 1
        folder = f"{_folder(name)}{number:05d}"
        release = Release(
            id=folder.removeprefix(RELEASES),
            number=number,
            mode=mode,
            stable=stable,
            candidate=candidate.model_copy(update={"pin": candidate.pin.model_copy(update={"name": name})}),
            rules=rules,
            started_at=at,
        )
        if not self._store.create(f"{folder}/release.json", release.to_json()):
            raise ReleaseError(f"release {number} of {name} was begun by somebody else just now; look at it first")
        return release

    def end(
        self,
        release: Release,
        verdict: Literal["promoted", "rolled_back"],
        by: Literal["comparison", "time", "operator"],
        at: datetime,
        reasons: tuple[str, ...] = (),
        comparison: ReleaseComparison | None = None,
    ) -> ReleaseOutcome:
        """End a release; returns the outcome that counts, which is another one if that was stored first."""
        outcome = ReleaseOutcome(
            release=release.id, verdict=verdict, by=by, reasons=reasons, comparison=comparison, at=at
        )
        key = f"{RELEASES}{release.id}/outcome.json"
        if not self._store.create(key, outcome.to_json()):
            outcome = self._read_model(key, ReleaseOutcome) or outcome
        self.settle(ReleaseState(release, outcome))
        return outcome

    def roll_back_promoted(self, name: str, at: datetime) -> ReleaseState:
        """Serve the version before the last promoted one again, as a release of its own that is decided immediately.
        Raises `ReleaseError` if none was promoted."""
        last = self.last(name)
        if last is None or last.served.pin.key != last.release.candidate.pin.key:
            raise ReleaseError(f"the last release of {name} was not promoted; there is nothing to go back from")
        former = last.release.stable
        release = self.begin(name, former, last.release.rules, at, "direct")
        return ReleaseState(
            release, self.end(release, "promoted", "operator", at, ("the version before is served again",))
        )

    def settle(self, standing: ReleaseState) -> None:
        """Update the catalog to the release's outcome, unless it is up to date. A worker that read the release just
        before its end may have published another version."""
        if standing.outcome is None:
            return
        found = self._catalog.find(standing.release.name)
        if found is None or found.pin.key != standing.served.pin.key:
            self._catalog.publish(standing.served.model_copy(update={"published_at": standing.outcome.at}))

    def publish(self, entry: CatalogEntry, *, candidate: bool = False) -> bool:
        """Publish a version that a worker serves from now on. The model's name selects it, unless releases have decided
        otherwise or it is a candidate; returns whether the name selects it."""
        self._catalog.publish_version(entry)
        last = self.last(entry.pin.name)
        if last is None:
            if not candidate:
                self._catalog.publish(entry)
            return not candidate
        if last.served.pin.key != entry.pin.key:
            return False
        self._catalog.publish(entry)
        return True

    def begin_canary(self, release: Release, at: datetime, reasons: tuple[str, ...]) -> CanaryStage:
        """Let the candidate answer a share of the callers from now on; the first record counts."""
        stage, key = CanaryStage(release=release.id, reasons=reasons, at=at), f"{RELEASES}{release.id}/canary.json"
        if not self._store.create(key, stage.to_json()):
            stage = self._read_model(key, CanaryStage) or stage
        return stage

    def canary(self, release: Release) -> CanaryStage | None:
        """Since when the candidate answers callers; None: it doesn't."""
        return self._read_model(f"{RELEASES}{release.id}/canary.json", CanaryStage)

    def record_drift(self, release: Release, drift: LogprobDrift) -> None:
        """Record the drift of the candidate's log-probabilities from the stable version's; the first record counts."""
        self._store.create(f"{RELEASES}{release.id}/drift.json", drift.to_json())

    def drift(self, release: Release) -> LogprobDrift | None:
        """The recorded drift; None: there is none."""
        return self._read_model(f"{RELEASES}{release.id}/drift.json", LogprobDrift)

    def _numbers(self, folder: str) -> list[int]:
        """Numbers of the release folders; a folder may lack its release, if its writer died."""
        names = [prefix[len(folder) :].rstrip("/") for prefix in self._store.folders(folder)]
        return [int(name) for name in names if name.isdigit()]

    def _last(self, folder: str) -> ReleaseState | None:
        found = (self._read(folder, number) for number in sorted(self._numbers(folder), reverse=True))
        return next((standing for standing in found if standing is not None), None)

    def _read(self, folder: str, number: int) -> ReleaseState | None:
        prefix = f"{folder}{number:05d}/"
        release = self._read_model(f"{prefix}release.json", Release)
        return (
            None
            if release is None
            else ReleaseState(release, self._read_model(f"{prefix}outcome.json", ReleaseOutcome))
        )

    def _read_model(self, key: str, kind: type[SomeModel]) -> SomeModel | None:
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return parse_stored(self._store.locate(key), data, kind)


def _folder(name: str) -> str:
    return f"{RELEASES}{hashlib.sha256(name.encode()).hexdigest()[:32]}/"
