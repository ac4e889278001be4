"""The encoder's engine from outside: order, failures, cancelling, deadlines, refusals; several texts in a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.config import EngineConfig, ScheduleConfig
from engine.embedding.embedder import Embedder
from engine.embedding.engine import EncoderEngine
from engine.embedding.waiting import WaitingPrompts
from engine.errors import ContextLengthExceeded, EngineError, RequestRefused
from engine.groups import GroupEngine
from engine.models.base import ModelSpec
from engine.models.encoders.head import EmbeddingHead
from engine.models.encoders.settings import EmbeddingSettings
from engine.request import Completion, FinishReason, Request, SamplingParams, as_token_ids

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=2, vocab_size=400,
    max_position=64, windows=(None,), eos_token_ids=(), num_parameters=0, dtype=torch.float32, generates=False,
)  # fmt: skip
POISON, BROKEN = 399, 398
SCORES = SamplingParams(max_tokens=0, temperature=0)


class SumModel:
    """A model whose vector is (sum of the ids, how many); a step with `POISON` fails, `BROKEN` gives no number."""

    spec = SPEC
    num_token_types = 2

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def pool(
        self, prompts: Sequence[NDArray[np.int32]], mode: str, skips: Sequence[int], types: Any
    ) -> NDArray[np.float32]:
        self.batches.append([len(prompt) for prompt in prompts])
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("the device said no")
        rows = [[np.nan if BROKEN in p else p[skip:].sum(), len(p)] for p, skip in zip(prompts, skips, strict=True)]
        return np.array(rows, dtype=np.float32)


class FakeClock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def make(tokens: int = 64, clock: Any = None) -> EncoderEngine:
    config = EngineConfig(schedule=ScheduleConfig(max_num_batched_tokens=tokens))
    return EncoderEngine(config, SumModel(), "mean", clock or FakeClock())


def make_request(name: str, ids: Sequence[int], **more: Any) -> Request:
    return Request(name, as_token_ids(ids), SCORES, pooling="mean", **more)


def finish(engine: Any) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.has_work:
        try:
            completions = engine.step()
        except EngineError:
            completions = engine.take_ended()
        for completion in completions:
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


def reason(completion: Completion) -> FinishReason:
    return completion.choices[0].finish_reason


# -- which go together


LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(16, 200), st.integers(1, 9))
def test_batches_hold_the_oldest_of_the_first_class_and_fit(
    given_: list[tuple[int, int]], tokens: int, most: int
) -> None:
    waiting = WaitingPrompts()
    for at, (length, priority) in enumerate(given_):
        waiting.add(Request(str(at), as_token_ids(range(length)), SCORES, priority=priority))
    left = {str(at): pair for at, pair in enumerate(given_)}
    while left:
        batch = waiting.take(tokens, most)
        names = [request.request_id for request in batch]
        first = min(priority for _, priority in left.values())
        oldest = min((name for name, (_, priority) in left.items() if priority == first), key=int)
        longest = max(len(request.prompt_token_ids) for request in batch)
        assert oldest in names
        assert {left[name][1] for name in names} == {first}
        assert len(names) == 1 or (longest * len(names) <= tokens and len(names) <= most)
        for name in names:
            del left[name]
    assert len(waiting) == 0
    assert waiting.take(tokens, most) == []


def test_texts_of_one_length_share_a_batch() -> None:
    engine = make(tokens=40)
    for at, length in enumerate([10, 3, 10, 3, 10, 3, 10]):
        engine.add(make_request(str(at), range(3, 3 + length)))
    finish(engine)
    assert engine._model.batches == [[10, 10, 10, 10], [3, 3, 3]]


def test_no_more_texts_share_a_batch_than_may() -> None:
    engine = make(tokens=400)
    engine.config = replace(engine.config, schedule=replace(engine.config.schedule, max_num_seqs=3))
    for at in range(7):
        engine.add(make_request(str(at), [5]))
    finish(engine)
    assert [len(batch) for batch in engine._model.batches] == [3, 3, 1]


# -- one text a request


def test_a_failed_step_fails_its_batch_and_no_other() -> None:
    engine = make(tokens=8)
    engine.add(make_request("bad", [POISON, 1, 2, 3]))
    engine.add(make_request("batch", [1, 2, 3, 4]))
    engine.add(make_request("later", [1, 2]))
    with pytest.raises(EngineError, match="the device said no"):
        engine.step()
    ended = {done.request_id: done for done in engine.take_ended()}
    assert {name: reason(done) for name, done in ended.items()} == dict.fromkeys(("bad", "batch"), FinishReason.ERROR)
    assert "RuntimeError: the device said no" in str(ended["bad"].error)
    assert finish(engine)["later"].pooled.tolist() == [3, 2]


def test_numbers_that_are_not_finite_fail_their_text_alone() -> None:
    engine = make()
    engine.add(make_request("bad", [BROKEN]))
    engine.add(make_request("good", [5]))
    done = finish(engine)
    assert (reason(done["bad"]), done["bad"].error) == (
        FinishReason.ERROR, "the model gave numbers that are not finite",
    )  # fmt: skip
    assert done["good"].pooled.tolist() == [5, 1]


def test_cancelled_and_late_requests_report_their_reason() -> None:
    clock = FakeClock()
    engine = make(clock=clock)
    engine.add(make_request("gone", [5]))
    engine.add(make_request("late", [5], deadline=6.0))
    engine.add(make_request("in time", [5], deadline=60.0))
    assert engine.cancel("gone")
    assert not engine.cancel("gone")
    clock.now = 7.0
    done = finish(engine)
    assert {name: reason(completion) for name, completion in done.items()} == {
        "gone": FinishReason.CANCELLED, "late": FinishReason.TIMEOUT, "in time": FinishReason.LENGTH,
    }  # fmt: skip
    assert done["in time"].started_at == 7.0


@pytest.mark.parametrize(
    ("request_", "named", "kind"),
    [
        (Request("a", as_token_ids([5]), SamplingParams()), "an encoder generates nothing", RequestRefused),
        (replace(make_request("a", [5]), pooling="last"), "it pools its hidden states .mean", RequestRefused),
        (make_request("a", []), "at least one token", RequestRefused),
        (make_request("a", [400]), "leaves the vocabulary of 400", RequestRefused),
        (make_request("a", [-1]), "leaves the vocabulary", RequestRefused),
        (make_request("a", [5] * 65), "65 tokens", ContextLengthExceeded),
        (make_request("a", [5], pooling_skip=1), "must leave in one", RequestRefused),
        (make_request("taken", [5]), "already running", RequestRefused),
    ],
)
def test_what_can_not_be_computed_is_refused(request_: Request, named: str, kind: type[Exception]) -> None:
    engine = make()
    engine.add(make_request("taken", [5]))
    with pytest.raises(kind, match=named):
        engine.add(request_)
    assert list(finish(engine)) == ["taken"]


# -- several texts a request


@pytest.fixture
def embedder() -> Embedder:
    return Embedder(GroupEngine(make(tokens=8)), EmbeddingHead(EmbeddingSettings("mean")))


def several(name: str, *texts: Sequence[int], **more: Any) -> Request:
    first, *rest = (make_request(name, list(text), **more) for text in texts)
    return replace(first, more=tuple(rest))


def test_a_request_ends_with_its_last_text(embedder: Embedder) -> None:
    embedder.add(several("two", [1, 2, 3, 4, 5, 6], [7]))
    embedder.add(several("one", [8, 9]))
    first = embedder.step()
    assert first == []
    done = finish(embedder)
    assert done["two"].embeddings.tolist() == [[21, 6], [7, 1]]
    assert (done["two"].prompt_tokens, done["two"].pooled, reason(done["two"])) == (7, None, FinishReason.LENGTH)
    assert done["one"].embeddings.tolist() == [[17, 2]]


def test_one_bad_text_fails_its_request_and_drops_the_others(embedder: Embedder) -> None:
    # Given a request whose first text fails while its others wait
    embedder.add(several("bad", [POISON] * 8, [1] * 8, [2] * 8))
    embedder.add(several("good", [3] * 8))
    with pytest.raises(EngineError):
        embedder.step()
    # then it ends at once, and what is left of it is not computed
    [bad] = embedder.take_ended()
    assert (bad.request_id, reason(bad), bad.embeddings) == ("bad", FinishReason.ERROR, None)
    assert "the device said no" in str(bad.error)
    assert embedder.num_waiting == 1
    assert finish(embedder)["good"].embeddings.tolist() == [[24, 8]]


def test_a_request_with_a_text_that_can_not_be_leaves_nothing_behind(embedder: Embedder) -> None:
    with pytest.raises(RequestRefused, match="vocabulary"):
        embedder.add(several("a", [1], [2], [400]))
    embedder.add(several("a", [3], [4]))
    done = finish(embedder)
    assert list(done) == ["a"]
    assert done["a"].embeddings.tolist() == [[3, 1], [4, 1]]


def test_cancelling_takes_all_texts(embedder: Embedder) -> None:
    embedder.add(several("a", [1] * 8, [2] * 8))
    embedder.step()
    assert embedder.cancel("a")
    assert not embedder.cancel("b")
    done = finish(embedder)
    assert [choice.finish_reason for choice in done["a"].choices] == [FinishReason.LENGTH, FinishReason.CANCELLED]
    assert done["a"].embeddings is None
    embedder.add(several("a", [5]))
    assert finish(embedder)["a"].embeddings.tolist() == [[5, 1]]


def test_vectors_are_cut_before_they_are_scaled() -> None:
    embedder = Embedder(GroupEngine(make()), EmbeddingHead(EmbeddingSettings("mean", normalize=True)))
    embedder.add(several("whole", [3, 1, 1, 1]))
    embedder.add(several("cut", [3, 1, 1, 1], dimensions=1))
    done = finish(embedder)
    np.testing.assert_allclose(done["whole"].embeddings, [[6 / 52**0.5, 4 / 52**0.5]], rtol=1e-6)
    np.testing.assert_allclose(done["cut"].embeddings, [[1.0]])
