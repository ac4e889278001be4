"""Embeddings requests: translates a body to the engine's request, and vectors to OpenAI's response.

Texts are prepared as in sentence-transformers 6: one of the model's prompts is prepended, blanks at the ends stay, and
the tokenizer adds its special tokens. Token ids are used as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.models.encoders.settings import EmbeddingSettings
from engine.request import Request
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowError, RowErrorCode, invalid_request
from schemas.requests.parsing import EmbeddingBody
from workers.rows import ComputedRow, Envelope, RowName
from workers.text.tokenizer import EncodedText, TokenIds, Tokenizer
from workers.translation.pooling import pooling_request
from workers.translation.rendering import encodable
from workers.translation.requests import JobRules, ModelLimits

Input = str | TokenIds
"""One input to embed: text to encode, or token ids (int32 [tokens])."""


class EmbeddingReader:
    """Translates the embeddings requests of one job for one model."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, rules: JobRules) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._rules = rules
        self._skips: dict[str, int] = {}  # prompt -> its tokens that pooling excludes

    def inputs_of(self, body: EmbeddingBody) -> list[Input]:
        """The inputs to encode and embed. Raises `RowError`."""
        settings = self._settings()
        prompt = self._prompt(body, settings)
        inputs: list[Input] = []
        for at, given in enumerate(body.input):
            if isinstance(given, str):
                text = self._prepared(prompt + encodable(given, _name(body, at)), settings)
                if min_tokens := self._tokenizer.count_excess(text, self.max_tokens):
                    raise self._too_long(f"{_name(body, at)} has at least {min_tokens} tokens")
                inputs.append(text)
                continue
            if body.prompt_name is not None or (prompt and not settings.include_prompt):
                raise invalid_request(
                    f"{_name(body, at)} is token ids, before which no prompt can be put; give text", "input"
                )
            for token_id in given:
                if token_id >= self._limits.vocab_size:
                    last = self._limits.vocab_size - 1
                    raise invalid_request(
                        f"{_name(body, at)} holds token {token_id}, but the model's ids end at {last}", "input"
                    )
            inputs.append(np.asarray(given, dtype=np.int32))
        self._check_dimensions(body, settings)
        return inputs

    def encode(self, inputs: Sequence[Sequence[Input]]) -> list[list[TokenIds]]:
        """Encode the inputs of many requests; all texts in one call."""
        texts = [given for request in inputs for given in request if isinstance(given, str)]
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=True))
        return [[next(encoded) if isinstance(given, str) else given for given in request] for request in inputs]

    def request(self, request_id: str, body: EmbeddingBody, prompts: Sequence[TokenIds]) -> Request:
        """The engine's request for encoded inputs. Raises `RowError`."""
        settings = self._settings()
        limit = self.max_tokens
        for at, prompt in enumerate(prompts):
            if not len(prompt):
                raise invalid_request(f"{_name(body, at)} holds no tokens; give some text", "input")
            if len(prompt) > limit:
                raise self._too_long(f"{_name(body, at)} has {len(prompt)} tokens")
        total = sum(len(prompt) for prompt in prompts)
        if total > self._rules.max_embedding_tokens:
            allowed = self._rules.max_embedding_tokens
            raise invalid_request(
                f"input holds {total} tokens, but at most {allowed} are allowed; send several requests", "input"
            )
        return pooling_request(
            request_id,
            [EncodedText(prompt) for prompt in prompts],
            self._rules,
            settings.pooling,
            skip=self._skip(body, settings, min(map(len, prompts))),
            dimensions=body.dimensions,
        )

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of one input."""
        return min(self._limits.max_model_len, self._settings().max_tokens or self._limits.max_model_len)

    def _too_long(self, what: str) -> RowError:
        message = f"{what}, but the model embeds at most {self.max_tokens}; shorten it"
        return RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="input")

    def _settings(self) -> EmbeddingSettings:
        if self._limits.embedding is None:
            raise RowError(
                RowErrorCode.UNSUPPORTED_URL,
                "the model publishes no pooling settings (modules.json), so it makes no embeddings; "
                "choose a model made for them",
                param="url",
            )
        return self._limits.embedding

    def _prompt(self, body: EmbeddingBody, settings: EmbeddingSettings) -> str:
        name = settings.default_prompt if body.prompt_name is None else body.prompt_name
        if name is not None and name not in settings.prompts:
            known = ", ".join(sorted(settings.prompts)) or "none"
            raise invalid_request(
                f"prompt_name is {name[:40]!r}, but the model's prompts are {known[:200]}", "prompt_name"
            )
        return "" if name is None else settings.prompts[name]

    def _prepared(self, text: str, settings: EmbeddingSettings) -> str:
        return text.lower() if settings.lower_case else text

    def _check_dimensions(self, body: EmbeddingBody, settings: EmbeddingSettings) -> None:
        wanted, size = body.dimensions, self._limits.embedding_size
        if wanted is None:
            return
        if settings.dimensions is not None and wanted not in (*settings.dimensions, size):
            known = ", ".join(map(str, settings.dimensions))
            raise invalid_request(
                f"dimensions is {wanted}, but the model's vectors can be cut to {known}", "dimensions"
            )
        if wanted > size:
            raise invalid_request(
                f"dimensions is {wanted}, but the model's vectors have {size}; lower it", "dimensions"
            )

    def _skip(self, body: EmbeddingBody, settings: EmbeddingSettings, shortest: int) -> int:
        """Tokens of the prompt that pooling excludes: all of them but a special token at its end. 0: none."""
        prompt = "" if settings.include_prompt else self._prompt(body, settings)
        if not prompt:
            return 0
        if prompt not in self._skips:
            (ids,) = self._tokenizer.encode_batch([self._prepared(prompt, settings)], add_special_tokens=True)
            ends_special = len(ids) > 0 and int(ids[-1]) in self._tokenizer.special_ids
            self._skips[prompt] = len(ids) - ends_special
        return min(self._skips[prompt], shortest - 1)


def embedding_results(row: ComputedRow, envelope: Envelope) -> list[ResultRow]:
    """The results of an embedded row and of its copies. `ResultRow.embedding` is the vector of a request with one
    input; the vectors of several inputs are in `response`."""
    prepared, completion = row.prepared, row.completion
    body, vectors = prepared.body, completion.embeddings
    assert isinstance(body, EmbeddingBody)
    assert vectors is not None, "an embedded row has vectors"
    response = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": completion.prompt_tokens, "total_tokens": completion.prompt_tokens},
    }
    text = orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY).decode()

    def result(index: int, name: RowName) -> ResultRow:
        return ResultRow(
            custom_id=name.custom_id,
            row=name.row,
            status=RowStatus.SUCCEEDED,
            status_code=200,
            response=text,
            model=body.model,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens if index == 0 else completion.prompt_tokens,
            completion_tokens=0,
            embedding=vectors[0] if len(vectors) == 1 else None,
            created_at=envelope.created_at,
            started_at=envelope.wall(completion.started_at),
            finished_at=envelope.wall(completion.finished_at),
            attempt=envelope.attempt,
        )

    return [result(index, name) for index, name in enumerate(prepared.names)]


def _encode_vector(vector: NDArray[np.float32], encoding: str) -> Any:
    """A vector in the response's encoding: numbers, or the base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return np.ascontiguousarray(vector, dtype=np.float32)


def _name(body: EmbeddingBody, at: int) -> str:
    return "input" if len(body.input) == 1 else f"input[{at}]"
