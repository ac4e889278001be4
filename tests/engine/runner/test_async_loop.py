"""Steps that are planned while the last one computes: the same tokens as one after the other, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from engine import (
    CacheConfig,
    Engine,
    EngineConfig,
    FinishReason,
    Request,
    SamplingParams,
    ScheduleConfig,
    as_token_ids,
)
from engine.config import SpeculationConfig
from engine.errors import EngineError
from engine.runner.runner import SubmittedStep

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def load(path: Path, ahead: bool, *, rows: int = 4, tokens: int = 24, blocks: int = 80, **changes: Any) -> Engine:
    return Engine.load(
        path,
        EngineConfig(
            dtype="float32", threads=1, max_model_len=96, async_scheduling=ahead,
            cache=CacheConfig(block_size=4, num_blocks=blocks),
            schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=tokens), **changes,
        ),
    )  # fmt: skip


def prompt(at: int, length: int, shared: int = 0) -> np.ndarray:
    rng = np.random.default_rng(at)
    return as_token_ids([*range(5, 5 + shared), *rng.integers(3, 257, length).tolist()])


class StopAtDivisible:
    """Ends a choice at the first token that some number divides: a stop string, to the engine."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor

    def push(self, token_id: int) -> bool:
        return token_id % self._divisor == 0


@dataclass
class OddTokens:
    """A mask that allows every other token, by the last one."""

    last: int = 0

    def fill(self, words: Any) -> None:
        words[:] = 0x55555555 if self.last % 2 else -0x55555556

    def advance(self, token_id: int) -> None:
        self.last = token_id


PARAMS = [
    SamplingParams(max_tokens=14, temperature=0.0),
    SamplingParams(max_tokens=11, temperature=0.9, seed=5, n=3),
    SamplingParams(max_tokens=9, temperature=1.4, top_p=0.7, seed=6),
    SamplingParams(max_tokens=12, temperature=1.0, top_k=9, min_p=0.05, seed=7, stop_token_ids=(3, 30, 77, 130, 200)),
    SamplingParams(max_tokens=10, temperature=0.0, min_tokens=6, logit_bias={9: 2.0, 2: 5.0}),
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=10, repetition_penalty=1.4, frequency_penalty=0.3, seed=8),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
]


def plain_work() -> Iterator[Request]:
    """Requests of which the host needs no result before it plans the next step."""
    for i in range(15):
        yield Request(
            str(i), prompt(i, 3 + 5 * i % 23, shared=9 if i % 3 else 0), PARAMS[i % 5], priority=i % 2,
            watcher=(lambda choice: StopAtDivisible(7)) if i % 4 == 1 else None, expected_tokens=1,
        )  # fmt: skip


def workload() -> Iterator[Request]:
    for i in range(18):
        params = PARAMS[i % len(PARAMS)]
        yield Request(
            str(i), prompt(i, 3 + 5 * i % 23, shared=9 if i % 3 else 0), params, priority=i % 2,
            watcher=(lambda choice: StopAtDivisible(7)) if i % 4 == 1 else None,
            mask=(lambda choice: OddTokens()) if i == 9 else None,
        )  # fmt: skip


