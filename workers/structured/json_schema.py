"""JSON schemas as the grammar library takes them.

What a schema says is left as it is. Taken out is what only annotates it: names of formats that the library doesn't know
(a format is an annotation, says JSON Schema 2020-12, section 7 of its validation), and a `$schema` of somebody's own.
"""

from __future__ import annotations

import json
from typing import Any, Final

from schemas.requests.errors import RowError, RowErrorCode

MAX_DEPTH: Final = 64
"""Levels of a schema."""

BLANKS: Final = r"(\x20|\x0A\x20{0,48}|\x0A\x09{0,12})"
"""Between two parts of a JSON text: one blank, or a new line and its indentation. Small models that may write any
blanks write nothing else."""

FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance keeps to (parser/src/json/formats.rs)."""

_DATA: Final = ("const", "enum", "default", "examples")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """A rule's right side: a JSON text that follows the (adapted) schema."""
    options = {"whitespace_flexible": True, "whitespace_pattern": BLANKS, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def adapted(schema: dict[str, Any], base: str = "#") -> dict[str, Any]:
    """The schema, with references into itself led to `base`, where it stands inside another one."""
    found: dict[str, Any] = _adapted(schema, base, names=False)
    if "json-schema.org" not in str(found.get("$schema", "json-schema.org")):
        del found["$schema"]
    return found


def _adapted(value: Any, base: str, *, names: bool) -> Any:
    """`names`: the keys are names of schemas, not keywords."""
    if isinstance(value, list):
        return [_adapted(item, base, names=False) for item in value]
    if not isinstance(value, dict):
        return value
    if names:
        return {key: _adapted(item, base, names=False) for key, item in value.items()}
    found = {}
    for key, item in value.items():
        if key == "format" and isinstance(item, str) and item not in FORMATS:
            continue
        if key == "$ref" and isinstance(item, str) and item.startswith("#"):
            found[key] = base + item[1:]
        else:
            found[key] = item if key in _DATA else _adapted(item, base, names=key in _NAMED)
    return found


def check_depth(schema: Any, param: str) -> None:
    """Refuse what no parser should be led into; raises `RowError`."""
    left = [(0, schema)]
    while left:
        depth, node = left.pop()
        if depth > MAX_DEPTH:
            message = f"{param} is nested deeper than {MAX_DEPTH}; simplify the schema"
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param=param)
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        left += [(depth + 1, child) for child in inner]
