"""The parts of a request to Anthropic's Messages API: content blocks, messages, tools and their choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from schemas.requests.bodies import unsupported
from schemas.requests.fields import NULL, defaulting, one_of, only
from schemas.requests.structured import NAME, invalid

_BLOCK_HINTS: Final[Mapping[str, str]] = {
    "image": "models here read text only",
    "document": "models here read text only; give the document's text",
    "search_result": "models here read text only; give the result's text",
    "redacted_thinking": "only Anthropic can read it; remove it",
}
_SERVER_HINT: Final = "no tools run on this server; offer a tool of your own, with an input_schema"


class Part(BaseModel):
    """Base of the models: strict, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CacheControl(Part):
    """The end of a prefix that is cached for `ttl`."""

    type: Literal["ephemeral"]
    ttl: Annotated[Literal["5m", "1h"], defaulting("5m")] = "5m"

    @property
    def ttl_seconds(self) -> int:
        return 3_600 if self.ttl == "1h" else 300


def _check_citations(value: Any) -> None:
    if value not in (None, []):
        raise unsupported("are not supported: models here cite nothing; remove them")


def _check_toolset(value: Any) -> None:
    if value is not None:
        raise unsupported("is not supported: there are no toolsets here; remove it")


def _check_caller(value: Any) -> None:
    if value not in (None, {"type": "direct"}):
        raise unsupported("is not supported: only the model calls tools here; remove it")


def _check_callers(value: Any) -> None:
    if value not in (None, ["direct"]):
        raise unsupported("is not supported: only the model calls tools here; remove it")


def _check_deferred(value: Any) -> None:
    if value is not None and value is not False:
        raise unsupported("is not supported: there is no search for tools here; remove it")


def _check_examples(value: Any) -> None:
    if value not in (None, []):
        raise unsupported("are not supported: write them into the description")


_TOOLSET: Final = only(_check_toolset, NULL)
_DIRECT: Final[JsonSchemaValue] = {
    "type": "object",
    "properties": {"type": {"const": "direct"}},
    "required": ["type"],
    "additionalProperties": False,
}


class TextBlock(Part):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[None, only(_check_citations, {"enum": [None, []]})] = None


class ToolUseBlock(Part):
    """A tool call of an assistant. `input`: the arguments."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(pattern=NAME)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[None, only(_check_caller, one_of(NULL, _DIRECT))] = None
    toolset_name: Annotated[None, _TOOLSET] = None


@dataclass(frozen=True, slots=True)
class text_or_blocks:  # noqa: N801 - read as a word: Annotated[tuple[Block, ...], text_or_blocks(KINDS)]
    """Reads a string as one text block, and refuses kinds of blocks that aren't supported.

    Args:
        known: the supported kinds.
    """

    known: frozenset[str]

    def check(self, value: Any) -> Any:
        if isinstance(value, str):
            return ({"type": "text", "text": value},)
        if not isinstance(value, list | tuple):
            raise invalid("must be a string or a list of blocks")
        for at, block in enumerate(value):
            check_kind(f"block {at}", block, self.known, _BLOCK_HINTS, _SERVER_HINT)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return one_of({"type": "string"}, handler(schema))


def check_kind(what: str, value: Any, known: Collection[str], hints: Mapping[str, str], hint: str) -> None:
    """Refuse a value of an unsupported `type`, with the hint for it."""
    if isinstance(value, BaseModel):
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid(f'{what} must be an object with a type, such as {{"type": "text", "text": …}}')
    if kind not in known:
        listed = ", ".join(sorted(known))
        raise unsupported(
            f"{what} has the type {kind[:40]!r}, but only {listed} are supported: {hints.get(kind, hint)}"
        )


class ToolResultBlock(Part):
    """The result of a tool call, in a user's message."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Annotated[tuple[TextBlock, ...], Strict(False), text_or_blocks(frozenset({"text"})), defaulting(())] = ()
    is_error: Annotated[bool, defaulting(False)] = False
    cache_control: CacheControl | None = None
    toolset_name: Annotated[None, _TOOLSET] = None


class ThinkingBlock(Part):
    """An assistant's reasoning. `signature` is not checked: a client may write any reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
_KINDS: Final[Mapping[str, frozenset[str]]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
    "system": frozenset({"text"}),
}


class Turn(Part):
    """One turn. A string is one text block."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[tuple[Block, ...], Strict(False), text_or_blocks(frozenset().union(*_KINDS.values()))]

    def check(self, where: str) -> None:
        """Refuse blocks that the role can't have. `where`: the message's path in the body."""
        for at, block in enumerate(self.content):
            if block.type not in _KINDS[self.role]:
                roles = [role for role, kinds in _KINDS.items() if block.type in kinds]
                raise invalid(f"is a {block.type}, which only the {roles[0]} has; move it", f"{where}.content[{at}]")
        kinds = [block.type for block in self.content]
        if "tool_result" in kinds and kinds.index("tool_result") != 0:
            at = kinds.index("tool_result")
            raise invalid("is a tool_result behind other blocks; put results first", f"{where}.content[{at}]")


class ClientTool(Part):
    """A tool of the client. `input_schema`: the JSON schema of its arguments, an object."""

    type: Annotated[Literal["custom"], defaulting("custom")] = "custom"
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[True] | None = None
    allowed_callers: Annotated[None, only(_check_callers, {"enum": [None, ["direct"]]})] = None
    defer_loading: Annotated[None, only(_check_deferred, {"enum": [None, False]})] = None
    input_examples: Annotated[None, only(_check_examples, {"enum": [None, []]})] = None


@dataclass(frozen=True, slots=True)
class client_tools:  # noqa: N801 - the same
    """Refuses tools that would run on the server."""

    def check(self, value: Any) -> Any:
        for at, tool in enumerate(value if isinstance(value, list | tuple) else ()):
            if isinstance(tool, dict) and tool.get("type") is not None:
                check_kind(f"tool {at}", tool, ("custom",), {}, _SERVER_HINT)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))


class ToolChoice(Part):
    """Whether and which tools are called. `name`: for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Annotated[bool, defaulting(False)] = False


class Thinking(Part):
    """Whether the model reasons before it answers. `adaptive`: without a bound of its own.

    `budget_tokens`: most tokens of reasoning, for the type `enabled`. `display`: reasoning is always shown.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized"] | None = None


class JsonFormat(Part):
    """The form of the answer: JSON that follows `schema`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    """`effort`: how much the model reasons. `format`: the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh"] | None = None
    format: JsonFormat | None = None


class Metadata(Part):
    """`user_id`: whom the request is made for; it doesn't change the answer."""

    user_id: str | None = None
