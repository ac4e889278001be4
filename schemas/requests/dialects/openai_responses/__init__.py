"""OpenAI's Responses API as a dialect: text, function calls, JSON schemas and reasoning; nothing is stored."""

from __future__ import annotations

from typing import Final

from schemas.requests.dialects.dialect import Dialect
from schemas.requests.dialects.openai_responses.body import CHAT_NAMES, HINTS, NO_CHANGE, ResponsesBody
from schemas.requests.dialects.openai_responses.response import to_response

RESPONSES_URL: Final = "/v1/responses"

RESPONSES: Final = Dialect(
    body=ResponsesBody,
    response=to_response,
    no_change=NO_CHANGE,
    hints=HINTS,
    names=CHAT_NAMES,
    repeated=frozenset(("metadata", "user")),
)
