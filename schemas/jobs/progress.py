"""How far a job is: a cache, which anybody can make anew from what is committed."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.jobs.outcome import Counts, JobStatus, Usage
from schemas.stored import Count, StoredReport


class Progress(StoredReport):
    """`progress.json`: a cache of what the parts say, true at `as_of`.

    Attributes:
        tokens_left: estimated, prompts and answers, of the planned shards without a part; None while the plan isn't
            whole.
        cost: of what is committed; None: nobody knows what an hour of its workers costs.
        attention: why the job stands still until somebody repairs it; None: it doesn't.
        eta: when the job should be done, by what its model's workers have measured; None: nothing is known yet.
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
