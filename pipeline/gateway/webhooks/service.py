"""Tells tenants' endpoints that their batches have ended, each at least once.

What is to be told lies in the root (`pipeline.jobs.pending_webhooks`), so whatever dies, another goes on with it. Each
endpoint is told by itself, one event after the other: one that is dead or slow holds up nobody else. What fails is
tried again after a while that grows with its age, for days.
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
from pipeline.gateway.records import seconds
from pipeline.gateway.webhooks.client import Endpoint, NotDelivered, WebhookSender, signature_headers
from pipeline.jobs.pending_webhooks import DUE, WANTED, DueWebhook, WebhookRequest
from pipeline.ledger.active_index import ACTIVE
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.ports import Lease, ObjectNotFound, PipelineError, World
from pipeline.runtime.leader_election import Leading
from pipeline.runtime.supervision import reason_of
from pipeline.tracing import TRACEPARENT, working_for
from schemas.jobs.outcome import Manifest

BEGINNING: Final = timedelta(days=1)
"""A job that was about to be made so long ago never will be."""
_JITTER: Final = 0.25
_SWEEP_SECONDS: Final = 3_600.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NotifierSettings:
    """Times in seconds.

    Attributes:
        every: between two looks.
        first, longest: between two tries of an event, at least and at most.
        growth: the time until the next try, as a share of the event's age.
        patience: an event that is so old is not told any more.
    """

    every: float = 1.0
    first: float = 5.0
    longest: float = 6 * 3_600.0
    growth: float = 0.5
    patience: float = 3 * 86_400.0


class Notifier:
    """Tells the endpoints. Several may run.

    Args:
        lease: of several that run, one works; None: each does, and endpoints hear everything from each.
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
        self._leading = Leading(lease, world.clock, "telling of batches")
        self._again: dict[str, float] = {}  # what failed, by key -> when it is tried again (monotonic)
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._sweep_at = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Tell until `stop`; what is under way then is told again by whoever comes next."""
        try:
            asyncio.run(self._run(stop))
        finally:
            self._leading.give_up()

    async def _run(self, stop: threading.Event) -> None:
        self._telling.clear()  # tasks of an event loop that has ended
        while not stop.is_set():
            try:
                if await asyncio.to_thread(self._leading.now):
                    await self.look()
            except PipelineError as error:
                logger.error("webhooks_not_looked_at", reason=str(error))
            await asyncio.to_thread(stop.wait, self._settings.every)
        for task in self._telling.values():
            task.cancel()
        await asyncio.gather(*self._telling.values(), return_exceptions=True)

    async def look(self) -> None:
        """Find what has ended, and begin to tell those endpoints that are not being told something already."""
        due = await asyncio.to_thread(self._find)
        now, there = self._world.clock.monotonic(), {key for keys in due.values() for key in keys}
        self._again = {key: at for key, at in self._again.items() if key in there}
        for name, task in list(self._telling.items()):
            if task.done():
                del self._telling[name]
                if isinstance(error := task.exception(), Exception):  # of one endpoint; the others are notified
                    self._world.errors.note("webhooks", error, endpoint=name)
        for name, keys in due.items():
            ready = [key for key in keys if self._again.get(key, now) <= now]
            if ready and name not in self._telling:
                self._telling[name] = asyncio.create_task(self._tell(self._endpoints[name], ready))

    async def settle(self) -> None:
        """Until nothing is being told."""
        await asyncio.gather(*self._telling.values())

    # -- what there is to tell

    def _find(self) -> Mapping[str, list[str]]:
        """Keys of what is due, by endpoint: the oldest first."""
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
        """Now and then, remove what is due to endpoints that are none any more. Not at once: another gateway may have
        newer settings."""
        now = self._world.clock.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_SECONDS
        for folder in folders:
            for info in list(self._store.list(folder)):
                due = self._load(info.key)
                if due is not None and self._age(due) >= self._settings.patience:
                    self._store.delete(info.key)
                    logger.warning("webhook_without_endpoint", webhook=due.id, job=due.job)

    def _end(self, job: str) -> None:
        """Write down who is to be told of the job, if it has ended."""
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
        """Tenant, type and moment of the job's end, when all that comes of it stands."""
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
            if outcome is None:  # its files don't stand yet
                return None
            at = outcome.at
        return job.tenant, f"batch.{manifest.status.value}", at

    def _forget(self, name: str) -> None:
        """A job that isn't there: it is about to be made, or never was."""
        try:
            wanted = parse_stored(self._store.locate(WANTED + name), self._store.read(WANTED + name), WebhookRequest)
        except ObjectNotFound:
            return
        if wanted.at + BEGINNING <= self._world.clock.now():
            self._store.delete(WANTED + name)

    # -- telling

    async def _tell(self, endpoint: Endpoint, keys: Sequence[str]) -> None:
        """Tell an endpoint these, until one can't be brought there at all."""
        try:
            for key in keys:
                due = await asyncio.to_thread(self._load, key)
                if due is None:
                    continue
                try:
                    status = await self._post(endpoint, due)
                except NotDelivered as error:
                    await self._failed(endpoint, key, due, str(error))
                    again = self._again.get(key, self._world.clock.monotonic() + self._settings.first)
                    self._again |= dict.fromkeys(keys[keys.index(key) :], again)  # the others would only fail likewise
                    return
                if 200 <= status < 300:
                    await asyncio.to_thread(self._store.delete, key)
                    logger.info("webhook_told", endpoint=endpoint.id, webhook=due.id, job=due.job, status=status)
                else:
                    await self._failed(endpoint, key, due, f"answered {status}")
        except PipelineError as error:
            logger.error("webhook_not_told", endpoint=endpoint.id, reason=str(error))

    async def _post(self, endpoint: Endpoint, due: DueWebhook) -> int:
        payload = orjson.dumps(
            {
                "id": due.id,
                "object": "event",
                "type": due.type,
                "created_at": seconds(due.at),
                "data": {"id": due.job},
            }
        )
        headers = signature_headers(endpoint.secret, due.id, self._world.clock.now(), payload)
        if not self._world.traces.on:
            return await self._sender.post(endpoint, headers, payload)
        job = await asyncio.to_thread(JobLedger(self._store, f"{JOBS}{due.job}/").find_job)
        about = {"tokenmill.webhook": endpoint.id, "tokenmill.job.id": due.job}
        span = self._world.traces.begin(
            "webhook", about, kind="client", parent=None if job is None else self._world.traces.of_job(job)
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
        """Try again later: the older it is, the later; or never, when it is too old."""
        settings = self._settings
        age = self._age(due)
        told = {"endpoint": endpoint.id, "host": endpoint.host, "webhook": due.id, "job": due.job, "reason": why}
        if age >= settings.patience:
            await asyncio.to_thread(self._store.delete, key)
            logger.error("webhook_given_up", **told)
            return
        chance = int.from_bytes(self._world.random.token(4)) / 2**32
        wait = min(settings.longest, max(settings.first, settings.growth * age)) * (1 + _JITTER * (2 * chance - 1))
        self._again[key] = self._world.clock.monotonic() + wait
        logger.warning("webhook_failed", again_in=round(wait, 1), **told)

    def _age(self, due: DueWebhook) -> float:
        return (self._world.clock.now() - due.at).total_seconds()


def event_id(job: str, kind: str) -> str:
    """The same in every repeat."""
    return f"evt_{hashlib.sha256(f'{job}/{kind}'.encode()).hexdigest()[:32]}"


def endpoint_id(tenant: str, url: str) -> str:
    """Names an endpoint without telling where it is."""
    return hashlib.sha256(f"{tenant}\0{url}".encode(errors="surrogatepass")).hexdigest()[:16]
