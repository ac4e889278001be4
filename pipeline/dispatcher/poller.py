"""The state poller reads new plan segments and parts of all open jobs, with concurrent requests: over a network one
answer takes as long as many.

Some reads are urgent: parts of shards that were queued and that no worker holds, and plans that this controller is
making. The others (periodic full listings of a job's parts, plans of jobs that wait for a planner) are spread over many
ticks, so that a tick stays short however many jobs are open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

from pipeline.dispatcher.job_state import NewPart, OpenJob, ShardId
from pipeline.results.part_files import PartEntry
from pipeline.runtime.inline_executor import MAX_CONCURRENT_REQUESTS

MAX_DEFERRABLE_READS: Final = MAX_CONCURRENT_REQUESTS
"""Reads of each deferrable kind in one poll."""

MAX_PARTS_PER_POLL: Final = 128
"""Parts read in one poll: a dispatcher that takes over a large job has very many to read."""

_T = TypeVar("_T")


class StatePoller:
    """One poll of all open jobs.

    Args:
        executor: executor of the requests.
        planning: jobs whose plans may have grown; None: all jobs, and no read is deferred.
    """

    def __init__(self, executor: Executor, held: set[ShardId], now: float, planning: Container[str] | None) -> None:
        self._executor = executor
        self._held = held
        self._now = now
        self._planning = planning
        self._is_full = planning is None
        self._failed: dict[str, Exception] = {}
        self._new_parts: defaultdict[str, list[NewPart]] = defaultdict(list)

    def poll(self, jobs: Sequence[OpenJob]) -> None:
        """Read new segments and parts, and apply them to the jobs."""
        plans = self._read_all(OpenJob.read_plan, self._jobs_with_new_plans(jobs))
        for job, segments in plans:
            self._apply(job, partial(job.apply_plan, segments, self._now))
        due = sorted((job for job in jobs if job.sweep_at <= self._now), key=lambda job: job.sweep_at)
        for job, standing in self._read_all(OpenJob.list_parts, due if self._is_full else due[:MAX_DEFERRABLE_READS]):
            self._apply(job, partial(job.apply_part_listing, standing, self._now))
        self._make_rejects(jobs)
        self._read_parts(jobs)

    def new_parts(self, job: OpenJob) -> list[NewPart]:
        """The job's new parts; raises the exception that polling this job raised."""
        if (error := self._failed.get(job.job.id)) is not None:
            raise error
        return self._new_parts[job.job.id]

    def _jobs_with_new_plans(self, jobs: Iterable[OpenJob]) -> list[OpenJob]:
        unplanned = [job for job in jobs if not job.is_planned]
        if self._planning is None:
            return unplanned
        growing = [job for job in unplanned if job.job.id in self._planning]
        others = [job for job in unplanned if job.job.id not in self._planning]
        return growing + sorted(others, key=lambda job: job.plan_read_at)[:MAX_DEFERRABLE_READS]

    def _read_parts(self, jobs: Iterable[OpenJob]) -> None:
        wanted = [(job, number) for job in jobs for number in job.shards_to_check(self._held)]
        for job in jobs:
            while job.unread_parts and (self._is_full or len(wanted) < MAX_PARTS_PER_POLL):
                wanted.append((job, job.unread_parts.popleft()))
        for job, entry in self._read_all(OpenJob.read_part, *_columns(wanted)):
            if entry is not None:
                self._add_part(job, entry)

    def _make_rejects(self, jobs: Iterable[OpenJob]) -> None:
        wanted = [(job, number) for job in jobs for number in job.missing_rejects()]
        for job, entry in self._read_all(
            OpenJob.make_rejects, *_columns(wanted if self._is_full else wanted[:MAX_PARTS_PER_POLL])
        ):
            self._add_part(job, entry)

    def _add_part(self, job: OpenJob, entry: PartEntry) -> None:
        if (found := job.apply_part(entry)) is not None:
            self._new_parts[job.job.id].append(found)

    def _read_all(
        self, read: Callable[..., _T], jobs: Sequence[OpenJob], *arguments: Sequence[int]
    ) -> list[tuple[OpenJob, _T]]:
        """The jobs' answers; the exception of a failed read is stored for `new_parts`."""
        futures = [self._executor.submit(read, *each) for each in zip(jobs, *arguments, strict=True)]
        answers = []
        for job, future in zip(jobs, futures, strict=True):
            try:
                answers.append((job, future.result()))
            except Exception as error:  # noqa: BLE001 - concerns one job; `new_parts` raises it
                self._failed.setdefault(job.job.id, error)
        return answers

    def _apply(self, job: OpenJob, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as error:  # noqa: BLE001 - concerns one job; `new_parts` raises it
            self._failed.setdefault(job.job.id, error)


def _columns(pairs: Sequence[tuple[OpenJob, int]]) -> tuple[list[OpenJob], list[int]]:
    return [job for job, _ in pairs], [number for _, number in pairs]
