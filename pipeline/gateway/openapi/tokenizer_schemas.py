"""Responses of /tokenize and /detokenize for the OpenAPI document; see `build_schemas`."""

from __future__ import annotations

from schemas.jobs.batch import ResponseModel
from schemas.stored import Count


class Tokenized(ResponseModel):
    """Token ids of a prompt. `token_strs`: their spellings in the vocabulary, if they are wanted."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(ResponseModel):
    """The text of token ids, special tokens spelt."""

    prompt: str
