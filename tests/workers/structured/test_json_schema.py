"""The bounds of JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.requests.errors import RowError
from workers.structured.json_schema import MAX_DEPTH, check_depth


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_given_a_schema_of_the_maximum_depth_when_checked_then_it_is_accepted_and_one_more_level_is_refused() -> None:
    check_depth(nested(MAX_DEPTH), "response_format")

    with pytest.raises(RowError, match=f"response_format is nested deeper than {MAX_DEPTH}"):
        check_depth(nested(MAX_DEPTH + 1), "response_format")
