"""Models of the responses to requests for scores, rankings and labels, in vLLM's form."""

from __future__ import annotations

from typing import Literal

from pipeline.gateway.openapi.completion_schemas import EmbeddingUsage, JudgedResponse
from schemas.jobs.batch import ResponseModel, UnixTime
from schemas.stored import Count


class Score(ResponseModel):
    """The score of a pair."""

    index: Count
    object: Literal["score"]
    score: float


class Scores(JudgedResponse):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: UnixTime
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(ResponseModel):
    """A document."""

    text: str


class RankedDocument(ResponseModel):
    """The relevance of the document at `index` of the request; the document itself, unless the request leaves it
    out."""

    index: Count
    document: RankedText | None = None
    relevance_score: float


class Ranking(JudgedResponse):
    """The documents, the most relevant first."""

    id: str
    created: UnixTime
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class ScoredChoice(ResponseModel):
    """The log-probability of a choice's tokens behind the prompt: their sum."""

    text: str
    logprob: float
    num_tokens: Count


class Label(ResponseModel):
    """The most probable label of an input, and the probability of each label, in the order of the model, or of the
    request's choices."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count
    choices: list[ScoredChoice] | None = None


class Classification(JudgedResponse):
    """The labels of all inputs, in their order."""

    id: str
    object: Literal["list"]
    created: UnixTime
    model: str
    data: list[Label]
    usage: EmbeddingUsage
