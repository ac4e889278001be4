"""Requests to a store that wait for each other's answers only where they must: an executor runs them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final

AT_ONCE: Final = 16
"""Requests that may be under way to a store which is asked over a network."""

BESIDE: Final = 2
"""Of those that nobody waits for."""


class InlineExecutor(Executor):
    """Runs each task at once, on the caller's thread: for a store that answers as fast as it is asked, and wherever
    the order of things must be the same each time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future carries it to whoever asks
            future.set_exception(error)
        return future
