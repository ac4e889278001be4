"""Papers of releases: what a model answers to the canary prompts, which version is tried against which, and what came
of it. All but the record of failures are written once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.models import CatalogEntry, ModelPin
from schemas.settings.releases import ReleaseRules
from schemas.stored import Count, StoredModel, StoredReport

Share = Annotated[float, Field(ge=0, le=1)]


class CanaryAnswer(StoredModel):
    """What a model made of one canary prompt.

    Attributes:
        prompt: its token ids.
        tokens: of the greedy answer.  logprobs: of each of them.  runners_up: of the second likeliest in each place.
        vector: of a model that makes vectors only, of length 1.
    """

    prompt: tuple[Count, ...]
    tokens: tuple[Count, ...] = ()
    logprobs: tuple[float, ...] = ()
    runners_up: tuple[float, ...] = ()
    vector: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> CanaryAnswer:
        if not len(self.tokens) == len(self.logprobs) == len(self.runners_up):
            raise ValueError("tokens, logprobs and runners_up are not of one length")
        return self


class CanaryRecord(StoredModel):
    """`canaries/KEY.json`: what the model of this pin answers to the canary prompts, as its first worker found it."""

    version: Literal[1] = 1
    pin: ModelPin
    answers: Annotated[tuple[CanaryAnswer, ...], Field(min_length=1)]
    recorded_at: AwareDatetime
    worker: str


class CanaryFailure(StoredReport):
    """`canaries/failed/KEY-WORKER.json`: a worker found other answers, and did not serve."""

    version: Literal[1] = 1
    pin: ModelPin
    reason: str
    at: AwareDatetime
    worker: str


class LogprobDrift(StoredReport):
    """`releases/…/drift.json`: how far the log-probabilities of a candidate lie from the stable version's, on the
    answers that this one gave to the canary prompts (nats)."""

    version: Literal[1] = 1
    mean: Annotated[float, Field(ge=0)]
    most: Annotated[float, Field(ge=0)]
    tokens: Annotated[int, Field(ge=1)]


class Release(StoredModel):
    """`releases/NAME/NNNNN/release.json`: one version is to take another's place.

    Attributes:
        id: its place below `releases/`; NAME is a hash of the model's name.  number: counts the model's releases.
        mode: "canary": decided by comparison; "shadow": compared, and left to somebody to decide; "direct": somebody
            decided it as it started.
        stable, candidate: both under the model's name.
    """

    version: Literal[1] = 1
    id: str
    number: Annotated[int, Field(ge=1)]
    mode: Literal["canary", "shadow", "direct"]
    stable: CatalogEntry
    candidate: CatalogEntry
    rules: ReleaseRules
    started_at: AwareDatetime

    @property
    def name(self) -> str:
        """The model's."""
        return self.stable.pin.name


class Bounds(StoredReport):
    """A mean, and between which bounds it lies with the confidence of the look."""

    mean: float
    low: float
    high: float


class ReleaseComparison(StoredReport):
    """What is known of a candidate beside the stable version, on the same rows.

    Attributes:
        shards, rows: that were compared.
        failed: rows that only the candidate failed.  mended: rows that only the stable version failed.
        more_errors: the share of the former less that of the latter.
        agreement: likeness of answers, 0 to 1.
        latency: how many times as long a token took.
        drift: of log-probabilities on the canary prompts; None: one of the two has no record.
    """

    shards: Count
    rows: Count
    failed: Count = 0
    mended: Count = 0
    more_errors: Bounds | None = None
    agreement: Bounds | None = None
    latency: Bounds | None = None
    drift: LogprobDrift | None = None


class ReleaseOutcome(StoredModel):
    """`releases/NAME/NNNNN/outcome.json`: the end of a release; the first one written counts."""

    version: Literal[1] = 1
    release: str
    verdict: Literal["promoted", "rolled_back"]
    by: Literal["comparison", "time", "operator"]
    reasons: tuple[str, ...] = ()
    comparison: ReleaseComparison | None = None
    at: AwareDatetime


class ShadowHead(StoredReport):
    """The footer of a shadow copy's results: what they are of, and when they were made."""

    version: Literal[1] = 1
    release: str
    job: str
    shard: Count
    worker: str
    finished_at: AwareDatetime
