"""Requests for scores, rankings and labels: translates a body to the engine's request, and logits to vLLM's response.

The tokenizer's own template joins the texts of a pair. A sequence that is too long fails its row, or is cut at its end
where the request says so: of a pair the longer text first, as by transformers ("longest_first").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.models.encoders.classifier import ClassifierSettings, activate
from engine.request import Request, SamplingParams
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ClassifyBody, RerankBody, ScoreBody
from workers.rows import ComputedRow, Envelope, RowName, response_id
from workers.text.tokenizer import EncodedText, Texts, Tokenizer
from workers.translation.choices import classified_by_choices
from workers.translation.rendering import encodable
from workers.translation.requests import JobRules, ModelLimits

MAX_TOKEN_CHARS: Final = 16
"""Characters of a request's texts for each token that it may have: about four times as many as texts have."""

MAX_CUT_CHARS: Final = 64
"""Characters that are encoded of a text for each token that it is cut to. Only runs of blanks or the like have more."""

ScoringRequest = ScoreBody | RerankBody | ClassifyBody


class ScoringReader:
    """Translates the requests of one job that a classifier answers."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._rules = rules

    def inputs_of(self, body: ScoringRequest) -> list[Texts | EncodedText]:
        """What the model reads: texts to encode, or token ids. Raises `RowError`."""
        settings = self._settings()
        if not isinstance(body, ClassifyBody) and len(settings.labels) > 1:
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                f"the model tells {len(settings.labels)} labels apart and gives no score; use /v1/classify",
                param="url",
            )
        limit = self._limit(body)
        self._check_chars(body, limit)
        known: dict[str, tuple[str, int]] = {}
        inputs: list[Texts | EncodedText] = []
        for at, sequence in enumerate(body.sequences):
            name = body.name_of(at)
            if isinstance(sequence[0], tuple):
                inputs.append(self._ids(sequence[0], name))
                continue
            for text in map(str, sequence):
                if text not in known:
                    known[text] = self._measured(
                        text, name, settings, None if body.truncate_prompt_tokens is None else limit
                    )
            texts = tuple(known[str(text)][0] for text in sequence)
            least = sum(known[str(text)][1] for text in sequence)
            if body.truncate_prompt_tokens is None and least > limit:
                raise self._too_long(f"{name} has at least {least} tokens", limit)
            inputs.append(texts)
        return inputs

    def encode(
        self, requests: Sequence[tuple[ScoringRequest, Sequence[Texts | EncodedText]]]
    ) -> list[list[EncodedText]]:
        """Encode the inputs of many requests, and cut them where a request says so; all texts in one call."""
        texts: list[Texts] = []
        most: list[int | None] = []
        for body, inputs in requests:
            limit = None if body.truncate_prompt_tokens is None else self._limit(body)
            own = [given for given in inputs if not isinstance(given, EncodedText)]
            texts += own
            most += [limit] * len(own)
        encoded = iter(self._tokenizer.encode_texts(texts, most))
        return [
            [given if isinstance(given, EncodedText) else next(encoded) for given in inputs] for _, inputs in requests
        ]

    def request(self, request_id: str, body: ScoringRequest, encoded: Sequence[EncodedText]) -> Request:
        """The engine's request for encoded inputs. Raises `RowError`."""
        settings, limit = self._settings(), self._limit(body)
        cut = list(encoded)
        for at, one in enumerate(encoded):
            name = body.name_of(at)
            if not len(one.ids):
                raise _refuse(f"{name} holds no tokens; give some text", name)
            if len(one.ids) <= limit:
                continue
            if body.truncate_prompt_tokens is None:
                raise self._too_long(f"{name} has {len(one.ids)} tokens", limit)
            cut[at] = EncodedText(one.ids[:limit])  # token ids: texts are cut where they are encoded
        total = sum(len(one.ids) for one in cut)
        if total > (allowed := self._rules.max_embedding_tokens):
            name = "input" if isinstance(body, ClassifyBody) else "documents"
            raise _refuse(
                f"{name} makes {total} tokens, but at most {allowed} are allowed; send several requests", name
            )
        types = [one.types for one in cut if one.types is not None]
        return Request(
            request_id=request_id,
            prompt_token_ids=cut[0].ids,
            more_prompts=tuple(one.ids for one in cut[1:]),
            token_type_ids=tuple(types) if len(types) == len(cut) else (),
            params=SamplingParams(max_tokens=0, temperature=0.0),
            priority=self._rules.priority,
            salt=self._rules.salt,
            pooling=settings.pooling,
        )

    def _check_chars(self, body: ScoringRequest, limit: int) -> None:
        """Refuse texts that can't be few enough tokens before they are encoded: a query counts with each document.
        Raises `RowError`."""
        chars = 0
        for sequence in body.sequences:
            if not isinstance(sequence[0], tuple):
                size = sum(map(len, map(str, sequence)))
                chars += size if body.truncate_prompt_tokens is None else min(size, limit * MAX_TOKEN_CHARS)
        if chars > (allowed := self._rules.max_embedding_tokens * MAX_TOKEN_CHARS):
            name = "input" if isinstance(body, ClassifyBody) else "documents"
            each = "" if isinstance(body, ClassifyBody) else ", the query with each of them"
            raise _refuse(
                f"{name} makes {chars} characters{each}, but at most {allowed} are allowed; send several requests", name
            )

    def _measured(self, text: str, name: str, settings: ClassifierSettings, limit: int | None) -> tuple[str, int]:
        """The text as it is encoded, without what `limit` tokens never hold, and a lower bound of its tokens."""
        if limit is not None:
            text = text[: limit * MAX_CUT_CHARS]
        prepared = self._prepared(encodable(text, name), settings)
        return prepared, self._tokenizer.least_tokens(prepared)

    def _limit(self, body: ScoringRequest) -> int:
        """Maximum tokens of a sequence. Raises `RowError`."""
        most = min(self._limits.max_model_len, self._settings().max_tokens or self._limits.max_model_len)
        wanted = body.truncate_prompt_tokens
        if wanted is None or wanted == -1:
            return most
        if wanted > most:
            raise _refuse(
                f"truncate_prompt_tokens is {wanted}, but the model takes at most {most}; lower it, or give -1",
                "truncate_prompt_tokens",
            )
        added = self._tokenizer.num_added_tokens(pair=not isinstance(body, ClassifyBody))
        if wanted <= added:
            raise _refuse(
                f"truncate_prompt_tokens is {wanted}, but the tokenizer itself adds {added} tokens; raise it",
                "truncate_prompt_tokens",
            )
        return wanted

    def _ids(self, given: tuple[int, ...], name: str) -> EncodedText:
        size = self._limits.vocab_size
        for token_id in given:
            if token_id >= size:
                raise _refuse(f"{name} holds token {token_id}, but the model's ids end at {size - 1}", name)
        return EncodedText(np.asarray(given, dtype=np.int32))

    def _too_long(self, what: str, limit: int) -> RowError:
        message = f"{what}, but the model takes at most {limit}; shorten it, or set truncate_prompt_tokens to -1"
        return RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message)

    def _settings(self) -> ClassifierSettings:
        if self._limits.classifier is None:
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                "the model has no head for labels (…ForSequenceClassification), so it makes no scores; "
                "choose a reranker or a classifier, or classify by choices",
                param="url",
            )
        return self._limits.classifier

    def _prepared(self, text: str, settings: ClassifierSettings) -> str:
        return text.lower() if settings.lower_case else text


