"""The only limit of time in the tests: a guard against hanging, minutes long, so that a busy machine fails nothing.

How long something takes is for benchmarks. A test waits until something happens, and fails where it never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

HANG_SECONDS: Final = 600.0
"""After so long without the awaited event a test has failed. Less than pytest's own limit (pyproject.toml)."""

Value = TypeVar("Value")


def wait_for(
    condition: Callable[[], Value],
    why: str = "it does not happen",
    *,
    seconds: float = HANG_SECONDS,
    pause_seconds: float = 0.02,
) -> Value:
    """The first true value of `condition`. Raises `TimeoutError` that says `why`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{why}: not within {seconds:.0f} s")
        time.sleep(pause_seconds)
    return value
