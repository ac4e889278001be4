"""Delivers webhook events to tenants' endpoints when their batches have ended, each at least once.

Pending events are stored in the root (`pipeline.jobs.pending_webhooks`), so after a crash another process continues.
Each endpoint has its own task that sends one event after the other, so a dead or slow endpoint doesn't delay others. A
failed event is retried with a delay that grows with its age, for days.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import orjson
import structlog

from pipeline.gateway.batches.serialization import find_order, find_outcome
from pipeline.gateway.webhooks.client import Endpoint, NotDelivered, WebhookSender
from pipeline.gateway.webhooks.signature import signature_headers
from pipeline.jobs.pending_webhooks import DUE, WANTED, DueWebhook, WebhookRequest
from pipeline.ledger.active_index import ACTIVE
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.ports import Lease, ObjectNotFound, PipelineError, World
from pipeline.runtime.leader_election import LeaderElection
from pipeline.runtime.supervision import reason_of
from pipeline.tracing import TRACEPARENT, working_for
from schemas.jobs.batch import unix_time
from schemas.jobs.outcome import Manifest

PENDING_GRACE_PERIOD: Final = timedelta(days=1)
"""A pending webhook without a job is removed after this time: its job was never created."""
_JITTER: Final = 0.25
_SWEEP_SECONDS: Final = 3_600.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NotifierSettings:
    """Intervals and time-outs in seconds.

    Attributes:
        poll_interval_seconds: the polling interval.
        min_retry_seconds, max_retry_seconds: the bounds of the delay between two attempts of an event.
        retry_growth: the delay until the next attempt, as a share of the event's age.
        retry_timeout_seconds: events that are older than this are dropped.
    """

    poll_interval_seconds: float = 1.0
    min_retry_seconds: float = 5.0
    max_retry_seconds: float = 6 * 3_600.0
    retry_growth: float = 0.5
    retry_timeout_seconds: float = 3 * 86_400.0


class Notifier:
    """Polls for ended batches and sends their events to the endpoints. Several may run.

    Args:
        lease: elects the one instance that works; None: each works, and endpoints get every event from each.
    """

    def __init__(
        self,
        world: World,
        endpoints: Sequence[Endpoint],
        sender: WebhookSender,
        settings: NotifierSettings | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._world = world
        self._store = world.store
        self._endpoints = {endpoint.id: endpoint for endpoint in endpoints}
        self._sender = sender
        self._settings = settings or NotifierSettings()
        self._leading = LeaderElection(lease, world.clock, "running_notifier of batches")
        self._retry_at: dict[str, float] = {}  # key of a failed event -> when it is retried (monotonic)
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        self._sweep_at = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Deliver events until `stop` is set; interrupted deliveries are repeated by the next process."""
        try:
            asyncio.run(self._run(stop))
        finally:
            self._leading.give_up()

    async def _run(self, stop: threading.Event) -> None:
        self._deliveries.clear()  # tasks of a closed event loop
        while not stop.is_set():
            try:
                if await asyncio.to_thread(self._leading.now):
                    await self.poll()
            except PipelineError as error:
                logger.error("webhooks_poll_failed", reason=str(error))
            await asyncio.to_thread(stop.wait, self._settings.poll_interval_seconds)
        for task in self._deliveries.values():
            task.cancel()
        await asyncio.gather(*self._deliveries.values(), return_exceptions=True)

    async def poll(self) -> None:
        """Find due events, and start a delivery task for each endpoint without one."""
        due = await asyncio.to_thread(self._find)
        now, due_keys = self._world.clock.monotonic(), {key for keys in due.values() for key in keys}
        self._retry_at = {key: at for key, at in self._retry_at.items() if key in due_keys}
        for name, task in list(self._deliveries.items()):
            if task.done():
                del self._deliveries[name]
                if isinstance(error := task.exception(), Exception):  # of one endpoint; the others are notified
                    self._world.errors.record("webhooks", error, endpoint=name)
        for name, keys in due.items():
            ready = [key for key in keys if self._retry_at.get(key, now) <= now]
            if ready and name not in self._deliveries:
                self._deliveries[name] = asyncio.create_task(self._deliver(self._endpoints[name], ready))

    async def wait_idle(self) -> None:
        """Wait until no delivery is in progress."""
        await asyncio.gather(*self._deliveries.values())

    # -- due events

    def _find(self) -> Mapping[str, list[str]]:
        """The keys of due events by endpoint, the oldest first."""
        wanted = [info.key.removeprefix(WANTED) for info in self._store.list(WANTED)]
        if wanted:
            still_open = {info.key.removeprefix(ACTIVE) for info in self._store.list(ACTIVE)}
            for job in wanted:
                if job not in still_open:
                    self._end(job)
        names = {folder: folder.removeprefix(DUE).rstrip("/") for folder in self._store.folders(DUE)}
        self._sweep([folder for folder, name in names.items() if name not in self._endpoints])
        return {
            name: [info.key for info in self._store.list(folder)][::-1]
            for folder, name in names.items()
            if name in self._endpoints
        }

    def _sweep(self, folders: Sequence[str]) -> None:
        """Remove due events of endpoints that aren't configured, at an interval, once their retry time-out is over:
        another gateway may have newer settings."""
        now = self._world.clock.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_SECONDS
        for folder in folders:
            for info in list(self._store.list(folder)):
                due = self._load(info.key)
                if due is not None and self._age(due) >= self._settings.retry_timeout_seconds:
                    self._store.delete(info.key)
                    logger.warning("webhook_without_endpoint", webhook=due.id, job=due.job)

    def _end(self, job: str) -> None:
        """Store the due events of the job, if it has ended."""
        try:
            ended = self._ended(job)
        except Exception as error:  # noqa: BLE001 - of one job; the others go on
            reason = reason_of(error, "webhooks", self._world, job=job)
            logger.error("webhook_not_made", job=job, reason=reason)
            return
        if ended is None:
            return
        tenant, kind, at = ended
        due = DueWebhook(id=event_id(job, kind), type=kind, job=job, at=at)
        for endpoint in self._endpoints.values():
            if endpoint.tenant == tenant and kind in endpoint.events:
                self._store.create(f"{DUE}{endpoint.id}/{job}", due.to_json())
        self._store.delete(WANTED + job)

    def _ended(self, name: str) -> tuple[str, str, datetime] | None:
        """The tenant, event type and time of an ended job; None while its output files aren't committed."""
        ledger = JobLedger(self._store, f"{JOBS}{name}/")
        job = ledger.find_job()
        if job is None:
            self._forget(name)
            return None
        manifest: Manifest | None = ledger.manifest()
        if manifest is None:
            return None
        at = manifest.finished_at
        if find_order(self._store, name) is not None:
            outcome = find_outcome(self._store, name)
            if outcome is None:  # its output files aren't committed yet
                return None
            at = outcome.at
        return job.tenant, f"batch.{manifest.status.value}", at

    def _forget(self, name: str) -> None:
        """Remove the pending webhook of a missing job, unless the job may still be about to be created."""
        try:
            wanted = parse_stored(self._store.locate(WANTED + name), self._store.read(WANTED + name), WebhookRequest)
        except ObjectNotFound:
            return
        if wanted.at + PENDING_GRACE_PERIOD <= self._world.clock.now():
            self._store.delete(WANTED + name)

    # -- delivery

    async def _deliver(self, endpoint: Endpoint, keys: Sequence[str]) -> None:
        """Send events to an endpoint, until it can't be reached."""
        try:
            for key in keys:
                due = await asyncio.to_thread(self._load, key)
                if due is None:
                    continue
                try:
                    status = await self._post(endpoint, due)
                except NotDelivered as error:
                    await self._failed(endpoint, key, due, str(error))
                    retry_at = self._retry_at.get(key, self._world.clock.monotonic() + self._settings.min_retry_seconds)
                    self._retry_at |= dict.fromkeys(keys[keys.index(key) :], retry_at)  # the others would fail, too
                    return
                if 200 <= status < 300:
                    await asyncio.to_thread(self._store.delete, key)
                    logger.info("webhook_delivered", endpoint=endpoint.id, webhook=due.id, job=due.job, status=status)
                else:
                    await self._failed(endpoint, key, due, f"answered {status}")
        except PipelineError as error:
            logger.error("webhook_delivery_failed", endpoint=endpoint.id, reason=str(error))

    async def _post(self, endpoint: Endpoint, due: DueWebhook) -> int:
        payload = orjson.dumps(
            {
                "id": due.id,
                "object": "event",
                "type": due.type,
                "created_at": unix_time(due.at),
                "data": {"id": due.job},
            }
        )
        headers = signature_headers(endpoint.secret, due.id, self._world.clock.now(), payload)
        if not self._world.traces.is_enabled:
            return await self._sender.post(endpoint, headers, payload)
        job = await asyncio.to_thread(JobLedger(self._store, f"{JOBS}{due.job}/").find_job)
        attributes = {"tokenmill.webhook": endpoint.id, "tokenmill.job.id": due.job}
        span = self._world.traces.begin(
            "webhook", attributes, kind="client", parent=None if job is None else self._world.traces.of_job(job)
        )
        with working_for(span):
            status = await self._sender.post(endpoint, headers | {TRACEPARENT: str(span.traceparent)}, payload)
        span.set({"http.response.status_code": status})
        span.end(None if 200 <= status < 300 else str(status))
        return status

    def _load(self, key: str) -> DueWebhook | None:
        try:
            return parse_stored(self._store.locate(key), self._store.read(key), DueWebhook)
        except ObjectNotFound:
            return None

    async def _failed(self, endpoint: Endpoint, key: str, due: DueWebhook, why: str) -> None:
        """Schedule a retry after a delay that grows with the event's age, or drop the event when it is too old."""
        settings = self._settings
        age = self._age(due)
        fields = {"endpoint": endpoint.id, "host": endpoint.host, "webhook": due.id, "job": due.job, "reason": why}
        if age >= settings.retry_timeout_seconds:
            await asyncio.to_thread(self._store.delete, key)
            logger.error("webhook_given_up", **fields)
            return
        chance = int.from_bytes(self._world.random.token(4)) / 2**32
        wait = min(settings.max_retry_seconds, max(settings.min_retry_seconds, settings.retry_growth * age)) * (
            1 + _JITTER * (2 * chance - 1)
        )
        self._retry_at[key] = self._world.clock.monotonic() + wait
        logger.warning("webhook_failed", again_in=round(wait, 1), **fields)

    def _age(self, due: DueWebhook) -> float:
        return (self._world.clock.now() - due.at).total_seconds()


def event_id(job: str, kind: str) -> str:
    """The event's id, which is the same in every attempt."""
    return f"evt_{hashlib.sha256(f'{job}/{kind}'.encode()).hexdigest()[:32]}"


def endpoint_id(tenant: str, url: str) -> str:
    """The endpoint's id, from which its URL can't be derived."""
    return hashlib.sha256(f"{tenant}\0{url}".encode(errors="surrogatepass")).hexdigest()[:16]
