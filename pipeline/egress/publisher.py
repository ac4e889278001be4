"""The publisher sends each result and each job change to topics, at least once, after the commit.

All messages are functions of committed objects (the order, parts, closing, manifest, the rows' source records). So a
message that is repeated after a crash is identical to the byte, and has the same id. Once the broker has confirmed the
messages a marker is created, and marked messages are not sent again:

    announced/results/JOB/PART   announced/replies/JOB/PART   announced/events/JOB/NAME   announced/jobs/JOB  (the end)

Jobs from Kafka are found by their origins (`intake/origins/`), which exist from before the job until all is announced.
Other jobs, if they are announced too, are found by their markers in `active/`, and by a sweep.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow.parquet as pq
import structlog

from pipeline.ingest.kafka.dead_letters import UnsentDeadLetters
from pipeline.ingest.kafka.micro_batches import (
    ORIGINS,
    KafkaBatch,
    Origin,
    group_records,
    load_batch,
    load_origin,
    origin_key,
)
from pipeline.ledger.active_index import ACTIVE
from pipeline.ledger.ledger import JOBS, JobLedger, LedgerError, part_key
from pipeline.ports import Lease, Message, Messages, NotConfirmed, ObjectStore, PipelineError, World
from pipeline.results.part_files import read_part
from pipeline.runtime.leader_election import LeaderElection
from pipeline.runtime.supervision import reason_of
from pipeline.tracing import TRACEPARENT
from schemas.jobs.events import JobChanged, ShardCommitted
from schemas.jobs.job import Job
from schemas.jobs.outcome import Counts, JobStatus, Manifest

ANNOUNCED: Final = "announced/"
QUIET_SHARE: Final = 0.1
_COLUMNS: Final = ["row", "custom_id", "status", "status_code", "response", "error_code", "error_message"]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Settings of the publisher; times in seconds.

    Attributes:
        reply_topics: topics that a record's `reply_to` may name; results for others go to `results_topic` alone.
        all_jobs: announce jobs of every ingest source, not only of Kafka.
        unsent_interval_seconds, unsent_retry_seconds: interval of checks for unsent dead letters, and the delay after a
            failed send.
        poll_interval_seconds: interval between two polls.
        sweep_interval_seconds: interval between two sweeps over all jobs, open or ended, with `all_jobs`.
        rows_at_once: results that are sent before the publisher waits for the broker's confirmation.
    """

    results_topic: str = "tokenmill.results"
    events_topic: str = "tokenmill.events"
    deadletter_topic: str = "tokenmill.deadletter"
    reply_topics: frozenset[str] = frozenset()
    all_jobs: bool = False
    poll_interval_seconds: float = 0.5
    sweep_interval_seconds: float = 3_600.0
    unsent_interval_seconds: float = 15.0
    unsent_retry_seconds: float = 300.0
    rows_at_once: int = 500


@dataclass(frozen=True, slots=True)
class _Source:
    """The Kafka record that a row came from."""

    key: bytes | None
    reply_to: str | None
    location: str | None


@dataclass(slots=True)
class _Quiet:
    """A job without news at its last poll: `since` when, and when it is polled `again` (monotonic)."""

    since: float
    again: float


