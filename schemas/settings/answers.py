"""Settings of the answer store."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from schemas.jobs.job_options import Amount
from schemas.requests.limits import Positive


class AnswerOptions(BaseModel):
    """Settings of the answer store, which jobs and requests opt into (`cache`, over HTTP `tokenmill: {"cache": true}`).

    Attributes:
        always: jobs and requests use the store without opt-in.
        retention: an amount of time from the computation of an answer, such as "7d"; older answers aren't found.
        max_tenant_answers: most answers of a tenant; the oldest are removed. Planners and gateways have 20 bytes of
            each in memory.
        max_tenant_bytes: most bytes of a tenant's answers over HTTP; the oldest are removed. Those of jobs are their
            results.
        max_entry_bytes: largest answer over HTTP that is stored.
        max_memory_bytes: of recent answers in the memory of a gateway.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    always: bool = False
    retention: Amount = timedelta(days=7)
    max_tenant_answers: Positive = 1_000_000
    max_tenant_bytes: Positive = 1 << 30
    max_entry_bytes: Annotated[int, Field(ge=1, le=1 << 19, strict=False)] = 1 << 18
    max_memory_bytes: Positive = 64 << 20

    def includes(self, cache: bool | None) -> bool:
        """Whether a job or request with this `cache` uses the store."""
        return self.always if cache is None else cache
