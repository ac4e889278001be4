"""An executor that runs tasks inline, and the concurrency limits of requests to a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final

MAX_CONCURRENT_REQUESTS: Final = 16
"""Maximum number of concurrent requests to a store over a network."""

MAX_BACKGROUND_REQUESTS: Final = 2
"""Maximum number of concurrent background requests to a store."""


class InlineExecutor(Executor):
    """Runs each task immediately, on the caller's thread: for stores without network latency, and where the order of
    requests must be deterministic."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future carries it to the caller
            future.set_exception(error)
        return future
