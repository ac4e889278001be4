"""Adapts JSON schemas to the grammar library.

The constraints of a schema stay as they are. Only annotations are removed: formats that the library doesn't know (a
format is an annotation: JSON Schema 2020-12, Validation, section 7), and a `$schema` outside json-schema.org.
"""

from __future__ import annotations

import json
from typing import Any, Final

from schemas.requests.errors import RowError, RowErrorCode

MAX_DEPTH: Final = 64
"""Maximum nesting of a schema."""

BLANKS: Final = r"(\x20|\x0A\x20{0,48}|\x0A\x09{0,12})"
"""White space between two parts of a JSON text: one blank, or a new line and its indentation. Without this limit small
models may write only white space."""

FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance enforces (parser/src/json/formats.rs)."""

_DATA: Final = ("const", "enum", "default", "examples")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The right side of a rule: a JSON text that follows the (adapted) schema."""
    options = {"whitespace_flexible": True, "whitespace_pattern": BLANKS, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def adapt_schema(schema: dict[str, Any], base: str = "#") -> dict[str, Any]:
    """The schema for the grammar library. Its internal references are rebased to `base`, its path in an outer
    schema."""
    found: dict[str, Any] = _adapt_node(schema, base, names=False)
    if "json-schema.org" not in str(found.get("$schema", "json-schema.org")):
        del found["$schema"]
    return found


def _adapt_node(value: Any, base: str, *, names: bool) -> Any:
    """`names`: the keys are names of schemas, not keywords."""
    if isinstance(value, list):
        return [_adapt_node(item, base, names=False) for item in value]
    if not isinstance(value, dict):
        return value
    if names:
        return {key: _adapt_node(item, base, names=False) for key, item in value.items()}
    found = {}
    for key, item in value.items():
        if key == "format" and isinstance(item, str) and item not in FORMATS:
            continue
        if key == "$ref" and isinstance(item, str) and item.startswith("#"):
            found[key] = base + item[1:]
        else:
            found[key] = item if key in _DATA else _adapt_node(item, base, names=key in _NAMED)
    return found


def check_depth(schema: Any, param: str) -> None:
    """Raise `RowError` when the schema is nested too deep for a parser."""
    left = [(0, schema)]
    while left:
        depth, node = left.pop()
        if depth > MAX_DEPTH:
            message = f"{param} is nested deeper than {MAX_DEPTH}; simplify the schema"
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param=param)
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        left += [(depth + 1, child) for child in inner]