class Publisher:
    """Announces the jobs of a root. Several may run: each sends unmarked messages, so without a lease that they contend
    for, each of them sends most messages.

    Args:
        lease: the lease of leader election; None: every publisher announces.
    """

    def __init__(
        self,
        world: World,
        messages: Messages,
        settings: PublisherSettings | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.failures = 0
        self._world = world
        self._store: ObjectStore = world.store
        self._messages = messages
        self._settings = settings or PublisherSettings()
        self._announced: defaultdict[str, set[str]] = defaultdict(set)
        self._quiet: dict[str, _Quiet] = {}
        self._owed = UnsentDeadLetters(world, messages, self._settings.deadletter_topic)
        self._sweep_at = self._owed_at = float("-inf")
        self._leadership = LeaderElection(lease, world.clock, "announcing")

    def run(self, stop: threading.Event) -> None:
        """Announce until `stop` is set, while this publisher leads; failures are retried."""
        try:
            while not stop.is_set():
                if self._leadership.now():
                    self.poll()
                stop.wait(self._settings.poll_interval_seconds)
        finally:
            self._leadership.give_up()

    def poll(self) -> int:
        """Announce all news; returns the number of jobs whose end was announced. A failure is logged and counted, and
        the next poll continues with its job."""
        ended = 0
        for name in self._open():
            known_before = len(self._announced.get(name, ()))
            try:
                if self.announce(JobLedger(self._store, f"{JOBS}{name}/")):
                    ended += 1
                else:
                    self._back_off(name, news=len(self._announced.get(name, ())) != known_before)
            except Exception as error:  # noqa: BLE001 - concerns one job; the others go on
                self.failures += 1
                reason = reason_of(error, "publisher", self._world, job=name)
                logger.error("not_announced", job=name, reason=reason)
                if isinstance(error, NotConfirmed) and not error.final:
                    break  # the others would only wait for the same brokers
        self._send_owed()
        return ended

    def _send_owed(self) -> None:
        """Send the messages of dead letters that Kafka ingest could not send when it read the records."""
        clock = self._world.clock
        if clock.monotonic() < self._owed_at:
            return
        again = self._settings.unsent_interval_seconds
        try:
            self._owed.send()
        except PipelineError as error:
            self.failures += 1
            again = self._settings.unsent_retry_seconds
            logger.error("dead_letters_still_owed", reason=str(error))
        self._owed_at = clock.monotonic() + again

    def announce(self, ledger: JobLedger) -> bool:
        """Announce the news of one job; True when its end was announced.

        Raises:
            NotConfirmed: a message could not be sent. Messages before it stay announced.
        """
        job = ledger.find_job()
        if job is None:
            return False
        manifest = ledger.manifest()
        self._announce_change(job, "accepted", JobStatus.VALIDATING, Counts(), job.created_at)
        parts = [number for number in ledger.result_parts(manifest) if f"whole/{number}" not in self._announced[job.id]]
        source = self._source(job) if parts else {}
        for number in parts:
            if not self._leadership.now():  # a large job takes long: the lease is renewed meanwhile, or was lost
                return False
            self._announce_part(ledger, job, number, source)
            self._announced[job.id].add(f"whole/{number}")
        closing = ledger.closing()
        if closing is not None and closing.kind != "expire":
            self._announce_change(job, "cancelling", JobStatus.CANCELLING, Counts(), closing.at)
        if manifest is None:
            return False
        self._end(job, manifest)
        return True

    def _open(self) -> Iterator[str]:
        names = {info.key.removeprefix(ORIGINS).removesuffix(".json") for info in self._store.list(ORIGINS)}
        if self._settings.all_jobs:
            names.update(info.key.removeprefix(ACTIVE) for info in self._store.list(ACTIVE))
            now = self._world.clock.monotonic()
            if now >= self._sweep_at:
                self._sweep_at = now + self._settings.sweep_interval_seconds
                names.update(folder.removeprefix(JOBS).rstrip("/") for folder in self._store.folders(JOBS))
            names.update(self._announced)  # one that ended since
        for name in self._announced.keys() - names:  # another announced it to its end
            del self._announced[name]
            self._quiet.pop(name, None)
        now = self._world.clock.monotonic()
        for name in sorted(names):
            if name in self._quiet and now < self._quiet[name].again:
                continue
            if self._store.info(f"{ANNOUNCED}jobs/{name}") is None:
                yield name
            else:
                self._forget(name)

    def _back_off(self, name: str, *, news: bool) -> None:
        """Poll an idle job less and less often: hundreds may wait to be planned. Its news is delayed by at most a tenth
        of the time that the job was idle."""
        now = self._world.clock.monotonic()
        if news:
            self._quiet.pop(name, None)
            return
        quiet = self._quiet.setdefault(name, _Quiet(now, now))
        quiet.again = now + QUIET_SHARE * (now - quiet.since) - self._settings.poll_interval_seconds

    def _end(self, job: Job, manifest: Manifest) -> None:
        message = manifest.errors[0].message if manifest.errors else None
        self._announce_change(job, "ended", manifest.status, manifest.counts, manifest.finished_at, message)
        self._store.create(f"{ANNOUNCED}jobs/{job.id}", b"")
        self._forget(job.id)

    def _forget(self, name: str) -> None:
        """Forget a job whose end is announced, and delete its origin."""
        self._announced.pop(name, None)
        self._quiet.pop(name, None)
        self._store.delete(origin_key(name))

    # -- parts

    def _announce_part(self, ledger: JobLedger, job: Job, number: int, source: Mapping[int, _Source]) -> None:
        results, replies, event = (
            self._marker(kind, job, name)
            for kind, name in (
                ("results", f"{number:05d}"),
                ("replies", f"{number:05d}"),
                ("events", f"part-{number:05d}"),
            )
        )
        if not self._is_marked(job, results):
            self._send_rows(ledger, job, number, source, None)
            self._mark(job, results)
        topics = {one.reply_to for one in source.values()} - {None}
        if topics and not self._is_marked(job, replies):
            self._send_rows(ledger, job, number, source, topics & self._settings.reply_topics)
            self._mark(job, replies)
        if not self._is_marked(job, event):
            summary = read_part(ledger, number).summary
            committed = ShardCommitted(
                id=f"{job.id}/part-{number:05d}", job=job.id, at=summary.committed_at, shard=number,
                rows=summary.counts.total, attempt=summary.attempt, usage=summary.usage,
            )  # fmt: skip
            self._send_event(job, committed)
            self._mark(job, event)

    def _send_rows(
        self, ledger: JobLedger, job: Job, number: int, source: Mapping[int, _Source], topics: set[Any] | None
    ) -> None:
        """Send a part's rows to the results topic, or to their reply topics among `topics`."""
        with ledger.store.open(ledger.prefix + part_key(number)) as stream:
            batches = pq.ParquetFile(stream, pre_buffer=False).iter_batches(
                self._settings.rows_at_once, columns=_COLUMNS
            )
            for batch in batches:
                messages = []
                for result in batch.to_pylist():
                    origin = source.get(result["row"]) or source.get(-1)
                    topic = self._settings.results_topic if topics is None else origin and origin.reply_to
                    if topic and (topics is None or topic in topics):
                        messages.append(self._result(ledger, job, number, result, origin, topic))
                if messages:
                    self._messages.send(messages)

    def _result(
        self, ledger: JobLedger, job: Job, part: int, result: dict[str, Any], origin: _Source | None, topic: str
    ) -> Message:
        number = result_id(job.id, result["row"])
        key = origin.key if origin is not None and origin.key is not None else _encoded(result["custom_id"])
        headers = [("result_id", number.encode()), ("job", job.id.encode())]
        if origin is not None and origin.location is not None:
            headers.append(("source", origin.location.encode()))
        headers += _trace_headers(job)
        message = Message(topic, _value(job.id, number, result), key, tuple(headers))
        if message.size <= self._messages.max_bytes:
            return message
        where = {"uri": ledger.location(part_key(part)), "row": result["row"]}
        short = orjson.dumps(_facts(job.id, number, result) | {"response": None, "error": None, "result_in": where})
        message = Message(topic, short, key, tuple(headers))
        if message.size <= self._messages.max_bytes:
            return message
        return Message(topic, orjson.dumps({"id": number, "job": job.id, "result_in": where}), None, tuple(headers))

    def _source(self, job: Job) -> dict[int, _Source]:
        """Row -> its source record; -1 -> the source of all rows."""
        origin = load_origin(self._store, job.id)
        if origin is None:
            return {}
        if origin.batch is None or origin.group is None:
            return {-1: _Source(None, origin.reply_to, None)}
        batch = self._batch(origin)
        found = group_records(self._store, batch.groups[origin.group], ["row", "key", "reply_to", "offset"])
        beginning = f"{batch.topic}/{batch.partition}/"
        return {one["row"]: _Source(one["key"], one["reply_to"], f"{beginning}{one['offset']}")
                for one in found.to_pylist()}  # fmt: skip

    def _batch(self, origin: Origin) -> KafkaBatch:
        assert origin.batch is not None
        batch = load_batch(self._store, origin.batch)
        if batch is None:
            raise LedgerError(f"{self._store.locate(origin.batch)}: is missing, but a job came from it; put it back")
        return batch

    # -- events and markers

    def _announce_change(
        self, job: Job, name: str, status: JobStatus, counts: Counts, at: Any, message: str | None = None
    ) -> None:
        marker = self._marker("events", job, name)
        if not self._is_marked(job, marker):
            event = JobChanged(id=f"{job.id}/{name}", job=job.id, at=at, status=status, counts=counts, message=message)
            self._send_event(job, event)
            self._mark(job, marker)

    def _send_event(self, job: Job, event: JobChanged | ShardCommitted) -> None:
        value = event.model_dump_json(exclude_none=True).encode()
        headers = (("event_id", event.id.encode()), *_trace_headers(job))
        self._messages.send([Message(self._settings.events_topic, value, job.id.encode(), headers)])

    def _marker(self, kind: str, job: Job, name: str) -> str:
        return f"{ANNOUNCED}{kind}/{job.id}/{name}"

    def _is_marked(self, job: Job, marker: str) -> bool:
        known = self._announced[job.id]
        if marker not in known and self._store.info(marker) is not None:
            known.add(marker)
        return marker in known

    def _mark(self, job: Job, marker: str) -> None:
        self._store.create(marker, b"")
        self._announced[job.id].add(marker)


def _trace_headers(job: Job) -> list[tuple[str, bytes]]:
    """The trace header from the job's order, so that a repeated message is identical."""
    return [] if job.traceparent is None else [(TRACEPARENT, job.traceparent.encode())]


def result_id(job: str, row: int) -> str:
    """The id of a result, identical in each repeat."""
    return f"res_{hashlib.sha256(f'{job}/{row}'.encode()).hexdigest()[:32]}"


def _facts(job: str, number: str, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": number,
        "job": job,
        "row": result["row"],
        "custom_id": result["custom_id"],
        "status": result["status"],
    }


def _value(job: str, number: str, result: dict[str, Any]) -> bytes:
    """A result as JSON: OpenAI's batch output line, with the job, the row and its status."""
    response = error = None
    if result["response"] is not None:
        body = orjson.Fragment(result["response"])
        response = {"status_code": result["status_code"], "request_id": number, "body": body}
    if result["error_code"] is not None:
        error = {"code": result["error_code"], "message": result["error_message"]}
    return orjson.dumps(_facts(job, number, result) | {"response": response, "error": error})


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")
