"""Latencies that the engine counts, against those of an observer that reads every choice after every step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ContextLengthExceeded
from engine.request import FinishReason, Request
from engine.scheduler.latency import BOUNDS, LatencyCounts, LatencyHistogram
from engine.scheduler.sequence import CLASSES, class_of
from schemas.workers.metrics import LATENCY_BOUNDS
from tests.engine.scheduler.scheduler_harness import Harness
from tests.engine.scheduler.test_scheduler_properties import Event, harnesses, histories

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


def test_the_buckets_are_those_that_workers_report() -> None:
    assert BOUNDS == LATENCY_BOUNDS


def test_a_bucket_includes_its_upper_end() -> None:
    histogram = LatencyHistogram()
    samples = [0.0, 0.001, 0.0010001, 0.05, 599.9, 600.0, 600.1, 1e6]
    for sample in samples:
        histogram.add(sample)
    histogram.add_each(np.array([0.05, 0.051]))
    histogram.add(1.5, times=3)
    counts = histogram.counts
    expected = Counter(bisect_left(BOUNDS, one) for one in [*samples, 0.05, 0.051, 1.5, 1.5, 1.5])
    assert dict(enumerate(counts.counts)) == {bucket: expected[bucket] for bucket in range(len(BOUNDS) + 1)}
    assert (counts.counts[0], counts.counts[1], counts.counts[-2], counts.counts[-1]) == (2, 1, 2, 2)
    assert counts.seconds == pytest.approx(sum(samples) + 0.101 + 4.5)


@dataclass
class LatencyObserver:
    """Reads every choice after every step.

    Attributes:
        firsts, gaps: seconds to the first and between tokens, by class.
    """

    harness: Harness
    requests: dict[str, tuple[Request, float]] = field(default_factory=dict)
    firsts: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    last: dict[tuple[str, int], float] = field(default_factory=dict)

    def observe(self, now: float) -> None:
        """Call after each step."""
        for name, (request, added_at) in self.requests.items():
            counts = {choice: len(tokens) for choice, tokens in self.harness.scheduler.sampled(name)}
            for choice in range(request.params.n):
                if (end := self.harness.finished.get((name, choice))) is not None:
                    counts[choice] = end.generated_tokens
            for choice, tokens in counts.items():
                if tokens > self.seen[name, choice]:
                    self._record((name, choice), request, added_at, now)
                    self.seen[name, choice] = tokens

    def _record(self, key: tuple[str, int], request: Request, added_at: float, now: float) -> None:
        of_class = class_of(request.priority)
        if key in self.last:
            self.gaps[of_class].append(now - self.last[key])
        else:
            self.firsts[of_class].append(now - added_at)
        self.last[key] = now


def check_histogram(counted: LatencyCounts, samples: list[float]) -> None:
    expected = Counter(bisect_left(BOUNDS, sample) for sample in samples)
    assert {bucket: count for bucket, count in enumerate(counted.counts) if count} == dict(expected)
    assert counted.seconds == pytest.approx(sum(samples))


@pytest.mark.exhaustive
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(harness=harnesses(), history=histories(), times=st.lists(st.sampled_from([0.0005, 0.01, 0.07, 3.0]), min_size=1))
def test_every_wait_is_counted_once_under_any_history(
    harness: Harness, history: list[Event], times: list[float]
) -> None:
    """Preemptions, drafts, cancels, failures, several choices and classes, steps of any time."""
    harness.depth = 1  # or the results of a step would come with the next one, and the observer be late
    observer, step, now = LatencyObserver(harness), 0, 0.0

    def step_once() -> None:
        nonlocal step, now
        step, now = step + 1, now + times[step % len(times)]
        harness.step(now)
        observer.observe(now)

    for event in history:
        while step < event.step:
            step_once()
        if event.kind == "cancel":
            harness.scheduler.cancel(event.request.request_id)
            continue
        request = harness.suited(event.request)
        try:
            harness.scheduler.add(request, now)
        except ContextLengthExceeded:
            continue
        observer.requests[request.request_id] = request, now
    while harness.scheduler.has_work:
        step_once()
        assert step < 5_000

    natural, some = Counter[int](), Counter[int]()
    for name, (request, _) in observer.requests.items():
        ends = [harness.finished[name, choice].finish_reason in NATURAL for choice in range(request.params.n)]
        natural[class_of(request.priority)] += all(ends)
        some[class_of(request.priority)] += any(ends)
    classes = harness.scheduler.classes
    assert len(classes) == CLASSES
    for number, counted in enumerate(classes):
        check_histogram(counted.first_token, observer.firsts[number])
        check_histogram(counted.between_tokens, observer.gaps[number])
        assert natural[number] <= sum(counted.whole.counts) <= some[number]
        assert (counted.running, counted.waiting) == (0, 0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(harness=harnesses(), history=histories())
@pytest.mark.slow
def test_running_and_waiting_choices_are_counted_by_class(harness: Harness, history: list[Event]) -> None:
    harness.depth = 1
    requests: list[Request] = []
    for event in history:
        if event.kind != "add":
            continue
        try:
            harness.scheduler.add(replace(harness.suited(event.request), deadline=None), 0.0)
        except ContextLengthExceeded:
            continue
        requests.append(event.request)
        harness.step(0.0)
        open_now = [
            (class_of(request.priority), choice)
            for request in requests
            for choice in range(request.params.n)
            if (request.request_id, choice) not in harness.finished
        ]
        classes, stats = harness.scheduler.classes, harness.scheduler.stats
        for number, counted in enumerate(classes):
            assert counted.running + counted.waiting == sum(of_class == number for of_class, _ in open_now)
        assert sum(counted.running for counted in classes) == stats.running
        assert sum(counted.waiting for counted in classes) == stats.waiting
