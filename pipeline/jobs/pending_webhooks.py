"""Markers of webhooks that are still to be sent when a job ends; no crash loses one.

    webhooks/wanted/JOB          created before the job; deleted once its `due` markers exist
    webhooks/due/ENDPOINT/JOB    a webhook that is due to an endpoint; deleted after its delivery

Both derive from durable objects, so each step can be repeated: then an endpoint may receive the same event once more,
under the same id.
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
    """`webhooks/wanted/JOB`: a webhook on the job's end was requested at `at`."""

    version: Literal[1] = 1
    at: AwareDatetime


class DueWebhook(StoredModel):
    """`webhooks/due/ENDPOINT/JOB`.

    Attributes:
        id: the event's, the same in each repetition.  type: such as "batch.completed".
        at: when the job ended.
    """

    version: Literal[1] = 1
    id: str
    type: str
    job: str
    at: AwareDatetime


def request_webhook(store: ObjectStore, job: str, now: datetime) -> None:
    """Request webhooks on the end of the job with this id, which is about to be created."""
    store.create(WANTED + job, WebhookRequest(at=now).to_json())
