"""Input lines in OpenAI's batch format, and their validation from parsed JSON.

An unsupported parameter is refused by name and never ignored silently. Only values that mean "as if absent" (null,
`stream: false`, `tools: []`, …) and fields that can't change an answer are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from schemas.requests.bodies import (
    UNSUPPORTED,
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    TextPart,
)
from schemas.requests.dialects.dialect import Dialect, DialectBody
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.sampling_defaults import FILLED_IN
from schemas.requests.scoring import Body, ClassifyBody, PairBody, PooledBody, RerankBody, ScoreBody, ScoringBody
from schemas.requests.structured import size_of

__all__ = [
    "CHAT_URL",
    "CLASSIFY_URL",
    "COMPLETIONS_URL",
    "EMBEDDINGS_URL",
    "RERANK_URL",
    "SCORE_URL",
    "Body",
    "ChatBody",
    "ChatMessage",
    "ClassifyBody",
    "CompletionBody",
    "EmbeddingBody",
    "GenerationBody",
    "PairBody",
    "PooledBody",
    "RequestLine",
    "RerankBody",
    "ScoreBody",
    "ScoringBody",
    "TextPart",
    "dump_body",
    "load_body",
    "parse_as",
    "parse_body",
    "parse_line",
    "row_error",
    "unsupported_url",
]

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
EMBEDDINGS_URL: Final = "/v1/embeddings"
SCORE_URL: Final = "/v1/score"
RERANK_URL: Final = "/v1/rerank"
CLASSIFY_URL: Final = "/v1/classify"

BODIES: Final[Mapping[str, type[Body] | type[DialectBody]]] = {
    CHAT_URL: ChatBody,
    COMPLETIONS_URL: CompletionBody,
    EMBEDDINGS_URL: EmbeddingBody,
    SCORE_URL: ScoreBody,
    RERANK_URL: RerankBody,
    CLASSIFY_URL: ClassifyBody,
    **{url: dialect.body for url, dialect in DIALECTS.items()},
}
"""The models that parse the bodies of each url. A dialect's body is parsed to a `ChatBody`."""

NO_CHANGE: Final[Mapping[str, tuple[Any, ...]]] = {
    # Known unsupported parameters, and the values (besides null) that mean the same as their absence.
    "functions": ([],),
    "function_call": ("none",),
    "stream": (False,),
    "stream_options": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True, False),  # a shown special token is spelt as it is, without blanks around
    "chat_template": (),
    "refusal": (),
}
HINTS: Final[Mapping[str, str]] = {
    "stream": "a batch has no stream; remove it",
    "stream_options": "a batch has no stream; remove it",
    "service_tier": "in a batch the job's tier applies; set that one instead",
    "best_of": "remove it, or ask for n choices and pick one",
}
TYPE_NAMES: Final[Mapping[str, str]] = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


_Model = TypeVar("_Model", bound=BaseModel)


