"""Ends of the lane's chats in the dialect of their requests: the lane and its workers know chats only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.parsing import CHAT_URL, ChatBody
from schemas.requests.tokenizing import COUNT_TOKENS_URL
from schemas.workers.lane import ErrorEvent


def lane_url(url: str) -> str:
    """The url of the lane request for a request to `url`."""
    return CHAT_URL if url in DIALECTS else url


def rewrite_response(url: str, body: BaseModel, response: dict[str, Any]) -> dict[str, Any]:
    """The worker's complete response in the format of `url`. `body`: the request's, as it was parsed."""
    dialect = DIALECTS.get(url)
    return dialect.response(response, body) if dialect is not None and isinstance(body, ChatBody) else response


def translate_event(url: str, event: ErrorEvent) -> ErrorEvent:
    """The worker's error with the parameters' names in requests to `url`."""
    if (dialect := DIALECTS.get(MESSAGES_URL if url == COUNT_TOKENS_URL else url)) is None:
        return event
    param = None if event.param is None else dialect.rename(event.param)
    return replace(event, message=dialect.rename_in(event.message, event.fields), param=param)
