"""Requests for scores, rankings and labels: translates a body to the engine's request, and logits to vLLM's response.

The tokenizer's own template joins the texts of a pair, unless the model's chat template does (`Tokenizer.render_pair`).
A sequence that is too long fails its row, or is cut where the request says so: at its end, of a pair the longer text
first, as by transformers ("longest_first"); of a rendered pair the document's end, so that the template stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.models.encoders.classifier import ClassifierSettings, activate
from engine.request import Request
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowError, RowErrorCode, invalid_request
from schemas.requests.parsing import ClassifyBody, PairBody, RerankBody, ScoreBody
from workers.rows import ComputedRow, Envelope, RowName, response_id
from workers.text.tokenizer import EncodedText, Texts, TokenIds, Tokenizer
from workers.translation.choices import classified_by_choices, continuation_logprobs, scoring_request
from workers.translation.pooling import pooling_request
from workers.translation.rendering import encodable
from workers.translation.requests import JobRules, ModelLimits, RowHints
from workers.translation.template_variables import pair_variables
from workers.translation.truncation import cut_text

MAX_TOKEN_CHARS: Final = 16
"""Characters of a request's texts for each token that it may have: about four times as many as texts have."""

MAX_CUT_CHARS: Final = 64
"""Characters that are encoded of a text for each token that it is cut to. Only runs of blanks or the like have more."""

ScoringRequest = ScoreBody | RerankBody | ClassifyBody

Input = Texts | str | EncodedText
"""What the model reads: a text or a pair to encode, a pair as its chat template has rendered it, or token ids."""