class ApproximateFloat(float):
    """A log-probability, which differs in its last digits by the shape of the batch that it was computed in."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-4

    def __ne__(self, other: object) -> bool:
        return not self == other


def approximate(values: Any) -> list[ApproximateFloat] | None:
    return None if values is None else [ApproximateFloat(value) for value in values]


def visible(done: Any) -> list[Any]:
    """All that a caller gets of a completion but its times and what depends on the order of steps."""
    choices = [
        (
            choice.token_ids.tolist(), choice.finish_reason, choice.stop_token_id,
            approximate(choice.logprobs and choice.logprobs.chosen),
        )
        for choice in done.choices
    ]  # fmt: skip
    scores = None if done.prompt_logprobs is None else np.nan_to_num(done.prompt_logprobs.chosen)  # the first has none
    return [done.request_id, choices, done.error, approximate(scores)]


def answers(engine: Engine, requests: list[Request]) -> list[Any]:
    return sorted(visible(done) for done in engine.run(requests))


def check_idle(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
    assert not engine.has_work


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("blocks", [pytest.param(200, marks=pytest.mark.exhaustive), 30])
def test_a_step_ahead_gives_the_same_answers(family: str, blocks: int, tiny_model: TinyModel) -> None:
    """Stops of all kinds, prefixes, windows, choices, scores, masks and penalties; in a pool that preempts as well."""
    path = tiny_model(family)
    for work in (plain_work, workload):
        want = answers(load(path, False, rows=6), list(work()))
        for rows in (8, 3):
            engine = load(path, True, rows=rows, blocks=blocks)
            assert answers(engine, list(work())) == want
            check_idle(engine)
            stats = engine.stats()
            assert stats.steps_ahead > 0
            if work is plain_work:
                assert stats.steps_not_ahead == 0
                assert (stats.preemptions > 0) == (blocks < 200 and rows == 8)


def test_rows_whose_results_are_not_needed_are_never_waited_for(llama: Path) -> None:
    requests = [Request(str(i), prompt(i, 6), PARAMS[i % 4]) for i in range(8)]
    engine = load(llama, True)
    want = answers(load(llama, False), requests)
    assert answers(engine, requests) == want
    stats = engine.stats()
    assert stats.steps_not_ahead == 0
    assert stats.steps_ahead >= stats.steps - 2


@pytest.mark.parametrize("params", [PARAMS[5], PARAMS[6]], ids=["logprobs", "penalties"])
def test_a_row_that_the_host_must_see_makes_its_steps_wait(params: SamplingParams, llama: Path) -> None:
    engine = load(llama, True)
    assert len(list(engine.run([Request("a", prompt(1, 6), params)]))) == 1
    assert engine.stats().steps_ahead == 0
    assert engine.stats().steps_not_ahead == engine.stats().steps


def test_the_device_never_waits_for_the_host(llama: Path) -> None:
    """When a step's results are requested, the next step has been submitted."""
    engine, log = load(llama, True), list[str]()
    runner = engine._runner
    submit, result = runner.submit, runner.result  # type: ignore[attr-defined]

    def recording_submit(plan: Any) -> SubmittedStep:
        log.append("submit")
        return submit(plan)  # type: ignore[no-any-return]

    def recording_result(step: SubmittedStep) -> Any:
        log.append("result")
        return result(step)

    runner.submit, runner.result = recording_submit, recording_result  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    list(engine.run([Request("a", prompt(1, 6), params), Request("b", prompt(2, 9), params)]))
    assert log[:2] == ["submit", "submit"]
    assert log[1:-1] == ["submit", "result"] * (len(log) // 2 - 1)
    assert log.count("submit") == 9  # whose last token is known to be the last is not gone on from


def test_cancelled_while_a_step_is_under_way(llama: Path) -> None:
    """Its row goes to another sequence at once, which the late results must not reach."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    want = dict(
        visible(done)[:2]
        for done in load(llama, False).run(Request(n, prompt(i, 8), params) for i, n in enumerate("abcd"))
    )
    engine = load(llama, True, rows=2)
    for i, name in enumerate("abcd"):
        engine.add(Request(name, prompt(i, 8), params))
    done = []
    for _ in range(5):
        done += engine.step()
    assert engine.cancel("a")
    while engine.has_work:
        done += engine.step()
        engine.scheduler.check_integrity()
    got = {each.request_id: each for each in done}
    assert got["a"].choices[0].finish_reason is FinishReason.CANCELLED
    assert got["a"].choices[0].token_ids.tolist() == want["a"][0][0][: len(got["a"].choices[0].token_ids)]
    assert [visible(got[name])[1] for name in "bcd"] == [want[name] for name in "bcd"]
    check_idle(engine)


def test_all_are_cancelled_while_a_step_is_under_way(llama: Path) -> None:
    engine = load(llama, True)
    engine.add(Request("a", prompt(1, 8), SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    done = []
    while engine.has_work:
        done += engine.step()
    assert [each.request_id for each in done] == ["a"]
    check_idle(engine)
    again = answers(engine, [Request("a", prompt(1, 8), PARAMS[0])])
    assert again == answers(load(llama, False), [Request("a", prompt(1, 8), PARAMS[0])])


def test_a_pooled_prompt_that_is_cancelled_half_way_changes_no_other_request(llama: Path) -> None:
    """Its row stays empty, and what the runner stores of it must not touch the tokens that the others go on from."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    requests = [Request(name, prompt(i, 5), params) for i, name in enumerate("ab")]
    want = answers(load(llama, False), requests)
    engine = load(llama, True, rows=4, tokens=12)
    for request in requests:
        engine.add(request)
    engine.add(Request("pooled", prompt(9, 80), SamplingParams(max_tokens=0), pooling="mean"))
    done = []
    for _ in range(4):
        done += engine.step()
    assert engine.cancel("pooled")
    while engine.has_work:
        done += engine.step()
    assert sorted(visible(each) for each in done if each.request_id != "pooled") == want
    assert engine.stats().steps_ahead > 10
    check_idle(engine)


def test_no_block_is_published_under_an_unknown_token(llama: Path) -> None:
    """Blocks filled by a token that is still being computed are published later, under the right digest."""
    engine = load(llama, True)
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    (want,) = load(llama, False).run([Request("a", prompt(1, 7), params)])
    whole = [*prompt(1, 7).tolist(), *want.choices[0].token_ids.tolist()]
    engine.add(Request("a", prompt(1, 7), params))
    while engine.has_work:
        engine.step()
        for _, node in engine.scheduler._cache.pools[0].named():
            names, at = list[bytes](), node
            while at.parent is not None:
                names, at = [at.token_bytes, *names], at.parent
            tokens = np.frombuffer(b"".join(names), dtype=np.int32).tolist()
            assert tokens == whole[: len(tokens)]
    (again,) = engine.run([Request("b", as_token_ids(whole), PARAMS[0])])
    assert again.cached_tokens == 24  # all whole blocks of what was computed: 27 tokens


def test_a_row_without_finite_logits_fails_alone(llama: Path) -> None:
    """The next step, submitted by then, computes the row with an invalid token."""
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, seed=3, ignore_eos=True)
    requests = [Request(str(i), prompt(i, 6), params) for i in range(3)]
    answers_by_mode = []
    for ahead in (False, True):
        engine, calls = load(llama, ahead, attention="reference"), 0
        model = engine._runner._model  # type: ignore[attr-defined]
        logits = model.logits

        def poisoned(hidden: torch.Tensor, logits: Any = logits) -> Any:
            nonlocal calls
            calls += 1
            values = logits(hidden)
            if calls == 5:
                values[1, 7] = float("nan")
            return values

        model.logits = poisoned
        answers_by_mode.append(answers(engine, requests))
        check_idle(engine)
    assert answers_by_mode[0] == answers_by_mode[1]
    assert [error for *_, error, _ in answers_by_mode[1]] == [None, "non-finite values at or before position 9", None]


