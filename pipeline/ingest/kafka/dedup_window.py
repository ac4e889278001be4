"""Which requests of a partition came lately: a producer that was not sure may send one again, batches later.

What is known is read from stored batches, so a consumer that takes a partition over knows the same. It only decides
what a new batch leaves out; what was left out, the stored batch says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from datetime import timedelta

from pipeline.ingest.kafka.micro_batches import KafkaBatch, PartitionId, batch_key, group_records, load_batch
from pipeline.ports import World


class ResendWindow:
    """The requests of one partition.

    Args:
        seconds: how long one is remembered, counted from its batch.  records: how many are, at most; 0: none.
    """

    def __init__(self, world: World, seconds: float, records: int) -> None:
        self._world = world
        self._span = timedelta(seconds=seconds)
        self._most = records
        self._batches: OrderedDict[int, tuple[KafkaBatch, frozenset[bytes]]] = OrderedDict()
        self.latest: int | None = None

    def seen(self) -> Collection[bytes]:
        """Digests of the requests that are remembered now."""
        self._forget()
        return frozenset().union(*(digests for _, digests in self._batches.values()))

    def remember(self, batch: KafkaBatch) -> None:
        """The partition's latest batch."""
        self.latest = batch.first
        self._batches[batch.first] = (batch, self._digests(batch) if self._most else frozenset())
        self._forget()

    def recall(self, batch: KafkaBatch) -> None:
        """The latest batch, and those before it, as far back as the window goes."""
        found, count = [batch], 0
        while self._most and count < self._most and self._is_recent(found[-1]):
            count += sum(group.rows for group in found[-1].groups)
            before = self._before(found[-1])
            if before is None:
                break
            found.append(before)
        for one in reversed(found):
            self.remember(one)

    def _before(self, batch: KafkaBatch) -> KafkaBatch | None:
        if batch.previous is None or batch.previous >= batch.first:
            return None
        place = PartitionId(batch.cluster, batch.topic, batch.partition, batch.tenant)
        return load_batch(self._world.store, batch_key(place, batch.previous))

    def _digests(self, batch: KafkaBatch) -> frozenset[bytes]:
        if not self._is_recent(batch):
            return frozenset()
        store, found = self._world.store, set[bytes]()
        for group in batch.groups:
            found.update(group_records(store, group, ["digest"])["digest"].to_pylist())
        found.discard(b"")
        return frozenset(found)

    def _is_recent(self, batch: KafkaBatch) -> bool:
        return self._world.clock.now() - batch.at < self._span

    def _forget(self) -> None:
        while self._batches:
            oldest, _ = next(iter(self._batches.values()))
            count = sum(len(digests) for _, digests in self._batches.values())
            if count <= self._most and self._is_recent(oldest):
                return
            self._batches.popitem(last=False)