class ScoringReader:
    """Translates the requests of one job that a classifier answers."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._rules = rules

    def inputs_of(self, body: ScoringRequest) -> list[Input]:
        """What the model reads. Raises `RowError`."""
        settings = self._settings()
        _check_labels(body, settings)
        limit = self._limit(body)
        variables = self._variables(body)
        self._check_chars(body, limit)
        known: dict[str, tuple[str, int]] = {}
        inputs: list[Input] = []
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
            min_tokens = sum(known[str(text)][1] for text in sequence)
            if body.truncate_prompt_tokens is None and min_tokens > limit:
                raise self._too_long(f"{name} has at least {min_tokens} tokens", limit)
            inputs.append(self._rendered(body, texts, variables) if self._renders(sequence) else texts)
        return inputs

    def encode(self, requests: Sequence[tuple[ScoringRequest, Sequence[Input]]]) -> list[list[EncodedText]]:
        """Encode the inputs of many requests, and cut them where a request says so, but for rendered pairs; all texts
        in one call."""
        texts: list[Texts] = []
        limits: list[int | None] = []
        rendered: list[str] = []
        for body, inputs in requests:
            limit = None if body.truncate_prompt_tokens is None else self._limit(body)
            own = [given for given in inputs if not isinstance(given, EncodedText | str)]
            texts += own
            limits += [limit] * len(own)
            rendered += [given for given in inputs if isinstance(given, str)]
        encoded = iter(self._tokenizer.encode_texts(texts, limits))
        chats = iter(self._tokenizer.encode_chats(rendered))

        def encoding(given: Input) -> EncodedText:
            if isinstance(given, EncodedText):
                return given
            return EncodedText(next(chats)) if isinstance(given, str) else next(encoded)

        return [[encoding(given) for given in inputs] for _, inputs in requests]

    def request(
        self, request_id: str, body: ScoringRequest, encoded: Sequence[EncodedText], hints: RowHints
    ) -> Request:
        """The engine's request for encoded inputs. Raises `RowError`."""
        settings, limit = self._settings(), self._limit(body)
        cut, sequences = list(encoded), body.sequences
        for at, one in enumerate(encoded):
            name = body.name_of(at)
            if not len(one.ids):
                raise invalid_request(f"{name} holds no tokens; give some text", name)
            if len(one.ids) <= limit:
                continue
            if body.truncate_prompt_tokens is None:
                raise self._too_long(f"{name} has {len(one.ids)} tokens", limit)
            # Other texts are cut where they are encoded.
            rendered = self._renders(sequences[at])
            cut[at] = EncodedText(self._cut_document(body, at, one.ids) if rendered else one.ids[:limit])
        total = sum(len(one.ids) for one in cut)
        if total > (allowed := self._rules.max_embedding_tokens):
            name = "input" if isinstance(body, ClassifyBody) else "documents"
            raise invalid_request(
                f"{name} makes {total} tokens, but at most {allowed} are allowed; send several requests", name
            )
        if settings.tokens is None:
            return pooling_request(request_id, cut, self._rules, settings.pooling)
        tokens = [np.array([token_id], dtype=np.int32) for token_id in settings.tokens]
        return scoring_request(request_id, [one.ids for one in cut], tokens, self._rules, hints)

    def _variables(self, body: ScoringRequest) -> dict[str, Any]:
        """Those of the chat template for pairs. Raises `RowError`."""
        return pair_variables(body, self._tokenizer) if isinstance(body, PairBody) else {}

    def _renders(self, sequence: Sequence[Any]) -> bool:
        """Whether the model's chat template joins it: a pair."""
        return self._tokenizer.renders_pairs and len(sequence) > 1

    def _rendered(self, body: ScoringRequest, pair: Texts, variables: Mapping[str, Any]) -> str:
        """The prompt of a prepared pair. Raises `RowError`."""
        query, document = pair
        own = body.instruction if isinstance(body, PairBody) else None
        instruction = own or self._settings().instruction
        return encodable(self._tokenizer.render_pair(query, document, instruction, variables), "documents")

    def _cut_document(self, body: ScoringRequest, at: int, prompt: TokenIds) -> TokenIds:
        """The prompt of a rendered pair with as much of the document as fits. Raises `RowError`."""
        limit, settings = self._limit(body), self._settings()
        variables = self._variables(body)
        query, document = (self._prepared(str(text)[: limit * MAX_CUT_CHARS], settings) for text in body.sequences[at])

        def prompt_of(text: str) -> TokenIds:
            return self._tokenizer.encode_chats([self._rendered(body, (query, text), variables)])[0]

        cut = cut_text(self._tokenizer, document, prompt_of, prompt, limit, chat=True)
        if cut is None:
            message = f"{body.name_of(at)} of {len(prompt)} tokens with its query is to be cut to {limit}, but nothing "
            raise RowError(
                RowErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"{message}of the document fits behind the query and the chat template; raise truncate_prompt_tokens",
                param="truncate_prompt_tokens",
            )
        return cut

    def _check_chars(self, body: ScoringRequest, limit: int) -> None:
        """Refuse texts that can't be few enough tokens before they are encoded: a query counts with each document.
        Raises `RowError`."""
        chars = 0
        if isinstance(body, PairBody):  # they stand in each pair's prompt
            given = [body.instruction or "", *body.chat_template_kwargs.values()]
            chars = len(body.sequences) * sum(len(text) for text in given if isinstance(text, str))
        for sequence in body.sequences:
            if not isinstance(sequence[0], tuple):
                size = sum(map(len, map(str, sequence)))
                chars += size if body.truncate_prompt_tokens is None else min(size, limit * MAX_TOKEN_CHARS)
        if chars > (allowed := self._rules.max_embedding_tokens * MAX_TOKEN_CHARS):
            name = "input" if isinstance(body, ClassifyBody) else "documents"
            each = "" if isinstance(body, ClassifyBody) else ", the query with each of them"
            raise invalid_request(
                f"{name} makes {chars} characters{each}, but at most {allowed} are allowed; send several requests", name
            )

    def _measured(self, text: str, name: str, settings: ClassifierSettings, limit: int | None) -> tuple[str, int]:
        """The text as it is encoded, without what `limit` tokens never hold, and a lower bound of its tokens."""
        if limit is not None:
            text = text[: limit * MAX_CUT_CHARS]
        prepared = self._prepared(encodable(text, name), settings)
        return prepared, self._tokenizer.count_min_tokens(prepared)

    def _limit(self, body: ScoringRequest) -> int:
        """Maximum tokens of a sequence. Raises `RowError`."""
        settings = self._settings()
        max_tokens = self._limits.max_model_len - (settings.tokens is not None)  # one of these follows the prompt
        max_tokens = min(max_tokens, settings.max_tokens or max_tokens)
        wanted = body.truncate_prompt_tokens
        if wanted is None or wanted == -1:
            return max_tokens
        if wanted > max_tokens:
            raise invalid_request(
                f"truncate_prompt_tokens is {wanted}, but the model takes at most {max_tokens}; lower it, or give -1",
                "truncate_prompt_tokens",
            )
        longest = max(body.sequences, key=len)
        added = 0 if self._renders(longest) else self._tokenizer.num_added_tokens(pair=len(longest) > 1)
        if wanted <= added:
            raise invalid_request(
                f"truncate_prompt_tokens is {wanted}, but the tokenizer itself adds {added} tokens; raise it",
                "truncate_prompt_tokens",
            )
        return wanted

    def _ids(self, given: tuple[int, ...], name: str) -> EncodedText:
        size = self._limits.vocab_size
        for token_id in given:
            if token_id >= size:
                raise invalid_request(f"{name} holds token {token_id}, but the model's ids end at {size - 1}", name)
        return EncodedText(np.asarray(given, dtype=np.int32))

    def _too_long(self, what: str, limit: int) -> RowError:
        message = f"{what}, but the model takes at most {limit}; shorten it, or set truncate_prompt_tokens to -1"
        return RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message)

    def _settings(self) -> ClassifierSettings:
        if self._limits.classifier is None:
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                "the model has no head for labels (…ForSequenceClassification) and no tokens for scores "
                "(--score-tokens), so it makes none; choose a reranker or a classifier, or classify by choices",
                param="url",
            )
        return self._limits.classifier

    def _prepared(self, text: str, settings: ClassifierSettings) -> str:
        return text.lower() if settings.lower_case else text


