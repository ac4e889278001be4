"""Records of releases: canary answers, a release with its two versions, and its outcome. All but the record of failures
are written once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.models import CatalogEntry, ModelPin
from schemas.settings.releases import ReleaseRules
from schemas.stored import Count, StoredModel, StoredReport

Share = Annotated[float, Field(ge=0, le=1)]


class CanaryAnswer(StoredModel):
    """A model's answer to one canary prompt.

    Attributes:
        prompt: its token ids.
        tokens: of the greedy answer.  logprobs: of each token.  runners_up: of the second most likely token at each
            position.
        vector: of an embedding model, normalized to length 1; of a classifier, its logits.
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
    """`canaries/KEY.json`: the answers of this pin's model to the canary prompts, as its first worker computed them."""

    version: Literal[1] = 1
    pin: ModelPin
    answers: Annotated[tuple[CanaryAnswer, ...], Field(min_length=1)]
    recorded_at: AwareDatetime
    worker: str


class CanaryFailure(StoredReport):
    """`canaries/failed/KEY-WORKER.json`: a worker computed other answers and did not serve."""

    version: Literal[1] = 1
    pin: ModelPin
    reason: str
    at: AwareDatetime
    worker: str


class LogprobDrift(StoredReport):
    """`releases/…/drift.json`: the differences between the log-probabilities of a candidate and of the stable version,
    on the stable version's answers to the canary prompts (nats)."""

    version: Literal[1] = 1
    mean: Annotated[float, Field(ge=0)]
    most: Annotated[float, Field(ge=0)]
    tokens: Annotated[int, Field(ge=1)]


class Release(StoredModel):
    """`releases/NAME/NNNNN/release.json`: one version is to replace another.

    Attributes:
        id: its key below `releases/`; NAME is a hash of the model's name.  number: of the model's release, from 1.
        mode: "canary": decided by comparison; "shadow": compared, and decided by an operator; "direct": decided by an
            operator at its start.
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
        """The model's name."""
        return self.stable.pin.name


class Bounds(StoredReport):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


class ReleaseComparison(StoredReport):
    """The comparison of a candidate with the stable version, on the same rows.

    Attributes:
        shards, rows: numbers of those compared.
        failed: rows that only the candidate failed.  mended: rows that only the stable version failed.
        more_errors: the share of failed rows minus that of mended ones.
        agreement: similarity of answers, 0 to 1.
        latency: time per token, as a multiple of the stable version's.
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
    """The footer of a shadow copy's results: their shard, and when they were computed."""

    version: Literal[1] = 1
    release: str
    job: str
    shard: Count
    worker: str
    finished_at: AwareDatetime
