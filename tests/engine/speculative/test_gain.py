"""The gain of speculation, against arithmetic by hand, and in an engine whose steps take a known time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SpeculationConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams, as_token_ids
from engine.speculative.base import Draft, DraftRequest
from engine.speculative.draft_lengths import AdaptiveLengths, FixedLengths
from engine.speculative.gain import Gain
from engine.speculative.trial_budget import SHARE, TrialBudget


def test_it_is_what_stayed_less_what_the_time_would_have_brought() -> None:
    gain = Gain()
    gain.record(4, 0, 0, 0.010)
    gain.record(4, 8, 6, 0.0125)  # a quarter more time would have brought one token more
    assert gain.tokens == pytest.approx(6 - 1)
    assert gain.seconds == 0.0125
    gain.record(4, 8, 0, 0.020)  # and twice the time four of them
    assert gain.tokens == pytest.approx(5 - 4)


def test_drafts_that_cost_more_than_they_yield_lose_tokens() -> None:
    gain = Gain()
    gain.record(16, 0, 0, 0.010)
    gain.record(16, 64, 3, 0.030)
    assert gain.tokens == pytest.approx(3 - 32)


def test_a_step_that_nothing_compares_with_is_left_out() -> None:
    gain = Gain()
    gain.record(4, 8, 6, 0.010)
    gain.record(4, 0, 0, 0.010)
    gain.record(64, 8, 6, 0.010)
    assert (gain.tokens, gain.seconds) == (0.0, 0.0)
    gain.record(4, 8, 6, 0.010)
    assert (gain.tokens, gain.seconds) == (6.0, 0.010)


class EveryOtherStepProposer:
    """Drafts three tokens in every other step; two of them are right."""

    def __init__(self, engine: Engine, answers: dict[str, list[int]]) -> None:
        self._rows = engine.scheduler.rows
        self._answers = answers
        self.num_calls = 0

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.num_calls += 1
        return [
            Draft(self._draft_tokens(request) if self.num_calls % 2 else as_token_ids([]), "oracle")
            for request in requests
        ]

    def learn(self, request: Request, token_ids: Any) -> None:
        pass

    def _draft_tokens(self, request: DraftRequest) -> Any:
        answer = self._answers[request.request.request_id]
        done = int(self._rows.num_known[request.row]) - len(request.request.prompt_token_ids)
        tokens = [*answer[done : done + 2], 0, 0, 0][:3]
        tokens[2] = (answer[done + 2] + 1) % 257 if done + 2 < len(answer) else 0
        return as_token_ids(tokens)[: request.max_drafts]


BASE, PER_TOKEN = 0.008, 0.001


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_models: Any) -> Any:
    """Makes an engine whose steps take `BASE` and `PER_TOKEN` for each token."""
    folder = tmp_path / "tiny"
    tiny_models.make_tiny_model("llama", folder)
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(
        "engine.runner.async_loop.time",
        SimpleNamespace(perf_counter=lambda: now.seconds, monotonic=lambda: now.seconds),
    )

    def timed(rows: int = 4) -> Engine:
        config = EngineConfig(
            dtype="float32", max_model_len=256, cache=CacheConfig(block_size=16, num_blocks=40 + 5 * rows),
            schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=128),
            speculation=SpeculationConfig("off"),
        )  # fmt: skip
        engine = Engine.load(folder, config)
        execute = engine._runner.execute

        def slow(plan: Any) -> Any:
            now.seconds += BASE + PER_TOKEN * plan.num_tokens
            return execute(plan)

        monkeypatch.setattr(engine._runner, "execute", slow)
        return engine

    return timed


def requests(count: int) -> Sequence[Request]:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    return [Request(str(i), as_token_ids(np.arange(5) * (i + 3) % 200 + 5), params) for i in range(count)]


def test_an_engine_reports_the_gain_of_its_drafts(timed: Any) -> None:
    answers = {done.request_id: done.choices[0].token_ids.tolist() for done in timed().run(requests(2))}
    engine = timed()
    engine.scheduler.speculate(EveryOtherStepProposer(engine, answers), FixedLengths(3))
    plans: list[Any] = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: plans.append(plan := schedule(now)) or plan  # type: ignore[method-assign]
    done = {one.request_id: one.choices[0].token_ids.tolist() for one in engine.run(requests(2))}
    assert done == answers
    stats = engine.stats().speculation
    # Both rows decode in step until the end, so what is compared is every step with drafts, behind the first without.
    plain = BASE + 2 * PER_TOKEN
    decoding = next(at for at, plan in enumerate(plans) if plan is not None and (plan.counts == 1).all())
    known = [plan for plan in plans[decoding:] if plan is not None and plan.drafts is not None]
    assert all(len(plan.rows) == 2 for plan in known)
    seconds = [BASE + PER_TOKEN * plan.num_tokens for plan in known]
    accepted = sum(min(2, int(count)) for plan in known for count in plan.drafts)
    assert len(known) >= 5
    assert stats.compared_seconds == pytest.approx(sum(seconds))
    assert stats.gained == pytest.approx(accepted - sum(2 * (took - plain) / plain for took in seconds))
    assert stats.gained_per_second == pytest.approx(stats.gained / stats.compared_seconds)
    assert stats.gained > 0


def test_without_drafts_no_gain_is_reported(timed: Any) -> None:
    engine = timed()
    list(engine.run(requests(2)))
    assert engine.stats().speculation.gained_per_second is None


class AllWrongProposer(EveryOtherStepProposer):
    """Drafts tokens of which none is right."""

    def _draft_tokens(self, request: DraftRequest) -> Any:
        answer = self._answers[request.request.request_id]
        done = int(self._rows.num_known[request.row]) - len(request.request.prompt_token_ids)
        return as_token_ids([(token + 1) % 257 for token in answer[done : done + 3]])[: request.max_drafts]


def drafted_by_budget(engine: Engine, proposer: Any, count: int) -> Any:
    """The speculation of a job of so many requests, as `auto` has it with this proposer."""
    engine.scheduler.speculate(proposer, AdaptiveLengths(engine.max_num_seqs, 8), TrialBudget())
    assert sum(1 for _ in engine.run(requests(count))) == count
    return engine.stats().speculation


def test_given_a_small_job_then_nothing_is_drafted_that_could_not_pay_before_its_end(timed: Any) -> None:
    answers = {done.request_id: done.choices[0].token_ids.tolist() for done in timed(16).run(requests(13))}
    engine = timed(16)
    assert drafted_by_budget(engine, EveryOtherStepProposer(engine, answers), 13).drafted == 0


@pytest.mark.slow
def test_given_a_large_job_that_copies_then_drafts_begin_and_gain(timed: Any) -> None:
    answers = {done.request_id: done.choices[0].token_ids.tolist() for done in timed(2).run(requests(40))}
    engine = timed(2)
    stats = drafted_by_budget(engine, EveryOtherStepProposer(engine, answers), 40)
    assert stats.accepted > 200
    assert stats.gained > 100


@pytest.mark.slow
def test_given_a_large_job_whose_drafts_are_all_wrong_then_they_lose_no_more_than_their_share(timed: Any) -> None:
    answers = {done.request_id: done.choices[0].token_ids.tolist() for done in timed(2).run(requests(40))}
    engine = timed(2)
    stats = drafted_by_budget(engine, AllWrongProposer(engine, answers), 40)
    generated = engine.stats().generated
    assert stats.drafted > 0
    # One step may pass the budget, by all that it drafted.
    assert -stats.gained <= SHARE * generated + 2 * 8
