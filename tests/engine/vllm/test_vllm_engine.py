"""vLLM behind the engine's interface, beside this project's engine on the same weights (real vLLM, its CPU build)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.errors import EngineError, EngineLost, RequestRefused
from engine.request import Completion, FinishReason, PartialChoice
from engine.step_engine import StepEngine
from engine.vllm.engine import VLLMEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=512,
    cache=CacheConfig(num_blocks=256),
    schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=256),
)


@pytest.fixture(scope="module")
def folder(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tiny_models.make_tiny_model("llama", tmp_path_factory.mktemp("vllm"), hidden_size=64, head_dim=32)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine.load(folder, CONFIG)
    yield engine
    engine.close()


@pytest.fixture
def vllm(loaded: VLLMEngine) -> VLLMEngine:
    while loaded.has_work:
        loaded.step()
    return loaded


def prompt(seed: int, length: int = 20) -> Any:
    return as_token_ids(np.random.default_rng(seed).integers(3, 257, length).tolist())


def ask(name: str, ids: Any, max_tokens: int = 16, priority: int = 2, salt: bytes = b"", **params: Any) -> Request:
    settings = {"temperature": 0.0, "ignore_eos": True} | params
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, **settings), priority=priority, salt=salt)


def complete(engine: StepEngine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done.update((completion.request_id, completion) for completion in engine.step())
    return done


def tokens(completion: Completion, choice: int = 0) -> list[int]:
    return completion.choices[choice].token_ids.tolist()


def test_greedy_answers_and_log_probabilities_are_those_of_our_engine(vllm: VLLMEngine, folder: Path) -> None:
    requests = [ask(str(n), prompt(n), 24, logprobs=5, prompt_logprobs=2) for n in range(8)]
    ours, theirs = complete(Engine.load(folder, CONFIG), *requests), complete(vllm, *requests)
    equal = 0
    for request in requests:
        mine, other = ours[request.request_id], theirs[request.request_id]
        first, second = tokens(mine), tokens(other)
        differs = next(
            (at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first)
        )
        equal += differs == len(first)
        logprobs, others = mine.choices[0].logprobs, other.choices[0].logprobs
        assert logprobs is not None
        assert others is not None
        if differs < len(first):
            assert first[differs] in others.top_ids[differs]
            assert second[differs] in logprobs.top_ids[differs]
        np.testing.assert_allclose(others.chosen[:differs], logprobs.chosen[:differs], atol=2e-3)
        np.testing.assert_allclose(others.top[:differs], logprobs.top[:differs], atol=2e-3)
        assert mine.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert other.prompt_logprobs.top.shape == (20, 2)
        np.testing.assert_allclose(other.prompt_logprobs.chosen[1:], mine.prompt_logprobs.chosen[1:], atol=2e-3)
        assert np.isnan(other.prompt_logprobs.chosen[0])
    assert equal >= 7


def test_a_prompt_is_scored_without_an_answer(vllm: VLLMEngine, folder: Path) -> None:
    request = ask("score", prompt(1), 0, prompt_logprobs=0)
    mine, other = complete(Engine.load(folder, CONFIG), request)["score"], complete(vllm, request)["score"]
    assert (other.generated_tokens, tokens(other), other.choices[0].finish_reason) == (0, [], FinishReason.LENGTH)
    assert mine.prompt_logprobs is not None
    assert other.prompt_logprobs is not None
    np.testing.assert_allclose(other.prompt_logprobs.chosen[1:], mine.prompt_logprobs.chosen[1:], atol=2e-3)


def test_the_lane_starts_while_bulk_rows_fill_the_batch(vllm: VLLMEngine) -> None:
    bulk = [ask(f"bulk {n}", prompt(n), 200) for n in range(8)]
    for request in bulk:
        vllm.add(request)
    while not all(vllm.partial(request) for request in bulk[:4]):
        vllm.step()
    urgent = ask("urgent", prompt(99), 5, priority=0)
    vllm.add(urgent)
    ended = [completion.request_id for _ in range(2) for completion in vllm.step()]
    assert vllm.partial(urgent), "its first token came with the next steps"
    while "urgent" not in ended:
        ended += [completion.request_id for completion in vllm.step()]
    assert ended == ["urgent"], "no bulk row had to end"
    assert vllm.num_waiting == 4, "and no further one was begun"
    for request in bulk:
        assert vllm.cancel(request.request_id)
    assert {completion.request_id for completion in vllm.step()} == {request.request_id for request in bulk}
    assert not vllm.has_work


def test_a_request_of_a_higher_tier_gets_the_row_of_one_of_a_lower_tier(vllm: VLLMEngine) -> None:
    bulk = [ask(f"bulk {n}", prompt(n), 60) for n in range(4)]
    alone = complete(vllm, *bulk)
    for request in bulk:
        vllm.add(request)
    while not all(vllm.partial(request) for request in bulk):
        vllm.step()
    standard = ask("standard", prompt(99), 5, priority=1)
    vllm.add(standard)
    before = vllm.stats().preemptions
    assert not [completion for _ in range(3) for completion in vllm.step()]
    assert vllm.partial(standard), "it did not wait for a bulk row's end"
    assert vllm.stats().preemptions == before + 1
    done = complete(vllm)
    for request in bulk:
        assert tokens(done[request.request_id]) == tokens(alone[request.request_id])


class EndsAtThird:
    """A watcher that ends its choice at the third token that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def push(self, token_id: int) -> bool:
        self.seen += 1
        return self.seen == 3


