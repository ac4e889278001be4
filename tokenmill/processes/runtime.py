"""What all long-running commands have in common: parts on threads, one stop, and an orderly end."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import structlog

from pipeline.ports import Randomness, World
from pipeline.runtime.supervision import supervise
from tokenmill.processes.signals import StopSignal

Part = Callable[[threading.Event], None]
"""Works until the event is set. Called again when it has raised something, so it begins with nothing in mind."""

logger = structlog.get_logger(__name__)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Leave what is loaded by now (up to a million objects: modules, vocabulary, model) out of garbage collection.

    It stays to the end anyway, and looking through it again and again cost a quarter of a big job's processor time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_together(stop: StopSignal, world: World, main: Part, others: Mapping[str, Part]) -> None:
    """Run `main` on this thread and the others beside it, until `stop` is set. An exception ends a turn of a part in
    `others`, which then begins anew (`supervise`); one of `main`, whose loss is the process's end, ends all. When one
    of them returns, all do. Raises what `main` raised, or the first part that can't go on (`PartStopped`).
    """
    with settled_heap():
        stop.begin()
        _run_together(stop, world, main, others)


def _run_together(stop: threading.Event, world: World, main: Part, others: Mapping[str, Part]) -> None:
    failed: list[BaseException] = []

    def ended(name: str, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            logger.error("a part failed", part=name, reason=str(error))
            failed.append(error)
        stop.set()

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        for name, part in others.items():
            pool.submit(supervise, name, part, stop, world).add_done_callback(partial(ended, name))
        try:
            main(stop)
        finally:
            stop.set()
    if failed:
        raise failed[0]


def wait_for_stop(stop: threading.Event) -> None:
    """The main thread's part where all others are on threads of their own; signals get through to it."""
    while not stop.wait(1.0):
        pass


def unique_name(random: Randomness) -> str:
    """Of this process among all that ever were: where it runs, and something by chance."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{random.token(4).hex()}"
