"""The waiting queue: the admission order, and the cached blocks that waiting sequences will read.

Sequences wait by arrival, highest class first; preempted ones, and those that continue a prompt which has just been
computed (`Request.continues`), precede the others of their class. This is the whole order while more requests may
arrive. Once the input is complete (`settled`), the end of the run is predictable: the tokens still to be sampled,
divided by the rows, give the remaining steps. An answer that takes as many steps must start now, or it ends alone. So
the order is arrival, but answers that are expected to last to the end go first, the longest before all. Arrival is the
planner's order, in which readers of a prefix are adjacent: it is left only for the few answers that must not wait, and
only towards the end.

Class 0 holds interactive requests, and its rows are shared out by owner (`Request.salt`). The owner with the fewest
rows is next; of equal ones the owner whose first sequence comes first in the order above. Once two owners have sent
requests, a single owner gets all rows but a reserve, so that a request of another one finds a row at once. A choice
counts as a row. Where blocks are short, rows of the owner with the most rows are preempted (step_planner.py).

A waiting sequence is registered as a reader of its prompt's blocks, so these are evicted after all others
(`CacheTables`). The plan announces readers of a prefix group that have not arrived yet; all of a group count as one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from itertools import groupby, takewhile

from engine.adapters.places import AdapterPlaces
from engine.cache.prefix import HashChain
from engine.cache.tables import CacheTables
from engine.scheduler.length_estimator import LazyHeap, LengthEstimator
from engine.scheduler.sequence import CLASSES, Sequence, SequenceState, class_of
from engine.scheduler.slo_control import URGENT

Order = tuple[int, int, int]
"""Class, stage, and rank within the stage; the serial breaks ties."""

CONTINUED, ORDERED, ARRIVED = range(3)

NOW = 1 << 62

MAX_GROUPS = 1024
"""Prefix groups whose announced readers are tracked."""


class WaitingQueue:
    """Sequences without a row, in dispatch order.

    Args:
        cache: receives the blocks that will be read.
        places: of adapters.
        lengths: estimates answer lengths.
        rope_original_max: prompts longer than this have keys that depend on the prompt's length.
        rows: sequences that can run concurrently.

    Attributes:
        settled: no more requests will be added.
        by_class: sequences that wait, by `class_of`.
        preempted: those of them that had a row.
    """

    def __init__(
        self,
        cache: CacheTables,
        lengths: LengthEstimator,
        rope_original_max: int | None,
        rows: int,
        places: AdapterPlaces | None = None,
    ) -> None:
        self.settled = False
        self.by_class = [0] * CLASSES
        self.preempted: set[Sequence] = set()
        self._cache = cache
        self._places = places or AdapterPlaces()
        self._set_aside: dict[str, dict[Sequence, Order]] = {}  # adapter -> sequences without a place for it
        self._lengths = lengths
        self._rope_original_max = rope_original_max
        self._heaps: dict[bytes | None, LazyHeap[Sequence, Order]] = {}  # class 0 by owner; None: the other classes
        self._head: Sequence | None = None  # cached result of `peek`, until something changes
        self._urgent_rows = Counter[bytes]()  # rows of class 0, by owner
        self._max_rows_per_owner = max(1, rows - max(1, rows // 8))
        self._first_owner: bytes | None = None
        self._has_several_owners = False
        self._groups = GroupReaders(cache)
        self._reorder_at_length = NOW  # the order is computed again when so few wait

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values())) + sum(map(len, self._set_aside.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others of its class, or before them if it continues a former one."""
        self._reorder_at_length = NOW
        request = sequence.request
        if request.priority == URGENT:
            self._first_owner = request.salt if self._first_owner is None else self._first_owner
            self._has_several_owners |= request.salt != self._first_owner
        self._push(sequence, CONTINUED if request.continues else ARRIVED)
        if request.prefix_group is not None and sequence.choice == 0 and sequence.digests_to_read:
            self._groups.record_arrival(request.prefix_group, sequence.digests_to_read, request.prefix_readers)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others of its class (and owner) that had no row, by arrival."""
        self.release_row(sequence)
        self._push(sequence, CONTINUED)
        self.preempted.add(sequence)

    def peek(self) -> Sequence | None:
        """Return the head without removing it."""
        if self._head is None:
            self._head = self._find_head()
        return self._head

    def pop(self, sequence: Sequence) -> None:
        """Remove the sequence that `peek` returned, which has a row now, and its registration as a reader."""
        taken = self._heaps[_owner(sequence)].pop()
        assert taken is sequence, "the first one of its owner"
        if sequence.request.priority == URGENT:
            self._urgent_rows[sequence.request.salt] += 1
        self._count_removed(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that ended while it waited."""
        adapter = sequence.request.adapter
        aside = {} if adapter is None else self._set_aside.get(adapter, {})
        if aside.pop(sequence, None) is None:
            self._heaps[_owner(sequence)].discard()
        elif adapter is not None and not aside:
            del self._set_aside[adapter]
        self._count_removed(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Remove the sequence that `peek` returned until its adapter may have a place (`return_aside`)."""
        assert sequence.request.adapter is not None
        heap = self._heaps[_owner(sequence)]
        order = heap.first_order()
        assert order is not None, "the head is in its heap"
        heap.pop()
        self._set_aside.setdefault(sequence.request.adapter, {})[sequence] = order
        self._head = None

    def return_aside(self) -> None:
        """Queue again what was set aside and may run now, and have a place freed for the rest, in the order of what was
        set aside first with each adapter."""
        if not self._set_aside:
            self._places.drain(None)
            return
        places, idle = self._places, self._places.num_idle
        first = {
            name: next((order, sequence.serial) for sequence, order in aside.items())
            for name, aside in self._set_aside.items()
        }
        for name in sorted(first, key=first.__getitem__):
            if places.is_used(name):
                if not places.has_place(name, first[name][0][0]):
                    continue
            elif idle <= 0:
                continue
            else:
                idle -= 1
            self._return(name)
        places.drain(min((first[name][0][0] for name in self._set_aside), default=None))

    def _return(self, adapter: str) -> None:
        self._head = None
        for sequence, order in self._set_aside.pop(adapter).items():
            self._heap_of(sequence).push(order, sequence.serial, sequence)

    def release_row(self, sequence: Sequence) -> None:
        """Count off the row of a sequence that has ended or was preempted."""
        self._head = None
        if sequence.request.priority == URGENT:
            self._urgent_rows[sequence.request.salt] -= 1
            if not self._urgent_rows[sequence.request.salt]:
                del self._urgent_rows[sequence.request.salt]

    def check_rows(self, sequences: Iterable[Sequence]) -> None:
        """Check the row counts of class 0; raises AssertionError with the arithmetic."""
        urgent = (one for one in sequences if one.request.priority == URGENT and one.state is SequenceState.RUNNING)
        if (rows := Counter(one.request.salt for one in urgent)) != self._urgent_rows:
            raise AssertionError(f"rows of class 0 by owner are {rows}, but {self._urgent_rows} are counted")

    @property
    def shares_rows(self) -> bool:
        """Whether several owners have or want rows in class 0."""
        owners = len(self._urgent_rows)
        if owners == 0 or not self._has_several_owners:
            return False
        head = self.peek()
        new = head is not None and head.request.priority == URGENT and head.request.salt not in self._urgent_rows
        return owners + new > 1

    def urgent_rows(self, sequence: Sequence) -> int:
        """Return the number of rows of class 0 that the sequence's owner has; 0 in the other classes."""
        return self._urgent_rows[sequence.request.salt] if sequence.request.priority == URGENT else 0

    def _find_head(self) -> Sequence | None:
        """Find the head: the first sequence of class 0 of the owner with the fewest rows; if no owner may have a row,
        the first of the other classes."""
        for owner in [owner for owner, heap in self._heaps.items() if not len(heap)]:
            del self._heaps[owner]
        limit = self._max_rows_per_owner if self._has_several_owners else NOW
        ready = [owner for owner in self._heaps if owner is not None and self._urgent_rows[owner] < limit]
        chosen = min(ready, key=self._dispatch_key) if ready else None
        return self._heaps[chosen].peek() if chosen in self._heaps else None

    def _dispatch_key(self, owner: bytes) -> tuple[int, Order, int]:
        """Return the sort key of an owner: lower ones are dispatched first."""
        heap = self._heaps[owner]
        order, head = heap.first_order(), heap.peek()
        assert order is not None, "the heap has live items"
        assert head is not None, "the heap has live items"
        return self._urgent_rows[owner], order, head.serial

    def _count_removed(self, sequence: Sequence) -> None:
        """Update the counts for a sequence that left the queue."""
        self._head = None
        self.by_class[class_of(sequence.request.priority)] -= 1
        self._unregister_reader(sequence)
        self.preempted.discard(sequence)

    def forget_groups(self) -> None:
        """Unregister announced readers that have not arrived, because no request is left."""
        self._groups.clear()

    @property
    def order_is_due(self) -> bool:
        """Whether `order` may change anything: the input is complete, and a sequence arrived, or the number of waiting
        sequences fell to the one that `order` set."""
        return self.settled and 0 < len(self) <= self._reorder_at_length

    def order(self, running: int, rows: int) -> None:
        """Move the answers that are due to the front. Preempted sequences stay before all others.

        Args:
            running: tokens that running sequences are still expected to sample.
            rows: sequences that run concurrently.
        """
        for name in list(self._set_aside):
            self._return(name)
        self._head = None
        entries = [entry for heap in self._heaps.values() for entry in heap.drain()]
        entries.sort(key=lambda entry: (entry[0], entry[1].serial))
        left, early, before = float(running), len(entries), 0
        classes: list[tuple[list[Sequence], list[int], float]] = []
        for _, of_class in groupby(entries, key=lambda entry: entry[0][0]):
            waiting = [sequence for (_, stage, _), sequence in of_class if stage != CONTINUED]
            lengths = [self._lengths.expect(sequence.request) for sequence in waiting]
            left += sum(lengths)
            classes.append((waiting, lengths, left))
            early = min(early, before + until_due(lengths, left, rows))
            before += len(waiting)
        if early > 0:
            for order, sequence in entries:
                self._heap_of(sequence).push(order, sequence.serial, sequence)
        else:
            for (priority, stage, _), sequence in entries:
                if stage == CONTINUED:
                    self._heap_of(sequence).push((priority, stage, 0), sequence.serial, sequence)
            for waiting, lengths, of_class_left in classes:
                for rank, i in enumerate(due_first(lengths, of_class_left, rows)):
                    sequence = waiting[i]
                    order = sequence.request.priority, ORDERED, rank
                    self._heap_of(sequence).push(order, sequence.serial, sequence)
        self._reorder_at_length = len(entries) - max(1, len(entries) // 16, early // 2)

    def chain(self, sequence: Sequence) -> HashChain:
        """Return the sequence's digests; a choice starts with the prompt digests that its siblings have computed."""
        if sequence.chain is None:
            first = sequence.siblings[0].chain
            if first is not None:
                sequence.chain = first.fork(sequence.prompt_len // self._cache.block_size)
            else:
                sequence.chain = HashChain.of_prompt(
                    sequence.request.salt,
                    sequence.prompt_len,
                    self._rope_original_max,
                    self._cache.index.digest,
                    self._places.digest(sequence.request.adapter),
                )
        return sequence.chain

    def _heap_of(self, sequence: Sequence) -> LazyHeap[Sequence, Order]:
        owner = _owner(sequence)
        if owner not in self._heaps:
            self._heaps[owner] = LazyHeap(lambda sequence: sequence.state is SequenceState.WAITING)
        return self._heaps[owner]

    def _push(self, sequence: Sequence, stage: int) -> None:
        self._head = None
        self._heap_of(sequence).push((sequence.request.priority, stage, 0), sequence.serial, sequence)
        self.by_class[class_of(sequence.request.priority)] += 1
        if self._cache.prefix_caching and sequence.reads_prefix_cache:
            size, tokens = self._cache.block_size, sequence.token_ids[: sequence.cache_limit]
            chain = self.chain(sequence)
            whole = (len(tokens) - 1) // size  # the last token is always left to compute
            sequence.digests_to_read = [
                chain.of_block(block, tokens[block * size : (block + 1) * size].tobytes()) for block in range(whole)
            ]
            self._cache.expect_reader(sequence.digests_to_read)

    def _unregister_reader(self, sequence: Sequence) -> None:
        self._cache.dismiss_reader(sequence.digests_to_read)
        sequence.digests_to_read = []


def _owner(sequence: Sequence) -> bytes | None:
    """Return the key of a sequence's heap: its owner in class 0, None in the other classes."""
    return sequence.request.salt if sequence.request.priority == URGENT else None


def until_due(lengths: Listing[int], left: float, rows: int) -> int:
    """Count the answers that `due_first` would start in the order given before it moves one forward."""
    longest = max(lengths, default=0)
    for count, length in enumerate(lengths):
        if longest * rows >= left:
            return count
        left -= length
    return len(lengths)


def due_first(lengths: Listing[int], left: float, rows: int) -> list[int]:
    """Return the order in which to start answers of these expected lengths (tokens), which are given in the order that
    suits the prefix cache: each next one is the longest if it is due, else the first.

    Args:
        left: tokens to be sampled until the end of the run, these included.
        rows: sequences that run concurrently.
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
    """Announced readers of prefix groups that have not arrived. All readers of a group count as one reader of the
    blocks that the group's sequences have in common; these are derived from the sequences that have arrived."""

    __slots__ = ("_cache", "_common")

    def __init__(self, cache: CacheTables) -> None:
        self._cache = cache
        self._common: OrderedDict[int, list[bytes]] = OrderedDict()

    def record_arrival(self, group: int, digests: list[bytes], num_expected: int) -> None:
        """Record the arrival of a sequence of the group.

        Args:
            digests: of the blocks that it will read.
            num_expected: sequences that begin with the group's prefix and will arrive after it.
        """
        common = self._common.pop(group, None)
        if common is not None:
            self._cache.dismiss_reader(common)
        if not num_expected:
            return
        if common is not None:
            digests = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(common, digests, strict=False))]
        self._cache.expect_reader(digests)
        self._common[group] = digests
        if len(self._common) > MAX_GROUPS:
            self._cache.dismiss_reader(self._common.popitem(last=False)[1])

    def clear(self) -> None:
        """Unregister all announced readers."""
        for digests in self._common.values():
            self._cache.dismiss_reader(digests)
        self._common.clear()
