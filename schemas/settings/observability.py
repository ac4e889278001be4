"""Settings of monitoring."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CloudWatchOptions(BaseModel):
    """Metrics of each model's backlog, sent to Amazon's CloudWatch by dispatchers. Credentials come from AWS's
    credential chain; the region is S3's.

    Attributes:
        namespace: of the metrics; None: none are sent.
        installation: the value of their dimension Installation.
        interval_seconds: a little less than a minute gives each of CloudWatch's minutes a value.
        worker_tokens_per_second: assumed speed of a worker, until one has been measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: Annotated[str, Field(pattern=r"^[^:\s][^:]{0,254}$")] | None = None
    installation: Annotated[str, Field(min_length=1, max_length=255)] = "tokenmill"
    interval_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    worker_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1_000.0


class TracingOptions(BaseModel):
    """Settings of traces. OpenTelemetry's own variables enable them and name their target.

    Attributes:
        step_seconds: between two spans of engine steps; 0: no steps get a span.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
