"""Messages on topics, as doors and announcer send them: confirmed, or not sent as far as anybody may rely on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.ports import PipelineError

OVERHEAD: Final = 512
"""Bytes of a message besides its key, value and headers, at most; each header may take 32 more."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Headers are in order, and a name may come more than once."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()

    @property
    def size(self) -> int:
        """Bytes that it takes on the way, at most."""
        headers = sum(32 + len(name) + len(value or b"") for name, value in self.headers)
        return OVERHEAD + len(self.key or b"") + len(self.value or b"") + headers


class NotConfirmed(PipelineError):
    """Raised when some messages were not confirmed; others, or even these, may have been sent all the same.

    Attributes:
        final: they were refused, and to send them again would change nothing.
    """

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Messages(Protocol):
    """Where messages are sent."""

    @property
    def most_bytes(self) -> int:
        """The largest `Message.size` that is taken."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Return when the broker has confirmed them all, in order for each key; raises `NotConfirmed`."""
        ...
