"""Settings of a worker's warm-up and canary check, and of the comparison of model versions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.limits import Positive


class WarmupOptions(BaseModel):
    """Settings of a worker's warm-up, between loading a model and serving it.

    Attributes:
        prompt_tokens: length of the one long prompt.
        rows: batch sizes to compute, as far as the running batch allows them.
        tolerance: allowed difference of the canary prompts' log-probabilities from the recorded ones (nats); None: 0.05
            at float32, 0.3 at 16 bits, where another batch or another processor rounds differently.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: Positive = 256
    rows: tuple[Positive, ...] = (1, 8, 32)
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def tolerance_of(self, dtype: str) -> float:
        """The tolerance for a model of this dtype (nats)."""
        return self.tolerance if self.tolerance is not None else 0.05 if dtype == "float32" else 0.3


class ReleaseRules(BaseModel):
    """The rules by which a new version of a model is promoted or rolled back; stored in each release at its start.
    `pipeline.models.evaluation` applies them.

    Attributes:
        share: share of the stable version's committed shards that the candidate computes, too.
        mirror: share of callers' requests that gateways copy to the candidate. The callers get the stable version's
            answers.
        canary: share of callers that the candidate answers, once the comparison before that keeps all limits.
        least_shards: minimum number of compared shards for a decision.  most_shards: an undecided release is rolled
            back at this number. Of callers' requests, groups of 16 count as shards do.
        longest_seconds: an undecided release is rolled back after this time.
        confidence: that a candidate just within all limits isn't rolled back, and that one just beyond a limit isn't
            promoted.
        agreement: minimum mean similarity of answers, from 0 to 1.
        more_errors: maximum share of rows that fail with the candidate only.
        slower: maximum time per token of shards, as a multiple of the stable version's.
        slower_ttft, slower_itl: maximum time to the first token and between two tokens of callers' requests, as
            multiples of the stable version's.
        start_seconds: a canary request without any token after this time is answered by the stable version. A copy
            may end this much later than the caller's request, and three times as long as that took.
        drift: maximum mean difference of log-probabilities (nats), on the stable version's answers to the canary
            prompts; None: any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    mirror: Annotated[float, Field(ge=0, le=1)] = 0.0
    canary: Annotated[float, Field(ge=0, le=1)] = 0.0
    least_shards: Annotated[int, Field(ge=4)] = 8
    most_shards: Annotated[int, Field(ge=4)] = 256
    longest_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 86_400.0
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    agreement: Annotated[float, Field(ge=0, le=1)] = 0.8
    more_errors: Annotated[float, Field(gt=0, le=1)] = 0.01
    slower: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    slower_ttft: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    slower_itl: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    start_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    drift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.5
