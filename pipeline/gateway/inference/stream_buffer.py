"""What of an answer's stream waits for its readers: numbered from 0, and bounded. Of one event loop.

A stream that nobody can go on with keeps what its reader has not taken; one that outgrows its bound is the end of that
reader alone. A stream that can be gone on with keeps as much of its past as the bound allows, for any reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass


class Overrun(Exception):
    """Raised for a reader that was too slow: what it should get next is gone."""


@dataclass(frozen=True, slots=True)
class Item:
    """One event of the stream."""

    number: int
    data: bytes


class StreamBuffer:
    """A bounded stream.

    Args:
        most_bytes: that wait.  keep: what was read, too.

    Attributes:
        ended: nothing comes any more.  overrun: something was dropped that nobody had read.
    """

    def __init__(self, most_bytes: int, *, keep: bool) -> None:
        self.ended = False
        self.overrun = False
        self._most_bytes = most_bytes
        self._keep = keep
        self._items: deque[Item] = deque()
        self._size = 0
        self._next = 0
        self._changed = asyncio.Event()

    def push(self, data: bytes) -> None:
        """Append an event."""
        if self.ended:
            return
        self._items.append(Item(self._next, data))
        self._next += 1
        self._size += len(data)
        if self._size > self._most_bytes and len(self._items) > 1 and not self._keep:
            self.overrun = True
            self._drop_all()
        while self._size > self._most_bytes and len(self._items) > 1:
            self._size -= len(self._items.popleft().data)
        self._changed.set()

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self._changed.set()

    async def take(self, after: int, timeout: float) -> list[Item]:
        """Events behind number `after` (-1: from the beginning), at least one; none after `timeout` seconds, or where
        nothing comes any more. Raises `Overrun`."""
        found = self._behind(after)
        if not found and not self.ended:
            self._changed.clear()
            with suppress(TimeoutError):  # and look all the same: something may have come in the same moment
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            found = self._behind(after)
        return found

    def _behind(self, after: int) -> list[Item]:
        wanted = self._next - 1 - after
        if wanted > len(self._items):
            raise Overrun
        found = [self._items[-back] for back in range(wanted, 0, -1)]
        if not self._keep:
            self._drop_all()
        return found

    def _drop_all(self) -> None:
        self._items.clear()
        self._size = 0
