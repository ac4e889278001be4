"""An EAGLE-3 head drafts as in its paper, from the states that it was trained on, and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine import (
    CacheConfig,
    Completion,
    Engine,
    Request,
    SamplingParams,
    ScheduleConfig,
    SpeculationConfig,
    as_token_ids,
)
from engine.models.eagle_checkpoint import describe_head
from engine.sampling.sampler import Sampler
from engine.speculative.base import Draft, DraftRequest, Proposer
from engine.speculative.draft_lengths import FixedLengths
from tests.engine.speculative.proposers import eagle_heads as heads
from tests.engine.test_speculation import SMALL, assert_same, load, repeating_prompts, requests_of, run

pytestmark = pytest.mark.slow

TinyModel = Callable[[str], Path]

LAYERS = [0, 1, 2]


def random_head(folder: Path, target: Path, *, seed: int = 0, draft_vocab: int = 150, **changes: Any) -> Path:
    config = heads.head_config(AutoConfig.from_pretrained(target), draft_vocab=draft_vocab, layers=LAYERS, **changes)
    return heads.save_head(folder, config, heads.random_weights(config, seed))


def with_head(path: Path, head: Path, longest: int = 4, **changes: Any) -> Engine:
    return load(path, "off", speculation=SpeculationConfig("eagle3", str(head), longest), **changes)


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """A row's known tokens when it was drafted for, and the drafts."""

    request: Request
    tokens: list[int]
    drafts: list[int]


class RecordingProposer:
    """Records the drafts of a proposer."""

    def __init__(self, engine: Engine, proposer: Proposer) -> None:
        self.drafts: list[RecordedDraft] = []
        self._rows = engine.scheduler.rows
        self._proposer = proposer

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = self._proposer.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            known = self._rows.token_ids[request.row, : self._rows.num_known[request.row]].tolist()
            self.drafts.append(RecordedDraft(request.request, known, draft.tokens.tolist()))
        return drafts

    def learn(self, request: Request, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._proposer.learn(request, token_ids)


def record_drafts(engine: Engine, longest: int) -> RecordingProposer:
    reader = engine._runner._reader  # type: ignore[attr-defined]
    recorder = RecordingProposer(engine, reader)
    engine.scheduler.speculate(recorder, FixedLengths(longest))
    return recorder


def sampling_like(request: Request, vocab_size: int) -> Callable[[Tensor, int], int]:
    """A request's draw from logits at a position: what the model would draw there if the logits were its own."""
    sampler = Sampler(1, vocab_size, (), torch.device("cpu"))
    prompt = request.prompt_token_ids
    sampler.assign(0, request, 0, prompt, len(prompt))

    def draw(logits: Tensor, at: int) -> int:
        row, position = np.zeros(1, dtype=np.int32), np.array([at], dtype=np.int32)
        return int(sampler.sample(logits[None].clone(), row, position, position - len(prompt)).token_ids[0])

    return draw


@pytest.mark.parametrize(
    ("kind", "family", "attention", "layers"),
    [
        ("midlayer", "llama", "native", [0, 1, 2]),
        pytest.param("midlayer", "gemma3", "paged-sdpa", [1, 3, 4], marks=pytest.mark.exhaustive),
        pytest.param("speculators", "llama", "paged-sdpa", [1, 2, 3], marks=pytest.mark.exhaustive),
        pytest.param("speculators", "gemma3", "native", [0, 2, 4], marks=pytest.mark.exhaustive),
    ],
)
def test_given_a_random_head_when_it_drafts_then_its_drafts_are_those_of_the_paper(
    kind: str, family: str, attention: str, layers: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model(family)
    flat = heads.head_config(AutoConfig.from_pretrained(path), draft_vocab=150, layers=layers)
    layer, first, config = "midlayer", False, flat
    if kind == "speculators":
        layer, first = "layers.0", True
        own = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "architectures"}
        config = {name: flat[name] for name in own}
        config |= {"norm_before_residual": True, "speculators_model_type": "eagle3"}
        config["transformer_layer_config"] = {name: value for name, value in flat.items() if name not in own}
    weights = heads.random_weights(flat, layer=layer)
    head = heads.save_head(tmp_path / "head", config, weights)
    # Given rows of unequal lengths, prompts in chunks of 16 tokens, and urgent requests that preempt others,
    small: dict[str, Any] = {**SMALL, "cache": CacheConfig(block_size=8, num_blocks=26, prefix_caching=False)}
    engine = with_head(path, head, longest=4, attention=attention, **small)
    recorder = record_drafts(engine, 4)
    requests = [
        Request(
            str(i),
            as_token_ids(prompt),
            SamplingParams(max_tokens=30, temperature=(i % 2) * 0.8, top_p=0.95, seed=i, ignore_eos=True),
        )
        for i, prompt in enumerate(repeating_prompts(8))
    ]
    for request in requests[:5]:
        engine.add(request)
    for _ in range(24):
        engine.step()
    run(engine, [replace(urgent, priority=0) for urgent in requests[5:]])

    assert engine.stats().preemptions > 0 or family == "gemma3"
    nonempty = [recorded for recorded in recorder.drafts if recorded.drafts]
    assert len(nonempty) > 100
    assert {len(recorded.drafts) for recorded in nonempty} >= {2, 4}
    target = heads.Target(path, layers)
    for recorded in nonempty[::7]:
        states = target.states(recorded.tokens[:-1])
        draw = sampling_like(recorded.request, len(weights["t2d"]))
        expected = heads.chain(weights, states, recorded.tokens, len(recorded.drafts), draw, layer=layer, first=first)
        assert recorded.drafts == expected
    assert len({tuple(recorded.drafts) for recorded in nonempty}) > 30  # not always the same


@pytest.mark.parametrize(
    ("family", "attention", "prefix_caching"),
    [
        ("llama", "native", True),
        ("llama", "paged-sdpa", False),
        ("gemma3", "native", True),
        ("qwen3", "native", False),
    ],
)
@pytest.mark.exhaustive
def test_given_any_kind_of_request_and_few_blocks_when_a_head_drafts_then_answers_are_those_without(
    family: str, attention: str, prefix_caching: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, requests = tiny_model(family), requests_of(18)
    plain = run(load(path, "off", attention=attention), requests)
    cache = CacheConfig(block_size=8, num_blocks=26, prefix_caching=prefix_caching)
    engine = with_head(path, random_head(tmp_path, path), attention=attention, **{**SMALL, "cache": cache})
    done: dict[str, Completion] = {}
    for request in requests[0::3] + requests[1::3]:
        engine.add(request)
    for _ in range(14):
        done |= {completion.request_id: completion for completion in engine.step()}
    assert engine.cancel(requests[0].request_id) or requests[0].request_id in done
    done |= run(engine, [replace(urgent, priority=0) for urgent in requests[2::3]])

    first = requests[0].request_id
    assert_same({k: v for k, v in done.items() if k != first}, {k: v for k, v in plain.items() if k != first})
    stats = engine.stats()
    assert stats.preemptions > 0 or family == "gemma3"
    assert (stats.cached > 0) == prefix_caching
    assert stats.speculation.sources["eagle3"].num_drafted == stats.speculation.drafted > 100


class TrainedHead:
    """A model, a head that was trained on its answers, and the answers."""

    def __init__(self, folder: Path, tiny_models: ModuleType) -> None:
        self.path: Path = tiny_models.make_tiny_model("llama", folder / "model", seed=3, vocab_size=64)
        self.config = heads.head_config(AutoConfig.from_pretrained(self.path), draft_vocab=64, layers=LAYERS)
        prompts = [[3 + (7 * i + j * (i + 1)) % 60 for j in range(12)] for i in range(24)]
        greedy = SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)
        self.requests = [Request(str(i), as_token_ids(prompt), greedy) for i, prompt in enumerate(prompts)]
        self.answers = run(load(self.path, "off"), self.requests)
        texts = [[*prompt, *self.answers[str(i)].choices[0].token_ids.tolist()] for i, prompt in enumerate(prompts)]
        self.weights = heads.random_weights(self.config, seed=1)
        heads.train(self.weights, heads.Target(self.path, LAYERS), texts, steps=200, lead=10)
        self.head = heads.save_head(folder / "head", self.config, self.weights)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_models: ModuleType) -> TrainedHead:
    return TrainedHead(tmp_path_factory.mktemp("trained"), tiny_models)


