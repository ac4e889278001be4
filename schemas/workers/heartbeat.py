"""A worker's heartbeat as it is stored on a server that many can write to. Data outside these bounds is no heartbeat.
Unknown fields are ignored, so that an older dispatcher doesn't take a newer worker for dead."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.settings.kv_transfer import Role
from schemas.stored import Count, StoredReport

Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class StoredHeartbeat(StoredReport):
    """A worker's state; see `pipeline.ports.WorkerState`."""

    name: Name
    models: tuple[Name, ...] = ()
    held: tuple[tuple[Name, Count], ...] = ()
    waiting_tokens: Count = 0
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    draining: bool = False
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    passed_over: tuple[tuple[Name, Count], ...] = ()
    max_num_seqs: Count | None = None
    takes_lane_requests: bool = False
    role: Role = "both"
