"""Plans the rest of a job in a process of its own, beside the work on what is planned already.

A thread would share the interpreter with the engine's, which would wait for its turn again and again; a process takes
the core that the engine leaves. The two share nothing but the ledger, where whoever creates a segment first decides. So
the planner may be killed at any moment: it ends with its parent, and the next run goes on at the first missing segment.
That run begins when both are gone: the planner holds the folder's lock with its parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.locks import RunLock
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.ledger import JobLedger
from pipeline.planning import plan_job
from pipeline.ports import PipelineError, World
from schemas.inputs import InputRef
from schemas.plan import PlanSegment
from tokenmill.inputs import open_input

LOOK_SECONDS: Final = 0.5
NICENESS: Final = 10
"""The engine goes first: when it runs short of shards, it leaves the planner enough time by itself."""

END_SECONDS: Final = 5.0
"""It gets so long to remove what it was building; what is left is swept by the next run."""

_FAILED: Final = 3


class PlannerProcess:
    """Plans the job in an output folder while the `with` block runs.

    Args:
        folder: the output folder.  inputs: where the input lies now.
        lock: the run's, on this folder. The process holds it too: outliving its parent, it may still write there.
        on_segment: told of each segment that has come to stand; on a thread of its own.
        on_failure: called once when planning can't go on; `check` then raises.
    """

    def __init__(
        self,
        folder: Path,
        lock: RunLock,
        ledger: JobLedger,
        inputs: InputRef,
        on_segment: Callable[[PlanSegment], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._ledger = ledger
        self._on_segment = on_segment
        self._on_failure = on_failure
        self._known = sum(1 for _ in ledger.segments())
        self._stopping = threading.Event()
        self._failure: str | None = None
        self._task = json.dumps({"folder": str(folder.absolute()), "inputs": inputs.model_dump(mode="json")})
        self._thread = threading.Thread(target=self._watch, name="planner", daemon=True)

    def __enter__(self) -> PlannerProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(self._lock.descriptor,),
            start_new_session=True,  # Ctrl-C is for the parent, which then ends this one
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._task + "\n")
        self._process.stdin.flush()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def check(self) -> None:
        """Raises `PipelineError` when planning couldn't go on."""
        if self._failure is not None:
            raise PipelineError(self._failure)

    def _watch(self) -> None:
        while True:
            ended = self._process.poll() is not None  # looked at first: what it committed before is then seen
            try:
                self._tell()
            except PipelineError as error:
                self._fail(str(error))
                return
            if self._stopping.is_set():
                return
            if ended:
                break
            self._stopping.wait(LOOK_SECONDS)
        if self._process.returncode:
            assert self._process.stdout is not None
            said = self._process.stdout.read().strip()
            self._fail(said or f"the planner ended with code {self._process.returncode}; run the same command again")

    def _tell(self) -> None:
        for segment in self._ledger.segments(self._known):
            self._known = segment.index + 1
            self._on_segment(segment)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._on_failure()


def main() -> None:
    """What the process does: one line on stdin says what to plan, and stdin's end that the parent is gone."""
    task = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICENESS)
    try:
        with FolderStore(Path(task["folder"])) as store:
            ledger = JobLedger(store)
            job = ledger.job().model_copy(update={"input": InputRef.model_validate(task["inputs"])})
            world = World(store, SystemClock(), SystemRandomness(), store.scratch)
            plan_job(ledger, job, world, open_input=open_input)
    except PipelineError as error:
        print(error)
        sys.exit(_FAILED)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(1)


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
