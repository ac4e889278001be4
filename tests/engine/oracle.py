"""The answers of transformers, one prompt at a time, and the comparison of an engine's answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import CacheConfig, Completion, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids

TIE = 1e-4
"""Where transformers' two best logits are closer than this, either token is right, and the comparison stops."""

BATCH_SIZES = (1, 7, 64)
CHUNK_SIZES = (16, 256, 2048)
BLOCK_SIZES = (16, 32, 128)
PREFIX_CACHING = (True, False)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the same work."""

    batch_size: int
    chunk_size: int
    block_size: int
    prefix_caching: bool
    num_blocks: int | None = None

    def config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(
            cache=CacheConfig(
                block_size=self.block_size,
                prefix_caching=self.prefix_caching,
                num_blocks=self.num_blocks,
                memory_bytes=2 << 30,
            ),
            schedule=ScheduleConfig(max_num_seqs=self.batch_size, max_num_batched_tokens=self.chunk_size),
            **{"dtype": "float32", **changes},
        )


def all_settings() -> list[Setting]:
    """All 54 combinations of the settings."""
    return [Setting(*values) for values in product(BATCH_SIZES, CHUNK_SIZES, BLOCK_SIZES, PREFIX_CACHING)]


def covering_settings() -> list[Setting]:
    """A pairwise covering array, greedily built: every pair of values of two parameters stands in some setting."""
    factors = (BATCH_SIZES, CHUNK_SIZES, BLOCK_SIZES, PREFIX_CACHING)

    def pairs(values: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
        return {(i, values[i], j, values[j]) for i, j in combinations(range(len(values)), 2)}

    rows = list(product(*factors))
    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return [Setting(*values) for values in chosen]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens (an end token included) and, for each, by how much it led the second best."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def greedy_answer(model: Any, prompt: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int]) -> Answer:
    """transformers' greedy answer to one prompt, with its own cache."""
    tokens: list[int] = []
    margins: list[float] = []
    ids, cache = torch.tensor([list(prompt)]), None
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos_token_ids):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([tokens[-1:]])
    return Answer(tokens, margins)


def engine_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, expected_tokens: int | None = None
) -> list[Completion]:
    """The engine's greedy completions, in the prompts' order."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = [
        Request(str(i), as_token_ids(prompt), params, expected_tokens=expected_tokens)
        for i, prompt in enumerate(prompts)
    ]
    done = {completion.request_id: completion for completion in engine.run(requests)}
    return [done[request.request_id] for request in requests]


def tokens_of(completion: Completion) -> list[int]:
    """The first choice's tokens, its end token included."""
    choice = completion.choices[0]
    stop = [] if choice.stop_token_id is None else [choice.stop_token_id]
    return [*choice.token_ids.tolist(), *stop]


def check_equal(want: Sequence[Answer], got: Sequence[Completion]) -> int:
    """Assert equal tokens up to a tie; returns how many comparisons stopped at one."""
    ties = 0
    for i, (answer, completion) in enumerate(zip(want, got, strict=True)):
        assert completion.error is None, f"prompt {i}: {completion.error}"
        tokens = tokens_of(completion)
        for at, (expected, margin) in enumerate(zip(answer.token_ids, answer.margins, strict=True)):
            if margin < TIE:
                ties += 1
                break
            found = tokens[at] if at < len(tokens) else None
            assert found == expected, f"prompt {i}, token {at}: {found}, transformers says {expected} by {margin:.5f}"
        else:
            assert len(tokens) == len(answer.token_ids), f"prompt {i}: {len(tokens)} tokens"
    return ties


def make_prompts(seed: int, count: int, vocab_size: int, shared: int, longest: int) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; two thirds of them begin with the same `shared` tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, vocab_size, shared).tolist()
    prompts = []
    for i in range(count):
        tail = rng.integers(3, vocab_size, int(rng.integers(1, longest - shared))).tolist()
        prompts.append(head + tail if i % 3 else tail)
    return prompts


def prompt_scores(path: Path, prompt: Sequence[int], **settings: Any) -> torch.Tensor:
    """The log-probabilities of a prompt's tokens behind the first one, computed by an engine with these settings."""
    config = EngineConfig(max_model_len=256, cache=CacheConfig(num_blocks=40), **{"dtype": "float32", **settings})
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [done] = Engine.load(path, config).run([Request("0", as_token_ids(list(prompt)), params)])
    assert done.prompt_logprobs is not None
    return torch.from_numpy(done.prompt_logprobs.chosen[1:].copy())


def scores_of_logits(logits: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    """The same from a model's logits [tokens, vocabulary]."""
    return logits.log_softmax(-1)[:-1].gather(1, prompt[1:, None])[:, 0]
