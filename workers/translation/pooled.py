"""Requests that are answered with numbers instead of text: each is translated by the reader of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.models.encoders.classifier import ClassifierSettings
from engine.request import Request
from schemas.jobs.results import ResultRow
from schemas.requests.parsing import EmbeddingBody, PooledBody
from workers.rows import ComputedRow, Envelope
from workers.text.tokenizer import Tokenizer
from workers.translation.embeddings import EmbeddingReader, embedding_results
from workers.translation.requests import JobRules, ModelLimits
from workers.translation.scoring import ScoringReader, scoring_results

Inputs = Sequence[Any]
"""What the model reads, in the form of the body's reader."""


class PooledReader:
    """Translates the requests of one job for one model."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules) -> None:
        self._embeddings = EmbeddingReader(tokenizer, limits, rules)
        self._scores = ScoringReader(tokenizer, limits, rules)

    def inputs_of(self, body: PooledBody) -> Inputs:
        """The inputs to encode. Raises `RowError`."""
        return self._embeddings.inputs_of(body) if isinstance(body, EmbeddingBody) else self._scores.inputs_of(body)

    def encode(self, requests: Sequence[tuple[PooledBody, Inputs]]) -> list[Inputs]:
        """Encode the inputs of many requests; those of a kind in one call."""
        kinds = [isinstance(body, EmbeddingBody) for body, _ in requests]
        embedded, scored = (
            [inputs for (_, inputs), kind in zip(requests, kinds, strict=True) if kind is wanted]
            for wanted in (True, False)
        )
        vectors, scores = iter(self._embeddings.encode(embedded)), iter(self._scores.encode(scored))
        return [next(vectors) if kind else next(scores) for kind in kinds]

    def request(self, request_id: str, body: PooledBody, encoded: Inputs) -> Request:
        """The engine's request for encoded inputs. Raises `RowError`."""
        if isinstance(body, EmbeddingBody):
            return self._embeddings.request(request_id, body, encoded)
        return self._scores.request(request_id, body, encoded)


def pooled_results(row: ComputedRow, envelope: Envelope, classifier: ClassifierSettings | None) -> list[ResultRow]:
    """The results of a row and of its copies. `classifier`: of the model that computed it."""
    if isinstance(row.prepared.body, EmbeddingBody):
        return embedding_results(row, envelope)
    assert classifier is not None, "only a classifier's rows are scored"
    return scoring_results(row, envelope, classifier)
