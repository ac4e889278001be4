"""A bounded buffer of a stream's events, numbered from 0. For one event loop.

The buffer of a stream that can't be resumed holds the events that its reader hasn't taken; when it overflows, only that
reader fails. The buffer of a resumable stream also retains events that were read, as many as fit, for later readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple


class Overrun(Exception):
    """Raised for a reader that was too slow: its next event has been evicted from the buffer."""


class ServerEvent(NamedTuple):
    """What a stream sends: data, and the event's name ("": it has none, as in OpenAI's chat streams)."""

    data: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """One event of the stream."""

    number: int
    data: bytes
    name: str = ""


class StreamBuffer:
    """A bounded buffer of a stream's events.

    Args:
        max_bytes: of buffered events, besides the largest push: a reader can't take events between those of one push.
        retain: events that were read stay in the buffer, for readers that resume.

    Attributes:
        ended: no further events follow.  overrun: unread events were evicted.
    """

    def __init__(self, max_bytes: int, *, retain: bool) -> None:
        self.ended = False
        self.overrun = False
        self._max_bytes = max_bytes
        self._retain = retain
        self._items: deque[Item] = deque()
        self._size = 0
        self._largest_push = 0  # bytes, of those since the buffer was empty
        self._next = 0
        self._changed = asyncio.Event()

    def push(self, *events: ServerEvent) -> None:
        """Append events that arise together. Whether the reader is too slow depends on those before them."""
        if self.ended:
            return
        allowed = self._max_bytes + self._largest_push
        if self._size > allowed and not self._retain:
            self.overrun = True
            self._clear()
        while self._size > allowed:
            self._size -= len(self._items.popleft().data)
        self._items.extend(Item(self._next + at, *event) for at, event in enumerate(events))
        self._next += len(events)
        pushed = sum(len(event.data) for event in events)
        self._size += pushed
        self._largest_push = max(self._largest_push, pushed)
        self._changed.set()

    def end(self) -> None:
        """Mark the end of the stream."""
        self.ended = True
        self._changed.set()

    async def take(self, after: int, timeout: float) -> list[Item]:
        """The events after number `after` (-1: from the beginning). Waits for at least one; returns none after
        `timeout` seconds or at the stream's end. Raises `Overrun`."""
        found = self._items_after(after)
        if not found and not self.ended:
            self._changed.clear()
            with suppress(TimeoutError):  # then read once more: an event may have arrived at the same moment
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            found = self._items_after(after)
        return found

    def _items_after(self, after: int) -> list[Item]:
        wanted = self._next - 1 - after
        if wanted > len(self._items):
            raise Overrun
        found = [self._items[-back] for back in range(wanted, 0, -1)]
        if not self._retain:
            self._clear()
        return found

    def _clear(self) -> None:
        self._items.clear()
        self._size = self._largest_push = 0
