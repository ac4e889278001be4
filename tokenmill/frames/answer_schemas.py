"""JSON schemas that users write for answers: what is none, and how long an answer may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenmill.errors import InvalidCall

ANNOTATIONS: Final = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples"})
"""Keywords of a schema that constrain nothing."""

KEYWORDS: Final = frozenset((
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "items",
    "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
    "unevaluatedItems", "minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType",
    "contentSchema", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$anchor", "$defs", "definitions",
))  # fmt: skip
"""Those that say what an answer is (JSON Schema 2020-12, and its former `definitions`)."""

_TYPES: Final[Mapping[str, str]] = {
    "str": "string", "string": "string", "text": "string", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "bool": "boolean", "boolean": "boolean",
}  # fmt: skip
"""Types of a schema by the names that users give them."""


def check_is_schema(given: Mapping[str, Any]) -> None:
    """Raise `InvalidCall` for a dict that says nothing as a JSON schema, such as one of names and types. The message
    has the schema that was meant. (The empty one is any JSON.)"""
    if not given or not KEYWORDS.isdisjoint(given):
        return
    names = {str(name): _TYPES.get(getattr(kind, "__name__", str(kind)).lower()) for name, kind in given.items()}
    properties = {name: {} if kind is None else {"type": kind} for name, kind in names.items()}
    meant = {"type": "object", "properties": properties, "required": list(properties)}
    raise InvalidCall(
        f"output: a dict must be a JSON schema, and this one has none of its keywords; give {json.dumps(meant)}, or a "
        "pydantic model"
    )