class RequestLine(BaseModel):
    """One line of a job. `body` is not validated yet; `parse_body` converts it to one of the bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def parse_line(obj: object, limits: Limits | None = None) -> RequestLine:
    """Validate an input line (parsed JSON); raises `RowError`."""
    limits = limits or Limits()
    if not isinstance(obj, dict):
        raise RowError(RowErrorCode.INVALID_JSON, f"the line holds {_kind(obj)}, but must hold a JSON object")
    try:
        line = RequestLine.model_validate(obj)
    except ValidationError as error:
        raise row_error(error) from None
    if not line.custom_id:
        raise _refuse("custom_id", "is empty; give each line a name of its own")
    if len(line.custom_id) > limits.max_custom_id_chars:
        length = len(line.custom_id)
        raise _refuse("custom_id", f"has {length} characters, but at most {limits.max_custom_id_chars} are allowed")
    if line.url not in BODIES:
        raise unsupported_url(line.url)
    return line


def parse_body(url: str, body: Mapping[str, Any], limits: Limits | None = None) -> Body:
    """Validate the body for `url`; raises `RowError` that names the invalid field and the valid values. A dialect's
    body becomes a `ChatBody`."""
    limits = limits or Limits()
    if (dialect := DIALECTS.get(url)) is not None:
        return _parse_dialect(dialect, body, limits)
    parsed = parse_as(_stored_model(url), body)
    if isinstance(parsed, GenerationBody):
        _check_limits(parsed, limits)
    elif isinstance(parsed, ClassifyBody) and len(parsed.choices) > limits.max_choices:
        raise _refuse("choices", f"holds {len(parsed.choices)}, but at most {limits.max_choices} are allowed")
    elif (count := parsed.num_sequences) > limits.max_embedding_inputs:
        most = limits.max_embedding_inputs
        name = "documents" if isinstance(parsed, ScoreBody | RerankBody) else "input"
        raise _refuse(name, f"holds {count} texts, but at most {most} are allowed; send several requests")
    return parsed


def parse_as(model: type[_Model], body: Mapping[str, Any]) -> _Model:
    """Validate a body as this model, without the limits; raises `RowError`."""
    fields = _without_filled_nulls(_without_no_ops(body, known=frozenset(model.model_fields)))
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            _without_no_ops(message, f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise row_error(error) from None


def _parse_dialect(dialect: Dialect, body: Mapping[str, Any], limits: Limits) -> ChatBody:
    """The chat body of a dialect's body."""
    fields = _without_filled_nulls(_without_no_ops(body, no_change=dialect.no_change, hints=dialect.hints))
    try:
        parsed = dialect.body.model_validate(fields)
    except ValidationError as error:
        raise row_error(error) from None
    try:
        chat = parsed.to_chat()
        _check_limits(chat, limits)
    except ValidationError as error:
        raise dialect.translate(row_error(error)) from None
    except RowError as error:
        raise dialect.translate(error) from None
    return chat


def _stored_model(url: str) -> type[Body]:
    """The model of the bodies that requests to `url` are stored as."""
    model = BODIES[url]
    return ChatBody if issubclass(model, DialectBody) else model


def unsupported_url(url: str) -> RowError:
    """The error of a request to an unsupported url."""
    known = f"{', '.join(list(BODIES)[:-1])} or {list(BODIES)[-1]}"
    return RowError(RowErrorCode.UNSUPPORTED_URL, f"url is {url[:200]!r}, but must be {known}", param="url")


def dump_body(body: Body) -> bytes:
    """The body as compact JSON without defaults; `load_body` reads it back."""
    return body.model_dump_json(exclude_defaults=True).encode()


def load_body(url: str, data: bytes | str) -> Body:
    """A body that `dump_body` wrote; raises pydantic's ValidationError if it did not."""
    return _stored_model(url).model_validate_json(data)


def _without_no_ops(
    fields: Mapping[str, Any],
    where: str = "",
    no_change: Mapping[str, tuple[Any, ...]] = NO_CHANGE,
    hints: Mapping[str, str] = HINTS,
    known: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """A copy without unsupported parameters whose values mean their absence; refuses other values. `known`: names that
    are supported here."""
    effective: dict[str, Any] = {}
    for name, value in fields.items():
        neutral = None if name in known else no_change.get(name)
        if neutral is None:
            effective[name] = value
        elif value is not None and not any(type(value) is type(same) and value == same for same in neutral):
            message = f"{where}{name} is not supported: {hints.get(name, 'remove it')}"
            raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param=where + name)
    return effective


def _without_filled_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without nulls where a model's defaults are filled in: there null is the same as absence."""
    return {name: value for name, value in fields.items() if value is not None or name not in FILLED_IN}


