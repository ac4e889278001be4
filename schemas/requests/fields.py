"""Custom validators of body fields, and their JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

NULL: Final[JsonSchemaValue] = {"type": "null"}
TEXT: Final[JsonSchemaValue] = {"type": "string", "minLength": 1}
TEXTS: Final[JsonSchemaValue] = {"type": "array", "items": TEXT, "minItems": 1}
TOKEN_IDS: Final[JsonSchemaValue] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}
NAME: Final[JsonSchemaValue] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}


def one_of(*schemas: JsonSchemaValue) -> JsonSchemaValue:
    """A schema that accepts whatever one of these accepts."""
    return {"anyOf": list(schemas)}


def record(required: tuple[str, ...] = (), **fields: JsonSchemaValue) -> JsonSchemaValue:
    """An object with these fields, and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def or_null(kind: str) -> JsonSchemaValue:
    """A value of this type, or null."""
    return {"type": [kind, "null"]}


@dataclass(frozen=True, slots=True)
class only:  # noqa: N801 - read as a word: Annotated[int, only(check, takes)]
    """Validates a field by `check` alone. (pydantic's PlainValidator would lose the type in serialization.)

    Args:
        takes: the JSON schema of accepted values.
    """

    check: Callable[[Any], Any]
    takes: JsonSchemaValue

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(lambda value, _: self.check(value), handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(self.takes)


@dataclass(frozen=True, slots=True)
class defaulting:  # noqa: N801 - the same
    """Replaces JSON null by the default, as OpenAI does."""

    default: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: self.default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return one_of(handler(schema), NULL)


STOP: Final = one_of(TEXT, {"type": "array", "items": TEXT}, NULL)
BAD_WORDS: Final = one_of({"type": "array", "items": {"type": "string", "pattern": "\\S"}}, NULL)
LOGIT_BIAS: Final = one_of(
    {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    },
    NULL,
)
PROMPT: Final = one_of(TEXT, TOKEN_IDS, {"type": "array", "items": one_of(TEXT, TOKEN_IDS), "minItems": 1})
INPUTS: Final = PROMPT
TEXT_PARTS: Final[JsonSchemaValue] = {
    "type": "array",
    "items": record(("type", "text"), type={"const": "text"}, text={"type": "string"}),
    "minItems": 1,
}
CONTENT: Final = one_of({"type": "string"}, TEXT_PARTS, NULL)
_SAID: Final = {"content": one_of({"type": "string"}, TEXT_PARTS)}
_NO_CALLS: Final[JsonSchemaValue] = {"tool_calls": {"enum": [None, []]}, "reasoning": NULL, "reasoning_content": NULL}
MESSAGE: Final = one_of(
    {
        "properties": {"role": {"enum": ["system", "developer", "user"]}, **_SAID, **_NO_CALLS},
        "required": ["role", "content"],
    },
    {
        "properties": {"role": {"const": "tool"}, **_SAID, **_NO_CALLS, "tool_call_id": {"type": "string"}},
        "required": ["role", "content", "tool_call_id"],
    },
    {"properties": {"role": {"const": "assistant"}, **_SAID}, "required": ["role", "content"]},
    {
        "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
        "required": ["role", "tool_calls"],
    },
)
"""The required fields of a message, by its role."""

TEMPLATE_KWARGS: Final = one_of(
    {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "number", "string"]}}, NULL
)
RESPONSE_FORMAT: Final = one_of(
    record(("type",), type={"enum": ["text", "json_object"]}, json_schema=NULL),
    record(
        ("type", "json_schema"),
        type={"const": "json_schema"},
        json_schema=record(
            ("name",),
            name=NAME,
            description=or_null("string"),
            schema=or_null("object"),
            strict=or_null("boolean"),
        ),
    ),
    NULL,
)
_KINDS: Final[dict[str, JsonSchemaValue]] = {
    "json": {"type": ["object", "string", "null"]},
    "regex": one_of(TEXT, NULL),
    "choice": one_of(TEXTS, NULL),
    "grammar": one_of(TEXT, NULL),
}
STRUCTURED_OUTPUTS: Final = one_of(
    {
        **record((), json_schema=_KINDS["json"], json_object=or_null("boolean"), **_KINDS),
        "minProperties": 1,
    },
    NULL,
)
GUIDED: Final = {f"guided_{kind}": schema for kind, schema in _KINDS.items()}
"""vLLM's older names of `structured_outputs` of one kind."""

TOOL_CHOICE: Final = one_of(
    {"enum": ["none", "auto", "required", None]},
    record(("type", "function"), type={"const": "function"}, function=record(("name",), name=NAME)),
)