def test_a_watcher_may_end_a_resumed_choice_at_once(vllm: VLLMEngine) -> None:
    request = ask("a", prompt(1), 12, logprobs=1)
    whole = complete(vllm, request)["a"].choices[0]
    assert whole.logprobs is not None
    known = PartialChoice(0, whole.token_ids[:5], whole.logprobs[:5])
    vllm.add(replace(request, partial=(known,), watcher=lambda choice: EndsAtThird()))
    (ended,) = vllm.step()
    assert ended.choices[0].finish_reason is FinishReason.STOP
    assert tokens(ended) == whole.token_ids[:3].tolist()
    assert ended.choices[0].logprobs is not None
    assert len(ended.choices[0].logprobs.chosen) == 3
    assert not vllm.has_work


def test_prefixes_are_cached_by_owner(vllm: VLLMEngine) -> None:
    ids = prompt(5, 300)
    first = complete(vllm, ask("a", ids, 2, salt=b"tenant one"))["a"]
    same = complete(vllm, ask("b", ids, 2, salt=b"tenant one"))["b"]
    other = complete(vllm, ask("c", ids, 2, salt=b"tenant two"))["c"]
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert same.cached_tokens >= 256
    assert vllm.stats().cached >= 256


def test_draws_follow_from_the_seed_also_behind_long_prompts(vllm: VLLMEngine) -> None:
    """Together they are longer than a step's budget: chunked, they would fail on a CPU."""
    requests = [ask(f"{name} {n}", prompt(n, 200), 12, temperature=1.0, seed=7, n=2) for name in "ab" for n in range(4)]
    done = complete(vllm, *requests)
    assert all(tokens(done[f"a {n}"], choice) == tokens(done[f"b {n}"], choice) for n in range(4) for choice in (0, 1))
    assert tokens(done["a 0"], 0) != tokens(done["a 0"], 1)


