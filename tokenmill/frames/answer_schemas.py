"""JSON schemas that users write for answers: what is none, and how long an answer may be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


BLANK_BYTES: Final = 49
"""Of white space between two parts of an answer, at most (`BLANKS` of workers.structured.json_schema)."""

CHAR_BYTES: Final = 6
"""Of a character of a text, at most: an escape."""


@dataclass(frozen=True, slots=True)
class AnswerBound:
    """How long an answer may be. A token has a byte at least.

    Attributes:
        max_bytes: of its text; None: any number.
        unbounded: the paths of texts, lists and objects without a bound.
    """

    max_bytes: int | None
    unbounded: tuple[str, ...] = ()


def bound_answer(schema: Mapping[str, Any]) -> AnswerBound:
    """How long the JSON text of a schema's values may be."""
    bounds = _Bounds(schema)
    try:
        size = bounds.max_bytes(schema, "")
    except RecursionError:  # such a schema is refused when its answers are to be enforced
        return AnswerBound(None)
    return AnswerBound(size, tuple(dict.fromkeys(path or "the answer" for path in bounds.unbounded)))


class _Bounds:
    """The sizes of a schema's parts, each of which is looked at once, however often it is referred to.

    Attributes:
        unbounded: the paths of values that may have any number of bytes, but for numbers.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.unbounded: list[str] = []
        self._root = root
        self._targets: dict[str, int | None] = {}  # by pointer; None: unbounded, or not known yet: a recursion

    def max_bytes(self, schema: Any, path: str) -> int | None:
        """The bytes of a value at a path, at most; None: any number."""
        if isinstance(schema, dict) and isinstance(pointer := schema.get("$ref"), str):
            if pointer not in self._targets:
                self._targets[pointer] = None
                self._targets[pointer] = self.max_bytes(find_target(pointer, self._root), path)
            elif self._targets[pointer] is None:
                self.unbounded.append(path)
            return self._targets[pointer]
        if not isinstance(schema, dict):
            self.unbounded.append(path)
            return None
        if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return max((len(json.dumps(value, ensure_ascii=False).encode()) for value in values), default=0)
        if isinstance(alternatives := schema.get("anyOf") or schema.get("oneOf"), list):
            return _greatest(self.max_bytes(one, path) for one in alternatives)
        kinds = schema.get("type")
        return _greatest(self._of_kind(one, schema, path) for one in (kinds if isinstance(kinds, list) else [kinds]))

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], path: str) -> int | None:
        """See `max_bytes`: of the values of one type."""
        if kind in ("boolean", "null"):
            return len("false")
        if kind in ("integer", "number"):
            ends = schema.get("minimum"), schema.get("maximum")
            is_whole = kind == "integer" and all(isinstance(end, int) for end in ends)
            return max(2, *(len(str(end)) for end in ends)) if is_whole else None  # 2: -0
        if kind == "string" and isinstance(schema.get("maxLength"), int):
            return 2 + CHAR_BYTES * int(schema["maxLength"])
        if kind == "array" and isinstance(schema.get("maxItems"), int) and "items" in schema:
            item = self.max_bytes(schema["items"], f"{path}[]")
            return None if item is None else 2 + BLANK_BYTES + schema["maxItems"] * (item + 1 + 2 * BLANK_BYTES)
        if kind == "object" and schema.get("additionalProperties") is False and "patternProperties" not in schema:
            inner = {
                name: self.max_bytes(one, f"{path}.{name}" if path else name)
                for name, one in (schema.get("properties") or {}).items()
            }
            known = [size for size in inner.values() if size is not None]
            names = sum(len(json.dumps(name, ensure_ascii=False).encode()) for name in inner)
            blanks = BLANK_BYTES * (1 + 3 * len(inner))
            return None if len(known) < len(inner) else 2 + sum(known) + names + 2 * len(inner) + blanks
        self.unbounded.append(path)
        return None


def _greatest(sizes: Iterable[int | None]) -> int | None:
    """The greatest size; None: one is any number."""
    found = list(sizes)
    known = [size for size in found if size is not None]
    return max(known) if len(known) == len(found) else None


def find_target(pointer: str, root: Mapping[str, Any]) -> Any:
    """The schema at a JSON pointer within the document; None: there is none."""
    found: Any = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
