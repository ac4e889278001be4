"""What a worker computes between loading a model and serving it: real steps at the shapes that will come, and canary
prompts whose answers are known.

The steps come first: kernels are chosen or compiled, graphs captured and memory taken at a shape's first use, and no
request should pay for that. The canary prompts then show that this model on this machine computes what it computed
where it was recorded; a wrong kernel, a bad memory or another library may give fluent nonsense without any error.
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
"""Plain texts of several kinds, without a chat template; changing one makes all that was recorded useless."""

CANARY_TOKENS: Final = 16
"""Of each answer."""

DECODED: Final = 4
"""Steps that each batch is decoded for."""

SHORT: Final = 16
"""Tokens of a prompt in a batch."""


def warm_up(model: LoadedModel, options: WarmupOptions) -> None:
    """Compute one long prompt, then batches of each size. Raises `BrokenEngineError`."""
    longest = model.limits.max_model_len
    length = max(1, min(options.prompt_tokens, longest - DECODED))
    _complete(model, [_request(model, "long", length, longest)])
    for rows in sorted({min(rows, model.max_num_seqs) for rows in options.rows}):
        short = max(1, min(SHORT, longest - DECODED))
        _complete(model, [_request(model, f"{rows}-{row}", short, longest) for row in range(rows)])


def answer_canaries(model: LoadedModel) -> tuple[CanaryAnswer, ...]:
    """The model's answers to the canary prompts. Raises `BrokenEngineError`."""
    prompts = [_cut(ids, model) for ids in model.tokenizer.encode_batch(CANARY_PROMPTS, add_special_tokens=True)]
    requests = []
    for number, prompt in enumerate(prompts):
        most = min(CANARY_TOKENS, model.limits.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, logprobs=2)
        requests.append(_pooled(model, Request(f"canary-{number}", as_token_ids(prompt), params)))
    done = _complete(model, requests)
    return tuple(_answer(prompt, done[f"canary-{number}"]) for number, prompt in enumerate(prompts))


def drift_from(model: LoadedModel, recorded: Sequence[CanaryAnswer]) -> LogprobDrift | None:
    """How far this model's log-probabilities lie from those of another one, on the other's answers: each of its tokens
    is scored behind all that it had said before. None where the two can't be compared: other tokens, or vectors. Raises
    `BrokenEngineError`."""
    own = [_cut(ids, model) for ids in model.tokenizer.encode_batch(CANARY_PROMPTS, add_special_tokens=True)]
    if not model.limits.generates or [tuple(ids) for ids in own] != [answer.prompt for answer in recorded]:
        return None
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    requests = [
        Request(f"drift-{number}", as_token_ids([*answer.prompt, *answer.tokens]), params)
        for number, answer in enumerate(recorded)
    ]
    done = _complete(model, requests)
    off: list[float] = []
    for number, answer in enumerate(recorded):
        scored = done[f"drift-{number}"].prompt_logprobs
        assert scored is not None, "a prompt that was to be scored has log-probabilities"
        off += np.abs(scored.chosen[len(answer.prompt) :] - np.array(answer.logprobs)).tolist()
    return LogprobDrift(mean=float(np.mean(off)), most=max(off), tokens=len(off)) if off else None


def _request(model: LoadedModel, name: str, length: int, longest: int) -> Request:
    """A prompt of so many tokens that no other begins with."""
    first = sum(name.encode())
    ids = [1 + (first * 31 + place * 7919) % max(1, model.limits.vocab_size - 1) for place in range(length)]
    params = SamplingParams(max_tokens=min(DECODED, longest - length), temperature=0.0, ignore_eos=True)
    return _pooled(model, Request(f"warm-{name}", as_token_ids(ids), params))


def _pooled(model: LoadedModel, request: Request) -> Request:
    """As the model can compute it: one that generates nothing makes vectors."""
    embedding = model.limits.embedding
    if model.limits.generates or embedding is None:
        return request
    return replace(request, params=SamplingParams(max_tokens=0, temperature=0.0), pooling=embedding.pooling)


def _cut(prompt: Iterable[int], model: LoadedModel) -> list[int]:
    """A prompt that leaves room for an answer, as far as the model has any."""
    room = model.limits.max_model_len - (CANARY_TOKENS if model.limits.generates else 0)
    return [int(token) for token in prompt][: max(1, room)]


def _complete(model: LoadedModel, requests: Sequence[Request]) -> dict[str, Completion]:
    """All of them, computed together. Raises `BrokenEngineError`."""
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


def _answer(prompt: Sequence[int], completion: Completion) -> CanaryAnswer:
    if completion.embeddings is not None:
        vector = completion.embeddings[0].astype(np.float64)
        vector /= np.linalg.norm(vector) or 1.0
        return CanaryAnswer(prompt=tuple(prompt), vector=tuple(round(float(value), 6) for value in vector))
    choice = completion.choices[0]
    assert choice.logprobs is not None, "they were asked for"
    return CanaryAnswer(
        prompt=tuple(prompt),
        tokens=tuple(choice.token_ids.tolist()),
        logprobs=tuple(round(float(value), 6) for value in choice.logprobs.chosen),
        runners_up=tuple(round(float(min(pair)), 6) for pair in choice.logprobs.top),
    )
