"""The contract of `StepEngine`: what a worker's loop relies on, whichever engine computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.embedding.embedder import Embedder
from engine.embedding.engine import EncoderEngine
from engine.errors import ContextLengthExceeded, RequestRefused
from engine.groups import GroupEngine
from engine.models.encoders.head import EmbeddingHead
from engine.models.encoders.settings import EmbeddingSettings
from engine.models.load import describe_model
from engine.request import Completion, FinishReason
from engine.step_engine import StepEngine
from engine.vllm.engine import VLLMEngine

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=128,
    cache=CacheConfig(block_size=16, num_blocks=64),
    schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64),
)
VOCABULARY = 257
"""Tokens of the tiny models."""

Make = Callable[[], StepEngine]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def vllm(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One engine for all tests: it takes half a minute to start."""
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
    folder = tiny_models.make_tiny_model("llama", tmp_path_factory.mktemp("vllm"), hidden_size=64, head_dim=32)
    engine = VLLMEngine.load(folder, replace(CONFIG, cache=CacheConfig(num_blocks=64)))
    yield engine
    engine.close()


@pytest.fixture(
    params=["engine", "null", "embedder over an engine", "groups", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def make(request: pytest.FixtureRequest, model: Path) -> Make:
    """Makes engines that generate."""
    if request.param == "vllm":
        engine = request.getfixturevalue("vllm")

        def drained() -> VLLMEngine:
            while engine.has_work:
                engine.step()
            return engine

        return drained

    def null() -> Engine:
        return Engine.without_model(describe_model(model).spec, CONFIG, 64)

    def embedder() -> Embedder:
        return Embedder(Engine.load(model, CONFIG), EmbeddingHead(EmbeddingSettings("last")))

    made: dict[str, Make] = {
        "engine": lambda: Engine.load(model, CONFIG), "null": null, "embedder over an engine": embedder,
        "groups": lambda: GroupEngine(Engine.load(model, CONFIG)),
    }  # fmt: skip
    return made[request.param]


@pytest.fixture(params=["an encoder", "a decoder"])
def make_pooling(request: pytest.FixtureRequest, model: Path, embedding_model: Path) -> Make:
    """Makes engines that pool."""
    head = EmbeddingHead(EmbeddingSettings("mean"))
    if request.param == "an encoder":
        return lambda: Embedder(GroupEngine(EncoderEngine.load(embedding_model, CONFIG)), head)
    return lambda: Embedder(GroupEngine(Engine.load(model, CONFIG)), head)


def ask(name: str, max_tokens: int = 12, *, first: int = 3, **more: Any) -> Request:
    """A greedy request that end tokens don't end."""
    params = {name: more.pop(name) for name in ("n", "temperature", "seed", "stop_token_ids") if name in more}
    prompt = as_token_ids([first + at % 50 for at in range(20)])
    return Request(
        name,
        prompt,
        SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | params),
        **more,
    )


def finish(engine: StepEngine) -> dict[str, Completion]:
    """Step until all work is done; each request ends once."""
    done: dict[str, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    return done


def complete(engine: StepEngine, requests: Iterable[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return finish(engine)


def tokens(completion: Completion, choice: int = 0) -> list[int]:
    return completion.choices[choice].token_ids.tolist()


@dataclass
class EndsAt:
    """A watcher that ends its choice at the third token."""

    seen: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return len(self.seen) == 3


def test_every_request_ends_once_with_its_tokens(make: Make) -> None:
    engine = make()
    assert not engine.has_work
    before = engine.stats().generated
    done = complete(engine, [ask(str(number), 5 + number) for number in range(9)])
    assert sorted(done) == [str(number) for number in range(9)]
    for number in range(9):
        completion = done[str(number)]
        assert completion.choices[0].finish_reason is FinishReason.LENGTH
        assert len(tokens(completion)) == completion.generated_tokens == 5 + number
        assert completion.prompt_tokens == 20
        assert completion.finished_at >= completion.started_at
    assert engine.stats().generated - before == sum(5 + number for number in range(9))


def test_drafts_can_be_turned_off_and_on_or_the_engine_says_that_they_cant(make: Make) -> None:
    engine = make()
    answers = [complete(engine, [ask("a")])["a"]]
    for enabled in (False, True):
        assert engine.set_drafting(enabled=enabled) is not isinstance(engine, VLLMEngine)
        answers.append(complete(engine, [ask("a")])["a"])
    assert tokens(answers[0]) == tokens(answers[1]) == tokens(answers[2])


def test_choices_of_a_request_come_together(make: Make) -> None:
    completion = complete(make(), [ask("a", n=3, temperature=1.0, seed=7)])["a"]
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.generated_tokens == 36
    assert all(len(tokens(completion, choice)) == 12 for choice in range(3))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (lambda: replace(ask("a"), prompt_token_ids=as_token_ids([])), RequestRefused),
        (lambda: replace(ask("a"), prompt_token_ids=as_token_ids([VOCABULARY])), RequestRefused),
        (lambda: ask("a", 120), ContextLengthExceeded),
        (lambda: ask("taken"), RequestRefused),
    ],
)
def test_what_can_not_be_computed_is_refused_and_the_others_go_on(
    make: Make, changed: Callable[[], Request], error: type[Exception]
) -> None:
    engine = make()
    engine.add(ask("taken"))
    with pytest.raises(error):
        engine.add(changed())
    assert sorted(finish(engine)) == ["taken"]


def test_a_stop_token_ends_the_choice_and_is_not_part_of_it(make: Make) -> None:
    engine = make()
    free = tokens(complete(engine, [ask("free")])["free"])
    completion = complete(engine, [ask("stopped", stop_token_ids=(free[4],))])["stopped"]
    at = free.index(free[4])
    assert tokens(completion) == free[:at]
    assert completion.choices[0].finish_reason is FinishReason.STOP
    assert completion.choices[0].stop_token_id == free[4]
    assert completion.generated_tokens == at + 1


def test_a_watcher_gets_each_token_and_ends_its_choice(make: Make) -> None:
    watchers = {choice: EndsAt() for choice in (0, 1)}
    completion = complete(make(), [ask("a", n=2, temperature=1.0, seed=3, watcher=watchers.__getitem__)])["a"]
    for choice, watcher in watchers.items():
        assert completion.choices[choice].finish_reason is FinishReason.STOP
        assert tokens(completion, choice) == watcher.seen


def test_cancelled_and_late_requests_end_once_with_their_reason(make: Make) -> None:
    engine = make()
    for name in ("running", "waiting", "kept"):
        engine.add(ask(name, 40))
    engine.add(ask("late", 40, deadline=engine.clock() - 1.0))
    assert engine.cancel("waiting")
    ended: list[Completion] = []
    while not engine.partial(ask("running", 40)):
        ended += engine.step()
    assert engine.cancel("running")
    assert not engine.cancel("nobody")
    ended += finish(engine).values()
    assert sorted((completion.request_id, completion.choices[0].finish_reason) for completion in ended) == [
        ("kept", FinishReason.LENGTH), ("late", FinishReason.TIMEOUT), ("running", FinishReason.CANCELLED),
        ("waiting", FinishReason.CANCELLED),
    ]  # fmt: skip
    # and an id is free again
    assert len(tokens(complete(engine, [ask("running", 4)])["running"])) == 4


def test_new_tokens_are_those_of_the_choices_that_grow(make: Make) -> None:
    """Given more choices than rows, when new tokens are asked for after each step, then those of the few choices that
    may have some are all."""
    engine = make()
    requests = {str(at): ask(str(at), 9, n=2, temperature=1.0, seed=at, first=3 + at) for at in range(7)}
    for request in requests.values():
        engine.add(request)
    given: dict[str, dict[int, int]] = {name: {} for name in requests}
    seen = 0
    while engine.has_work:
        for completion in engine.step():
            del requests[completion.request_id]
        growing = engine.growing()
        assert sum(map(len, growing.values())) <= CONFIG.schedule.max_num_seqs
        for name, request in requests.items():
            new = [one for one in engine.partial(request, given[name]) if one.finish_reason is None]
            found = engine.partial(request, given[name], growing.get(name, ()))
            assert [(one.index, one.token_ids.tolist()) for one in found if one.finish_reason is None] == [
                (one.index, one.token_ids.tolist()) for one in new
            ]
            given[name] |= {one.index: given[name].get(one.index, 0) + len(one.token_ids) for one in new}
            seen += len(new)
    assert seen > 50
    assert not engine.growing()


def test_of_several_choices_one_may_be_cancelled(make: Make) -> None:
    engine = make()
    request = ask("a", 30, n=2, temperature=1.0, seed=5)
    engine.add(request)
    while not engine.partial(request):
        engine.step()
    assert engine.cancel("a", 1)
    completion = finish(engine)["a"]
    assert [choice.finish_reason for choice in completion.choices] == [FinishReason.LENGTH, FinishReason.CANCELLED]


def test_urgent_requests_run_first(make: Make) -> None:
    engine = make()
    for number in range(12):
        engine.add(ask(f"bulk {number}", 20, first=3 + number))
    for _ in range(3):
        engine.step()
    engine.add(ask("urgent", 5, priority=0))
    order: list[str] = []
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]
    # Four rows run at once; all of them may end before the urgent one has its five tokens, and no further ones.
    assert order.index("urgent") <= 4


@pytest.mark.parametrize("steps", [2, 6, 11])
def test_a_request_goes_on_from_its_logged_tokens(make: Make, steps: int) -> None:
    requests = [ask("greedy", 12), ask("sampled", 12, n=2, temperature=0.9, seed=11)]
    whole = complete(make(), requests)
    engine = make()
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    logged = {request.request_id: engine.partial(request) for request in requests}
    again = complete(make(), [replace(request, partial=logged[request.request_id]) for request in requests])
    for request in requests:
        known = logged[request.request_id]
        assert known
        completion = again[request.request_id]
        for choice in range(request.params.n):
            found, expected = tokens(completion, choice), tokens(whole[request.request_id], choice)
            if isinstance(engine, VLLMEngine) and not request.params.greedy:
                logged_tokens = known[choice].token_ids.tolist()  # vLLM draws on with numbers of its own
                assert found[: len(logged_tokens)] == logged_tokens
                assert len(found) == len(expected)
            else:
                assert found == expected
        assert completion.resumed_tokens == sum(len(choice.token_ids) for choice in known)
        assert completion.generated_tokens == whole[request.request_id].generated_tokens


def test_only_new_tokens_are_logged(make: Make) -> None:
    engine = make()
    request = ask("a", 20)
    engine.add(request)
    pieces: list[np.ndarray[Any, Any]] = []
    taken = 0
    while engine.has_work:
        done = engine.step()
        for choice in engine.partial(request, {0: taken}) if not done else ():
            pieces.append(choice.token_ids)
            taken += len(choice.token_ids)
    assert len(pieces) > 5
    assert np.concatenate(pieces).tolist() == tokens(complete(make(), [request])["a"])[:taken]


def test_texts_are_pooled_each_by_itself(make_pooling: Make) -> None:
    engine = make_pooling()

    def texts(name: str, *given: list[int]) -> Request:
        params = SamplingParams(max_tokens=0, temperature=0.0)
        first, *more = (Request(name, as_token_ids(ids), params, pooling="mean") for ids in given)
        return replace(first, more=tuple(more))

    done = complete(engine, [texts("two", [5, 6, 7], [8, 9]), texts("one", [8, 9])])
    assert done["two"].embeddings is not None
    assert done["one"].embeddings is not None
    assert done["two"].embeddings.shape[0] == 2
    np.testing.assert_allclose(done["two"].embeddings[1], done["one"].embeddings[0], atol=1e-5)
    assert (done["two"].prompt_tokens, done["two"].generated_tokens) == (5, 0)
