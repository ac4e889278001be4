"""A minimal cluster for streams: gateways and workers as processes, with a real Redis between them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.cluster import NULL_WORKER, ROOT
from tests.cluster.null_worker import ExpectedAnswers
from tests.cluster.stream_clients import Kind, Reader
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

START_SECONDS = 60.0


@dataclass
class LaneCluster:
    """Processes by name: "gateway-…", "worker-…" and "dispatcher".

    Attributes:
        worker: the program of workers, with its options.  variables: settings of all processes.
    """

    folder: Path
    redis: RedisServer
    worker: tuple[str, ...]
    variables: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def meters(self) -> Path:
        return self.folder / "meters"

    def start(self, *names: str) -> None:
        """Start these, or start them again, and wait until all are up; a gateway has the same URL each time."""
        for name in names:
            program = self.worker
            if name.startswith("gateway"):
                port = self._ports.setdefault(name, free_port())
                program = ("-m", "tokenmill", "gateway", "--port", str(port))
            elif name == "dispatcher":
                program = ("-m", "tokenmill", "dispatcher")
            with self._log_of(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, *program], stdout=log, stderr=log, env={**os.environ, **self.variables}
                )
        starts = {name: self._count_starts(name) for name in names}
        for name in names:
            wait_for(partial(self._is_up, name, starts[name]), f"{name} is not up")

    def url(self, name: str) -> str:
        """Of a gateway."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def end(self, name: str, seconds: float = 60.0) -> int:
        """Stop it and wait; returns its exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(seconds)

    def kill(self, name: str) -> None:
        """Kill it (SIGKILL)."""
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        """The log of the processes with this name."""
        return self._log_of(name).read_text(errors="replace")

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _count_starts(self, name: str) -> int:
        """How often a process of this name has logged that it is up."""
        return len(re.findall(r"^(?:serving|working for|dispatching for) ", self.log(name), re.MULTILINE))

    def _is_up(self, name: str, starts_before: int) -> bool:
        if self.processes[name].poll() is not None:
            raise ChildProcessError(f"{name} ended:\n{self.log(name)[-2_000:]}")
        return self._count_starts(name) > starts_before


def lane_cluster(
    folder: Path, engine: Sequence[object], redis: RedisServer, **variables: str
) -> AbstractContextManager[LaneCluster]:
    """A cluster of null workers with these options. Only Redis runs in it yet; all started processes end with the
    block."""
    (folder / "meters").mkdir(parents=True)
    worker = (*NULL_WORKER, *(str(option) for option in engine), "--meters", str(folder / "meters"))
    return cluster_of(folder, worker, redis, **variables)


@contextmanager
def cluster_of(folder: Path, worker: Sequence[str], redis: RedisServer, **variables: str) -> Iterator[LaneCluster]:
    """A cluster of workers of this program; as `lane_cluster`."""
    made = LaneCluster(
        folder,
        redis,
        tuple(worker),
        {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TOKENMILL_ROOT": str(folder / "root"),
            "TOKENMILL_REDIS_URL": redis.url,
            **variables,
        },
    )
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def request(number: int, tokens: int) -> dict[str, Any]:
    """A chat unlike all others, of exactly so many tokens, for the model "null"."""
    return {
        "model": "null",
        "messages": [{"role": "user", "content": f"stream {number}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def readers(model: Path, kinds: Sequence[Kind], tokens: int, ramp: float, until: float, n: int = 1) -> list[Reader]:
    """One client of each kind, with its expected answer.

    Args:
        ramp: seconds over which they come.
        until: seconds after all have come when clients that don't read to the end stop.
        n: choices that clients request that will stop reading, so that more is written to them.
    """
    bodies = [request(number, tokens) for number in range(len(kinds))]
    texts = ExpectedAnswers(model).texts(bodies)
    more = {"reads": 1, "leaves": 1, "stalls": n}
    return [
        Reader(body | {"stream": True, "n": more[kind]}, text, kind, ramp * number / len(kinds), until)
        for number, (body, text, kind) in enumerate(zip(bodies, texts, kinds, strict=True))
    ]


def dropped(log: str) -> dict[str, float]:
    """Requests that the worker of this log stopped computing because they were unwanted: id -> `time.time`."""
    found = re.findall(r"timestamp='(\S+)' .*event='request cancelled: .*request='(\S+)'", log)
    return {request: datetime.fromisoformat(at).timestamp() for at, request in found}