def test_steps_with_drafts_wait(llama: Path) -> None:
    requests = [Request(str(i), as_token_ids([*range(5, 15)] * 3), PARAMS[0]) for i in range(3)]
    engine = load(llama, True, speculation=SpeculationConfig("ngram"))
    assert answers(engine, requests) == answers(load(llama, False), requests)
    assert engine.stats().steps_ahead == 0


@pytest.mark.parametrize("at", ["submit", "result"])
def test_a_step_that_fails_takes_its_own_rows_alone(at: str, llama: Path) -> None:
    """Rows that ended with the step before it have their answers; the engine goes on."""
    engine = load(llama, True, rows=2)
    runner, calls = engine._runner, 0
    inner = getattr(runner, at)

    def fails(argument: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("device lost")
        return inner(argument)

    setattr(runner, at, fails)
    long, short = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (30, 5))
    engine.add(Request("long", prompt(1, 5), long))
    engine.add(Request("short", prompt(2, 5), short))
    engine.add(Request("later", prompt(3, 5), short))
    done, errors = {}, []
    while engine.has_work:
        try:
            for each in engine.step():
                done[each.request_id] = each
        except EngineError as error:
            errors.append(str(error))
    assert errors == ["the step failed: RuntimeError: device lost"]
    assert done["long"].choices[0].finish_reason is FinishReason.ERROR
    assert done["short"].choices[0].finish_reason is FinishReason.LENGTH
    assert set(done) == {"long", "short", "later"}
    check_idle(engine)


