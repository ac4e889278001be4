"""The runtime of long-running commands: parts on threads, one stop signal, and a graceful end."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import structlog

from pipeline.ports import Randomness, World
from pipeline.runtime.supervision import supervise
from tokenmill.processes.signals import StopSignal

Part = Callable[[threading.Event], None]
"""Works until the event is set. It is called again after it has raised an error, so it must keep no state."""

logger = structlog.get_logger(__name__)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects that exist now (up to a million: modules, vocabulary, model) from garbage collection.

    They live to the end anyway, and traversing them repeatedly cost a quarter of a big job's processor time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_until_stopped(stop: StopSignal, world: World, main: Part, others: Mapping[str, Part]) -> None:
    """Run `main` on this thread and the others on threads of their own, until `stop` is set. A part in `others` is
    restarted after an exception (`supervise`); an exception of `main` ends all. When one of them returns, all stop.
    Raises what `main` raised, or the first part's `PartStopped`.
    """
    with frozen_heap():
        stop.begin()
        _run_until_stopped(stop, world, main, others)


def _run_until_stopped(stop: threading.Event, world: World, main: Part, others: Mapping[str, Part]) -> None:
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
    """The main part where all others run on threads of their own; signals interrupt its wait."""
    while not stop.wait(1.0):
        pass


def unique_name(random: Randomness) -> str:
    """A unique name of this process: host, process id and a random suffix."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{random.token(4).hex()}"


def machine_name(gpu_uuids: Sequence[str]) -> str:
    """What stays when a worker is restarted: its first GPU or MIG instance, by its UUID; without one the host's name,
    which several workers may share. `gpu_uuids`: of the worker, see `engine.engine.gpu_uuids`."""
    return gpu_uuids[0] if gpu_uuids else socket.gethostname()
