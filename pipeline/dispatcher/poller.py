"""What is new of all open jobs, read at once: over a network one answer takes as long as many.

Some looks can't wait: shards that were put and that nobody holds, the plans that are being made here. The others (a
full listing of a job's parts now and then, the plans of jobs whose turn to be planned has not come) are spread over
many ticks, so that none lasts long however many jobs are open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

from pipeline.dispatcher.job_state import Found, OpenJob, Shard
from pipeline.results.parts import PartEntry
from pipeline.runtime.inline_executor import AT_ONCE

AT_LEISURE: Final = AT_ONCE
"""Of the looks that can wait, so many of each kind are taken at once."""

READ_AT_ONCE: Final = 128
"""Parts read in one look: a dispatcher that takes up a large job has very many to read."""

_T = TypeVar("_T")


class StatePoller:
    """One look at all open jobs.

    Args:
        together: runs the requests.
        planning: jobs whose plans may have grown; None: all, and nothing is left for later.
    """

    def __init__(self, together: Executor, held: set[Shard], now: float, planning: Container[str] | None) -> None:
        self._together = together
        self._held = held
        self._now = now
        self._planning = planning
        self._whole = planning is None
        self._failed: dict[str, Exception] = {}
        self._found: defaultdict[str, list[Found]] = defaultdict(list)

    def take(self, jobs: Sequence[OpenJob]) -> None:
        """Read what is new, and have the jobs learn it."""
        plans = self._all(OpenJob.read_plan, self._whose_plans(jobs))
        for job, segments in plans:
            self._guarded(job, partial(job.learn_plan, segments, self._now))
        due = sorted((job for job in jobs if job.sweep_at <= self._now), key=lambda job: job.sweep_at)
        for job, standing in self._all(OpenJob.list_parts, due if self._whole else due[:AT_LEISURE]):
            self._guarded(job, partial(job.learn_standing, standing, self._now))
        self._make_rejects(jobs)
        self._read_parts(jobs)

    def of(self, job: OpenJob) -> list[Found]:
        """The job's parts that are new; raises what looking at it raised."""
        if (error := self._failed.get(job.job.id)) is not None:
            raise error
        return self._found[job.job.id]

    def _whose_plans(self, jobs: Iterable[OpenJob]) -> list[OpenJob]:
        unplanned = [job for job in jobs if not job.planned]
        if self._planning is None:
            return unplanned
        growing = [job for job in unplanned if job.job.id in self._planning]
        others = [job for job in unplanned if job.job.id not in self._planning]
        return growing + sorted(others, key=lambda job: job.plan_read_at)[:AT_LEISURE]

    def _read_parts(self, jobs: Iterable[OpenJob]) -> None:
        wanted = [(job, number) for job in jobs for number in job.unsure(self._held)]
        for job in jobs:
            while job.unread and (self._whole or len(wanted) < READ_AT_ONCE):
                wanted.append((job, job.unread.popleft()))
        for job, entry in self._all(OpenJob.read_part, *_columns(wanted)):
            if entry is not None:
                self._learn(job, entry)

    def _make_rejects(self, jobs: Iterable[OpenJob]) -> None:
        wanted = [(job, number) for job in jobs for number in job.unmade()]
        for job, entry in self._all(OpenJob.make_rejects, *_columns(wanted if self._whole else wanted[:READ_AT_ONCE])):
            self._learn(job, entry)

    def _learn(self, job: OpenJob, entry: PartEntry) -> None:
        if (found := job.learn_part(entry)) is not None:
            self._found[job.job.id].append(found)

    def _all(
        self, read: Callable[..., _T], jobs: Sequence[OpenJob], *arguments: Sequence[int]
    ) -> list[tuple[OpenJob, _T]]:
        """The answers there are; what failed is kept."""
        futures = [self._together.submit(read, *each) for each in zip(jobs, *arguments, strict=True)]
        answers = []
        for job, future in zip(jobs, futures, strict=True):
            try:
                answers.append((job, future.result()))
            except Exception as error:  # noqa: BLE001 - of one job; raised where its turn comes
                self._failed.setdefault(job.job.id, error)
        return answers

    def _guarded(self, job: OpenJob, learn: Callable[[], None]) -> None:
        try:
            learn()
        except Exception as error:  # noqa: BLE001 - of one job; raised where its turn comes
            self._failed.setdefault(job.job.id, error)


def _columns(pairs: Sequence[tuple[OpenJob, int]]) -> tuple[list[OpenJob], list[int]]:
    return [job for job, _ in pairs], [number for _, number in pairs]
