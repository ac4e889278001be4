"""Who is to be told that a job has ended: markers, so that no end is missed, whoever dies when.

    webhooks/wanted/JOB          made before the job; goes when what follows stands
    webhooks/due/ENDPOINT/JOB    what an endpoint is still to be told; goes when it has heard it

Both are made of what is durable, so each step can be done again: then an endpoint may hear the same event, under the
same id, once more.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from pydantic import AwareDatetime

from pipeline.ports import ObjectStore
from schemas.stored import StoredModel

WANTED: Final = "webhooks/wanted/"
DUE: Final = "webhooks/due/"


class WebhookRequest(StoredModel):
    """`webhooks/wanted/JOB`: since `at` somebody wants to know of its end."""

    version: Literal[1] = 1
    at: AwareDatetime


class DueWebhook(StoredModel):
    """`webhooks/due/ENDPOINT/JOB`.

    Attributes:
        id: the event's, the same in each repeat.  type: such as "batch.completed".
        at: when the job ended.
    """

    version: Literal[1] = 1
    id: str
    type: str
    job: str
    at: AwareDatetime


def want_notice(store: ObjectStore, job: str, now: datetime) -> None:
    """A job of this id is about to be made, and somebody wants to know of its end."""
    store.create(WANTED + job, WebhookRequest(at=now).to_json())
