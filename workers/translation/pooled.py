"""Requests that are answered with numbers instead of text: each is translated by the reader of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

from engine.models.encoders.classifier import ClassifierSettings
from engine.request import Request
from schemas.jobs.results import ResultRow
from schemas.requests.parsing import ClassifyBody, EmbeddingBody, PairBody, PooledBody
from workers.rows import ComputedRow, Envelope
from workers.text.tokenizer import Tokenizer
from workers.translation.choices import ChoiceReader
from workers.translation.embeddings import EmbeddingReader, embedding_results
from workers.translation.policy_texts import texts_of_inputs, texts_of_prompt
from workers.translation.prompts import encode
from workers.translation.requests import JobRules, ModelLimits, RowHints, Translator
from workers.translation.scoring import ScoringReader, scoring_results

Inputs = Sequence[Any]
"""What the model reads, in the form of the body's reader."""


class _Kind(Enum):
    VECTORS = auto()
    LABELS = auto()  # by a head for labels
    CHOICES = auto()  # of texts
    CHAT_CHOICES = auto()


class PooledReader:
    """Translates the requests of one job for one model. `translator`: of the prompts that choices continue."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules, translator: Translator) -> None:
        self._tokenizer = tokenizer
        self._translator = translator
        self._embeddings = EmbeddingReader(tokenizer, limits, rules)
        self._scores = ScoringReader(tokenizer, limits, rules)
        self._choices = ChoiceReader(tokenizer, limits, rules)

    def inputs_of(self, body: PooledBody) -> Inputs:
        """The inputs to encode. Raises `RowError`."""
        if isinstance(body, EmbeddingBody):
            return self._embeddings.inputs_of(body)
        if isinstance(body, ClassifyBody) and body.choices:
            return self._translator.prompts_of(body.prompt_body)
        return self._scores.inputs_of(body)

    def texts_of(self, body: PooledBody, inputs: Inputs) -> tuple[str, ...]:
        """The texts that content policies judge: what the model reads, and choices and messages as received."""
        if not (isinstance(body, ClassifyBody) and body.choices):
            read = texts_of_inputs(inputs, self._tokenizer)
            return (*read, *_texts_of_pairs(body)) if isinstance(body, PairBody) else read
        prompts = body.prompt_body
        texts = (text for given in inputs for text in texts_of_prompt(prompts, given, self._tokenizer))
        return (*texts, *body.choices)

    def encode(self, requests: Sequence[tuple[PooledBody, Inputs]]) -> list[Inputs]:
        """Encode the inputs of many requests; those of a kind in one call."""
        kinds = [_kind_of(body) for body, _ in requests]
        encoded: dict[_Kind, Iterator[Inputs]] = {}
        for kind in set(kinds):
            own = [request for request, each in zip(requests, kinds, strict=True) if each is kind]
            inputs = [given for _, given in own]
            if kind is _Kind.LABELS:
                scored = [(body, given) for body, given in own if not isinstance(body, EmbeddingBody)]
                encoded[kind] = iter(self._scores.encode(scored))
            elif kind is _Kind.VECTORS:
                encoded[kind] = iter(self._embeddings.encode(inputs))
            else:
                encoded[kind] = iter(encode(self._tokenizer, inputs, chat=kind is _Kind.CHAT_CHOICES))
        return [next(encoded[kind]) for kind in kinds]

    def request(self, request_id: str, body: PooledBody, encoded: Inputs, hints: RowHints) -> Request:
        """The engine's request for encoded inputs. Raises `RowError`."""
        if isinstance(body, EmbeddingBody):
            return self._embeddings.request(request_id, body, encoded)
        if isinstance(body, ClassifyBody) and body.choices:
            return self._choices.request(request_id, body, encoded, hints)
        return self._scores.request(request_id, body, encoded, hints)


def _texts_of_pairs(body: PairBody) -> tuple[str, ...]:
    """A body's texts as received: a chat template may omit or respell parts of them."""
    texts = dict.fromkeys(str(text) for pair in body.sequences for text in pair)
    given = (body.instruction, *body.chat_template_kwargs.values())
    return (*texts, *(text for text in given if isinstance(text, str)))


def _kind_of(body: PooledBody) -> _Kind:
    if isinstance(body, EmbeddingBody):
        return _Kind.VECTORS
    if isinstance(body, ClassifyBody) and body.choices:
        return _Kind.CHAT_CHOICES if body.messages else _Kind.CHOICES
    return _Kind.LABELS


def pooled_results(row: ComputedRow, envelope: Envelope, classifier: ClassifierSettings | None) -> list[ResultRow]:
    """The results of a row and of its copies. `classifier`: of the model that computed it."""
    if isinstance(row.prepared.body, EmbeddingBody):
        return embedding_results(row, envelope)
    return scoring_results(row, envelope, classifier)