class LimitedMemoryRunner:
    """A runner on a device that has no room for more than so many tokens at once."""

    def __init__(self, inner: Any, room: int) -> None:
        self._inner, self.room, self.failed = inner, room, 0

    def _check(self, plan: Any) -> None:
        if plan.num_tokens > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def execute(self, plan: Any) -> Any:
        self._check(plan)
        return self._inner.execute(plan)

    def submit(self, plan: Any) -> SubmittedStep:
        self._check(plan)
        return self._inner.submit(plan)  # type: ignore[no-any-return]

    def result(self, step: SubmittedStep) -> Any:
        return self._inner.result(step)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("room", [13, 3, 1])
def test_a_step_without_room_costs_no_row(room: int, ahead: bool, llama: Path) -> None:
    requests = list(workload())
    want = answers(load(llama, False), requests)
    engine = load(llama, ahead)
    engine._runner = cramped = LimitedMemoryRunner(engine._runner, room)
    assert answers(engine, requests) == want
    check_idle(engine)
    stats = engine.stats()
    assert stats.steps_out_of_memory == cramped.failed > 0
    assert engine.scheduler.step_tokens <= room


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_fits_no_step_fails_with_the_reason(ahead: bool, llama: Path) -> None:
    engine = load(llama, ahead)
    engine._runner = LimitedMemoryRunner(engine._runner, 0)
    engine.add(Request("a", prompt(1, 8), PARAMS[0]))
    errors, done = [], []
    while engine.has_work:
        try:
            done += engine.step()
        except EngineError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert errors[0].startswith("the device has no room for a step of one token; give the cache less memory")
    assert [each.error for each in done] == errors
    check_idle(engine)


@pytest.mark.slow
@seed(1)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(data=st.data())
def test_any_work_at_all(data: st.DataObject, llama: Path) -> None:
    """Random requests, pools, budgets and cancellations: the answers are those of one step after the other."""
    count = data.draw(st.integers(1, 9))
    requests = [
        Request(
            str(i), prompt(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 30)), data.draw(st.integers(0, 12))),
            PARAMS[data.draw(st.integers(0, len(PARAMS) - 1))], priority=data.draw(st.integers(0, 2)),
            watcher=(lambda choice: StopAtDivisible(5)) if data.draw(st.booleans()) else None,
        )
        for i in range(count)
    ]  # fmt: skip
    want = {name: rest for name, *rest in answers(load(llama, False, rows=8), requests)}
    engine = load(
        llama, True, rows=data.draw(st.integers(1, 6)), tokens=data.draw(st.integers(2, 40)),
        blocks=data.draw(st.integers(24, 60)),
    )  # fmt: skip
    room = data.draw(st.sampled_from([1000, 1000, 7]))
    engine._runner = LimitedMemoryRunner(engine._runner, room)
    cancelled = {str(i) for i in range(count) if data.draw(st.integers(0, 5)) == 0}
    at = data.draw(st.integers(1, 20))
    for request in requests:
        engine.add(request)
    done, steps = {}, 0
    while engine.has_work:
        steps += 1
        assert steps < 2000, "nothing moves"
        if steps == at:
            cancelled = {name for name in cancelled if engine.cancel(name)}
        for each in engine.step():
            done[each.request_id] = each
        engine.scheduler.check_integrity()
    assert set(done) == set(want)
    for name, each in done.items():
        if steps < at or name not in cancelled:
            assert visible(each)[1:] == want[name]
        else:
            for choice, due in zip(each.choices, want[name][0], strict=True):
                assert choice.token_ids.tolist() == due[0][: len(choice.token_ids)]
    check_idle(engine)
