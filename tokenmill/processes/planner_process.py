"""A planner in a process of its own: for `run` the rest of its one job, while the planned part is computed; for a
dispatcher one job of its root after the other (`planner_pool`), within a memory limit.

A planner thread would contend with the engine for the interpreter; a process uses a core that the engine leaves free.
The two share only the ledger, where the first creator of a segment wins. So the planner may be killed at any moment: it
ends with its parent, and the next run goes on at the first missing segment. That run starts after both have ended,
because the planner of a run holds the folder's lock with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Final, TextIO

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.answers.index import AnswerIndex
from pipeline.jobs.planning import plan_job, plan_open_job
from pipeline.ledger.ledger import JobLedger
from pipeline.models.stored_answers import open_answers
from pipeline.ports import PipelineError, World
from pipeline.routing.loads import ModelLoad
from pipeline.routing.rules import RuleRouter
from schemas.jobs.inputs import InputRef
from schemas.jobs.plan import PlanSegment
from tokenmill.config.former import open_former
from tokenmill.config.inputs import open_input
from tokenmill.processes.logging import log_to_stderr
from tokenmill.processes.tracing import traces_of
from tokenmill.root import open_root
from tokenmill.settings import read_settings

POLL_SECONDS: Final = 0.5
NICENESS: Final = 10
"""The engine has priority: when it runs short of shards, it leaves the planner enough time."""

END_SECONDS: Final = 5.0
"""Time to remove unfinished files; the next run removes the rest."""

PROGRESS_SECONDS: Final = 0.2
"""Minimum interval of progress reports."""

_FAILED: Final = 3

EXIT_STOPPED: Final = 128 + signal.SIGTERM
"""Its exit status after SIGTERM."""


def start_planner(
    task: Mapping[str, Any], *, pass_fds: Sequence[int] = (), variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    """Start a planner process and send its task: `{"folder", "inputs", "reuse"}` for one job in an output folder, or
    `{"root", "command", "log_format", "memory_bytes"}` for jobs of a root, which are then requested line by line."""
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(variables),
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends this one
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    return process


def end_planner(process: subprocess.Popen[str]) -> None:
    """End a planner process, by SIGTERM first."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class PlannerProcess:
    """Plans the job in an output folder while the `with` block runs.

    Args:
        folder: the output folder.  inputs: the current location of the input.
        lock: the run's, on this folder. The process holds it too, because it may still write after its parent's end.
        on_segment: called with each new segment; on a thread of its own.
        on_failure: called once when planning fails; `check` then raises.
        reuse: former results, see `open_former`; None: all rows are computed.
    """

    def __init__(
        self,
        folder: Path,
        lock: RunLock,
        ledger: JobLedger,
        inputs: InputRef,
        on_segment: Callable[[PlanSegment], None],
        on_failure: Callable[[], None],
        reuse: Path | None = None,
    ) -> None:
        self._lock = lock
        self._ledger = ledger
        self._on_segment = on_segment
        self._on_failure = on_failure
        self._known = sum(1 for _ in ledger.segments())
        self._stopping = threading.Event()
        self._failure: str | None = None
        self._task = {
            "folder": str(folder.absolute()),
            "inputs": inputs.model_dump(mode="json"),
            "reuse": None if reuse is None else str(reuse.absolute()),
        }
        self._thread = threading.Thread(target=self._watch, name="planner", daemon=True)

    def __enter__(self) -> PlannerProcess:
        self._process = start_planner(self._task, pass_fds=(self._lock.descriptor,))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        end_planner(self._process)
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def check(self) -> None:
        """Raises `PipelineError` when planning failed."""
        if self._failure is not None:
            raise PipelineError(self._failure)

    def _watch(self) -> None:
        while True:
            ended = self._process.poll() is not None  # read first, so that its last segments are found below
            try:
                self._report_segments()
            except PipelineError as error:
                self._fail(str(error))
                return
            if self._stopping.is_set():
                return
            if ended:
                break
            self._stopping.wait(POLL_SECONDS)
        if self._process.returncode:
            assert self._process.stdout is not None
            message = self._process.stdout.read().strip()
            self._fail(message or f"the planner ended with code {self._process.returncode}; run the same command again")

    def _report_segments(self) -> None:
        for segment in self._ledger.segments(self._known):
            self._known = segment.index + 1
            self._on_segment(segment)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._on_failure()


