"""All dialects, by the url of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.requests.dialects.anthropic.body import ANTHROPIC, MESSAGES_URL
from schemas.requests.dialects.dialect import Dialect
from schemas.requests.dialects.openai_responses import RESPONSES, RESPONSES_URL
from schemas.requests.errors import RowError

DIALECTS: Final[Mapping[str, Dialect]] = {RESPONSES_URL: RESPONSES, MESSAGES_URL: ANTHROPIC}


def translate_error(url: str, error: RowError) -> RowError:
    """An error of a request to this url, with the url's own names of the parameters."""
    dialect = DIALECTS.get(url)
    return error if dialect is None else dialect.translate(error)
