"""The planning queue runs plans on an executor in the order of `PlanningOrder`. Each thread that becomes free takes the
next job itself, so a planner never idles until the next tick."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import datetime

from pipeline.dispatcher.planning_order import PlanningOrder
from pipeline.jobs.planning import PlanOutcome


@dataclass(frozen=True, slots=True)
class _Task:
    """A job's plan function, and the future of its outcome."""

    plan: Callable[[], PlanOutcome]
    future: Future[PlanOutcome] = field(default_factory=Future)


class PlanningQueue:
    """Jobs that wait for a planner. Thread-safe.

    Args:
        executor: runs the plans; the caller shuts it down.
        planners: plans that run concurrently.
    """

    def __init__(self, executor: Executor, planners: int) -> None:
        self._executor = executor
        self._order: PlanningOrder[_Task] = PlanningOrder(planners)
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, tenant: str, created_at: datetime, plan: Callable[[], PlanOutcome]) -> Future[PlanOutcome]:
        """Queue a job for planning. The future can be cancelled until planning starts."""
        task = _Task(plan)
        with self._lock:
            self._order.add(tenant, created_at, task)
        self._executor.submit(self._run_tasks)
        return task.future

    def close(self) -> None:
        """Start no further plan."""
        self._is_closed = True

    def _run_tasks(self) -> None:
        """Plan one job after another until none may be planned. A job that waits for a running plan of its own tenant
        is taken by the thread of that plan."""
        while (taken := self._take()) is not None:
            tenant, task = taken
            try:
                if task.future.set_running_or_notify_cancel():
                    task.future.set_result(task.plan())
            except BaseException as error:
                task.future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._lock:
                    self._order.ended(tenant)

    def _take(self) -> tuple[str, _Task] | None:
        with self._lock:
            return None if self._is_closed else self._order.take()
