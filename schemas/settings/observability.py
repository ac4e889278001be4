"""Settings of what is told of an installation, for those who watch it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CloudWatchOptions(BaseModel):
    """The backlog of each model, told to Amazon's CloudWatch by dispatchers. Credentials are found where AWS's tools
    look for them; the region is S3's.

    Attributes:
        namespace: of the metrics; None: nothing is told.
        installation: the value of their dimension Installation.
        every_seconds: between two values; a little less than a minute leaves none of CloudWatch's without one.
        worker_tokens_per_second: that a worker is assumed to compute, until one has measured it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: Annotated[str, Field(pattern=r"^[^:\s][^:]{0,254}$")] | None = None
    installation: Annotated[str, Field(min_length=1, max_length=255)] = "tokenmill"
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    worker_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1_000.0


class TracingOptions(BaseModel):
    """What traces hold. Whether there are any, and where they go, OpenTelemetry's own variables say.

    Attributes:
        step_seconds: between two steps of a worker's engine that get a span; 0: none does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
