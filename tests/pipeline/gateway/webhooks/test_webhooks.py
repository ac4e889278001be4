"""Webhooks: each end of a batch is delivered at least once, despite crashes of the sender or the receiver."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from structlog.testing import capture_logs

from pipeline.gateway.webhooks.client import Endpoint, NotDelivered
from pipeline.gateway.webhooks.service import Notifier, event_id
from pipeline.ingest.intake import IntakeSettings
from pipeline.jobs.pending_webhooks import DUE, WANTED, DueWebhook, WebhookRequest, request_webhook
from pipeline.ports import World
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.gateway.webhooks.receiver import Receiver
from tests.pipeline.gateway.webhooks.webhook_tools import SECRET, endpoint, running_notifier
from tests.pipeline.simulation import MemoryStore
from tests.waiting import wait_for


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path, intake=IntakeSettings(noticed=frozenset({"default"}))) as harness:
        yield harness


def submit(harness: HttpHarness, count: int = 3, data: bytes | None = None, **more: Any) -> Any:
    client = harness.client()
    file = client.files.create(file=("a.jsonl", lines(count) if data is None else data), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return client.batches.create(**wanted)


def due(world: World) -> list[str]:
    return [info.key for prefix in (WANTED, DUE) for info in world.store.list(prefix)]


@pytest.mark.slow
def test_openais_client_reads_the_end_of_a_batch(harness: HttpHarness, receiver: Receiver) -> None:
    with running_notifier(harness.world, endpoint(receiver.url("/hook?token=1"))):
        batch = submit(harness)
        wait_for(lambda: receiver.received, "nothing was delivered")
        wait_for(lambda: not due(harness.world), "a delivered event stays due")
    (delivery,) = receiver.received
    event = OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(delivery.body, delivery.headers)
    assert (event.type, event.object) == ("batch.completed", "event")
    assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
    assert event.data.id == batch.id
    assert event.id == delivery.headers["webhook-id"] == event_id(batch.id, "batch.completed")
    ended = harness.client().batches.retrieve(batch.id)
    assert ended.output_file_id, "delivered only after its files are committed"
    assert event.created_at == ended.completed_at
    assert delivery.path == "/hook?token=1"
    assert delivery.headers["content-type"] == "application/json"
    for wrong in (delivery.body + b" ", delivery.body.replace(b"completed", b"cancelled")):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(wrong, delivery.headers)


@pytest.mark.slow
def test_each_final_status_is_sent_to_its_subscribers(tmp_path: Path, receiver: Receiver) -> None:
    noticed = IntakeSettings(noticed=frozenset({"default"}))
    only = endpoint(receiver.url("/only"), events=frozenset({"batch.cancelled"}))
    other = endpoint(receiver.url("/other"), tenant="other")
    with (
        run_http_harness(tmp_path, permits=0, intake=noticed) as harness,
        running_notifier(harness.world, endpoint(receiver.url("/all")), only, other),
    ):
        cancelled = submit(harness)
        wait_for(lambda: harness.client().batches.retrieve(cancelled.id).status == "in_progress", "it did not begin")
        harness.client().batches.cancel(cancelled.id)
        wait_for(lambda: receiver.received, "nothing was delivered")
        expired = submit(harness)
        wait_for(lambda: harness.client().batches.retrieve(expired.id).status == "in_progress", "it did not begin")
        harness.clock.ahead = 25 * 3_600
        wait_for(lambda: len(receiver.received) >= 3, "its expiry was not delivered")
        failed = submit(harness, data=b"no json\n")
        wait_for(lambda: len(receiver.received) >= 4, "its failure was not delivered")
        wait_for(lambda: not due(harness.world), "something stays due")
    delivered = {
        (one.path, json.loads(one.body)["type"], json.loads(one.body)["data"]["id"]) for one in receiver.received
    }
    assert delivered == {
        ("/all", "batch.cancelled", cancelled.id),
        ("/only", "batch.cancelled", cancelled.id),
        ("/all", "batch.expired", expired.id),
        ("/all", "batch.failed", failed.id),
    }


@pytest.mark.slow
def test_a_retried_batch_sends_a_webhook_too(tmp_path: Path, receiver: Receiver) -> None:
    noticed = IntakeSettings(noticed=frozenset({"default"}))
    with (
        run_http_harness(tmp_path, permits=0, intake=noticed) as harness,
        running_notifier(harness.world, endpoint(receiver.url())),
        harness.http() as http,
    ):
        first = submit(harness)
        harness.client().batches.cancel(first.id)
        wait_for(lambda: receiver.received, "nothing was delivered")
        harness.permits.release(10)
        second = http.post(f"/v1/batches/{first.id}/retry").raise_for_status().json()
        wait_for(lambda: len(receiver.received) == 2, "the retry was not delivered")
    delivered = [(json.loads(one.body)["type"], json.loads(one.body)["data"]["id"]) for one in receiver.received]
    assert delivered == [("batch.cancelled", first.id), ("batch.completed", second["id"])]


@pytest.mark.slow
def test_an_event_is_delivered_unchanged_when_a_dead_receiver_recovers(
    harness: HttpHarness, receiver: Receiver
) -> None:
    receiver.status = 500
    with running_notifier(harness.world, endpoint(receiver.url())):
        submit(harness)
        wait_for(lambda: len(receiver.received) >= 2, "it was not tried again")
        receiver.kill()
        time.sleep(0.3)
        receiver.status = 200
        count = len(receiver.received)
        receiver.start()
        wait_for(lambda: len(receiver.received) > count, "it was not delivered after the restart")
        wait_for(lambda: not due(harness.world), "it stays due")
    assert len({(one.headers["webhook-id"], one.body) for one in receiver.received}) == 1
    last = receiver.received[-1]
    OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(last.body, last.headers)
    assert abs(int(last.headers["webhook-timestamp"]) - last.at) <= 2, "the time is that of the try"


@pytest.mark.slow
def test_after_a_crash_events_are_repeated_and_none_is_lost(harness: HttpHarness, receiver: Receiver) -> None:
    """Killed after each step: when the receiver has answered, when the due is written, and before anything."""
    world, target = harness.world, endpoint(receiver.url())
    batch = submit(harness)
    wait_for(lambda: harness.client().batches.retrieve(batch.id).status == "completed", "it did not end")
    assert due(world) == [WANTED + batch.id], "before any poll"
    with running_notifier(world, target):
        wait_for(lambda: len(receiver.received) == 1, "it was not delivered")
        wait_for(lambda: not due(world), "it stays due")
    request_webhook(world.store, batch.id, world.clock.now())  # as if it had died before it removed this
    with running_notifier(world, target):
        wait_for(lambda: len(receiver.received) == 2, "it was not delivered again")
        wait_for(lambda: not due(world), "it stays due")
    repeated = DueWebhook(
        id=event_id(batch.id, "batch.completed"), type="batch.completed", job=batch.id, at=world.clock.now()
    )
    world.store.create(f"{DUE}{target.id}/{batch.id}", repeated.to_json())  # as if it had died when it was answered
    with running_notifier(world, target):
        wait_for(lambda: len(receiver.received) == 3, "it was not delivered again")
    assert len({one.headers["webhook-id"] for one in receiver.received}) == 1


@pytest.mark.slow
def test_a_slow_or_dead_endpoint_does_not_delay_others(harness: HttpHarness, receiver: Receiver) -> None:
    slow, dead = Receiver(), Receiver()
    slow.slow = 1.5
    dead.kill()
    with running_notifier(harness.world, *(endpoint(one.url()) for one in (slow, dead, receiver)), timeout=1.0):
        for _ in range(3):
            submit(harness)
        wait_for(lambda: len(receiver.received) == 3, "it waited for others")
        wait_for(lambda: slow.received, "the slow one was left out")
        assert due(harness.world)
    slow.kill()


@pytest.mark.slow
def test_redirects_are_not_followed(harness: HttpHarness, receiver: Receiver) -> None:
    elsewhere = Receiver()
    receiver.status, receiver.location = 307, elsewhere.url("/stolen")
    with running_notifier(harness.world, endpoint(receiver.url())), capture_logs() as logs:
        submit(harness)
        wait_for(lambda: len(receiver.received) >= 2, "a redirect is a failure, and tried again")
    assert not elsewhere.received
    assert due(harness.world)
    failed = next(log for log in logs if log["event"] == "webhook_failed")
    assert failed["reason"] == "answered 307"
    assert "/hook" not in str(failed), "where it is may be a secret"
    elsewhere.kill()


def test_an_event_that_fails_for_days_is_dropped(world: World) -> None:
    class UnreachableClient:
        async def post(self, endpoint: Endpoint, headers: Any, payload: bytes) -> int:
            tries.append(world.clock.now())
            raise NotDelivered("no receiver")

    tries: list[datetime] = []
    target = endpoint("https://a.example/")
    now = world.clock.now()
    world.store.create(
        f"{DUE}{target.id}/job", DueWebhook(id="evt_1", type="batch.completed", job="job", at=now).to_json()
    )
    world.store.create(f"{DUE}gone/job", DueWebhook(id="evt_1", type="batch.completed", job="job", at=now).to_json())
    world.store.create(f"{WANTED}never", WebhookRequest(at=now).to_json())
    notifier = Notifier(world, [target], UnreachableClient())

    async def wait() -> None:
        while due(world) and world.clock.now() < now + timedelta(days=10):
            await notifier.poll()
            await notifier.wait_idle()
            world.clock.sleep(5.0 if world.clock.now() < now + timedelta(hours=1) else 600.0)

    with capture_logs() as logs:
        asyncio.run(wait())
    assert isinstance(world.store, MemoryStore)
    assert not due(world)
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["webhook_given_up"]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(tries)]
    assert timedelta(days=3) <= tries[-1] - now < timedelta(days=3, hours=8)
    assert gaps[0] < 20
    assert 4 * 3_600 < max(gaps) < 8 * 3_600
    assert 15 < len(tries) < 80
