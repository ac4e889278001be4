"""Plans a root's jobs in a few long-lived processes, so that an input costs its own job only, whatever it is made of.

Each process plans one job at a time, within a limit of memory: when one dies it is known whose job it was, and another
takes its place. They are started when they are first needed, by whichever thread needs one.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from typing import Any, Final

from pydantic import TypeAdapter

from pipeline.ledger import JobLedger
from pipeline.planning import PlanningCancelled, PlanningFailed, PlanOutcome
from pipeline.ports import PipelineError
from tokenmill.logs import LogFormat
from tokenmill.planner_process import END_SECONDS, TOLD_TO_STOP, end_planner, start_planner

_MALLOC: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
"""Allocators that reserve no more than they use, so that the limit is one on what is used."""

_OUTCOME: Final = TypeAdapter(PlanOutcome)
_ENDING: Final = "planning ends with this process"


class PlannerPool:
    """`JobPlanner` in other processes; as many as threads plan at once.

    Args:
        root: the root's URL.  command: whose logs and traces the processes' are.
        memory_bytes: that planning may take in one process.
    """

    def __init__(self, root: str, command: str, log_format: LogFormat, memory_bytes: int) -> None:
        self._task = {"root": root, "command": command, "log_format": log_format, "memory_bytes": memory_bytes}
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[str]] = []
        self._all: set[subprocess.Popen[str]] = set()
        self._busy: dict[str, subprocess.Popen[str]] = {}  # by the job that is being planned
        self._cancelled: set[str] = set()
        self._closed = False

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """See `JobPlanner`.

        Raises:
            PlanningFailed: planning raised something, took too much memory, or its process died.
            PlanningCancelled: `cancel` has ended it.
            PipelineError: no process could be started, or the job can't be planned now. Not counted against the job.
        """
        process = self._ask({"job": ledger.name, "in_time": in_time})
        with self._lock:
            self._busy[ledger.name] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        with self._lock:  # from here on `cancel` does not find the process, which may plan another job next
            del self._busy[ledger.name]
            is_cancelled = ledger.name in self._cancelled
            self._cancelled.discard(ledger.name)
        if answer is None or answer.pop("ends") or is_cancelled:
            self._discard(process)
        else:
            with self._lock:
                self._idle.append(process)
        if answer is None and is_cancelled and not self._closed:
            raise PlanningCancelled("planning was ended: the job is closed")
        if answer is None:
            raise self._died(process)
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
            process = self._busy.get(job)
            if process is None or job in self._cancelled:
                return
            self._cancelled.add(job)
            process.terminate()
        killing = threading.Timer(END_SECONDS, process.kill)
        killing.daemon = True
        killing.start()

    def close(self) -> None:
        """End the processes; what they were planning is left to the next dispatcher."""
        with self._lock:
            self._closed = True
            processes, self._idle = list(self._all), []
        for process in processes:
            process.terminate()
        for process in processes:
            self._discard(process)

    @property
    def pids(self) -> set[int]:
        """Of the processes that live."""
        with self._lock:
            return {process.pid for process in self._all if process.poll() is None}

    @property
    def _limit(self) -> str:
        return f"{self._memory_bytes >> 20} MiB of memory (setting planner_memory_bytes)"

    def _ask(self, task: dict[str, Any]) -> subprocess.Popen[str]:
        """The process that has taken the task in."""
        while True:
            process = self._take()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
                return process
            except BrokenPipeError:  # it died before it had a job
                self._discard(process)

    def _take(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise PipelineError(_ENDING)
            if self._idle:
                return self._idle.pop()
            try:
                process = start_planner(self._task, variables=_MALLOC)
            except OSError as error:
                raise PipelineError(f"no planner process can be started: {error}; check memory and limits") from error
            self._all.add(process)
        assert process.stdout is not None
        if not process.stdout.readline():  # it opens the root first, and then says that it is ready
            how = self._ended(process)
            why = f"a planner process ended {how} before it had a job; see its log"
            raise PipelineError(_ENDING if self._closed else why)
        return process

    def _discard(self, process: subprocess.Popen[str]) -> None:
        end_planner(process)
        with self._lock:
            self._all.discard(process)

    def _ended(self, process: subprocess.Popen[str]) -> str:
        """How a process ended that has closed its stdout."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a signal now would hide why it ends
            process.wait(END_SECONDS)
        self._discard(process)
        code = process.returncode
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"

    def _died(self, process: subprocess.Popen[str]) -> Exception:
        how = self._ended(process)
        if self._closed:
            return PipelineError(_ENDING)
        if process.returncode in (TOLD_TO_STOP, -signal.SIGTERM):  # a service manager may stop all processes at once
            return PipelineError("a planner process was told to stop")
        return PlanningFailed(f"the planner's process ended {how}; planning may have needed more than {self._limit}")
