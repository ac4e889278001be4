"""Anthropic's `count_tokens`: the prompt of a message is a conversation that a worker tokenizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError, bad_request
from pipeline.gateway.inference.responses import InferenceResponses
from schemas.requests.bodies import INT32_MAX, ChatBody
from schemas.requests.dialects.anthropic.body import COUNTED, MESSAGES_URL
from schemas.requests.errors import STATUS_CODES, RowError
from schemas.requests.limits import Limits
from schemas.requests.parsing import dump_body, parse_body
from schemas.requests.tokenizing import OF_CHAT, TOKENIZE_URL


async def count_tokens(
    answers: InferenceResponses, caller: Caller, body: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    """The number of the prompt's tokens, in Anthropic's form. Raises `ApiError`."""
    for name in body:
        if name not in COUNTED:
            message = f"{name[:80]} is not a parameter known here; remove it"
            raise bad_request(message, name[:80], "unsupported_parameter")
    given = dict(body)
    if given.get("model") is None and answers.builder.default_model is not None:
        given["model"] = answers.builder.default_model
    try:
        chat = parse_body(MESSAGES_URL, {**given, "max_tokens": INT32_MAX}, limits)
        assert isinstance(chat, ChatBody), "of the url"
        dumped = orjson.loads(dump_body(chat))
    except RowError as error:
        raise ApiError(STATUS_CODES[error.code], error.code.value, error.message, param=error.param) from None
    except ValueError:
        raise bad_request("the body holds half a character (a lone surrogate); send text") from None
    prompt = {name: dumped[name] for name in ("model", *OF_CHAT) if name in dumped}
    if not chat.offered_tools:
        prompt.pop("tools", None)
    inference = await answers.read(caller, TOKENIZE_URL, prompt)
    return {"input_tokens": (await answers.complete(inference))["count"]}
