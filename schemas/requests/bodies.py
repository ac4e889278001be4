"""Request bodies: OpenAI's fields, plus vLLM's usual extensions.

Validation is strict: a bool is not a number, "5" is not 5, and an unknown field is refused. Known but unsupported
fields are refused in `schemas.requests.parsing`, with a message of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from schemas.requests.breakpoints import MAX_BREAKPOINTS, CacheBreakpoint, check_breakpoints
from schemas.requests.fields import (
    BAD_WORDS,
    CONTENT,
    GUIDED,
    INPUTS,
    LOGIT_BIAS,
    MESSAGE,
    PROMPT,
    RESPONSE_FORMAT,
    STOP,
    STRUCTURED_OUTPUTS,
    TEMPLATE_KWARGS,
    TOOL_CHOICE,
    defaulting,
    only,
)
from schemas.requests.structured import (
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolCall,
    check_response_format,
    check_structured_outputs,
    check_tool_choice,
    check_tools,
    invalid,
)

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
REASONING_NAMES: Final = ("reasoning", "reasoning_content")
"""Names of the thought in a message and in a stream's delta, each with the same text: vLLM renamed the second one to
the first, and clients read either."""
UNSUPPORTED = "unsupported_parameter"
"""Type of validation errors for fields that are known but not supported."""


def unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    """An error with this text; `param` names the field where a check covers several."""
    return PydanticCustomError(UNSUPPORTED, "{text}", {"text": message, "param": param})


class TextPart(BaseModel):
    """One text part of a message's content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text"]
    text: str


def _check_content(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of text parts")
    parts: list[TextPart] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"part {index} has type {kind!r}, but only text parts are supported; remove it")
        if not isinstance(part, dict) or kind != "text" or part.keys() != {"type", "text"}:
            raise invalid(f'part {index} must be {{"type": "text", "text": …}}')
        if not isinstance(part["text"], str):
            raise invalid(f"part {index} has a text that is not a string")
        parts.append(TextPart(type="text", text=part["text"]))
    if not parts:
        raise invalid("is an empty list; give at least one text part")
    return tuple(parts)


class ChatMessage(BaseModel):
    """One message of a conversation. Only an assistant that calls tools may leave out the content, and only an
    assistant has reasoned."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, json_schema_extra=MESSAGE)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | tuple[TextPart, ...] | None, only(_check_content, CONTENT)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False), defaulting(())] = ()
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thought(self) -> str | None:
        """What an assistant has thought, under either name; None: it is not given."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    @property
    def text(self) -> str:
        """The content as one string; parts are joined with newlines, as vLLM does for templates that take strings."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    @property
    def num_parts(self) -> int:
        """Text parts of the content; a string is one."""
        return len(self.content) if isinstance(self.content, tuple) else int(self.content is not None)


def _check_conversation(messages: tuple[ChatMessage, ...]) -> None:
    """Refuse missing contents, and results of calls that no message made."""
    made: set[str] = set()
    for at, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise invalid("are an assistant's; remove them", f"messages[{at}].tool_calls")
        for name in REASONING_NAMES:
            if getattr(message, name) is not None and message.role != "assistant":
                raise invalid("is an assistant's; remove it", f"messages[{at}].{name}")
        if message.reasoning_content not in (None, message.thought):
            text = "differs from reasoning_content, but both are names of the thought; give one of them"
            raise invalid(text, f"messages[{at}].reasoning")
        if message.content is None and not message.tool_calls:
            given = "content" in message.model_fields_set
            text = "must be a string or a list of text parts" if given else "is missing; add it"
            raise invalid(text, f"messages[{at}].content")
        made.update(call.id for call in message.tool_calls)
        if message.role == "tool":
            if message.tool_call_id is None:
                raise invalid("is missing; name the call that is answered", f"messages[{at}].tool_call_id")
            if message.tool_call_id not in made:
                name = message.tool_call_id[:40]
                raise invalid(f"is {name!r}, which no call before it has as its id", f"messages[{at}].tool_call_id")


def _check_stop(value: Any) -> Any:
    if value is None or value == []:
        return ()
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("must be a string or a list of strings")
    if not all(stops):
        raise invalid("holds an empty string; remove it")
    return tuple(stops)


def _check_logit_bias(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("must be an object of token ids (as strings) and biases from -100 to 100")
    for key, bias in value.items():
        canonical = isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key[:11])) == key
        if not canonical or int(key) > INT32_MAX:
            raise invalid(f'has the key {str(key)[:40]!r}, but keys must be token ids such as "1234"')
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(f"gives token {key} the bias {str(bias)[:40]}, but a bias must be from -100 to 100")
    return {key: float(bias) for key, bias in value.items()}


DISTINCT = AfterValidator(lambda ids: tuple(dict.fromkeys(ids)))
"""Drops what a list names again."""


def _check_bad_words(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise invalid("must be a list of strings")
    if not all(word.strip() for word in value):
        raise invalid("holds an empty string; remove it")
    return tuple(value)


def check_template_kwargs(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise invalid("must be an object of the chat template's variables")
    for name, given in value.items():
        if not isinstance(given, str | bool | int | float):
            raise invalid(f"gives {name[:40]!r} a value that is not a string, a number, true or false")
    return dict(value)


def _check_prompt(value: Any) -> Any:
    """A single prompt as it is, several as a tuple of them."""
    if not isinstance(value, list | tuple) or not any(isinstance(item, str | list | tuple) for item in value):
        return check_text_or_ids(value)
    if len(value) == 1:
        return check_text_or_ids(value[0])
    prompts = []
    for index, prompt in enumerate(value):
        try:
            prompts.append(check_text_or_ids(prompt))
        except PydanticCustomError as error:
            raise invalid(error.message(), f"prompt[{index}]") from None
    return tuple(prompts)


def check_inputs(value: Any, check: Callable[[Any], Any] | None = None) -> Any:
    """Check a text, token ids, or a list of either; returns a tuple of texts and tuples of token ids. `check`: of one
    of them, where they may be something else as well."""
    several = isinstance(value, list | tuple) and any(isinstance(item, str | list | tuple) for item in value)
    inputs = []
    for index, one in enumerate(value if several else (value,)):
        try:
            inputs.append((check or check_text_or_ids)(one))
        except PydanticCustomError as error:
            raise invalid(f"[{index}] {error.message()}" if several else error.message()) from None
    return tuple(inputs)


def check_text_or_ids(value: Any) -> str | tuple[int, ...]:
    """Check a text or token ids."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, str) or value in ([], ()):
        raise invalid("is empty; give some text or token ids")
    if isinstance(value, list | tuple) and all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        return tuple(value)
    raise invalid("must be a string or a list of token ids (integers from 0), or a list of either")


