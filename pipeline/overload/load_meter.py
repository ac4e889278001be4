"""Measures a model's workers for the forecast: what they have reported in the last quarter of a minute, as far as they
answered interactive requests then, and before that the last time they did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.overload.forecast import PoolLoad
from pipeline.ports import WorkerState
from schemas.jobs.job import Tier
from schemas.workers.metrics import TierMetrics, WorkerMetrics

RECENT_SECONDS: Final = 15.0
_NOTHING: Final = TierMetrics()


@dataclass(frozen=True, slots=True)
class _Speed:
    """Mean tokens of an answer, time between two of them, and tokens for each such time."""

    answer_tokens: float
    token_seconds: float
    gap_tokens: float


class LoadMeter:
    """Turns the reports of workers into the loads of models (`ModelPin.key`). `max_requests`: of a worker, where that
    is limited (`lane.max_requests`)."""

    def __init__(self, max_requests: int | None = None) -> None:
        self._max_requests = max_requests
        self._reports: dict[str, deque[tuple[float, WorkerMetrics]]] = {}  # by worker, changes only
        self._speeds: dict[str, _Speed] = {}

    def read(
        self, states: Iterable[WorkerState], metrics: Mapping[str, WorkerMetrics], now: float
    ) -> dict[str, tuple[str, PoolLoad]]:
        """The name and the load of each model whose workers have answered an interactive request. `now`: seconds."""
        workers: dict[str, list[tuple[WorkerState, WorkerMetrics]]] = {}
        for state in states:
            report = metrics.get(state.name)
            takes = state.takes_lane_requests and not state.draining and state.max_num_seqs
            if report is None or not takes:
                continue
            self._add(state.name, report, now)
            for key in state.models:  # a model and its adapters share its slots
                workers.setdefault(key, []).append((state, report))
        self._reports = {name: known for name, known in self._reports.items() if name in metrics}
        self._speeds = {key: speed for key, speed in self._speeds.items() if key in workers}
        found = {}
        for key, members in workers.items():
            speed = self._measure(state.name for state, _ in members) or self._speeds.get(key)
            if speed is None:
                continue
            self._speeds[key] = speed
            slots = sum(self._slots(state) for state, _ in members)
            running = sum(_interactive(report).running for _, report in members)
            load = PoolLoad(slots, running, speed.answer_tokens, speed.token_seconds, speed.gap_tokens)
            found[key] = members[0][1].model, load
        return found

    def _slots(self, state: WorkerState) -> int:
        slots = state.max_num_seqs or 0
        return slots if self._max_requests is None else min(slots, self._max_requests)

    def _add(self, worker: str, report: WorkerMetrics, now: float) -> None:
        known = self._reports.setdefault(worker, deque())
        if known and known[-1][1].seconds > report.seconds:
            known.clear()  # it serves another model since, or begins anew
        if not known or known[-1][1] != report:
            known.append((now, report))
        while len(known) > 2 and known[1][0] <= now - RECENT_SECONDS:
            known.popleft()

    def _measure(self, workers: Iterable[str]) -> _Speed | None:
        """The speed by the difference between each worker's first and last report; None: no answer has ended."""
        seconds = 0.0
        gaps = answered = tokens = accepted = 0
        for name in workers:
            known = self._reports[name]
            before = _interactive(known[0][1]) if len(known) > 1 else _NOTHING
            after = _interactive(known[-1][1])
            seconds += after.itl.seconds - before.itl.seconds
            gaps += after.itl.samples - before.itl.samples
            answered += after.answered - before.answered
            tokens += after.usage.completion - before.usage.completion
            accepted += after.usage.accepted - before.usage.accepted
        if answered <= 0 or tokens <= 0:
            return None
        token_seconds = seconds / gaps if gaps > 0 and seconds > 0 else 0.0
        return _Speed(tokens / answered, token_seconds, tokens / max(1, tokens - accepted))


def _interactive(report: WorkerMetrics) -> TierMetrics:
    return report.tiers.get(Tier.INTERACTIVE, _NOTHING)
