"""The threads of a worker beside its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from workers.shards.heartbeats import HEARTBEAT_THREADS, Timer, thread_timer


@dataclass(frozen=True, slots=True)
class WorkerExecutors:
    """Where a worker's other tasks run. Each is a thread pool of its own, unless another is given.

    Attributes:
        writer: makes all writes, one after the other.  fetcher: takes and prepares shards.
        heartbeat: sends heartbeats, and polls for revoked shards.  heartbeat_timer: repeats heartbeats.
    """

    writer: Executor
    fetcher: Executor
    heartbeat: Executor
    heartbeat_timer: Timer


def _no_timer(_task: Callable[[], None]) -> AbstractContextManager[None]:
    """A `Timer` that repeats nothing."""
    return nullcontext()


@contextmanager
def worker_executors(
    helper: Executor | None, heartbeat: Executor | None, heartbeat_timer: Timer | None
) -> Iterator[WorkerExecutors]:
    """The executors, until the block ends; see `ShardWorker` for those that may be given."""
    heartbeat = heartbeat or helper
    timer = heartbeat_timer or (_no_timer if heartbeat else thread_timer)
    with ExitStack() as pools:

        def pool(name: str, threads: int = 1) -> Executor:
            made = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"worker-{name}")
            pools.callback(made.shutdown, wait=True, cancel_futures=True)
            return made

        yield WorkerExecutors(
            helper or pool("writer"),
            helper or pool("fetcher"),
            heartbeat or pool("heartbeat", HEARTBEAT_THREADS),
            timer,
        )
