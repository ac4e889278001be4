"""Lets a worker outlive an outage of the store: it keeps its model and its shards, and waits.

To load a model again takes minutes, and the shards would be computed from their last checkpoints by a worker that can't
write either. Writes are tried again on the thread that makes them, while the engine goes on: with what the worker holds
already, for no shard is begun before that is durable. Requests of the lane need no store, and are answered meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol, TypeVar

import structlog

from pipeline.ledger.records import ShardReport
from pipeline.ports import Clock, StoreUnavailable
from pipeline.worker_client.protocol import (
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
"""Between two tries of a write, each of which may itself wait for the store."""

FORGET_SECONDS: Final = 60.0
"""After so long a read that failed counts no more, where the worker has had nothing to read since."""

Access = Literal["read", "write"]
Answer = TypeVar("Answer")

logger = structlog.get_logger(__name__)


def wait_out(use: Callable[[], Answer], clock: Clock, stop: threading.Event) -> Answer:
    """What `use` of the store returns, once the store can be used; raises its `StoreUnavailable` when `stop` is set."""
    waits = False
    while True:
        try:
            return use()
        except StoreUnavailable as error:
            if stop.is_set():
                raise
            if not waits:
                logger.error("the store can't be used: the worker waits", why=str(error))
            waits = True
            clock.sleep(RETRY_SECONDS)


class Client(ShardSource, ShardSink, Protocol):
    """A worker's side of the pipeline."""


class OutageTolerantClient:
    """`ShardSource` and `ShardSink` over those of `client`, whose writes must not mind being repeated.

    Args:
        stop: once set, an outage is waited for no more, and its error is raised.

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
        """Why the store can't be used now; None: it can."""
        return next(iter(self._reasons.copy().values()), None)

    # -- ShardSource

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard; None while the store can't be used."""
        try:
            work = self._client.take(timeout, tiers)
        except StoreUnavailable as error:
            self._note("read", error)
            self._clock.sleep(RETRY_SECONDS)
            return None
        if work is not None:
            self._note_success("read")
        elif self._clock.monotonic() - self._last_failure > FORGET_SECONDS:
            self._forget_reads()
        return work

    def finished(self) -> bool:
        """True when no shard will ever come again."""
        return self._client.finished()

    # -- ShardSink

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Make the shard's part, sooner or later."""
        return self._wait_out(lambda: self._client.commit(work, finished, report))

    def begin(self, work: ShardWork) -> None:
        """Make it durable that the attempt begins, sooner or later."""
        self._wait_out(lambda: self._client.begin(work))

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """Make what is new durable, sooner or later."""
        self._wait_out(lambda: self._client.checkpoint(work, new))

    def note(self, work: ShardWork, rows: Sequence[int]) -> None:
        """Make the note durable, sooner or later."""
        self._wait_out(lambda: self._client.note(work, rows))

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """Release the shard, sooner or later."""
        self._wait_out(lambda: self._client.release(work, generated, busy_seconds))

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """Record why the attempt can't go on with the shard, sooner or later."""
        self._wait_out(lambda: self._client.give_up(work, error, generated, busy_seconds))

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Needs no store; says whether it can be used."""
        if load.figures is not None:
            load = replace(load, figures=load.figures.model_copy(update={"store_outage": self.outage}))
        self._client.send_heartbeat(shards, load)

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """None are known while the store can't be used."""
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
        """A read says nothing of writes: a disk that is full can be read."""
        with self._lock:
            failed = bool(self._reasons)
            self._reasons.pop("read", None)
            if access == "write":
                self._reasons.pop("write", None)
            ended = failed and not self._reasons
        if ended:
            seconds = round(self._clock.monotonic() - self._since, 1)
            logger.info("the store can be used again: the worker goes on", seconds=seconds)

    def _forget_reads(self) -> None:
        with self._lock:
            self._reasons.pop("read", None)
