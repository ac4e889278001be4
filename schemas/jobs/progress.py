"""The progress of a job: a cache, which can be rebuilt from the committed objects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.jobs.outcome import Counts, JobStatus, Usage
from schemas.stored import Count, StoredReport


class Progress(StoredReport):
    """`progress.json`: a cache of the parts' counts, true at `as_of`.

    Attributes:
        tokens_left: estimated, prompts and answers, of the planned shards without a part; None while the plan isn't
            complete.
        cost: of the committed parts; None: the price of its workers is unknown.
        attention: why the job is stuck until an operator repairs it; None: it isn't.
        eta: expected end of the job, by the measured speed of its model's workers; None: not known yet.
    """

    version: Literal[1] = 1
    job: str
    status: JobStatus
    counts: Counts
    usage: Usage = Usage()
    cost: Annotated[float, Field(ge=0)] | None = None
    shards_total: Count = 0
    shards_done: Count = 0
    tokens_left: Count | None = None
    attention: str | None = None
    eta: AwareDatetime | None = None
    started_at: datetime | None = None
    as_of: AwareDatetime
