"""Answers requests for the model's tokenizer: /tokenize, /detokenize and `count_tokens`. The engine has no part in
them."""

from __future__ import annotations

from typing import Any

import numpy as np

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.tokenizing import COUNT_TOKENS_URL, DetokenizeBody, parse_tokenizing
from schemas.workers.lane import LaneRequest
from workers.model.loaded_model import LoadedModel
from workers.translation.rendering import encodable, rendered_chat


def tokenizer_response(request: LaneRequest, model: LoadedModel, limits: Limits) -> dict[str, Any]:
    """The response body, in the form of vLLM or Anthropic. A prompt may be longer than the model's context, but
    not than `max_prompt_tokens`. Raises `RowError`."""
    body, chat = parse_tokenizing(request.url, request.body, limits)
    tokenizer = model.tokenizer
    if isinstance(body, DetokenizeBody):
        size = model.limits.vocab_size
        unknown = next((token for token in body.tokens if token >= size), None)
        if unknown is not None:
            message = f"tokens holds token {unknown}, but the model's ids end at {size - 1}"
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param="tokens")
        none = np.zeros(0, dtype=np.int32)
        return {"prompt": tokenizer.decode_showing(none, list(body.tokens), tokenizer.special_spellings)}
    name = "prompt" if chat is None else "messages"
    text = encodable(body.prompt or "", name) if chat is None else rendered_chat(chat, tokenizer)
    _check_count(tokenizer.count_excess(text, limits.max_prompt_tokens), "at least ", name, limits)
    if chat is not None:
        (ids,) = tokenizer.encode_chats([text])
    else:
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=body.add_special_tokens is not False)
    _check_count(len(ids), "", name, limits)
    if request.url == COUNT_TOKENS_URL:
        return {"input_tokens": len(ids)}
    tokens = ids.tolist()
    return {
        "count": len(tokens),
        "max_model_len": model.limits.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.id_to_token(token) or "" for token in tokens] if body.return_token_strs else None,
    }


def _check_count(tokens: int, bound: str, name: str, limits: Limits) -> None:
    if tokens > (allowed := limits.max_prompt_tokens):
        message = f"{name} holds {bound}{tokens} tokens, but at most {allowed} are allowed; shorten it"
        raise RowError(RowErrorCode.INVALID_REQUEST, message, param=name)
