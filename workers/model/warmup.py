"""Warms up a loaded model before it serves: real steps at the expected shapes, then canary prompts with known answers.

The first use of a shape selects or compiles kernels, captures graphs and allocates memory, which no request should pay
for. The canary prompts then verify that the model on this machine computes the recorded answers: a wrong kernel, faulty
memory or another library version may produce fluent nonsense without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from engine.errors import EngineError
from engine.request import Completion, Request, SamplingParams, as_token_ids
from engine.scheduler.resume import ANSWERED
from schemas.releases import CanaryAnswer, LogprobDrift
from schemas.settings.releases import WarmupOptions
from workers.errors import BrokenEngineError
from workers.model.loaded_model import LoadedModel

CANARY_PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: What is 17 times 23?\nAnswer: 17 times 23 is",
    '{"name": "Ada Lovelace", "born": 1815, "profession": "',
    "Die Würde des Menschen ist",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Once upon a time, in a village between the mountains and the sea, there lived an old clockmaker who",
    "SELECT customer_id, SUM(amount) FROM orders WHERE",
)
"""Plain texts of several kinds, without a chat template. Changing one invalidates all recorded answers."""

CANARY_TOKENS: Final = 16
"""Tokens of each canary answer."""

DECODE_STEPS: Final = 4
"""Decode steps of each warm-up batch."""

PROMPT_TOKENS: Final = 16
"""Tokens of each prompt in a warm-up batch."""


def warm_up(model: LoadedModel, options: WarmupOptions) -> None:
    """Compute one long prompt, then a batch of each size. Raises `BrokenEngineError`."""
    longest = model.limits.max_model_len
    length = max(1, min(options.prompt_tokens, longest - DECODE_STEPS))
    _complete(model, [_request(model, "long", length, longest)])
    for rows in sorted({min(rows, model.max_num_seqs) for rows in options.rows}):
        short = max(1, min(PROMPT_TOKENS, longest - DECODE_STEPS))
        _complete(model, [_request(model, f"{rows}-{row}", short, longest) for row in range(rows)])


def answer_canaries(model: LoadedModel) -> tuple[CanaryAnswer, ...]:
    """The model's answers to the canary prompts. Raises `BrokenEngineError`."""
    prompts = [_cut(ids, model) for ids in model.tokenizer.encode_batch(CANARY_PROMPTS, add_special_tokens=True)]
    requests = []
    for number, prompt in enumerate(prompts):
        max_tokens = min(CANARY_TOKENS, model.limits.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        requests.append(_pooled(model, Request(f"canary-{number}", as_token_ids(prompt), params)))
    done = _complete(model, requests)
    is_score = model.limits.classifier is not None
    return tuple(_answer(prompt, done[f"canary-{number}"], is_score=is_score) for number, prompt in enumerate(prompts))


def drift_from(model: LoadedModel, recorded: Sequence[CanaryAnswer]) -> LogprobDrift | None:
    """How far this model's log-probabilities differ from recorded ones of another model: each token of the recorded
    answers is scored after its predecessors. None when the two can't be compared: their tokens differ, or they make
    embeddings. Raises `BrokenEngineError`."""
    own = [_cut(ids, model) for ids in model.tokenizer.encode_batch(CANARY_PROMPTS, add_special_tokens=True)]
    if not model.limits.generates or [tuple(ids) for ids in own] != [answer.prompt for answer in recorded]:
        return None
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    requests = [
        Request(f"drift-{number}", as_token_ids([*answer.prompt, *answer.tokens]), params)
        for number, answer in enumerate(recorded)
    ]
    done = _complete(model, requests)
    differences: list[float] = []
    for number, answer in enumerate(recorded):
        scored = done[f"drift-{number}"].prompt_logprobs
        assert scored is not None, "a scored prompt has log-probabilities"
        differences += np.abs(scored.chosen[len(answer.prompt) :] - np.array(answer.logprobs)).tolist()
    return (
        LogprobDrift(mean=float(np.mean(differences)), most=max(differences), tokens=len(differences))
        if differences
        else None
    )


def _request(model: LoadedModel, name: str, length: int, longest: int) -> Request:
    """A request with a prompt of `length` tokens that shares no prefix with another one."""
    first = sum(name.encode())
    ids = [1 + (first * 31 + index * 7919) % max(1, model.limits.vocab_size - 1) for index in range(length)]
    params = SamplingParams(max_tokens=min(DECODE_STEPS, longest - length), temperature=0.0, ignore_eos=True)
    return _pooled(model, Request(f"warm-{name}", as_token_ids(ids), params))


def _pooled(model: LoadedModel, request: Request) -> Request:
    """The request as the model can compute it: a model without a language-model head makes vectors or scores."""
    pooling = model.limits.pooling
    if model.limits.generates or pooling is None:
        return request
    return replace(request, params=SamplingParams(max_tokens=0, temperature=0.0), pooling=pooling)


def _cut(prompt: Iterable[int], model: LoadedModel) -> list[int]:
    """The prompt, cut to leave room for an answer if the model generates one."""
    room = model.limits.max_model_len - (CANARY_TOKENS if model.limits.generates else 0)
    return [int(token) for token in prompt][: max(1, room)]


def _complete(model: LoadedModel, requests: Sequence[Request]) -> dict[str, Completion]:
    """Compute all requests in one run. Raises `BrokenEngineError`."""
    engine = model.engine
    done: dict[str, Completion] = {}
    try:
        for request in requests:
            engine.add(request)
        engine.settle(more_to_come=False)
        while engine.has_work:
            done.update((completion.request_id, completion) for completion in engine.step())
    except EngineError as error:
        raise BrokenEngineError(f"{model.name} can't compute the first requests: {error}") from error
    for completion in done.values():
        if completion.choices[0].finish_reason not in ANSWERED:
            why = completion.error or completion.choices[0].finish_reason
            raise BrokenEngineError(f"{model.name} can't compute the first requests: {why}")
    return done


def _answer(prompt: Sequence[int], completion: Completion, *, is_score: bool) -> CanaryAnswer:
    if completion.embeddings is not None:
        vector = completion.embeddings[0].astype(np.float64)
        if not is_score:
            vector /= np.linalg.norm(vector) or 1.0
        return CanaryAnswer(prompt=tuple(prompt), vector=tuple(round(float(value), 6) for value in vector))
    choice = completion.choices[0]
    assert choice.logprobs is not None, "log-probabilities were requested"
    return CanaryAnswer(
        prompt=tuple(prompt),
        tokens=tuple(choice.token_ids.tolist()),
        logprobs=tuple(round(float(value), 6) for value in choice.logprobs.chosen),
        runners_up=tuple(round(float(min(pair)), 6) for pair in choice.logprobs.top),
    )
