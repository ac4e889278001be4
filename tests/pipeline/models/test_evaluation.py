"""Verdicts on new versions: with noise, with few samples, and with repeated evaluation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.evaluation import ReleaseVerdict, ShadowedShard, judge
from schemas.releases import LogprobDrift
from schemas.settings.releases import ReleaseRules

RULES = ReleaseRules(least_shards=8, most_shards=128, agreement=0.8, more_errors=0.02, slower=1.25)


def shards(
    count: int, *, seed: int = 0, agreement: float = 0.97, slower: float = 1.0, errors: float = 0.0, rows: int = 200
) -> list[ShadowedShard]:
    """Shards of a version with these true values, with the noise of real ones: 8 % in likeness, 20 % in time."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        failed = sum(draw.random() < errors for _ in range(rows))
        alike = min(1.0, max(0.0, draw.gauss(agreement, 0.08)))
        found.append(ShadowedShard(rows, failed, 0, alike, math.log(slower) + draw.gauss(0.0, 0.2)))
    return found


def outcome(verdict: ReleaseVerdict | None) -> str:
    return "open" if verdict is None else "promoted" if verdict.promote else "rolled back"


def test_given_too_few_shards_when_judged_then_nothing_is_decided_however_bad_they_are() -> None:
    assert judge(shards(7, agreement=0.0, errors=1.0), RULES, LogprobDrift(mean=9.0, most=9.0, tokens=1)) is None


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"agreement": 0.4}, "agreement of answers"),
        ({"slower": 2.5}, "time of a token"),
        ({"errors": 0.2}, "share of rows that fail more"),
    ],
)
def test_given_one_thing_bad_when_judged_then_it_is_rolled_back_for_that(what: dict[str, float], reason: str) -> None:
    verdict = judge(shards(128, **what), RULES, None)
    assert verdict is not None
    assert not verdict.promote
    assert verdict.reasons[0].startswith(reason)
    assert verdict.comparison.shards <= 32, "what is far off is seen soon"


def test_given_a_good_version_with_noise_when_judged_then_it_is_promoted() -> None:
    outcomes = [outcome(judge(shards(128, seed=seed), RULES, None)) for seed in range(100)]
    assert outcomes.count("promoted") >= 98


@pytest.mark.parametrize("what", [{"agreement": 0.8}, {"slower": 1.25}])
@pytest.mark.slow
def test_given_a_version_just_at_a_limit_when_judged_again_and_again_then_it_is_seldom_promoted_or_found_bad(
    what: dict[str, float],
) -> None:
    """At the limit both verdicts are mistakes: each may come in (1 - confidence) of the cases, all looks together. What
    is left when most_shards were compared is rolled back as not shown to be good."""
    verdicts = [judge(shards(128, seed=seed, **what), RULES, None) for seed in range(200)]
    promoted = sum(verdict is not None and verdict.promote for verdict in verdicts)
    found_bad = sum(
        verdict is not None and not verdict.promote and verdict.reasons[0] != "not shown to be as good"
        for verdict in verdicts
    )
    assert promoted <= 10
    assert found_bad <= 10


@pytest.mark.slow
def test_given_a_test_at_every_shard_when_judged_then_the_verdict_is_that_of_a_single_test() -> None:
    for seed in range(12):
        found = shards(128, seed=seed, agreement=0.84)
        verdicts = [judge(found[:count], RULES, None) for count in range(129)]
        first = next((verdict for verdict in verdicts if verdict is not None), None)
        assert first is not None
        decided = verdicts[verdicts.index(first) :]
        assert all(verdict == first for verdict in decided), "it went back and forth"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(
            ShadowedShard,
            rows=st.integers(1, 50),
            failed=st.integers(0, 1),
            mended=st.just(0),
            agreement=st.none() | st.floats(0, 1),
            latency=st.none() | st.floats(-3, 3),
        ),
        max_size=40,
    )
)
def test_given_whatever_was_compared_when_more_comes_then_a_verdict_stays(found: list[ShadowedShard]) -> None:
    rules = RULES.model_copy(update={"most_shards": 32})
    before: ReleaseVerdict | None = None
    for count in range(len(found) + 1):
        verdict = judge(found[:count], rules, None)
        assert before is None or verdict == before
        before = verdict
    assert (before is not None) or len(found) < 32, "nothing stays open for ever"


def test_given_no_answers_when_judged_then_it_is_not_promoted() -> None:
    nothing = [ShadowedShard(10, 0, 0, None, None)] * 128
    verdict = judge(nothing, RULES, None)
    assert verdict is not None
    assert (verdict.promote, verdict.reasons[0]) == (False, "not shown to be as good")


def requests(count: int, *, seed: int = 0, ttft: float = 1.0, itl: float = 1.0) -> list[ShadowedShard]:
    """Groups of 16 requests, as of shards, with 30 % of noise in TTFT and 5 % in ITL."""
    draw = random.Random(seed)
    return [
        ShadowedShard(16, 0, 0, 1.0, None, math.log(ttft) + draw.gauss(0, 0.3), math.log(itl) + draw.gauss(0, 0.05))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("what", "reason"), [({"ttft": 2.5}, "time to the first token"), ({"itl": 1.35}, "time between tokens")]
)
def test_given_slower_requests_when_judged_then_it_is_rolled_back_for_that(what: dict[str, float], reason: str) -> None:
    verdict = judge(requests(128, **what), RULES, None)
    assert verdict is not None
    assert not verdict.promote
    assert verdict.reasons[0].startswith(reason)


def test_given_good_requests_with_noise_when_judged_then_it_is_promoted() -> None:
    outcomes = [outcome(judge(requests(128, seed=seed), RULES, None)) for seed in range(100)]
    assert outcomes.count("promoted") >= 98


def test_given_several_sequences_when_one_is_judged_then_less_error_is_left_for_it() -> None:
    alone, one_of_three = (judge(shards(128, agreement=0.72), RULES, None, sequences) for sequences in (1, 3))
    assert alone is not None
    assert one_of_three is not None
    assert alone.comparison.agreement is not None
    assert one_of_three.comparison.agreement is not None
    widths = [one.comparison.agreement.high - one.comparison.agreement.low for one in (alone, one_of_three)]
    assert alone.comparison.shards < one_of_three.comparison.shards or widths[0] < widths[1]