def _check_limits(body: GenerationBody, limits: Limits) -> None:
    for name, count, most in (
        ("n", body.n, limits.max_choices),
        ("stop", len(body.stop), limits.max_stop_sequences),
        ("stop_token_ids", len(body.stop_token_ids), limits.max_stop_sequences),
        ("allowed_token_ids", len(body.allowed_token_ids or ()), limits.max_allowed_token_ids),
        ("bad_words", len(body.bad_words), limits.max_bad_words),
    ):
        if count > most:
            raise _refuse(name, f"asks for {count}, but at most {most} are allowed")
    longest = max(map(len, body.bad_words), default=0)
    if longest > limits.max_bad_word_chars:
        most = limits.max_bad_word_chars
        raise _refuse("bad_words", f"holds a word of {longest} characters, but at most {most} are allowed")
    if body.num_prompts > 1 and body.num_prompts * body.n > limits.max_prompts:
        times = f", {body.n} times each" if body.n > 1 else ""
        text = f"holds {body.num_prompts}{times}, but at most {limits.max_prompts} are allowed; send several requests"
        raise _refuse("prompt", text)
    _check_sizes(body, limits)


def _check_sizes(body: GenerationBody, limits: Limits) -> None:
    """Refuse schemas and grammars above the size limits."""
    most = limits.max_schema_bytes
    given: dict[str, int] = {}
    if body.response_format is not None and body.response_format.json_schema is not None:
        given["response_format"] = size_of(body.response_format.json_schema)
    if (outputs := body.structured_outputs) is not None:
        constraint = outputs.json_schema or outputs.regex or outputs.choice or outputs.grammar or ""
        given["structured_outputs"] = size_of(constraint)
    if isinstance(body, ChatBody) and body.tools:
        if len(body.tools) > limits.max_tools:
            raise _refuse("tools", f"holds {len(body.tools)}, but at most {limits.max_tools} are allowed")
        given["tools"] = sum(size_of(tool.function.parameters or {}) for tool in body.tools)
    for name, size in given.items():
        if size > most:
            raise _refuse(name, f"has {size} bytes of schema, but at most {most} are allowed")


def _refuse(name: str, text: str) -> RowError:
    return RowError(RowErrorCode.INVALID_REQUEST, f"{name} {text}", param=name)


def row_error(error: ValidationError) -> RowError:
    """The first of pydantic's errors, as a `RowError`."""
    detail = error.errors(include_url=False)[0]
    path = ""
    for step in detail["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    path = str(detail.get("ctx", {}).get("param") or path)
    code = RowErrorCode.INVALID_REQUEST
    if detail["type"] in (UNSUPPORTED, "extra_forbidden"):
        code = RowErrorCode.UNSUPPORTED_PARAMETER
    param, others = path[:200], detail.get("ctx", {}).get("fields", ())
    message = f"{param} {_explain(detail)}".strip()
    return RowError(code, message, param=param or None, fields=[*([param] if param else []), *others])


def _explain(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    got = f"is {_kind(detail['input'])}"
    match kind:
        case "missing":
            return "is missing; add it"
        case "extra_forbidden":
            return "is not a parameter known here; remove it"
        case "greater_than_equal":
            return f"{got}, but must be {context['ge']:g} or more" if context["ge"] > -1e9 else f"{got}: too small"
        case "greater_than":
            return f"{got}, but must be above {context['gt']:g}"
        case "less_than_equal":
            return f"{got}, but must be {context['le']:g} or less" if context["le"] < 1e9 else f"{got}: too large"
        case "literal_error":
            return f"{got}, but must be {context['expected']}"
        case "int_type" if isinstance(detail["input"], float) and abs(detail["input"]) > 2**53:
            return f"{got}: too large"  # the parser makes a float of an integer beyond 64 bits
        case "int_type" | "float_type" | "bool_type" | "string_type" | "tuple_type" | "dict_type" | "model_type":
            return f"{got}, but must be {TYPE_NAMES[kind]}"
        case "too_short" | "string_too_short":
            return "is empty; give at least one"
        case "invalid_request" | "unsupported_parameter":
            return detail["msg"]
        case _:
            return f"{got}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _kind(value: object) -> str:
    """A value for error messages: short, and never a whole prompt."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    return "a list" if isinstance(value, list | tuple) else "an object"
