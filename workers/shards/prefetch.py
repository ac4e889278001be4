"""Fetches and prepares the next shard while the worker computes others.

Reading and tokenizing a shard takes time in which the engine should not run dry, so another thread does it. One
prepared shard waits at most; a more urgent one is fetched all the same and opened before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

from pipeline.ports import Clock
from pipeline.worker_client.ports import BY_URGENCY, ShardSink, ShardSource
from schemas.jobs.job import Tier
from workers.errors import ModelMismatchError
from workers.policies.retry import JudgingInterrupted
from workers.shards.open_shard import PreparedShard
from workers.shards.shard_reader import ShardReader


class ShardFetcher:
    """Takes shards from a source and prepares them, one at a time.

    Args:
        sink: records shards that can't be prepared as given up.
        poll_seconds: interval of polling the source while it has no shard.

    Attributes:
        prepared: the shard that waits to be opened.
    """

    def __init__(
        self, source: ShardSource, sink: ShardSink, reader: ShardReader, clock: Clock, poll_seconds: float
    ) -> None:
        self._source = source
        self._sink = sink
        self._reader = reader
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        self._is_source_finished = False
        self._is_dry = False
        self._preparing: Future[PreparedShard | None] | None = None
        self.prepared: PreparedShard | None = None

    @property
    def is_preparing(self) -> bool:
        """Whether the source is being polled or a shard is being prepared."""
        return self._preparing is not None

    @property
    def is_source_finished(self) -> bool:
        """Whether the source has no more shards. Its last one may still be in preparation."""
        return self._is_source_finished

    @property
    def is_dry(self) -> bool:
        """Whether the source had no shard at the last poll for all tiers, so the open shards are probably the last.
        Another one may follow: of another job, from the planner, or because an attempt has died."""
        return self._is_dry and self.prepared is None

    @property
    def is_exhausted(self) -> bool:
        """Whether no shard will follow."""
        return self._is_source_finished and self._preparing is None and self.prepared is None

    def collect(self) -> PreparedShard | None:
        """The shard that was prepared since the last call. It is `prepared` now; if another one waits there already,
        the new one is more urgent and must be opened at once. Raises what fetching raised."""
        if self._preparing is None or not self._preparing.done():
            return None
        shard, self._preparing = self._preparing.result(), None
        if shard is None:
            self._next_poll = self._clock.monotonic() + self._poll_seconds
        elif self.prepared is None:
            self.prepared = shard
        return shard

    def fetch(self, executor: Executor, open_tiers: Sequence[Tier], among: Sequence[Tier] = BY_URGENCY) -> None:
        """Fetch and prepare the next shard, unless one is being fetched. While a prepared shard waits, only tiers are
        fetched that would be opened at once: more urgent than it and all open shards (`open_tiers`). `among`: no other
        tiers."""
        if self._preparing is not None or self._is_source_finished or self._clock.monotonic() < self._next_poll:
            return
        tiers: Sequence[Tier] = BY_URGENCY
        if self.prepared is not None:
            tiers = BY_URGENCY[: min(BY_URGENCY.index(tier) for tier in (*open_tiers, self.prepared.work.tier))]
        if tiers := [tier for tier in tiers if tier in among]:
            self._preparing = executor.submit(self._fetch, tiers)

    def take(self) -> PreparedShard | None:
        """Remove and return the prepared shard."""
        shard, self.prepared = self.prepared, None
        return shard

    def take_all(self) -> list[PreparedShard]:
        """Remove and return all shards; waits for the one in preparation."""
        shards = [self.take(), None if self._preparing is None else self._preparing.result()]
        self._preparing = None
        return [shard for shard in shards if shard is not None]

    def _fetch(self, tiers: Sequence[Tier]) -> PreparedShard | None:
        """The next shard, prepared; None when the source has none now. Runs on the fetch thread."""
        work = self._source.take(0.0, tiers)
        self._is_dry = work is None and len(tiers) == len(BY_URGENCY)
        if work is None:
            self._is_source_finished = self._source.finished()
            return None
        try:
            return self._reader.prepare(work)
        except ModelMismatchError:  # it concerns the worker, not the shard
            raise
        except JudgingInterrupted:
            self._sink.release(work, 0, 0.0)
            return None
        except Exception as error:  # noqa: BLE001 - it concerns one shard; the worker continues with others
            self._sink.give_up(work, error)
            return None
