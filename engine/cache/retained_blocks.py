"""The published blocks that requests retain, and which of the free ones is given up next.

An owner is the salt of the prefixes: only requests with this salt hit its blocks, so only they retain them. The block
that is given up is of the owner that has the most free retained blocks (among equal ones, whose number changed last);
of these it has the earliest deadline. So an owner loses none while another has more, however much the other one
retains. A block in use counts for no owner: it would be in memory without a mark too.

Each call costs O(1) in blocks and owners: owners are grouped by their number of blocks, which changes by one at a
time, so the largest number does too. Blocks with as many seconds are freed in the order of their deadlines; there is a
queue for each number of seconds, and callers use few (two in the product).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

Deadlines = dict[float, OrderedDict[int, float]]
"""By seconds of their mark: free blocks and their deadlines, the earliest first."""


class _Mark(NamedTuple):
    owner: bytes
    seconds: float


class RetainedBlocks:
    """The marks of one pool's blocks, and the order of those that are free. `in` says whether a block has a mark."""

    __slots__ = ("_deadlines", "_marks", "_max_free", "_num_free", "_owned", "_owners")

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}
        self._deadlines: Deadlines = {}
        self._owned: dict[bytes, Deadlines] = {}  # the same by owner
        self._num_free: dict[bytes, int] = {}  # by owner, of those that have any
        self._owners: dict[int, OrderedDict[bytes, None]] = {}  # by number of free blocks
        self._max_free = 0  # free blocks of one owner

    def __contains__(self, block: int) -> bool:
        return block in self._marks

    def __len__(self) -> int:
        """The number of blocks with a mark, free or not."""
        return len(self._marks)

    @property
    def num_free(self) -> int:
        """Free blocks with a mark, until a deadline that may have passed."""
        return sum(map(len, self._deadlines.values()))

    def mark(self, block: int, owner: bytes, seconds: float) -> None:
        """Mark a block that is not among the free ones. Of several marks the most seconds count."""
        known = self._marks.get(block)
        self._marks[block] = _Mark(owner, seconds if known is None else max(seconds, known.seconds))

    def unmark(self, block: int) -> None:
        """Remove the mark, if any, of a block that is not among the free ones."""
        self._marks.pop(block, None)

    def add(self, block: int, now: float) -> None:
        """Add a marked block to the free ones: its seconds begin."""
        owner, seconds = self._marks[block]
        for queues in (self._deadlines, self._owned.setdefault(owner, {})):
            queues.setdefault(seconds, OrderedDict())[block] = now + seconds
        self._count(owner, 1)

    def remove(self, block: int) -> None:
        """Remove a block from the free ones; it keeps its mark."""
        owner, seconds = self._marks[block]
        owned = self._owned[owner]
        for queues in (self._deadlines, owned):
            del queues[seconds][block]
            if not queues[seconds]:
                del queues[seconds]
        if not owned:
            del self._owned[owner]
        self._count(owner, -1)

    def give_up(self) -> int:
        """Remove a free block and its mark: of the owner that has most, the one with the earliest deadline."""
        owner = next(reversed(self._owners[self._max_free]))
        block, _ = min((next(iter(queue.items())) for queue in self._owned[owner].values()), key=lambda first: first[1])
        self.remove(block)
        self.unmark(block)
        return block

    def expire(self, now: float) -> Iterator[int]:
        """Remove the free blocks whose deadline has passed, and their marks."""
        for queue in list(self._deadlines.values()):
            while queue:
                block, deadline = next(iter(queue.items()))
                if deadline > now:
                    break
                self.remove(block)
                self.unmark(block)
                yield block

    def check(self) -> set[int]:
        """Compare the counts with the queues; returns the free blocks. Raises AssertionError with the arithmetic."""
        free = {block for queue in self._deadlines.values() for block in queue}
        owned = {owner: sum(map(len, queues.values())) for owner, queues in self._owned.items()}
        listed = {owner: count for count, owners in self._owners.items() for owner in owners}
        max_free = max(owned.values(), default=0)
        if not owned == self._num_free == listed or sum(owned.values()) != len(free) or self._max_free != max_free:
            raise AssertionError(
                f"{len(free)} free retained blocks; of owners {owned}, counted {self._num_free}, listed {listed}, "
                f"at most {self._max_free}"
            )
        return free

    def _count(self, owner: bytes, change: int) -> None:
        before = self._num_free.pop(owner, 0)
        after = before + change
        if before:
            del self._owners[before][owner]
            if not self._owners[before]:
                del self._owners[before]
        if after:
            self._num_free[owner] = after
            self._owners.setdefault(after, OrderedDict())[owner] = None
        if after > self._max_free or (before == self._max_free and before not in self._owners):
            self._max_free = after
