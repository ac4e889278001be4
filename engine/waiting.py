"""The waiting queue: who comes next, and what those who wait will read from the prefix cache.

Sequences wait by arrival, highest class first; those that were put back wait before the others of their class. While
more requests may come that is all. Once the rest of the work is known (`settled`), the end of the run can be seen: so
many tokens still to be sampled, in so many rows, take so many steps; an answer that takes as many must start now, or
it ends alone. So the order is arrival, but an answer that is expected to last to the end goes first, the longest
before all. Arrival is the planner's order, in which readers of a prefix stand side by side: it is left for the few
answers that must not wait, and only towards the end.

Who waits is known to read the blocks of its prompt, so these are not given away while others can be (`CacheTables`).
Of a prefix group the plan knows readers that have not even arrived; together they count as one more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Listing
from itertools import groupby, takewhile

from engine.admission import LazyHeap, LengthEstimator
from engine.cache.prefix import HashChain
from engine.cache.tables import CacheTables
from engine.sequence import CLASSES, Sequence, SequenceState, class_of

PUT_BACK, ORDERED, ARRIVED = range(3)

NOW = 1 << 62

MAX_GROUPS = 1024
"""Prefix groups with readers to arrive that are remembered."""


class WaitingQueue:
    """Sequences without a row, in the order in which they should get one.

    Args:
        cache: told which blocks will be read.
        lengths: how long answers are expected to be.
        rope_original_max: prompts longer than this have keys that depend on the prompt's length.

    Attributes:
        settled: nothing but what is here will be added.
        by_class: sequences that wait, by `class_of`.
    """

    def __init__(self, cache: CacheTables, lengths: LengthEstimator, rope_original_max: int | None) -> None:
        self.settled = False
        self.by_class = [0] * CLASSES
        self._cache = cache
        self._lengths = lengths
        self._rope_original_max = rope_original_max
        self._heap = LazyHeap[Sequence, tuple[int, int, int]](lambda sequence: sequence.state is SequenceState.WAITING)
        self._groups = GroupReaders(cache)
        self._look_again = NOW  # when so few wait, the order is looked at

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """A new sequence: behind all others of its class."""
        self._look_again = NOW
        self._push(sequence, ARRIVED)
        request = sequence.request
        if request.prefix_group is not None and sequence.choice == 0 and sequence.awaited:
            self._groups.tell(request.prefix_group, sequence.awaited, request.prefix_readers)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that had a row: before all others of its class that had none, by arrival."""
        self._push(sequence, PUT_BACK)

    def peek(self) -> Sequence | None:
        """The first one, left in place."""
        return self._heap.peek()

    def pop(self) -> Sequence:
        """Take the first one, which has got a row; what it will read counts as read."""
        sequence = self._heap.pop()
        self.by_class[class_of(sequence.request.priority)] -= 1
        self._read(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended while it waited."""
        self._heap.discard()
        self.by_class[class_of(sequence.request.priority)] -= 1
        self._read(sequence)

    def forget_groups(self) -> None:
        """Readers that have not arrived are not waited for any longer: nothing else is left to do."""
        self._groups.clear()

    @property
    def order_is_due(self) -> bool:
        """Whether `order` may change anything: the rest of the work is known, and something arrived, or as many have
        gone as `order` foresaw."""
        return self.settled and 0 < len(self) <= self._look_again

    def order(self, running: int, rows: int) -> None:
        """Take forward what is due. Those who were put back stay before all others.

        Args:
            running: tokens that sequences with a row are still expected to sample.
            rows: sequences that run side by side.
        """
        entries = self._heap.drain()
        left, early, before = float(running), len(entries), 0
        classes: list[tuple[list[Sequence], list[int], float]] = []
        for _, of_class in groupby(entries, key=lambda entry: entry[0][0]):
            waiting = [sequence for (_, stage, _), sequence in of_class if stage != PUT_BACK]
            lengths = [self._lengths.expect(sequence.request) for sequence in waiting]
            left += sum(lengths)
            classes.append((waiting, lengths, left))
            early = min(early, before + until_due(lengths, left, rows))
            before += len(waiting)
        if early > 0:
            self._heap.fill(entries, lambda sequence: sequence.serial)
        else:
            for (priority, stage, _), sequence in entries:
                if stage == PUT_BACK:
                    self._heap.push((priority, stage, 0), sequence.serial, sequence)
            for waiting, lengths, of_class_left in classes:
                for rank, i in enumerate(due_first(lengths, of_class_left, rows)):
                    sequence = waiting[i]
                    self._heap.push((sequence.request.priority, ORDERED, rank), sequence.serial, sequence)
        self._look_again = len(entries) - max(1, len(entries) // 16, early // 2)

    def chain(self, sequence: Sequence) -> HashChain:
        """The sequence's digests; a choice starts with those of the prompt that its siblings have computed."""
        if sequence.chain is None:
            first = sequence.siblings[0].chain
            if first is not None:
                sequence.chain = first.fork(sequence.prompt_len // self._cache.block_size)
            else:
                limit = self._rope_original_max
                length = sequence.prompt_len if limit is not None and sequence.prompt_len > limit else None
                sequence.chain = HashChain(sequence.request.salt, length, self._cache.index.digest)
        return sequence.chain

    def _push(self, sequence: Sequence, stage: int) -> None:
        self._heap.push((sequence.request.priority, stage, 0), sequence.serial, sequence)
        self.by_class[class_of(sequence.request.priority)] += 1
        if self._cache.prefix_caching and sequence.reads_prefix_cache:
            size, tokens = self._cache.block_size, sequence.token_ids
            chain = self.chain(sequence)
            whole = (len(tokens) - 1) // size  # the last token is always left to compute
            sequence.awaited = [
                chain.of_block(block, tokens[block * size : (block + 1) * size].tobytes()) for block in range(whole)
            ]
            self._cache.expect_reader(sequence.awaited)

    def _read(self, sequence: Sequence) -> None:
        self._cache.dismiss_reader(sequence.awaited)
        sequence.awaited = []


def until_due(lengths: Listing[int], left: float, rows: int) -> int:
    """How many of these answers `due_first` would start in the order given before it takes one forward."""
    longest = max(lengths, default=0)
    for count, length in enumerate(lengths):
        if longest * rows >= left:
            return count
        left -= length
    return len(lengths)


def due_first(lengths: Listing[int], left: float, rows: int) -> list[int]:
    """The order in which to start answers of these expected lengths (tokens), given in the order that suits the prefix
    cache: each next one is the longest if it is due, else the first.

    Args:
        left: tokens to be sampled until the end of the run, these included.
        rows: sequences that run side by side.
    """
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # stable: equal ones stay in order
    chosen: list[int] = []
    started = [False] * len(lengths)
    first = next_longest = 0
    while len(chosen) < len(lengths):
        while started[longest[next_longest]]:
            next_longest += 1
        while started[first]:
            first += 1
        i = longest[next_longest]
        if lengths[i] * rows < left:
            i = first
        started[i] = True
        chosen.append(i)
        left -= lengths[i]
    return chosen


class GroupReaders:
    """Readers of prefix groups that the plan knows and that have not arrived. All those of a group count as one reader
    of what the group's sequences have in common; what that is shows from those that did arrive."""

    __slots__ = ("_cache", "_common")

    def __init__(self, cache: CacheTables) -> None:
        self._cache = cache
        self._common: OrderedDict[int, list[bytes]] = OrderedDict()

    def tell(self, group: int, digests: list[bytes], to_come: int) -> None:
        """A sequence of the group has arrived.

        Args:
            digests: of the blocks that it will read.
            to_come: sequences that begin with the group's prefix and will arrive after it.
        """
        common = self._common.pop(group, None)
        if common is not None:
            self._cache.dismiss_reader(common)
        if not to_come:
            return
        if common is not None:
            digests = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(common, digests, strict=False))]
        self._cache.expect_reader(digests)
        self._common[group] = digests
        if len(self._common) > MAX_GROUPS:
            self._cache.dismiss_reader(self._common.popitem(last=False)[1])

    def clear(self) -> None:
        """Wait for nobody."""
        for digests in self._common.values():
            self._cache.dismiss_reader(digests)
        self._common.clear()
