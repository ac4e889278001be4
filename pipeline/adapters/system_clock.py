"""The machine's own time and randomness."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime


class SystemClock:
    """`Clock` of the operating system."""

    def now(self) -> datetime:
        """Wall time, aware, UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


class SystemRandomness:
    """`Randomness` of the operating system."""

    def token(self, num_bytes: int) -> bytes:
        """Unpredictable bytes."""
        return secrets.token_bytes(num_bytes)