def acceptance_rates(engine: Engine) -> list[float]:
    """The share of accepted drafts at each draft position."""
    counts = engine.stats().speculation.sources["eagle3"]
    return [accepted / drafted for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True)]


@pytest.mark.parametrize("attention", ["native", pytest.param("paged-sdpa", marks=pytest.mark.exhaustive)])
def test_given_a_trained_head_when_it_drafts_then_most_drafts_are_accepted(
    trained: TrainedHead, attention: str
) -> None:
    plain, engine = load(trained.path, "off"), with_head(trained.path, trained.head, longest=2, attention=attention)
    run(plain, trained.requests)
    assert_same(run(engine, trained.requests), trained.answers)
    first, second = acceptance_rates(engine)
    assert first > 0.9
    assert second > 0.5
    assert engine.stats().steps < 0.6 * plain.stats().steps


@pytest.mark.parametrize("attention", ["native", pytest.param("paged-sdpa", marks=pytest.mark.exhaustive)])
def test_given_a_head_that_reads_other_states_than_in_training_then_few_drafts_are_accepted(
    trained: TrainedHead, attention: str, tmp_path: Path
) -> None:
    # Given the same weights that read one layer further up,
    config = {**trained.config, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    engine = with_head(trained.path, heads.save_head(tmp_path / "up", config, trained.weights), attention=attention)
    assert_same(run(engine, trained.requests), trained.answers)
    assert acceptance_rates(engine)[0] < 0.6
    # or weights that were not trained,
    random = with_head(
        trained.path, random_head(tmp_path / "random", trained.path, draft_vocab=64), attention=attention
    )
    assert_same(run(random, trained.requests), trained.answers)
    assert acceptance_rates(random)[0] < 0.1


def test_given_prompts_in_the_prefix_cache_when_a_head_drafts_then_its_keys_are_cached_too(
    trained: TrainedHead,
) -> None:
    engine = with_head(trained.path, trained.head, longest=1, cache=CacheConfig(block_size=4, num_blocks=400))
    recorder = record_drafts(engine, 1)
    run(engine, trained.requests)
    first, before = {tuple(recorded.tokens): recorded.drafts for recorded in recorder.drafts}, engine.stats()
    recorder.drafts.clear()
    run(engine, [replace(request, request_id=f"again {request.request_id}") for request in trained.requests])
    after = engine.stats()

    assert after.cached - before.cached >= 8 * len(trained.requests)
    drafted = after.speculation.drafted - before.speculation.drafted
    assert after.speculation.accepted - before.speculation.accepted > 0.9 * drafted > 100
    # What the prompts' last blocks leave over is computed from its own states: the drafts are the same.
    again = {tuple(recorded.tokens): recorded.drafts for recorded in recorder.drafts}
    assert {text: again[text] for text in first if text in again} == {
        text: first[text] for text in first if text in again
    }
    assert len(first.keys() & again.keys()) > 100


def test_given_texts_longer_than_a_heads_context_then_it_stops_drafting_there(
    trained: TrainedHead, tmp_path: Path
) -> None:
    head = heads.save_head(tmp_path, {**trained.config, "max_position_embeddings": 24}, trained.weights)
    engine = with_head(trained.path, head, longest=2, schedule=ScheduleConfig(8, 32))
    recorder = record_drafts(engine, 2)
    long = [*range(3, 43)]
    beyond = Request("beyond", as_token_ids(long), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    answers = run(engine, [*trained.requests, beyond])
    assert_same({name: answers[name] for name in trained.answers}, trained.answers)
    # The last draft that it makes comes from its last position, 23, and is of token 25.
    assert max(len(recorded.tokens) + len(recorded.drafts) for recorded in recorder.drafts if recorded.drafts) == 26
    assert max(len(recorded.tokens) for recorded in recorder.drafts) > 39


def test_layers_may_be_named_by_what_goes_in_or_by_what_comes_out(trained: TrainedHead, tmp_path: Path) -> None:
    config = {name: value for name, value in trained.config.items() if name != "eagle_aux_hidden_state_layer_ids"}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True}
    engine = with_head(trained.path, heads.save_head(tmp_path, config, trained.weights), longest=1)
    run(engine, trained.requests)
    assert acceptance_rates(engine)[0] > 0.9
    assert describe_head(tmp_path).layers == (0, 1, 2)
    # Given a head that says nothing, they are those of the reference.
    del config["eagle_config"]
    heads.save_head(tmp_path, config, trained.weights)
    assert describe_head(tmp_path).layers_of(32) == (2, 16, 29)


def test_given_a_head_without_an_embedding_then_it_reads_the_model_s(trained: TrainedHead, tmp_path: Path) -> None:
    own = trained.weights["embed_tokens.weight"]
    weights = {name: tensor for name, tensor in trained.weights.items() if name != "embed_tokens.weight"}
    model = heads.Target(trained.path, LAYERS).model.get_input_embeddings().weight
    full = {**weights, "embed_tokens.weight": model.detach().clone()}
    assert not torch.equal(own, model)
    answers = []
    for name, held in (("without", weights), ("with", full)):
        engine = with_head(trained.path, heads.save_head(tmp_path / name, trained.config, held))
        recorder = record_drafts(engine, 4)
        run(engine, trained.requests)
        answers.append([recorded.drafts for recorded in recorder.drafts])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("attention", ["native", pytest.param("paged-sdpa", marks=pytest.mark.exhaustive)])
def test_given_a_head_that_overflows_when_it_drafts_then_only_its_drafts_are_lost(
    trained: TrainedHead, attention: str, tmp_path: Path
) -> None:
    for name in ("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "fc.weight", "lm_head.weight"):
        weights = {**trained.weights, name: torch.full_like(trained.weights[name], torch.nan)}
        engine = with_head(trained.path, heads.save_head(tmp_path / name, trained.config, weights), attention=attention)
        assert_same(run(engine, trained.requests), trained.answers)
        drafts = engine.stats().speculation.drafted
        assert (drafts > 0) == ("attn" in name)


def test_choices_that_copy_a_block_copy_the_heads_keys(tiny_model: TinyModel, tmp_path: Path) -> None:
    # Given choices of one prompt, which copy 13 tokens of its second block,
    path = tiny_model("llama")
    engine = with_head(path, random_head(tmp_path / "head", path))
    recorder = record_drafts(engine, 4)
    params = SamplingParams(max_tokens=8, temperature=0.0, n=3, ignore_eos=True)
    engine.add(Request("r", as_token_ids(range(3, 33)), params))
    while engine.has_work:
        engine.step()
    assert engine.stats().prompt == 30 + 2
    # then the head drafts the same for all of them.
    drafts: dict[int, list[list[int]]] = {}
    for draft in recorder.drafts:
        drafts.setdefault(len(draft.tokens), []).append(draft.drafts)
    assert max(map(len, drafts.values())) == 3
    assert all(draft == several[0] for several in drafts.values() for draft in several)
