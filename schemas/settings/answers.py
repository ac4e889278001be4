"""Settings of the answer store."""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, ConfigDict

from schemas.jobs.job_options import Amount
from schemas.requests.limits import Positive


class AnswerOptions(BaseModel):
    """Settings of the answer store, which jobs opt into (`cache`).

    Attributes:
        always: jobs use the store without opt-in.
        retention: an amount of time from the computation of an answer, such as "7d"; older answers aren't found.
        max_tenant_answers: most answers of a tenant; the oldest are removed. Planners have 20 bytes of each in memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    always: bool = False
    retention: Amount = timedelta(days=7)
    max_tenant_answers: Positive = 1_000_000

    def includes(self, cache: bool | None) -> bool:
        """Whether a job or request with this `cache` uses the store."""
        return self.always if cache is None else cache
