"""Records of releases: canary answers, a release with its two versions, what was compared, and the outcome. All but the
record of failures are written once."""

from __future__ import annotations

from typing import Annotated, Final, Literal

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
    """The comparison of a candidate with the stable version, on the same rows or callers' requests.

    Attributes:
        shards, rows: numbers of those compared; of callers' requests: of groups of 16, and of requests.
        failed: rows that only the candidate failed.  mended: rows that only the stable version failed.
        more_errors: the share of failed rows minus that of mended ones.
        agreement: similarity of answers, 0 to 1.
        latency: time per token, as a multiple of the stable version's.
        ttft, itl: time to the first token and between two tokens of callers' requests, as multiples of the stable
            version's.  length: tokens of their answers, likewise.
        lost: requests that the candidate's workers lost.  dropped: copies that were not sent or not compared.
        drift: of log-probabilities on the canary prompts; None: one of the two has no record.
        mirror, canary: of callers' requests, answered by the stable version, and by the candidate; None: there are
            none.
    """

    shards: Count
    rows: Count
    failed: Count = 0
    mended: Count = 0
    more_errors: Bounds | None = None
    agreement: Bounds | None = None
    latency: Bounds | None = None
    ttft: Bounds | None = None
    itl: Bounds | None = None
    length: Bounds | None = None
    lost: Count = 0
    dropped: Count = 0
    drift: LogprobDrift | None = None
    mirror: ReleaseComparison | None = None
    canary: ReleaseComparison | None = None


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Traffic = Literal["mirror", "canary"]
"""Who answers the callers of compared requests: the stable version, or the candidate."""

MAX_SAMPLES: Final = 64
"""Compared requests in one stored object."""


class AnswerSample(StoredReport):
    """One version's answer to a caller's request.

    Attributes:
        failed: it ended with an error.
        ttft_seconds: from sending the request to the first event of its answer.
        itl_seconds: mean time between two tokens; None: it has fewer than two.
        tokens: of the answer.
    """

    failed: bool = False
    ttft_seconds: Seconds | None = None
    itl_seconds: Seconds | None = None
    tokens: Count = 0


class RequestSample(StoredReport):
    """Both versions' answers to one caller's request, in numbers.

    Attributes:
        agreement: similarity of the answers; None: one of the two failed.
        lost: the candidate's worker ended without an answer, or did not begin one in time.
    """

    stable: AnswerSample
    candidate: AnswerSample
    agreement: Share | None = None
    lost: bool = False


class RequestSamples(StoredReport):
    """`releases/NAME/NNNNN/requests/TRAFFIC/…json`: requests that a gateway compared, the first one first, and the
    number of copies that it dropped meanwhile."""

    version: Literal[1] = 1
    release: str
    traffic: Traffic
    at: AwareDatetime
    samples: Annotated[tuple[RequestSample, ...], Field(max_length=MAX_SAMPLES)] = ()
    dropped: Count = 0


class CanaryStage(StoredModel):
    """`releases/NAME/NNNNN/canary.json`: from now on the candidate answers a share of the callers; written once."""

    version: Literal[1] = 1
    release: str
    reasons: tuple[str, ...] = ()
    at: AwareDatetime


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
