"""A pool of long-lived processes that plan a root's jobs, so that a malformed input fails only its own job.

Each process plans one job at a time, within a memory limit. When one dies, its job is known, and another process
replaces it. A thread that needs a process starts it on demand.

The time of planning is not limited, since it depends on the input's size. A process reports progress; one that is
silent for too long (it is stopped, or loops) is killed, and that is a failure of its job.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from pipeline.answers.index import AnswerStoreCounts
from pipeline.jobs.planning import PlanningCancelled, PlanningFailed, PlanOutcome
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import Clock, PipelineError
from pipeline.routing.rules import RuleRouter
from tokenmill.processes.logging import LogFormat
from tokenmill.processes.planner_process import END_SECONDS, EXIT_STOPPED, end_planner, start_planner

_MALLOC: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
"""Allocators that reserve no more than they use, so that the limit applies to used memory."""

_OUTCOME: Final = TypeAdapter(PlanOutcome)
_ENDING: Final = "planning ends with this process"


@dataclass(slots=True)
class _Attempt:
    """One job in one process.

    Attributes:
        progress_at: when the process last reported progress (monotonic), or took the job.
        is_cancelled: `cancel` ends the process.  is_stuck: it was killed for its silence.
    """

    process: subprocess.Popen[str]
    progress_at: float
    is_cancelled: bool = False
    is_stuck: bool = False


class PlannerPool:
    """A `JobPlanner` in other processes, as many as threads that plan concurrently.

    Args:
        root: the root's URL.  command: in the processes' logs and traces.
        memory_bytes: memory limit of one process.
        stuck_seconds: a process that reports no progress for so long is killed.
        router: gives the processes loads and labels for the rules of virtual models.
    """

    def __init__(
        self,
        root: str,
        command: str,
        log_format: LogFormat,
        memory_bytes: int,
        stuck_seconds: float,
        clock: Clock,
        router: RuleRouter | None = None,
        answers: AnswerStoreCounts | None = None,
    ) -> None:
        self._answers = answers or AnswerStoreCounts()
        self._router = router or RuleRouter()
        self._task = {"root": root, "command": command, "log_format": log_format, "memory_bytes": memory_bytes}
        self._memory_bytes = memory_bytes
        self._stuck_seconds = stuck_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[str]] = []
        self._all: set[subprocess.Popen[str]] = set()
        self._attempts: dict[str, _Attempt] = {}  # by the job that is being planned
        self._closed = False

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """See `JobPlanner`.

        Raises:
            PlanningFailed: planning raised an error, took too much memory, or its process died or was stuck.
            PlanningCancelled: `cancel` ended it.
            PipelineError: no process could be started, or the job can't be planned now. This is no failure of the job.
        """
        loads = {key: asdict(load) for key, load in self._router.loads().items()}
        attempt = self._send(ledger.name, {"job": ledger.name, "in_time": in_time, "loads": loads})
        answer = self._answer(attempt)
        for what, number in (answer or {}).pop("answers", {}).items():
            self._answers.add(what, number)
        with self._lock:  # from here on neither `cancel` nor `end_stuck` finds the process, which may plan another job
            del self._attempts[ledger.name]
        if answer is None or answer.pop("ends") or attempt.is_cancelled or attempt.is_stuck:
            self._discard(attempt.process)
        else:
            with self._lock:
                self._idle.append(attempt.process)
        if answer is None and attempt.is_cancelled and not self._closed:
            raise PlanningCancelled("planning was ended: the job is closed")
        if answer is None:
            raise self._died(attempt)
        if "later" in answer:
            raise PipelineError(answer["later"])
        if "memory" in answer:
            raise PlanningFailed(f"planning needed more than {self._limit}", answer["traceback"])
        if "failed" in answer:
            raise PlanningFailed(answer["failed"], answer["traceback"])
        return _OUTCOME.validate_python(answer)

    def cancel(self, job: str) -> None:
        """End the process that plans this job, if any; by force where it takes longer than `END_SECONDS`."""
        with self._lock:
            attempt = self._attempts.get(job)
            if attempt is None or attempt.is_cancelled:
                return
            attempt.is_cancelled = True
            attempt.process.terminate()
        killing = threading.Timer(END_SECONDS, attempt.process.kill)
        killing.daemon = True
        killing.start()

    def end_stuck(self) -> None:
        """Kill the processes that have reported no progress for too long."""
        with self._lock:
            for attempt in self._attempts.values():
                if self._clock.monotonic() - attempt.progress_at > self._stuck_seconds:
                    attempt.is_stuck = True
                    attempt.process.kill()

    def close(self) -> None:
        """End the processes; the next dispatcher plans their jobs."""
        with self._lock:
            self._closed = True
            processes, self._idle = list(self._all), []
        for process in processes:
            process.terminate()
        for process in processes:
            self._discard(process)

    @property
    def pids(self) -> set[int]:
        """The ids of the live processes."""
        with self._lock:
            return {process.pid for process in self._all if process.poll() is None}

    @property
    def _limit(self) -> str:
        return f"{self._memory_bytes >> 20} MiB of memory (setting planner_memory_bytes)"

    def _send(self, job: str, task: dict[str, Any]) -> _Attempt:
        """Send the task to a process."""
        while True:
            attempt = self._take(job)
            assert attempt.process.stdin is not None
            try:
                attempt.process.stdin.write(json.dumps(task) + "\n")
                attempt.process.stdin.flush()
                return attempt
            except BrokenPipeError:  # it died before it had a job
                with self._lock:
                    del self._attempts[job]
                self._discard(attempt.process)

    def _take(self, job: str) -> _Attempt:
        """An idle process, or a new one that is ready; from here on the job can be cancelled."""
        with self._lock:
            if self._closed:
                raise PipelineError(_ENDING)
            idle = self._idle.pop() if self._idle else None
            attempt = self._attempts[job] = _Attempt(idle or self._start(), self._clock.monotonic())
        if idle is None and self._read(attempt) is None:  # it opens the root, and then reports that it is ready
            with self._lock:
                del self._attempts[job]
            how = self._ended(attempt.process)
            if attempt.is_cancelled and not self._closed:
                raise PlanningCancelled("planning was ended: the job is closed")
            why = f"a planner process ended {how} before it had a job; see its log"
            raise PipelineError(_ENDING if self._closed else why)
        return attempt

    def _start(self) -> subprocess.Popen[str]:
        try:
            process = start_planner(self._task, variables=_MALLOC)
        except OSError as error:
            raise PipelineError(f"no planner process can be started: {error}; check memory and limits") from error
        self._all.add(process)
        return process

    def _answer(self, attempt: _Attempt) -> dict[str, Any] | None:
        """The result of planning, after progress reports and questions for labels; None: the process has ended."""
        while (answer := self._read(attempt)) is not None:
            if "classify" in answer:
                self._give_labels(attempt, answer["classify"])
            elif "progress" not in answer:
                break
        return answer

    def _give_labels(self, attempt: _Attempt, asked: dict[str, Any]) -> None:
        """Send the labels that a process asks for, or null."""
        labels = self._router.classify(**asked)
        attempt.progress_at = self._clock.monotonic()
        assert attempt.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; the next line says so
            attempt.process.stdin.write(json.dumps({"labels": labels}) + "\n")
            attempt.process.stdin.flush()

    def _read(self, attempt: _Attempt) -> dict[str, Any] | None:
        """The next line of the process; None: it has ended."""
        assert attempt.process.stdout is not None
        line = attempt.process.stdout.readline()
        attempt.progress_at = self._clock.monotonic()
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return answer

    def _discard(self, process: subprocess.Popen[str]) -> None:
        end_planner(process)
        with self._lock:
            self._all.discard(process)

    def _ended(self, process: subprocess.Popen[str]) -> str:
        """The exit status, in words, of a process that has closed its stdout."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a signal now would hide why it ends
            process.wait(END_SECONDS)
        self._discard(process)
        code = process.returncode
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"

    def _died(self, attempt: _Attempt) -> Exception:
        how = self._ended(attempt.process)
        if self._closed:
            return PipelineError(_ENDING)
        if attempt.is_stuck:
            limit = f"{self._stuck_seconds:g} s (setting planner_stuck_seconds)"
            return PlanningFailed(f"planning made no progress for {limit}, and its process was killed")
        if attempt.process.returncode in (EXIT_STOPPED, -signal.SIGTERM):  # a service manager may stop all processes
            return PipelineError("a planner process was stopped")
        return PlanningFailed(f"the planner's process ended {how}; planning may have needed more than {self._limit}")