def test_sampling_settings_are_passed_on(vllm: VLLMEngine) -> None:
    ids = prompt(3)
    free = tokens(complete(vllm, ask("free", ids))["free"])
    forced = complete(vllm, ask("forced", ids, logit_bias={11: 100.0}))["forced"]
    assert set(tokens(forced)) == {11}
    stopped = complete(vllm, ask("stopped", ids, stop_token_ids=(free[0],), min_tokens=6))["stopped"]
    assert stopped.generated_tokens >= 6
    assert free[0] not in tokens(stopped)[:6]
    penalized = tokens(complete(vllm, ask("new", ids, 16, frequency_penalty=2.0, presence_penalty=2.0))["new"])
    repeated = tokens(complete(vllm, ask("rep", ids, 16, repetition_penalty=8.0))["rep"])
    assert len(set(penalized)) == 16 or len(set(penalized)) > len(set(free))
    assert len(set(repeated)) > len(set(free)) or len(set(free)) == 16
    nucleus = tokens(complete(vllm, ask("k", ids, 8, temperature=1.5, top_k=1))["k"])
    assert nucleus == free[:8]
    words = ((5, 5), (6, 6), (7, 5), (5, 6, 7))
    few = tokens(complete(vllm, ask("few", ids, 24, allowed_token_ids=(5, 6, 7), bad_words=words))["few"])
    assert set(few) <= {5, 6, 7}
    assert not any(tuple(few[at : at + len(word)]) == word for word in words for at in range(len(few)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda: ask("a", prompt(1), logit_bias={5: 200.0}), "logit_bias"),
        (lambda: ask("a", prompt(1), temperature=5.0), "temperature"),
        (lambda: replace(ask("a", prompt(1)), mask=lambda choice: None), "mask"),  # type: ignore[arg-type, return-value]
        (lambda: replace(ask("a", prompt(1), 0), pooling="mean"), "does not pool"),
    ],
)
def test_what_vllm_does_not_compute_is_refused_by_name(vllm: VLLMEngine, changed: Any, says: str) -> None:
    with pytest.raises(RequestRefused, match=says):
        vllm.add(changed())
    assert not vllm.has_work


def test_rows_with_penalties_of_their_answer_start_again(vllm: VLLMEngine) -> None:
    assert vllm.resumes(ask("a", prompt(1)))
    penalized = ask("a", prompt(1), frequency_penalty=0.5)
    assert not vllm.resumes(penalized)


def test_a_failed_step_ends_its_rows_and_the_engine_goes_on(vllm: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(f"{n}", prompt(n), 30) for n in range(6)]
    for request in requests:
        vllm.add(request)
    for _ in range(3):
        vllm.step()
    runner = vllm._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as broken:
        broken.setattr(runner.model, "forward", lambda *args, **kwargs: 1 // 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            vllm.step()
    failed = vllm.take_ended()
    assert len(failed) == 4
    assert all(completion.choices[0].finish_reason is FinishReason.ERROR for completion in failed)
    assert all("ZeroDivisionError" in str(completion.error) for completion in failed)
    expected = complete(vllm, ask("same", prompt(0), 30))["same"]
    done = complete(vllm, ask("again", prompt(0), 30))
    assert tokens(done["again"]) == tokens(expected)
    assert tokens(failed[0]) == tokens(expected)[: len(tokens(failed[0]))]


def test_a_deadline_of_an_ended_request_leaves_a_later_one_of_its_name_alone(vllm: VLLMEngine) -> None:
    soon = replace(ask("again", prompt(1), 4), deadline=vllm.clock() + 0.3)
    assert complete(vllm, soon)["again"].choices[0].finish_reason is FinishReason.LENGTH
    vllm.add(ask("again", prompt(1), 400))
    ended = []
    until = vllm.clock() + 0.6
    while vllm.clock() < until and vllm.has_work:
        ended += vllm.step()
    assert not [completion for completion in ended if completion.choices[0].finish_reason is FinishReason.TIMEOUT]
    assert len(ended) + vllm.num_running + vllm.num_waiting == 1


def test_a_dead_engine_is_lost(vllm: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - only where it is installed

    def die() -> None:
        raise EngineDeadError

    vllm.add(ask("a", prompt(1)))
    with monkeypatch.context() as broken:
        broken.setattr(vllm._llm, "step", die)
        with pytest.raises(EngineLost):
            vllm.step()


def test_metrics_count_steps_tokens_and_times(vllm: VLLMEngine) -> None:
    before, classes = vllm.stats(), vllm.classes()
    complete(vllm, ask("a", prompt(70), 10, priority=0), ask("b", prompt(71), 10))
    after = vllm.stats()
    assert after.generated - before.generated == 20
    assert after.prompt - before.prompt == 40
    assert after.step_rows - before.step_rows == 20
    assert after.steps > before.steps
    assert after.total_blocks >= after.free_blocks > 0
    for at in (0, 2):
        found, then = vllm.classes()[at], classes[at]
        assert sum(found.first_token.counts) - sum(then.first_token.counts) == 1
        assert sum(found.between_tokens.counts) - sum(then.between_tokens.counts) == 9
        assert sum(found.whole.counts) - sum(then.whole.counts) == 1
