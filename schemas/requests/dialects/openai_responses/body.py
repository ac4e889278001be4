"""The body of /v1/responses: OpenAI's fields, plus the extensions of sampling that chats have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from schemas.requests.bodies import (
    INT32_MAX,
    ChatBody,
    ChatMessage,
    Effort,
    SamplingBody,
    TemplateKwargs,
    unsupported,
)
from schemas.requests.dialects.dialect import DialectBody
from schemas.requests.dialects.openai_responses.input_items import INPUT, read_input
from schemas.requests.fields import NAME, NULL, defaulting, one_of, only, or_null, record
from schemas.requests.structured import NAME as NAME_PATTERN
from schemas.requests.structured import NamedTool, ResponseFormat, check_response_format, check_tool_choice, invalid

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
"""What clients that store no responses ask for. Reasoning is text here, so nothing is added."""

NO_CHANGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream": (False,),
    "stream_options": (),
    "context_management": ([],),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    # Names of chat completions.
    "messages": (),
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "reasoning_effort": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}
_STATELESS: Final = "responses aren't stored here"
_NO_FIELD: Final = "a response has no field for them; use /v1/chat/completions"
HINTS: Final[Mapping[str, str]] = {
    "background": "submit a batch instead",
    "store": f"{_STATELESS}; set it to false, or remove it",
    "previous_response_id": f"{_STATELESS}; give the earlier input and output items as input",
    "conversation": f"{_STATELESS}; give the conversation's items as input",
    "prompt": "write the prompt as instructions and input",
    "max_tool_calls": "no tools run here, and a response calls functions only; remove it",
    "truncation": "shorten the input, or set it to disabled",
    "service_tier": "in a batch the job's tier applies; set that one instead",
    "stream": "a batch has no stream; remove it",
    "stream_options": "a batch has no stream; remove it",
    "context_management": "shorten the input",
    "messages": "give them as input",
    "n": "send several requests",
    "max_tokens": "give max_output_tokens",
    "max_completion_tokens": "give max_output_tokens",
    "response_format": "give text.format",
    "reasoning_effort": "give reasoning.effort",
    "logprobs": f'give include: ["{LOGPROBS}"]',
    "prompt_logprobs": _NO_FIELD,
    "return_token_ids": _NO_FIELD,
}
CHAT_NAMES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    ".function.parameters": ".parameters",
}
"""The chat's names of parameters, and those of the Responses API."""
SAME_AS_CHAT: Final = (
    *SamplingBody.model_fields, "top_logprobs", "parallel_tool_calls", "tool_choice", "chat_template_kwargs",
    "enable_thinking",
)  # fmt: skip


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(BaseModel):
    """How the model reasons. Reasoning is returned as text, never as a summary: `auto` is the best that there is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_summaries(cls, fields: Any) -> Any:
        for name, neutral in (("summary", (None, "auto")), ("generate_summary", (None,))):
            if isinstance(fields, dict) and fields.get(name) not in neutral:
                raise unsupported("is not supported: reasoning is returned as text; remove it", f"reasoning.{name}")
        return fields


def _check_text(value: Any) -> Any:
    """The value of `text`: a `ResponseFormat`, or None for plain text."""
    if value is None or isinstance(value, ResponseFormat):
        return value
    if not isinstance(value, dict):
        raise invalid('must be an object such as {"format": {"type": "json_object"}}')
    if more := sorted(value.keys() - {"format", "verbosity"}):
        raise unsupported("is not known here; remove it", f"text.{more[0][:80]}")
    if value.get("verbosity") not in (None, "medium"):
        raise unsupported("is not supported: no model here has it; remove it", "text.verbosity")
    given = value.get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        given = {"type": "json_schema", "json_schema": {name: one for name, one in given.items() if name != "type"}}
    try:
        return check_response_format(given)
    except PydanticCustomError as error:
        raise invalid(error.message().replace("json_schema.", ""), "text.format") from None


def _check_tools(value: Any) -> Any:
    for at, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = f"is {kind[:40]!r}, but only functions are supported: run the tool yourself, as a function"
            raise unsupported(message, f"tools[{at}].type")
    return value


def _check_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        value = {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}
    try:
        return check_tool_choice(value)
    except PydanticCustomError:
        raise invalid('must be none, auto, required or {"type": "function", "name": …}') from None


def _check_include(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise invalid("must be a list")
    for at, name in enumerate(value):
        if name not in (LOGPROBS, ENCRYPTED):
            message = f"is {str(name)[:60]!r}, but only {LOGPROBS!r} and {ENCRYPTED!r} are supported; remove it"
            raise unsupported(message, f"include[{at}]")
    return tuple(value)


_FORMAT: Final = one_of(
    record(("type",), type={"enum": ["text", "json_object"]}),
    record(
        ("type", "name"),
        type={"const": "json_schema"},
        name=NAME,
        description=or_null("string"),
        schema=or_null("object"),
        strict=or_null("boolean"),
    ),
    NULL,
)
_TEXT: Final = one_of(record(format=_FORMAT, verbosity={"enum": ["medium", None]}), NULL)
_CHOICE: Final = one_of(
    {"enum": ["none", "auto", "required", None]},
    record(("type", "name"), type={"const": "function"}, name=NAME),
)
_INCLUDE: Final[JsonSchemaValue] = one_of({"type": "array", "items": {"enum": [LOGPROBS, ENCRYPTED]}}, NULL)


class ResponsesBody(SamplingBody, DialectBody):
    """Body of /v1/responses.

    Nothing is stored: a conversation goes on by giving the earlier input and output items as `input`. `text` is the
    format of the answer.
    """

    input: Annotated[tuple[ChatMessage, ...], only(read_input, INPUT)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    text: Annotated[ResponseFormat | None, only(_check_text, _TEXT)] = None
    reasoning: Reasoning | None = None
    include: Annotated[tuple[str, ...], only(_check_include, _INCLUDE)] = ()
    top_logprobs: Annotated[int, Field(ge=0, le=20), defaulting(0)] = 0
    tools: Annotated[tuple[FunctionTool, ...], Strict(False), BeforeValidator(_check_tools), defaulting(())] = ()
    tool_choice: Annotated[Literal["none", "required"] | NamedTool | None, only(_check_choice, _CHOICE)] = None
    parallel_tool_calls: Annotated[bool, defaulting(True)] = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    enable_thinking: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ResponsesBody:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise invalid(f'needs include: ["{LOGPROBS}"]; add it', "top_logprobs")
        return self

    def to_chat(self) -> ChatBody:
        """The same request as a chat; `instructions` are its first message, of the role system."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in SAME_AS_CHAT if name in self.model_fields_set}
        fields["messages"] = self.input
        if self.instructions:
            fields["messages"] = (ChatMessage(role="system", content=self.instructions), *self.input)
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None:
            fields["response_format"] = {"type": self.text.type, "json_schema": self.text.json_schema}
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if isinstance(self.tool_choice, NamedTool):
            fields["tool_choice"] = self.tool_choice.model_dump()
        if LOGPROBS in self.include:
            fields["logprobs"] = True
        if self.tools:
            fields["tools"] = tuple(
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
                for tool in self.tools
            )
        return ChatBody.model_validate(fields)
