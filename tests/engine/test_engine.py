"""The engine from outside: scoring, log-probabilities, pooling, failures, cancelling, and answers that depend on
nothing but the request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

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
from engine.errors import ContextLengthExceeded, EngineError, OutOfMemory, RequestRefused, UnsupportedModel
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from engine.scheduler.scheduler import Scheduler
from tests.engine.oracle import Setting, make_prompts

TinyModel = Callable[[str], Path]


def load(path: Path, **changes: Any) -> Engine:
    return Engine.load(path, Setting(8, 64, 16, True).config(max_model_len=256, **changes))


def complete(engine: Engine, *requests: Request) -> dict[str, Any]:
    return {completion.request_id: completion for completion in engine.run(requests)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(seed=3, count=24, vocab_size=257, shared=30, longest=70)


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@torch.inference_mode()
def log_distribution(path: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probabilities, [tokens, vocab]; line i is for the token after position i."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)


SAMPLED = [
    SamplingParams(max_tokens=12, temperature=0.9, seed=11),
    SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, seed=-5),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=7, min_p=0.02, seed=2**70),
    SamplingParams(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, seed=4, n=3),
    SamplingParams(max_tokens=12, temperature=0.0, min_tokens=5, logit_bias={9: 3.0, 40: -100.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gemma3", "gpt2"))]
)
def test_an_answer_depends_on_its_request_alone(family: str, tiny_model: TinyModel, prompts: list[list[int]]) -> None:
    # Given requests with all kinds of sampling, when they run one by one, all at once, in small chunks, in small
    # blocks without the prefix cache, and in a pool that preempts, then every answer is the same each time
    requests = [
        Request(str(i), as_token_ids(prompt), SAMPLED[i % len(SAMPLED)], expected_tokens=1)
        for i, prompt in enumerate(prompts)
    ]

    def answers(setting: Setting, order: list[Request]) -> tuple[dict[str, list[list[int]]], Engine]:
        engine = Engine.load(tiny_model(family), setting.config(max_model_len=96))
        done = complete(engine, *order)
        return {name: [choice.token_ids.tolist() for choice in done[name].choices] for name in done}, engine

    want, _ = answers(Setting(1, 2048, 32, False), requests)
    for setting in (Setting(64, 2048, 32, True), Setting(7, 16, 16, True), Setting(7, 64, 4, False)):
        got, _ = answers(setting, requests[::-1])
        assert got == want
    got, engine = answers(Setting(32, 64, 4, True, num_blocks=30), requests)
    assert engine.stats().preemptions > 0
    assert got == want


def test_another_seed_gives_another_answer_and_choices_differ(llama: Path, prompts: list[list[int]]) -> None:
    params = [SamplingParams(max_tokens=16, temperature=1.5, seed=seed, n=4, ignore_eos=True) for seed in (1, 2)]
    done = complete(load(llama), *(Request(str(p.seed), as_token_ids(prompts[0]), p) for p in params))
    texts = {tuple(choice.token_ids.tolist()) for completion in done.values() for choice in completion.choices}
    assert len(texts) == 8


def test_prompt_logprobs_are_the_models_own(llama: Path, prompts: list[list[int]]) -> None:
    # Given a prompt longer than a chunk that is also in the prefix cache, when it is scored, then every token has the
    # log-probability that transformers gives it
    engine = load(llama)
    prompt = max(prompts, key=len)
    complete(engine, Request("warm", as_token_ids(prompt), SamplingParams(max_tokens=2)))
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    completion = complete(engine, Request("score", as_token_ids(prompt), params))["score"]
    want = log_distribution(llama, prompt)
    logprobs = completion.prompt_logprobs
    assert logprobs is not None
    assert completion.choices[0].token_ids.size == 0
    assert completion.choices[0].finish_reason is FinishReason.LENGTH
    assert np.isnan(logprobs.chosen[0])
    chosen = want[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(logprobs.chosen[1:], chosen.numpy(), atol=1e-4)
    np.testing.assert_allclose(logprobs.top[1:], want[:-1].topk(3).values.numpy(), atol=1e-4)
    np.testing.assert_array_equal(logprobs.top_ids[1:], want[:-1].topk(3).indices.numpy())


@pytest.mark.parametrize("num_blocks", [200, 40])
@pytest.mark.slow
def test_continuations_are_scored_on_a_cached_prefix(llama: Path, prompts: list[list[int]], num_blocks: int) -> None:
    # Given continuations of one prompt, of which only their own tokens' log-probabilities are asked for, and answers
    # beside them that need the blocks where there are few
    prompt = (3 * max(prompts, key=len))[:70]
    ends = [[5], [5, 6, 7], [9] * 6, [9] * 6, [11, 12]]  # the fourth could also take the tokens of the third
    scored = [
        Request(
            f"score-{at}",
            as_token_ids([*prompt, *end]),
            SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_start=len(prompt)),
        )
        for at, end in enumerate(ends)
    ]
    talk = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    talks = [Request(f"talk-{at}", as_token_ids(p), talk, expected_tokens=1) for at, p in enumerate(prompts[:8])]
    setting = Setting(8, 48, 4, True, num_blocks=num_blocks)
    engine = Engine.load(llama, setting.config(max_model_len=96))
    # When all are computed, then each token has the log-probability that transformers gives it
    done = complete(engine, *talks[:6], *scored, *talks[6:])
    for at, end in enumerate(ends):
        logprobs = done[f"score-{at}"].prompt_logprobs
        assert logprobs is not None
        assert np.isnan(logprobs.chosen[: len(prompt)]).all()
        want = log_distribution(llama, [*prompt, *end])[len(prompt) - 1 : -1]
        chosen = want[torch.arange(len(end)), torch.tensor(end)]
        np.testing.assert_allclose(logprobs.chosen[len(prompt) :], chosen.numpy(), atol=1e-4)
        np.testing.assert_allclose(logprobs.top[len(prompt) :], want.topk(2).values.numpy(), atol=1e-4)
    if num_blocks == 40:
        assert engine.stats().preemptions > 0
    else:  # and only the first one computed the prompt: of the others, less than a block of it
        assert [done[f"score-{at}"].cached_tokens for at in range(1, 5)] == [68] * 4


def test_logprobs_of_an_answer_are_before_the_sampling_chain(llama: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.7, top_k=4, seed=6, logprobs=2, ignore_eos=True)
    completion = complete(load(llama), Request("a", as_token_ids(prompts[1]), params))["a"]
    choice = completion.choices[0]
    tokens = choice.token_ids.tolist()
    want = log_distribution(llama, prompts[1] + tokens)[len(prompts[1]) - 1 : -1]
    assert choice.logprobs is not None
    chosen = want[torch.arange(len(tokens)), torch.tensor(tokens)]
    np.testing.assert_allclose(choice.logprobs.chosen, chosen.numpy(), atol=1e-4)
    np.testing.assert_allclose(choice.logprobs.top, want.topk(2).values.numpy(), atol=1e-4)


@pytest.mark.slow
def test_logprobs_survive_preemption(llama: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    requests = [Request(str(i), as_token_ids(p), params, expected_tokens=1) for i, p in enumerate(prompts[:8])]
    calm = complete(load(llama), *requests)
    tight = Engine.load(llama, Setting(8, 64, 4, True, num_blocks=30).config(max_model_len=96))
    done = complete(tight, *requests)
    assert tight.stats().preemptions > 0
    for name, completion in done.items():
        for got, want in (
            (completion.choices[0].logprobs, calm[name].choices[0].logprobs),
            (completion.prompt_logprobs, calm[name].prompt_logprobs),
        ):
            np.testing.assert_allclose(got.chosen, want.chosen, atol=1e-4)
            assert len(got.chosen) == len(want.chosen) > 0


@pytest.mark.parametrize("kind", ["last", "mean", "cls", "max", "mean_sqrt_len", "weightedmean"])
def test_pooled_hidden_states(kind: Any, llama: Path, prompts: list[list[int]]) -> None:
    prompt = (2 * max(prompts, key=len))[:65]  # a chunk, and one token more
    engine = load(llama)
    complete(engine, Request("warm", as_token_ids(prompt), SamplingParams(max_tokens=1)))
    request = Request("pool", as_token_ids(prompt), SamplingParams(max_tokens=0), pooling=kind)
    pooled = complete(engine, request)["pool"].pooled
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    weights = torch.arange(1, len(hidden) + 1)[:, None]
    want = {
        "last": hidden[-1],
        "cls": hidden[0],
        "max": hidden.amax(dim=0),
        "mean": hidden.mean(dim=0),
        "mean_sqrt_len": hidden.sum(dim=0) / len(hidden) ** 0.5,
        "weightedmean": (weights * hidden).sum(dim=0) / weights.sum(),
    }[kind]
    np.testing.assert_allclose(pooled, want.numpy(), atol=1e-4)


def test_a_row_with_non_finite_logits_fails_alone(tiny_models: Any, tmp_path: Path, prompts: list[list[int]]) -> None:
    # Given a model in which one token's embedding is broken
    def break_token(model: Any) -> None:
        model.model.embed_tokens.weight[200] = float("nan")

    path = tiny_models.make_tiny_model("llama", tmp_path / "broken", edit=break_token)
    good = [[token for token in prompt if token != 200] for prompt in prompts]
    params = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={200: -100.0})
    # when a prompt with it runs among others, in a pool whose blocks are used again and again
    engine = Engine.load(path, Setting(8, 64, 16, True, num_blocks=40).config(max_model_len=96))
    bad = Request("bad", as_token_ids([*good[0][:20], 200, *good[0][20:]]), params)
    after = [Request(f"after{i}", as_token_ids(p), params) for i, p in enumerate(good)]
    done = complete(engine, *(Request(str(i), as_token_ids(p), params) for i, p in enumerate(good[:4])), bad, *after)
    # then it fails, says so, and the others answer as if it had never been there
    assert done["bad"].choices[0].finish_reason is FinishReason.ERROR
    assert "non-finite" in done["bad"].error
    clean = complete(
        Engine.load(path, Setting(1, 64, 16, False).config(max_model_len=96)),
        *(Request(f"after{i}", as_token_ids(p), params) for i, p in enumerate(good)),
    )
    for name, completion in clean.items():
        assert done[name].error is None
        assert done[name].choices[0].token_ids.tolist() == completion.choices[0].token_ids.tolist()


SPEC = ModelSpec("null", 1, 1, 1, 8, 8, 1000, 4096, (None,), (2,), 0, torch.float32)


class FailingRunner(NullRunner):
    """Fails at the steps given, counted from 0."""

    def __init__(self, scheduler: Scheduler, fail_at: set[int]) -> None:
        super().__init__(scheduler.rows, SPEC.vocab_size)
        self.fail_at, self.steps = fail_at, 0

    def execute(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        if self.steps - 1 in self.fail_at:
            raise RuntimeError("the device is gone")
        return super().execute(plan)


def null_engine(num_blocks: int = 64, **schedule: int) -> Engine:
    return Engine.without_model(
        SPEC, EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(**schedule)), num_blocks
    )


def test_a_failed_step_ends_its_rows_and_the_engine_goes_on() -> None:
    config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=2))
    engine = Engine(config, SPEC, (CacheGroup((0,), None, 64),), 1000, lambda s: FailingRunner(s, {1}))
    for i in range(4):
        engine.add(Request(str(i), as_token_ids([5] * 20), SamplingParams(max_tokens=4)))
    assert engine.step() == []
    with pytest.raises(EngineError, match="the step failed: RuntimeError: the device is gone"):
        engine.step()
    done = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert [done[str(i)].choices[0].finish_reason.value for i in range(4)] == ["error", "error", "length", "length"]
    assert done["0"].error == "the step failed: RuntimeError: the device is gone"
    engine.scheduler.check_integrity()


def test_cancelled_and_late_requests_end_once_with_their_reason() -> None:
    now = 100.0
    engine = Engine.without_model(SPEC, EngineConfig(schedule=ScheduleConfig(max_num_seqs=2)), 64, clock=lambda: now)
    for i in range(4):
        deadline = 105.0 if i == 1 else None
        engine.add(Request(str(i), as_token_ids([5] * 9), SamplingParams(max_tokens=50), deadline=deadline))
    engine.step()
    assert engine.cancel("0")
    assert engine.cancel("3")
    assert not engine.cancel("unknown")
    now = 106.0
    done = [completion for _ in range(200) if engine.has_work for completion in engine.step()]
    reasons = {completion.request_id: completion.choices[0].finish_reason.value for completion in done}
    assert reasons == {"0": "cancelled", "1": "timeout", "2": "length", "3": "cancelled"}
    assert len(done) == 4
    assert not engine.has_work


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request("a", as_token_ids([])), RequestRefused, "at least one"),
        (Request("a", as_token_ids([1000])), RequestRefused, "1000"),
        (Request("a", as_token_ids([-1])), RequestRefused, "-1"),
        (Request("a", as_token_ids([5]), SamplingParams(logit_bias={1000: 1.0})), RequestRefused, "logit_bias.*1000"),
        (Request("a", as_token_ids([5] * 1000), SamplingParams(max_tokens=100)), ContextLengthExceeded, "1100"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_no_state(
    request_: Request, error: type[Exception], message: str
) -> None:
    engine = null_engine()
    with pytest.raises(error, match=message):
        engine.add(request_)
    assert not engine.has_work


def test_loading_names_the_obstacle(llama: Path) -> None:
    with pytest.raises(UnsupportedModel, match="max_model_len 4096 is beyond the model's context of 512"):
        Engine.load(llama, EngineConfig(max_model_len=4096))
    with pytest.raises(OutOfMemory, match="one sequence of 512 tokens needs"):
        Engine.load(llama, EngineConfig(cache=CacheConfig(memory_bytes=1 << 16)))
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="device 'cuda' is not there: torch sees no CUDA device"):
            Engine.load(llama, EngineConfig(device="cuda"))


def test_the_pool_is_no_larger_than_the_work(llama: Path) -> None:
    work = CacheConfig(block_size=16, sequences=4, tokens_per_sequence=64, memory_bytes=1 << 30)
    engine = Engine.load(llama, EngineConfig(dtype="float32", max_model_len=128, cache=work))
    assert engine.stats().total_blocks == 4 * 4 * 5 // 4  # a quarter more, for prefixes
    roomy = Engine.load(
        llama, EngineConfig(dtype="float32", max_model_len=128, cache=CacheConfig(memory_bytes=1 << 20))
    )
    assert roomy.stats().total_blocks * 32 * 2 * 3 * 2 * 12 * 4 <= 1 << 20
