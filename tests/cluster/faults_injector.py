"""Injects the planned faults into a cluster, and restarts processes that died, as an operator's supervisor does.

One thread calls `strike` and `poll`; senders, cancels and retries, which block, run on threads of their own.
"""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.heartbeats import RedisHeartbeats
from pipeline.runtime.availability import ServiceUnavailable
from tests.cluster.cluster import BUCKET, Cluster
from tests.cluster.faults_load import Senders
from tests.cluster.faults_plan import SILENCE, Fault, JobInput
from tests.cluster.faults_races import Races
from tests.cluster.faults_watch import Watch

RESTART_SECONDS: Final = 1.0
"""Time until a process that ended by itself is restarted."""

S3_FAULTS: Final[dict[str, dict[str, Any]]] = {
    "s3 busy": {"kind": "status", "status": 503, "chance": 0.6},
    "s3 slow": {"kind": "slow", "seconds": 1.0, "chance": 0.3},
    "s3 lost": {"kind": "lost", "method": "PUT", "path": f"/{BUCKET}/", "chance": 0.5},
}


@dataclass(slots=True)
class InjectedFault:
    """A fault that has struck; `at`: when (monotonic). `held`: shards that the victim held then."""

    fault: Fault
    at: float
    held: tuple[tuple[str, int], ...] = ()


@dataclass
class Injector:
    """Injects faults, and restarts or resumes what they hit.

    Attributes:
        names: of the plan's processes -> of the cluster's.
        probes, races: jobs that are sent with a fault, by its number.
        ended: processes that ended without being stopped, with the end of their logs.
        unsent: reasons why an input could not be sent, cancelled or retried.
    """

    cluster: Cluster
    senders: Senders
    watch: Watch
    names: dict[str, str]
    probes: dict[int, JobInput]
    races: dict[int, JobInput]
    strikes: list[InjectedFault] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._down: set[str] = set()
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="sender")
        self._waiting: list[Future[Any]] = []
        self._races = Races(self.cluster, self.senders, self.watch)
        self._heartbeats = RedisHeartbeats(RedisSettings(self.cluster.redis.url), lifetime=SILENCE)

    def send(self, job_input: JobInput) -> None:
        """Send it on a thread of the pool."""
        self._waiting.append(self._pool.submit(self.senders.send, job_input))

    def strike(self, fault: Fault) -> bool:
        """False: its victim is down; try again."""
        if fault.target and self.names[fault.target] in self._down:
            return False
        strike = InjectedFault(fault, time.monotonic(), self._held(fault))
        self.strikes.append(strike)
        if fault.kind in ("kill", "stop"):
            self._hit(self.names[fault.target], fault)
        elif fault.kind == "redis emptied":
            self.cluster.redis.kill()
            self._later(fault.seconds, self.cluster.redis.start_empty)
        elif fault.kind == "broker restarted":
            self.cluster.kafka.kill()
            self._later(fault.seconds, self.cluster.kafka.start)
        elif fault.kind in S3_FAULTS:
            wire = self.cluster.wire
            assert wire is not None
            rule = wire.add(**S3_FAULTS[fault.kind])
            self._later(fault.seconds, lambda: wire.remove(rule))
        else:
            races = {"cancel": self._races.cancel, "expire": self.senders.send, "retry": self._races.retry}
            self._waiting.append(self._pool.submit(races[fault.kind], self.races[fault.number]))
        self.send(self.probes[fault.number])
        return True

    def poll(self) -> None:
        """Run due actions, restart processes that ended, and record exceptions of senders."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for name, process in self.cluster.processes.items():
            if name not in self._down and process.poll() is not None:
                last = self.cluster.log(name).strip().splitlines()[-1:]
                self.ended.append(f"{name} ended with {process.returncode}: {' '.join(last)}")
                self._down.add(name)
                self._later(RESTART_SECONDS, lambda name=name: self._start(name))  # type: ignore[misc]
        for future in [future for future in self._waiting if future.done()]:
            self._waiting.remove(future)
            if (error := future.exception()) is not None:
                self.unsent.append(f"{type(error).__name__}: {error}")

    @property
    def busy(self) -> bool:
        """Whether a restart, a resume or an input is still due."""
        return bool(self._due or self._waiting or self._down)

    def close(self) -> None:
        """Wait for the senders."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._heartbeats.close()

    def _hit(self, name: str, fault: Fault) -> None:
        process = self.cluster.processes[name]
        if fault.kind == "stop":
            process.send_signal(signal.SIGSTOP)
            # To this very process: it may be killed before, and another have its name.
            self._later(fault.seconds, lambda: process.send_signal(signal.SIGCONT))
            return
        process.kill()
        process.wait()
        self._down.add(name)
        self._later(fault.seconds, lambda: self._start(name))

    def _start(self, name: str) -> None:
        self.cluster.start(name)
        self._down.discard(name)

    def _held(self, fault: Fault) -> tuple[tuple[str, int], ...]:
        """Shards that the victim holds, by its heartbeat."""
        if not fault.target.startswith("worker") or fault.kind not in ("kill", "stop"):
            return ()
        pid = self.cluster.processes[self.names[fault.target]].pid
        try:
            workers = self._heartbeats.workers()
        except ServiceUnavailable:
            return ()
        return tuple(sorted(shard for worker in workers if f"-{pid}-" in worker.name for shard in worker.held))

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))