def main() -> None:
    """Execute the task in the first line of stdin; the end of stdin means that the parent is gone."""
    lines: SimpleQueue[str] = SimpleQueue()
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    task = json.loads(lines.get())
    if "folder" in task:
        reuse = None if task["reuse"] is None else Path(task["reuse"])
        _plan_folder(Path(task["folder"]), InputRef.model_validate(task["inputs"]), reuse)
    else:
        _plan_jobs(task, lines)


def _plan_folder(folder: Path, inputs: InputRef, reuse: Path | None) -> None:
    """Plan the rest of an output folder's job."""
    os.nice(NICENESS)
    try:
        with FolderStore(folder) as store, ExitStack() as stack:
            ledger = JobLedger(store)
            job = ledger.job().model_copy(update={"input": inputs})
            world = World(store, SystemClock(), SystemRandomness(), store.scratch)
            former = None
            if reuse is not None:
                former = stack.enter_context(open_former(reuse, store.scratch, job.settings.limits.max_rows))
            plan_job(ledger, job, world, open_input=open_input, former=former)
    except PipelineError as error:
        print(error)
        sys.exit(_FAILED)


def _plan_jobs(task: dict[str, Any], lines: SimpleQueue[str]) -> None:
    """Plan jobs of a root as they are requested, one at a time. Stdout gets one line when the root is open, lines with
    `progress` while a job is planned, or with `classify` and texts, whose labels are the next line of stdin, and one
    with its outcome."""
    answers = _Answers(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    log_to_stderr(logging.INFO, task["log_format"], task["command"])
    settings, limit = read_settings(), int(task["memory_bytes"])
    with traces_of(task["command"]) as traces, open_root(task["root"], settings, traces=traces) as root:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        world = replace(root.world, on_progress=answers.report_progress)
        open_input = partial(root.open_input, on_read=answers.report_progress)
        index = AnswerIndex(world.store, world.clock, settings.answers)
        answers.write({"ready": True})
        ends = False
        while not ends:
            request = json.loads(lines.get())
            loads = {key: ModelLoad(**load) for key, load in request["loads"].items()}
            router = RuleRouter(partial(dict, loads), _ParentsClassifier(answers, lines))
            try:
                outcome = plan_open_job(
                    root.ledger(request["job"]), world, open_input, in_time=request["in_time"], router=router,
                    open_answers=partial(open_answers, index, world.scratch),
                )  # fmt: skip
                answer = asdict(outcome)
            except PipelineError as error:
                answer = {"later": str(error)}
            except MemoryError:
                answer, ends = {"memory": True, "traceback": ""}, True
            except Exception as error:  # noqa: BLE001 - the parent raises it anew, for this job
                answer = {
                    "failed": type(error).__name__,
                    "traceback": "".join(traceback.format_tb(error.__traceback__)),
                }
            ends = ends or data_bytes() > limit // 2  # leftover memory of this job must not fail the next one
            answers.write(answer | {"ends": ends, "answers": index.counts.take()})


class _ParentsClassifier:
    """Classification models, which the parent asks: its lane may be its own memory."""

    def __init__(self, answers: _Answers, lines: SimpleQueue[str]) -> None:
        self._answers = answers
        self._lines = lines

    def classify(
        self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str
    ) -> list[tuple[str, float]] | None:
        """See `Classifier`."""
        asked = {"model": model, "texts": texts, "timeout_seconds": timeout_seconds, "tenant": tenant}
        self._answers.write({"classify": asked})
        labels = json.loads(self._lines.get())["labels"]
        return None if labels is None else [(label, score) for label, score in labels]


class _Answers:
    """Writes the lines for the parent. It is thread-safe, because Arrow reads on threads of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._next_progress = 0.0

    def write(self, answer: Mapping[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(answer) + "\n")
            self._stream.flush()

    def report_progress(self) -> None:
        """Report progress, at most once in `PROGRESS_SECONDS`."""
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            self.write({"progress": True})


def data_bytes() -> int:
    """This process's private writable memory in bytes (Linux), which `RLIMIT_DATA` limits."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:")), 0)


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the exit
    sys.exit(EXIT_STOPPED)


def _listen(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
