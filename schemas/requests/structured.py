"""Structured outputs: the response format, grammar or tools of a request body.

Only shapes and sizes are checked here, without a tokenizer; the worker compiles the schema. The order of a schema's
properties is preserved, because answers follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError, from_json, to_json

NAME: Final = r"^[a-zA-Z0-9_-]{1,64}$"
FORMATS: Final = ("text", "json_object", "json_schema")
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
"""The kinds of vLLM's `structured_outputs`; one at a time."""


def invalid(message: str, param: str | None = None, *fields: str) -> PydanticCustomError:
    """A validation error with this text; `param` names the field where a check covers several. `fields`: others that
    the text names (`RowError.fields`)."""
    return PydanticCustomError("invalid_request", "{text}", {"text": message, "param": param, "fields": fields})


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`, except `text`, which is None. `json_schema`: {name, schema, strict, description}."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        """The JSON schema that the answer must follow."""
        schema: dict[str, Any] | None = None if self.json_schema is None else self.json_schema.get("schema")
        return {"type": "object"} if schema is None else schema

    @property
    def is_lenient(self) -> bool:
        """Whether unsupported schema keywords may be ignored: only where `strict` is false."""
        return self.json_schema is not None and self.json_schema.get("strict") is False


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one field is set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[tuple[str, ...], Strict(False)] | None = None
    grammar: str | None = None


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """An entry of `tools`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=NAME)]


class NamedTool(BaseModel):
    """A `tool_choice` that names the function to call."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


class CalledFunction(BaseModel):
    """A called function; `arguments` is the JSON text of an object."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=NAME)]
    arguments: str


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


def check_response_format(value: Any) -> Any:
    """The value of `response_format`: a `ResponseFormat`, or None for plain text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid('must be an object such as {"type": "json_object"}')
    kind = value.get("type")
    if kind not in FORMATS:
        raise invalid(f"has the type {str(kind)[:40]!r}, but must have one of {', '.join(FORMATS)}")
    if more := sorted(value.keys() - {"type", "json_schema"}):
        raise invalid(f"has {more[0][:40]!r}, which is not known here; remove it")
    given = value.get("json_schema")
    if kind == "json_schema":
        _check_json_schema(given)
    elif given is not None:
        raise invalid(f"has a json_schema, but the type {kind}; set the type to json_schema")
    return None if kind == "text" else ResponseFormat(type=kind, json_schema=given)


def _check_json_schema(given: Any) -> None:
    if not isinstance(given, dict):
        raise invalid('needs "json_schema": {"name": …, "schema": {…}}')
    if more := sorted(given.keys() - {"name", "description", "schema", "strict"}):
        raise invalid(f"has json_schema.{more[0][:40]}, which is not known here; remove it")
    name = given.get("name")
    if not isinstance(name, str) or not _is_name(name):
        raise invalid("needs json_schema.name: 1 to 64 letters, digits, _ or -")
    if not isinstance(given.get("description"), str | None):
        raise invalid("has a json_schema.description that is not a string")
    if not isinstance(given.get("strict"), bool | None):
        raise invalid("has a json_schema.strict that is not true or false")
    if not isinstance(given.get("schema"), dict | None):
        raise invalid("has a json_schema.schema that is not an object")


def check_structured_outputs(value: Any) -> Any:
    """The value of `structured_outputs`: a `StructuredOutputs` with one field, or None."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, dict):
        raise invalid('must be an object such as {"regex": "[0-9]+"}')
    given = {name: setting for name, setting in value.items() if setting is not None}
    given["json"] = given.pop("json_schema", given.get("json"))  # as `dump_body` writes it
    if given["json"] is None:
        del given["json"]
    if given.get("json_object") is False:
        del given["json_object"]
    if more := sorted(given.keys() - set(KINDS)):
        raise invalid(f"has {more[0][:40]!r}, but only {', '.join(KINDS)} are known here; remove it")
    if len(given) != 1:
        raise invalid(f"must have exactly one of {', '.join(KINDS)}")
    ((kind, setting),) = given.items()
    if kind == "json_object":
        if setting is not True:
            raise invalid("has a json_object that is not true or false")
        return StructuredOutputs(json_schema={"type": "object"})
    if kind == "json":
        return StructuredOutputs(json_schema=_as_schema(setting))
    if kind == "choice":
        strings = isinstance(setting, list | tuple) and all(isinstance(choice, str) for choice in setting)
        if not strings or not setting or not all(setting):
            raise invalid("has a choice that is not a list of strings, none of them empty")
        return StructuredOutputs(choice=tuple(setting))
    if not isinstance(setting, str) or not setting:
        raise invalid(f"has a {kind} that is not a string with something in it")
    return StructuredOutputs(regex=setting) if kind == "regex" else StructuredOutputs(grammar=setting)


def _as_schema(setting: Any) -> dict[str, Any]:
    """A schema, given as an object or, as vLLM accepts too, as text."""
    if isinstance(setting, str):
        try:
            setting = from_json(setting)
        except ValueError as error:
            raise invalid(f"has a json that is not JSON: {str(error)[:100]}") from error
    if not isinstance(setting, dict):
        raise invalid("has a json that is not a JSON schema (an object)")
    return setting


def check_tool_choice(value: Any) -> Any:
    """The value of `tool_choice`: a word or a `NamedTool`; None is `auto`."""
    if value is None or value == "auto":
        return None
    if value in ("none", "required"):
        return value
    name = value.get("function") if isinstance(value, dict) else None
    name = name.get("name") if isinstance(name, dict) else None
    if not isinstance(name, str) or value != {"type": "function", "function": {"name": name}} or not _is_name(name):
        raise invalid('must be none, auto, required or {"type": "function", "function": {"name": …}}')
    return NamedTool(type="function", function=FunctionName(name=name))


def check_tools(tools: Sequence[Tool], choice: str | NamedTool | None, parallel: bool) -> None:
    """Refuse invalid combinations of tools and choice."""
    names = [tool.function.name for tool in tools]
    if not tools:
        if choice not in (None, "none"):
            raise invalid("needs tools; give some, or remove it", "tool_choice")
        if not parallel:
            raise invalid("needs tools; give some, or remove it", "parallel_tool_calls")
        return
    if len(set(names)) < len(names):
        name = next(name for at, name in enumerate(names) if name in names[:at])
        raise invalid(f"names the function {name!r} twice; give each a name of its own", "tools")
    for at, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid('must have the type "object"', f"tools[{at}].function.parameters")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"names the function {choice.function.name!r}, which is none of the tools", "tool_choice")


def size_of(value: Mapping[str, Any] | str | Sequence[str]) -> int:
    """Bytes of a schema, a regex or a grammar."""
    return len(value.encode()) if isinstance(value, str) else len(to_json(value))


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= 64 and all(char.isascii() and (char.isalnum() or char in "_-") for char in name)
