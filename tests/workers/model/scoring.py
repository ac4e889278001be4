"""How well a model predicts texts: log-likelihood and perplexity, through the same engine that answers requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.engine import Engine
from engine.request import FinishReason, Request, SamplingParams
from workers.errors import WorkerError
from workers.text.tokenizer import TokenIds


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one sequence.

    Attributes:
        tokens: predicted tokens; the first one of a sequence has nothing before it and doesn't count.
        logprob: the sum of their log-probabilities (natural logarithm).
        greedy: number of tokens that are the model's likeliest.
    """

    tokens: int
    logprob: float
    greedy: int

    def __add__(self, other: Score) -> Score:
        return Score(self.tokens + other.tokens, self.logprob + other.logprob, self.greedy + other.greedy)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token (Jelinek et al. 1977); NaN when there is no token."""
        return math.exp(-self.logprob / self.tokens) if self.tokens else math.nan


def score(engine: Engine, sequences: Sequence[TokenIds]) -> list[Score]:
    """Score each sequence (int32 [tokens], at least one) by itself, all in one run; results in the order given.

    Raises `WorkerError` when the engine can't compute one, and what `Engine.add` raises.
    """
    params = SamplingParams(max_tokens=0, temperature=0, logprobs=0, prompt_logprobs=1)
    scores: list[Score] = [Score(0, 0.0, 0)] * len(sequences)
    requests = (Request(str(at), sequence, params) for at, sequence in enumerate(sequences))
    for completion in engine.run(requests):
        logprobs = completion.prompt_logprobs
        reason = completion.choices[0].finish_reason
        if logprobs is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise WorkerError(f"sequence {completion.request_id} can't be scored: {completion.error or reason}")
        at = int(completion.request_id)
        chosen = logprobs.chosen[1:].astype(np.float64)
        greedy = int((logprobs.top_ids[1:, 0] == sequences[at][1:]).sum())
        scores[at] = Score(len(chosen), float(chosen.sum()), greedy)
    return scores


def windows(ids: TokenIds, length: int, stride: int) -> Iterator[TokenIds]:
    """Pieces of a long text, `length` tokens each, every `stride` tokens; the last one may be shorter.

    With stride = length each token is scored once, which is how perplexities of GGUF models are usually given.
    """
    for start in range(0, max(1, len(ids) - 1), stride):
        yield ids[start : start + length]
        if start + length >= len(ids):
            return
