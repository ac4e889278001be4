"""A replica's process: it gets one task over its line, does it, and ends with the command that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.ledger import JobLedger
from pipeline.ports import ShardTask, WorkerState, World
from pipeline.shard_client import ShardClient
from schemas.figures import WorkerFigures
from tokenmill.errors import EXIT_FAILED
from tokenmill.replicas import END_SECONDS, Line
from tokenmill.tracker import Told

if TYPE_CHECKING:
    from schemas.job import ModelPin
    from schemas.settings import Settings
    from tokenmill.logs import LogFormat
    from tokenmill.readiness import LoadModel
    from tokenmill.wiring import RunPlan
    from workers.progress import WorkerProgress


class FarQueue:
    """The command's `ShardQueue`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def put(self, queue: str, task: ShardTask) -> None:
        """See `ShardQueue.put`."""
        self._line.call("put", queue, task)

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """See `ShardQueue.take`. The line is not held while there is nothing to take."""
        until = time.monotonic() + timeout
        while True:
            task: ShardTask | None = self._line.call("take", queues, 0.0)
            left = until - time.monotonic()
            if task is not None or left <= 0:
                return task
            time.sleep(min(left, 0.01))


class FarHeartbeats:
    """The command's `Heartbeats`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def beat(self, state: WorkerState) -> None:
        """See `Heartbeats.beat`."""
        self._line.call("beat", state)

    def leave(self, worker: str) -> None:
        """See `Heartbeats.leave`."""
        self._line.call("leave", worker)

    def tell(self, worker: str, figures: WorkerFigures) -> None:
        """See `Heartbeats.tell`."""
        self._line.call("tell", worker, figures)

    def figures(self) -> dict[str, WorkerFigures]:
        """See `Heartbeats.figures`."""
        found: dict[str, WorkerFigures] = self._line.call("figures")
        return found

    def workers(self) -> list[WorkerState]:
        """See `Heartbeats.workers`."""
        found: list[WorkerState] = self._line.call("workers")
        return found

    def since(self) -> float:
        """See `Heartbeats.since`."""
        found: float = self._line.call("since")
        return found


class FarTracker:
    """Tells the command how the work goes (`workers.progress.WorkerObserver`)."""

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number

    def progress(self, progress: WorkerProgress) -> None:
        """The worker's news."""
        self._line.call("progress", Told.of(progress), self._number)


def compute(line: Line, plan: RunPlan, pin: ModelPin, policies: Sequence[str], number: int) -> None:
    """`run`'s task: this replica's part of the shards of the job in the plan's folder."""
    from dataclasses import replace

    from tokenmill.logs import log_to_stderr
    from tokenmill.processes import settled_heap
    from tokenmill.stopping import until_told
    from tokenmill.wiring import load_model
    from workers.policy_loading import load_policies
    from workers.shard_worker import ShardWorker

    log_to_stderr()
    settings = replace(plan.worker, policies=load_policies(policies))
    with until_told() as stop, FolderStore(plan.output) as store:
        ledger = JobLedger(store)
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        model = load_model(plan, pin, list(ledger.segments()))
        line.call("ready")
        stop.begin()
        client = ShardClient(
            f"local-{number}", world, lambda _: ledger, FarQueue(line), FarHeartbeats(line),
            lambda: bool(line.call("finished")), models=[pin.key], price_per_hour=plan.price_of_worker,
        )  # fmt: skip
        with settled_heap():
            ShardWorker(model, client, client, world.clock, settings, FarTracker(line, number)).run(stop)
        client.close()


def work(
    _line: Line,
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Sequence[str],
    metrics_port: int | None,
    log_format: LogFormat | None,
    price_per_hour: float | None,
) -> None:
    """`worker`'s task: a worker of an installation."""
    from tokenmill.working import run_worker
    from workers.policy_loading import load_policies

    judges = load_policies(policies)
    run_worker(root_url, settings, models, switch_after, judges, metrics_port, log_format, price_per_hour)


def _end_with_command() -> None:
    """stdin's end means that the command is gone: end in order, and if that takes too long, at once."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(EXIT_FAILED)


def main() -> None:
    """What the process does; the number of its socket is its one argument."""
    from tokenmill.cli import explain

    threading.Thread(target=_end_with_command, daemon=True).start()
    connection: Any = Connection(int(sys.argv[1]))
    line = Line(connection)
    try:
        task = line.task()
        task.function(line, *task.arguments)
    except Exception as error:  # noqa: BLE001 - the command says it as it says its own
        with suppress(EOFError, OSError):  # if there is anybody to tell
            line.call("fail", explain(error))
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
