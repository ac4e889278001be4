"""Fetching shards ahead of need: one waits, prepared, while others are worked on, and more urgent ones pass it by.

Reading and tokenizing a shard takes time in which the engine should not run dry, so it happens on another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

from pipeline.ports import Clock
from pipeline.worker_client.protocol import BY_URGENCY, ShardSink, ShardSource
from schemas.jobs.job import Tier
from workers.errors import ModelMismatchError
from workers.shards.state import PreparedShard, ShardReader


class ShardFetcher:
    """Takes shards from a source and prepares them, one at a time.

    Args:
        sink: where a shard is given up that can't be prepared.
        look_seconds: between two looks for a shard, when there was none.

    Attributes:
        prepared: waits until there is too little left to do.
    """

    def __init__(
        self, source: ShardSource, sink: ShardSink, reader: ShardReader, clock: Clock, look_seconds: float
    ) -> None:
        self._source = source
        self._sink = sink
        self._reader = reader
        self._clock = clock
        self._look_seconds = look_seconds
        self._next_look = 0.0
        self._source_finished = False
        self._dry = False
        self._preparing: Future[PreparedShard | None] | None = None
        self.prepared: PreparedShard | None = None

    @property
    def preparing(self) -> bool:
        """A shard is being looked for or prepared now."""
        return self._preparing is not None

    @property
    def source_finished(self) -> bool:
        """The source has no more; what it gave last may still be being prepared."""
        return self._source_finished

    @property
    def dry(self) -> bool:
        """The source had nothing when it was last asked for anything: for all that is known, no shard comes after those
        that are open. One may all the same: of another job, from the planner, or because an attempt has died."""
        return self._dry and self.prepared is None

    @property
    def exhausted(self) -> bool:
        """No shard will ever come again."""
        return self._source_finished and self._preparing is None and self.prepared is None

    def collect(self) -> PreparedShard | None:
        """The shard that has come since the last call. It is `prepared` now; or, if another waits there already, it is
        more urgent than that one, and to be opened at once. Raises what fetching raised."""
        if self._preparing is None or not self._preparing.done():
            return None
        shard, self._preparing = self._preparing.result(), None
        if shard is None:
            self._next_look = self._clock.monotonic() + self._look_seconds
        elif self.prepared is None:
            self.prepared = shard
        return shard

    def fetch(self, helper: Executor, open_tiers: Sequence[Tier]) -> None:
        """Have the next shard fetched and prepared, if none is. While one waits, only those may come that would be
        opened at once: more urgent than all that is open (`open_tiers`) or waits."""
        if self._preparing is not None or self._source_finished or self._clock.monotonic() < self._next_look:
            return
        tiers: Sequence[Tier] = BY_URGENCY
        if self.prepared is not None:
            tiers = BY_URGENCY[: min(BY_URGENCY.index(tier) for tier in (*open_tiers, self.prepared.work.tier))]
        if tiers:
            self._preparing = helper.submit(self._fetch, tiers)

    def take(self) -> PreparedShard | None:
        """The prepared shard, which waits no more."""
        shard, self.prepared = self.prepared, None
        return shard

    def take_all(self) -> list[PreparedShard]:
        """What is prepared, and what is being prepared once it is."""
        shards = [self.take(), None if self._preparing is None else self._preparing.result()]
        self._preparing = None
        return [shard for shard in shards if shard is not None]

    def _fetch(self, tiers: Sequence[Tier]) -> PreparedShard | None:
        """On the other thread: the next shard, prepared, or None when there is none now."""
        work = self._source.take(0.0, tiers)
        self._dry = work is None and len(tiers) == len(BY_URGENCY)
        if work is None:
            self._source_finished = self._source.finished()
            return None
        try:
            return self._reader.prepare(work)
        except ModelMismatchError:  # the worker's, and no shard's
            raise
        except Exception as error:  # noqa: BLE001 - of one shard; the worker goes on with others
            self._sink.give_up(work, error)
            return None
