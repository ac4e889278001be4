"""Waiting for a content policy that can't judge: for which failures, for how long, and how often it is probed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from workers.policies.acting import ActingPolicy
from workers.policies.retry import (
    MAX_PROBE_SECONDS,
    MAX_TRIES,
    MIN_PROBE_SECONDS,
    JudgingInterrupted,
    PolicyRetry,
    PolicyUnavailable,
)


class AwayPolicy:
    """A policy that is away until a time of its clock. Texts in `slow` are never judged."""

    fingerprint, window = "away", 0

    def __init__(self, clock: Any, until: float, retry_seconds: float = 300.0) -> None:
        self.clock, self.until, self.retry_seconds = clock, until, retry_seconds
        self.probes: list[float] = []
        self.asked = 0
        self.is_slow = False

    def judge(self) -> str:
        self.asked += 1
        self.clock.sleep(0.25)
        if self.is_slow or self.clock.monotonic() < self.until:
            raise PolicyUnavailable("away")
        return "judged"

    def is_available(self) -> bool:
        self.probes.append(self.clock.monotonic())
        return bool(self.clock.monotonic() >= self.until)


Away = Callable[..., AwayPolicy]


@pytest.fixture
def clock(kit: Any) -> Any:
    return kit.FakeClock()


@pytest.fixture
def away(clock: Any) -> Away:
    """Makes a policy that is away for so many seconds."""
    return lambda seconds, **more: AwayPolicy(clock, clock.monotonic() + seconds, **more)


@pytest.fixture
def retry(clock: Any) -> PolicyRetry:
    return PolicyRetry(clock, lambda: True)


def test_given_an_outage_then_the_text_is_judged_after_it(away: Away, clock: Any, retry: PolicyRetry) -> None:
    policy = away(60)
    with capture_logs() as logs:
        assert retry.judge("guard", policy, policy.judge) == "judged"
    assert policy.until <= clock.monotonic() < policy.until + MAX_PROBE_SECONDS + 1
    assert policy.asked == 2, "it waits for the policy, and doesn't repeat its text"
    assert [line["event"] for line in logs] == [
        "a content policy can't judge: rows of jobs wait for it", "a content policy judges again",
    ]  # fmt: skip


def test_given_a_longer_outage_then_probes_become_fewer(away: Away, retry: PolicyRetry) -> None:
    policy = away(200)
    retry.judge("guard", policy, policy.judge)
    pauses = [after - before for before, after in zip(policy.probes, policy.probes[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(MIN_PROBE_SECONDS, abs=0.2)
    assert pauses[-1] == pytest.approx(MAX_PROBE_SECONDS, abs=0.2)


def test_given_an_outage_that_is_too_long_then_all_rows_fail_from_then_on_and_wait_for_the_next_one(
    away: Away, clock: Any, retry: PolicyRetry
) -> None:
    policy, began = away(1_000, retry_seconds=30.0), clock.monotonic()
    for _ in range(3):
        with pytest.raises(PolicyUnavailable):
            retry.judge("guard", policy, policy.judge)
    assert clock.monotonic() - began < 32, "it is one outage for all rows"
    policy.until = clock.monotonic()
    clock.sleep(MAX_PROBE_SECONDS)
    assert retry.judge("guard", policy, policy.judge) == "judged"
    policy.until = clock.monotonic() + 20
    assert retry.judge("guard", policy, policy.judge) == "judged"


def test_given_a_text_that_an_available_policy_can_not_judge_then_it_fails_soon(
    away: Away, clock: Any, retry: PolicyRetry
) -> None:
    policy, began = away(0), clock.monotonic()
    policy.is_slow = True
    with pytest.raises(PolicyUnavailable):
        retry.judge("guard", policy, policy.judge)
    assert (policy.asked, clock.monotonic() - began) == (MAX_TRIES, MAX_TRIES * 0.25)


@pytest.mark.parametrize("retry_seconds", [0.0, None])
def test_given_a_policy_without_a_time_to_wait_then_its_failure_is_raised_at_once(
    away: Away, retry: PolicyRetry, retry_seconds: float | None
) -> None:
    policy = away(60)
    if retry_seconds is None:
        del policy.retry_seconds
    else:
        policy.retry_seconds = retry_seconds
    with pytest.raises(PolicyUnavailable):
        retry.judge("guard", policy, policy.judge)
    assert (policy.asked, policy.probes) == (1, [])


def test_given_rows_that_may_not_wait_then_they_are_interrupted(away: Away, clock: Any) -> None:
    policy = away(60)
    stop_at = clock.monotonic() + 5
    retry = PolicyRetry(clock, lambda: clock.monotonic() < stop_at)
    with pytest.raises(JudgingInterrupted):
        retry.judge("guard", policy, policy.judge)
    assert clock.monotonic() < stop_at + 1


def test_given_another_action_of_a_policy_then_its_rows_wait_as_well(away: Away, retry: PolicyRetry) -> None:
    policy: Any = away(60)
    acting = ActingPolicy(policy, "flag")
    assert retry.judge("guard", acting, policy.judge) == "judged"
