"""Checks all jobs of a root: each as `Watch` does, and properties of several jobs.

Tokens are counted for the whole root, because a step computes rows of several jobs at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from engine.request import Request
from pipeline.ports import ShardTask
from tests.simulation.machine import Process
from tests.simulation.watch import Watch


class RootWatch:
    """Events that ports and engines report.

    Args:
        find: the watch of a job by its id, if the job is one that is watched.
        judge_removal: raises when an object must not go.

    Attributes:
        sampled: tokens, of all jobs.
        acknowledged: keys of objects whose permanent creation was reported to a process.
        commits: jobs and shards in the order in which their parts came to be.
        lives: worker's life -> the jobs that it has had rows of.
    """

    def __init__(self, find: Callable[[str], Watch | None], judge_removal: Callable[[str], None]) -> None:
        self._find = find
        self._judge_removal = judge_removal
        self.sampled = 0
        self.acknowledged: set[str] = set()
        self.commits: list[tuple[str, int]] = []
        self.lives: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.counters: Counter[str] = Counter()

    # -- reported by the ports

    def created(self, process: Process, key: str, data: bytes | None, *, won: bool) -> None:
        """A create has answered."""
        if not key.startswith(GOES) and not any(word in key for word in GOES_OF_JOBS):
            self.acknowledged.add(key)
        if not key.startswith("jobs/"):
            return
        job = key.split("/")[1]
        if "/results/" in key:
            self.counters["commits" if won else "commits that lost the race"] += 1
            if won:
                self.commits.append((job, int(key[-13:-8])))
        elif "/attempt-" in key and won and not key.endswith("-0001.json"):
            self.counters["shards taken again"] += 1
        watch = self._find(job)
        if won and watch is not None:
            watch.created(process, key, data)

    def deleted(self, key: str) -> None:
        """An object is to go. Raises `InvariantViolated` when it must not."""
        self._judge_removal(key)
        self.acknowledged.discard(key)

    def took(self, process: Process, task: ShardTask) -> None:
        """A worker got a shard's name."""
        watch = self._find(task.job)
        if watch is not None:
            watch.took(process, task.shard)

    # -- reported by engines

    def added(self, process: Process, request: Request) -> None:
        """An engine was given a request. Raises `InvariantViolated`."""
        job = _job(request.request_id)
        watch = self._find(job)
        if watch is not None:
            self.lives[process.name, process.life].add(job)
            watch.added(process, request)

    def left(self, process: Process, requests: Iterable[str]) -> None:
        """These requests have left the engine."""
        for request in requests:
            watch = self._find(_job(request))
            if watch is not None:
                watch.left(process, [request])

    def stepped(self, process: Process, sampled: int) -> None:
        """A step was computed."""
        self.sampled += sampled

    def step_failed(self, requests: set[str], *, broken: bool) -> None:
        """A step with these requests failed."""
        for job in {_job(request) for request in requests}:
            watch = self._find(job)
            if watch is not None:
                own = {request for request in requests if _job(request) == job}
                watch.step_failed(own, broken=broken, alone=len(requests) == 1)

    def died(self, process: Process) -> None:
        """A life ended, whatever ran in it."""
        watches = [self._find(job) for job in sorted(self.lives.pop((process.name, process.life), ()))]
        known = [watch for watch in watches if watch is not None]
        running = sum(watch.running(process) for watch in known)
        for watch in known:
            watch.died(process, alone=running == 1)


GOES = ("active/", "close/", "announced/", "intake/origins/", "taken/")
"""Prefixes of objects that are deleted once they are not needed any more."""

GOES_OF_JOBS = ("/work/", "/plans/")


def _job(request: str) -> str:
    return request.split("/", 1)[0]
