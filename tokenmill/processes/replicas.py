"""Data parallelism on one machine: several engines of one command, each in its own process on its own devices.

Each replica is a worker with its own name, and shares only the ledger with the others. Coordination state (queue,
heartbeats, progress) stays in the command's process, and replicas use it by remote calls. When one replica fails, all
end: the command reports which one, and committed results stay.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

import structlog

from tokenmill.errors import UserError

POLL_SECONDS: Final = 0.05

END_SECONDS: Final = 60.0
"""From the stop signal until a replica is killed; more than a worker takes to release its shards."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """A replica's task: `function(line, *arguments)` in its process. All of it must be picklable."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]


class ReplicaConnection:
    """A replica's connection to the command's process. It is thread-safe."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def task(self) -> ReplicaTask:
        """Receive the task, which is the first message."""
        found: ReplicaTask = self._connection.recv()
        return found

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the command's method `name`; raises what it raises, and `EOFError` when the command is gone."""
        with self._lock:
            self._connection.send((name, arguments))
            answer, error = self._connection.recv()
        if error is not None:
            raise error
        return answer


class _Replica:
    def __init__(self, number: int, task: ReplicaTask, environment: Mapping[str, str], keep: Sequence[int]) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # a library may have set a default time-out for new sockets
            end.setblocking(True)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill.processes.replica_main", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(environment),
                pass_fds=(theirs.fileno(), *keep),
                start_new_session=True,  # Ctrl-C is for the command, which then ends its replicas
            )
        self.line: Any = Connection(ours.detach())
        self.line.send(task)


class Replicas:
    """Processes that execute these tasks while the `with` block runs.

    Args:
        tasks: one for each.  environments: additional environment variables of each.
        methods: remote methods, besides `ready`, which waits for all replicas; called on threads of this process.
        on_ready: called when all are ready.
        keep: inherited descriptors, such as a lock's.
    """

    def __init__(
        self,
        tasks: Sequence[ReplicaTask],
        environments: Sequence[Mapping[str, str]],
        methods: Mapping[str, Callable[..., Any]] | None = None,
        on_ready: Callable[[], None] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self._tasks = list(zip(tasks, environments, strict=True))
        self._ready = threading.Barrier(len(self._tasks), on_ready)
        self._methods = {**(methods or {}), "ready": self._wait_for_all}
        self._keep = keep
        self._replicas: list[_Replica] = []
        self._threads: list[threading.Thread] = []
        self._failure: str | None = None
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [replica.process.pid for replica in self._replicas]

    def __enter__(self) -> Replicas:
        try:
            for number, (task, environment) in enumerate(self._tasks):
                replica = _Replica(number, task, environment, self._keep)
                self._replicas.append(replica)
                thread = threading.Thread(target=self._answer, args=(replica,), name=f"replica-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()

    def wait(self, stop: threading.Event) -> None:
        """Wait until all have ended, or `stop` is set and they have stopped. Raises `UserError` when one failed."""
        until: float | None = None
        while any(thread.is_alive() for thread in self._threads):
            if until is None and (stop.is_set() or self._failure is not None):
                self._stop_waiting()
                until = time.monotonic() + END_SECONDS
                for replica in self._replicas:
                    replica.process.terminate()
            if until is not None and time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        if self._failure is not None:
            raise UserError(self._failure)

    def _answer(self, replica: _Replica) -> None:
        """Answer a replica's calls until it ends."""
        reason = None
        try:
            while True:
                name, arguments = replica.line.recv()
                if name == "fail":
                    (reason,) = arguments
                    replica.line.send((None, None))
                    continue
                try:
                    answer, error = self._methods[name](*arguments), None
                except Exception as raised:  # noqa: BLE001 - it is raised again in the caller
                    answer, error = None, raised
                replica.line.send((answer, error))
        except (EOFError, OSError):
            pass  # it has ended
        code = replica.process.wait()
        if (reason is not None or code != 0) and self._failure is None and not self._stopping:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._failure = (
                f"replica {replica.number} {how}" if reason is None else f"replica {replica.number}: {reason}"
            )
            logger.error("a replica failed; all end", replica=replica.number, reason=reason or how)

    def _wait_for_all(self) -> None:
        self._ready.wait()

    def _stop_waiting(self) -> None:
        self._stopping = True
        self._ready.abort()

    def _kill(self) -> None:
        self._stop_waiting()
        for replica in self._replicas:
            replica.process.kill()
        for replica in self._replicas:
            replica.process.wait()
        for thread in self._threads:
            thread.join()
        for replica in self._replicas:
            replica.line.close()
            if replica.process.stdin is not None:
                replica.process.stdin.close()


def environments(replicas: int, devices_each: int, *, on_gpus: bool) -> list[dict[str, str]]:
    """The additional environment variables of each replica: on GPUs its share of the visible devices.

    Raises:
        UserError: there are too few.
    """
    if not on_gpus:
        return [{} for _ in range(replicas)]
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = (
        [str(n) for n in range(torch.cuda.device_count())] if given is None else list(filter(None, given.split(",")))
    )
    if len(visible) < replicas * devices_each:
        raise UserError(
            f"{replicas} replicas on {devices_each} GPUs each need {replicas * devices_each}, but {len(visible)} are "
            "visible; lower --replicas, --tensor-parallel or --pipeline-parallel"
        )
    slices = [visible[n * devices_each : (n + 1) * devices_each] for n in range(replicas)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in slices]
