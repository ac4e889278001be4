"""Hooks of schemathesis: most random model names and file ids are replaced by existing ones, which random values would
never hit."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

THERE = {"model": "TOKENMILL_FUZZ_MODEL", "input_file_id": "TOKENMILL_FUZZ_FILE"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Only a name that could be one: what is to be refused stays as it is."""
    body = case.body
    if isinstance(body, dict):
        for name, variable in THERE.items():
            given = body.get(name)
            if isinstance(given, str) and 0 < len(given) <= 1_024 and len(given) % 8:
                body[name] = os.environ[variable]
