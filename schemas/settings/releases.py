"""Settings of how a worker proves itself before it serves, and of how a new version of a model is compared."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.limits import Positive


class WarmupOptions(BaseModel):
    """What a worker computes between loading a model and serving it.

    Attributes:
        prompt_tokens: of the one long prompt.
        rows: sizes of the batches that are computed, as far as the running batch has so many rows.
        tolerance: by which log-probabilities of the canary prompts may differ from those that were recorded (nats);
            None: 0.05 at float32, 0.3 at 16 bits, where another batch or another processor rounds differently.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: Positive = 256
    rows: tuple[Positive, ...] = (1, 8, 32)
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def tolerance_of(self, dtype: str) -> float:
        """For a model that computes in this dtype (nats)."""
        return self.tolerance if self.tolerance is not None else 0.05 if dtype == "float32" else 0.3


class ReleaseRules(BaseModel):
    """When a new version of a model takes the place of the one that is served, and when it doesn't; frozen into each
    release as it starts. `pipeline.models.evaluation` says how.

    Attributes:
        share: of the stable version's committed shards that the new one computes, too.
        least_shards: compared before anything is decided.  most_shards: if it is still not decided then, it is rolled
            back.
        longest_seconds: so is one that has not been decided after this time.
        confidence: that a new version which is just within all limits isn't rolled back, and that one which is just
            beyond one isn't promoted.
        agreement: the mean likeness of answers, from 0 to 1, that is enough.
        more_errors: the share of rows that may fail with the new version only.
        slower: times as long as the stable version's that a token may take.
        drift: the mean difference of log-probabilities that is taken (nats), on the canary prompts' answers as the
            stable version gave them; None: any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    least_shards: Annotated[int, Field(ge=4)] = 8
    most_shards: Annotated[int, Field(ge=4)] = 256
    longest_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 86_400.0
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    agreement: Annotated[float, Field(ge=0, le=1)] = 0.8
    more_errors: Annotated[float, Field(gt=0, le=1)] = 0.01
    slower: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    drift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.5
