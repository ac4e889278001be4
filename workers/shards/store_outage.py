"""Makes a worker survive an outage of the store: it keeps its model and its shards, and retries.

Loading a model again would take minutes, and another worker that resumed the shards couldn't write either. Writes are
retried on the thread that makes them, while the engine continues with the shards that have begun: a shard's begin
record must be durable before its rows are computed. Requests of the lane need no store and are answered meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol, TypeVar

import structlog

from pipeline.ledger.records import ShardReport
from pipeline.ports import Clock, StoreUnavailable
from pipeline.worker_client.ports import (
    BY_URGENCY,
    CheckpointWork,
    RevokedShards,
    ShardSink,
    ShardSource,
    ShardWork,
    WorkerLoad,
)
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Tier

RETRY_SECONDS: Final = 1.0
"""Interval of retries; each try may itself wait for the store."""

READ_FAILURE_SECONDS: Final = 60.0
"""Time after which a failed read no longer counts as an outage, where the worker has read nothing since."""

Access = Literal["read", "write"]
Answer = TypeVar("Answer")

logger = structlog.get_logger(__name__)


def wait_out(use: Callable[[], Answer], clock: Clock, stop: threading.Event) -> Answer:
    """Call `use` until the store is available, and return its result. Raises `StoreUnavailable` once `stop` is set."""
    is_waiting = False
    while True:
        try:
            return use()
        except StoreUnavailable as error:
            if stop.is_set():
                raise
            if not is_waiting:
                logger.error("the store can't be used: the worker waits", why=str(error))
            is_waiting = True
            clock.sleep(RETRY_SECONDS)


class Client(ShardSource, ShardSink, Protocol):
    """A worker's client of the pipeline."""


class OutageTolerantClient:
    """A `ShardSource` and `ShardSink` that retries the calls of `client` during an outage. Its writes must be
    idempotent.

    Args:
        stop: once set, an outage raises its error instead of being waited for.
    """

    def __init__(self, client: Client, clock: Clock, stop: threading.Event) -> None:
        self._client = client
        self._clock = clock
        self._stop = stop
        self._lock = threading.Lock()
        self._since = 0.0
        self._last_failure = 0.0
        self._reasons: dict[Access, str] = {}

    @property
    def outage(self) -> str | None:
        """Why the store is unavailable; None: it is available."""
        return next(iter(self._reasons.copy().values()), None)

    # -- ShardSource

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard; None during an outage."""
        try:
            work = self._client.take(timeout, tiers)
        except StoreUnavailable as error:
            self._note("read", error)
            self._clock.sleep(RETRY_SECONDS)
            return None
        if work is not None:
            self._note_success("read")
        elif self._clock.monotonic() - self._last_failure > READ_FAILURE_SECONDS:
            self._forget_reads()
        return work

    def finished(self) -> bool:
        """Whether no shard will follow."""
        return self._client.finished()

    # -- ShardSink

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """See `ShardSink.commit`; retried during an outage."""
        return self._wait_out(lambda: self._client.commit(work, finished, report))

    def begin(self, work: ShardWork) -> None:
        """See `ShardSink.begin`; retried during an outage."""
        self._wait_out(lambda: self._client.begin(work))

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """See `ShardSink.checkpoint`; retried during an outage."""
        self._wait_out(lambda: self._client.checkpoint(work, new))

    def record(self, work: ShardWork, rows: Sequence[int]) -> None:
        """See `ShardSink.record`; retried during an outage."""
        self._wait_out(lambda: self._client.record(work, rows))

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """See `ShardSink.release`; retried during an outage."""
        self._wait_out(lambda: self._client.release(work, generated, busy_seconds))

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """See `ShardSink.give_up`; retried during an outage."""
        self._wait_out(lambda: self._client.give_up(work, error, generated, busy_seconds))

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Send the heartbeat, with the current outage in its metrics. Needs no store."""
        if load.metrics is not None:
            load = replace(load, metrics=load.metrics.model_copy(update={"store_outage": self.outage}))
        self._client.send_heartbeat(shards, load)

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """See `ShardSink.find_revoked`; none during an outage."""
        try:
            revoked = self._client.find_revoked(shards)
        except StoreUnavailable as error:
            self._note("read", error)
            return RevokedShards()
        if shards:
            self._note_success("read")
        return revoked

    def _wait_out(self, write: Callable[[], Answer]) -> Answer:
        while True:
            try:
                answer = write()
            except StoreUnavailable as error:
                if self._stop.is_set():
                    raise
                self._note("write", error)
                self._clock.sleep(RETRY_SECONDS)
            else:
                self._note_success("write")
                return answer

    def _note(self, access: Access, error: StoreUnavailable) -> None:
        with self._lock:
            first, self._last_failure = not self._reasons, self._clock.monotonic()
            self._reasons[access] = str(error)
            if first:
                self._since = self._last_failure
        if first:
            logger.error(
                "the store can't be used: the worker keeps its model and its shards, and waits", why=str(error)
            )

    def _note_success(self, access: Access) -> None:
        """Clear the failures that this success disproves. A read disproves none of writes: a full disk can be read."""
        with self._lock:
            failed = bool(self._reasons)
            self._reasons.pop("read", None)
            if access == "write":
                self._reasons.pop("write", None)
            ended = failed and not self._reasons
        if ended:
            seconds = round(self._clock.monotonic() - self._since, 1)
            logger.info("the store can be used again: the worker continues", seconds=seconds)

    def _forget_reads(self) -> None:
        with self._lock:
            self._reasons.pop("read", None)