Prompt = str | tuple[int, ...]
"""A text, or token ids."""

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


TemplateKwargs = Annotated[dict[str, str | bool | int | float], only(check_template_kwargs, TEMPLATE_KWARGS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class SamplingBody(BaseModel):
    """The common fields of chats, completions and OpenAI's responses.

    `top_k` 0 or -1 is off. `user`, `metadata` and the like are accepted and don't change an answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    temperature: Annotated[Finite, Field(ge=0, le=2), defaulting(1.0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1), defaulting(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), defaulting(0)] = 0
    min_p: Annotated[Finite, Field(ge=0, le=1), defaulting(0.0)] = 0.0
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Annotated[tuple[str, ...], only(_check_stop, STOP)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Strict(False), defaulting(())] = ()
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2), defaulting(0.0)] = 0.0
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2), defaulting(0.0)] = 0.0
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100), defaulting(1.0)] = 1.0
    logit_bias: Annotated[dict[str, float], only(_check_logit_bias, LOGIT_BIAS)] = Field(default_factory=dict)
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Strict(False), Field(min_length=1), DISTINCT] | None = None
    bad_words: Annotated[tuple[str, ...], only(_check_bad_words, BAD_WORDS)] = ()
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), defaulting(0)] = 0
    ignore_eos: Annotated[bool, defaulting(False)] = False
    skip_special_tokens: Annotated[bool, defaulting(True)] = True
    include_stop_str_in_output: Annotated[bool, defaulting(False)] = False
    structured_outputs: Annotated[StructuredOutputs | None, only(check_structured_outputs, STRUCTURED_OUTPUTS)] = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class GenerationBody(SamplingBody):
    """The common fields of chat and completions. `store` is accepted and doesn't change an answer."""

    n: Annotated[int, Field(ge=1), defaulting(1)] = 1
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: Annotated[bool, defaulting(False)] = False
    response_format: Annotated[ResponseFormat | None, only(check_response_format, RESPONSE_FORMAT)] = None
    store: bool | None = None

    @property
    def num_prompts(self) -> int:
        """Prompts, each of which gets `n` answers."""
        return 1

    @property
    def output_limit(self) -> int | None:
        """Maximum number of tokens to generate; None: the job's default."""
        raise NotImplementedError

    @property
    def is_deterministic(self) -> bool:
        """Whether a repeated computation must give the same answer."""
        return self.temperature == 0 or self.seed is not None

    @property
    def constrained(self) -> bool:
        """Whether the form of the answer is constrained."""
        return self.response_format is not None or self.structured_outputs is not None

    @model_validator(mode="before")
    @classmethod
    def _take_guided(cls, fields: Any) -> Any:
        """Map vLLM's older `guided_*` names to `structured_outputs`."""
        names = [name for name in GUIDED if isinstance(fields, dict) and name in fields]
        if not names:
            return fields
        others = {name: value for name, value in fields.items() if name not in GUIDED}
        given = {name: fields[name] for name in names if fields[name] is not None}
        if given and (len(given) > 1 or others.get("structured_outputs") is not None):
            raise invalid("goes with no other of its kind; keep one", next(iter(given)))
        if given:
            ((name, value),) = given.items()
            others["structured_outputs"] = {name.removeprefix("guided_"): value}
        return others

    @model_validator(mode="after")
    def _check_constraints(self) -> GenerationBody:
        if self.response_format is not None and self.structured_outputs is not None:
            raise invalid("and response_format are both set; remove one", "structured_outputs", "response_format")
        if self.constrained:
            for name, value in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
                if value:
                    raise invalid("can't go with a form that the answer must have: its end decides", name)
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> GenerationBody:
        name, kept = "truncate_prompt_tokens", self.truncate_prompt_tokens
        if kept == 0:
            raise invalid(
                "is 0, but must be 1 or more, or -1 for what max_tokens leaves of the context", name, "max_tokens"
            )
        if kept == -1 and self.output_limit is None:
            raise invalid(
                "is -1, which leaves room for the answer, but max_tokens is not set; set it", name, "max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_min_tokens(self) -> GenerationBody:
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            text = f"is {self.min_tokens}, but max_tokens is {limit}; lower min_tokens"
            raise invalid(text, "min_tokens", "max_tokens")
        return self


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions.

    `chat_template_kwargs`, `enable_thinking` and `reasoning_effort` are variables of the model's chat template, and
    refused where it does not read them. `thinking_token_budget`: tokens of the thought; -1: any number; None: the
    model's default. `cache_breakpoints`: prefixes that stay in the prefix cache (`cache_control` on /v1/messages).
    """

    messages: Annotated[tuple[ChatMessage, ...], Strict(False), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: Annotated[bool, defaulting(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), defaulting(0)] = 0
    tools: Annotated[tuple[Tool, ...], Strict(False), defaulting(())] = ()
    tool_choice: Annotated[Literal["none", "required"] | NamedTool | None, only(check_tool_choice, TOOL_CHOICE)] = None
    parallel_tool_calls: Annotated[bool, defaulting(True)] = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, defaulting(False)] = False
    cache_breakpoints: Annotated[
        tuple[CacheBreakpoint, ...], Strict(False), Field(max_length=MAX_BREAKPOINTS), defaulting(())
    ] = ()

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def constrained(self) -> bool:
        return bool(self.offered_tools) or super().constrained

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise invalid("and max_completion_tokens are both set; remove max_tokens", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise invalid("needs logprobs; set logprobs to true", "top_logprobs")
        _check_conversation(self.messages)
        if self.cache_breakpoints:
            check_breakpoints(self.cache_breakpoints, [message.num_parts for message in self.messages])
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid("can't go with continue_final_message; remove one", "add_generation_prompt")
            if self.messages[-1].role != "assistant" or not self.messages[-1].text:
                raise invalid("needs a last message of the assistant to go on with", "continue_final_message")
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.offered_tools and self.structured_outputs is not None:
            raise invalid("can't go with tools; use response_format", "structured_outputs", "response_format")
        return self


class CompletionBody(GenerationBody):
    """Body of /v1/completions.

    Attributes:
        prompt: a text, its token ids, or several of either; each of several is answered as if it were sent alone.
        max_tokens: 0 scores the prompt only.
        echo: the prompt comes before the answer.
    """

    prompt: Annotated[Prompt | tuple[Prompt, ...], only(_check_prompt, PROMPT)]
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[bool, defaulting(False)] = False

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, of which there is at least one."""
        if isinstance(self.prompt, tuple) and not isinstance(self.prompt[0], int):
            return self.prompt
        return (self.prompt,)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens


class EmbeddingBody(BaseModel):
    """Body of /v1/embeddings.

    Attributes:
        input: the texts, or their token ids; a single one is wrapped in a list.
        dimensions: length to which each vector is truncated.
        prompt_name: the model's named prompt that is put before each text; None: its default one, if it has one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    input: Annotated[tuple[Prompt, ...], only(check_inputs, INPUTS)]
    encoding_format: Annotated[Literal["float", "base64"], defaulting("float")] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    user: str | None = None

    @property
    def sequences(self) -> tuple[tuple[str | tuple[int, ...]], ...]:
        """What the model reads: each input by itself."""
        return tuple((given,) for given in self.input)

    @property
    def num_sequences(self) -> int:
        """The sequences that the model computes."""
        return len(self.input)