def _check_labels(body: ScoringRequest, settings: ClassifierSettings) -> None:
    """Refuse what the model's head is not made for. Raises `RowError`."""
    if isinstance(body, ClassifyBody):
        if not settings.labels:
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                "the model scores pairs and has no labels; use /v1/score or /v1/rerank, or classify by choices",
                param="url",
            )
    elif len(settings.labels) > 1:
        raise RowError(
            RowErrorCode.UNSUPPORTED_URL,
            f"the model tells {len(settings.labels)} labels apart and gives no score; use /v1/classify, whose input "
            "takes pairs",
            param="url",
        )


def scoring_results(row: ComputedRow, envelope: Envelope, settings: ClassifierSettings | None) -> list[ResultRow]:
    """The results of a scored row and of its copies. `ResultRow.text` is the label of a request with one input.
    `settings`: of the model's head for labels."""
    prepared, completion = row.prepared, row.completion
    body = prepared.body
    assert isinstance(body, ScoreBody | RerankBody | ClassifyBody)
    prompt_tokens, cached_tokens = completion.prompt_tokens, completion.cached_tokens
    if settings is not None and settings.tokens is not None and not isinstance(body, ClassifyBody):
        # Each prompt is that of two members, one for each token, and is read once.
        prompt_tokens = sum(member.params.prompt_logprobs_start for member in prepared.request.members[::2])
        cached_tokens = max(0, cached_tokens - (completion.prompt_tokens - prompt_tokens))
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
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
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens if index == 0 else prompt_tokens,
            completion_tokens=0,
            created_at=envelope.created_at,
            started_at=started,
            finished_at=finished,
            attempt=envelope.attempt,
        )

    return [result(index, name) for index, name in enumerate(prepared.names)]


def _scores(body: ScoreBody | RerankBody, row: ComputedRow, settings: ClassifierSettings | None) -> NDArray[np.float32]:
    """The score of each pair, float32 [pairs]."""
    assert settings is not None, "only a model with settings for scores gives them"
    if settings.tokens is None:
        logits = row.completion.embeddings
        assert logits is not None, "a scored row has logits"
    else:  # a difference of log-probabilities is that of the logits
        no_and_yes = np.concatenate(continuation_logprobs(row.prepared.request, row.completion)).reshape(-1, 2)
        logits = no_and_yes[:, 1:] - no_and_yes[:, :1]
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
