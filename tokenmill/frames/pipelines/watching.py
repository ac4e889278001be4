"""`tokenmill.watch`: the progress of a pipeline's steps, from any process that can read its folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.adapters.folder.locks import is_locked
from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobNotFound
from tokenmill.frames.pipelines.record import read_pipeline
from tokenmill.frames.pipelines.step_ledgers import ledger_of, read_progress
from tokenmill.local.progress import RunSnapshot, StepProgress

RETRIES: Final = "retries"
"""The folder of further runs, below the pipeline's."""

WATCH_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """The progress of a pipeline.

    Attributes:
        steps: in their order; rows count once they are committed.
        is_running: whether a process computes it now.
    """

    steps: tuple[StepProgress, ...]
    is_running: bool

    @property
    def has_ended(self) -> bool:
        """Whether all steps have."""
        return all(step.has_ended for step in self.steps)

    def __str__(self) -> str:
        state = "has ended" if self.has_ended else "is running" if self.is_running else "is not running, and not done"
        return "\n".join([*map(str, self.steps), state])


def watch(output_dir: str | os.PathLike[str], *, follow: bool = True) -> PipelineProgress:
    """Show the progress of a pipeline until it has ended or isn't running any more, and return its last state.

    Args:
        output_dir: of its `run`, in this process or another one, on this machine.
        follow: if not, return at once, and show nothing.

    Raises:
        InvalidCall: there is no pipeline.
    """
    from tokenmill import output
    from tokenmill.local.progress import ProgressDisplay

    folder = Path(output_dir).expanduser()
    progress = read_pipeline_progress(folder)
    if not follow:
        return progress
    with ProgressDisplay(output.stderr(), lambda: _snapshot(progress)):
        while progress.is_running and not progress.has_ended:
            time.sleep(WATCH_SECONDS)
            progress = read_pipeline_progress(folder)
    return progress


def read_pipeline_progress(folder: Path) -> PipelineProgress:
    """The state of the newest run in a pipeline's folder. Raises `InvalidCall`."""
    run = all_runs(folder)[-1]
    is_running = is_locked(run)  # read first, so that a run that ends meanwhile is seen as ended
    record = read_pipeline(run)
    with FolderStore(run, read_only=True) as store:
        found = []
        for step in record.steps:
            try:
                found.append(read_progress(step.name, ledger_of(store, step.name)))
            except JobNotFound:  # the run has just begun
                found.append(StepProgress(step.name, 0, 0, 0, is_planned=False, has_ended=False))
    return PipelineProgress(tuple(found), is_running)


def all_runs(folder: Path) -> list[Path]:
    """The folders of a pipeline's runs: its own, and those of retries, the newest last."""
    return [folder, *sorted((folder / RETRIES).glob("[0-9]*"))]


def _snapshot(progress: PipelineProgress) -> RunSnapshot:
    total, done = sum(step.total for step in progress.steps), sum(step.done for step in progress.steps)
    return RunSnapshot(f"{'  '.join(map(str, progress.steps))}", total=total, done=done)