def scoring_results(row: ComputedRow, envelope: Envelope, settings: ClassifierSettings | None) -> list[ResultRow]:
    """The results of a scored row and of its copies. `ResultRow.text` is the label of a request with one input.
    `settings`: of the model's head for labels."""
    prepared, completion = row.prepared, row.completion
    body = prepared.body
    assert isinstance(body, ScoreBody | RerankBody | ClassifyBody)
    usage = {"prompt_tokens": completion.prompt_tokens, "total_tokens": completion.prompt_tokens}
    started, finished = envelope.wall(completion.started_at), envelope.wall(completion.finished_at)
    common = {"created": int(started.timestamp()), "model": body.model}
    text = None
    response: dict[str, Any]
    if isinstance(body, ClassifyBody):
        data = _labels(body, row, settings)
        kind, response = "classify", {"id": "", "object": "list", **common, "data": data, "usage": usage}
        text = data[0]["label"] if len(data) == 1 else None
    else:
        scores = _scores(body, row, settings)
        if isinstance(body, RerankBody):
            kind, response = "rerank", {"id": "", **common, "results": _ranked(body, scores), "usage": usage}
        else:
            data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
            kind, response = "score", {"id": "", "object": "list", **common, "data": data, "usage": usage}

    def result(index: int, name: RowName) -> ResultRow:
        response["id"] = response_id(kind, envelope.job, name.row)
        return ResultRow(
            custom_id=name.custom_id,
            row=name.row,
            status=RowStatus.SUCCEEDED,
            status_code=200,
            text=text,
            response=orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY).decode(),
            model=body.model,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens if index == 0 else completion.prompt_tokens,
            completion_tokens=0,
            created_at=envelope.created_at,
            started_at=started,
            finished_at=finished,
            attempt=envelope.attempt,
        )

    return [result(index, name) for index, name in enumerate(prepared.names)]


def _scores(body: ScoreBody | RerankBody, row: ComputedRow, settings: ClassifierSettings | None) -> NDArray[np.float32]:
    """The score of each pair, float32 [pairs]."""
    logits = row.completion.embeddings
    assert settings is not None, "only a classifier gives scores"
    assert logits is not None, "a scored row has logits"
    return (activate(logits, settings.score) if body.use_activation else logits)[:, 0]


def _labels(body: ClassifyBody, row: ComputedRow, settings: ClassifierSettings | None) -> list[dict[str, Any]]:
    """The response's data: a label for each input."""
    if body.choices:
        return classified_by_choices(body, row.prepared.request, row.completion)
    logits = row.completion.embeddings
    assert settings is not None, "only a classifier gives labels"
    assert logits is not None, "a scored row has logits"
    values = activate(logits, settings.probability) if body.use_activation else logits
    return [_classified(at, each, settings.labels) for at, each in enumerate(values)]


def _classified(index: int, values: NDArray[np.float32], labels: Sequence[str]) -> dict[str, Any]:
    label = labels[int(values.argmax())]
    return {"index": index, "label": label, "probs": np.ascontiguousarray(values), "num_classes": len(labels)}


def _ranked(body: RerankBody, scores: NDArray[np.float32]) -> list[dict[str, Any]]:
    """The best documents first; equal ones in their order."""
    order = np.argsort(-scores, kind="stable")[: body.top_n or None].tolist()
    results: list[dict[str, Any]] = []
    for at in order:
        document = {"document": {"text": body.documents[at]}} if body.return_documents else {}
        results.append({"index": at, **document, "relevance_score": scores[at]})
    return results


def _refuse(message: str, param: str) -> RowError:
    return RowError(RowErrorCode.INVALID_REQUEST, message, param=param)
