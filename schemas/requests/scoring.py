"""Bodies of /v1/score, /v1/rerank and /v1/classify: vLLM's fields. (Those of a reranker are Jina's and Cohere's too.)

Each body names the sequences that the model computes: a text, or a pair of texts that it reads together.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from schemas.requests.bodies import (
    INT32_MAX,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Effort,
    EmbeddingBody,
    Prompt,
    TemplateKwargs,
    check_inputs,
    check_text_or_ids,
)
from schemas.requests.fields import NULL, TEXT, TEXTS, TOKEN_IDS, defaulting, one_of, only, record
from schemas.requests.structured import invalid

Sequences = tuple[tuple[str | tuple[int, ...], ...], ...]
"""What the model reads: each a text, token ids, or a pair of texts."""

PAIR_NAMES: Final = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))
"""The names by which vLLM takes the two sides of pairs."""

_SIDES: Final = tuple(dict.fromkeys(name for names in PAIR_NAMES for name in names))


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise invalid("must be a string")
    if not value:
        raise invalid("is empty; give some text")
    return value


def _check_instruction(value: Any) -> str | None:
    return None if value is None else _check_text(value)


def _check_side(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else [value]
    if not texts:
        raise invalid("is an empty list; give at least one text")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid("must be a string or a list of strings")
        if not text:
            raise invalid(f"[{index}] is empty; give some text")
    return tuple(texts)


def _check_documents(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise invalid("must be a list of strings")
    return _check_side([text["text"] if isinstance(text, dict) and text.keys() == {"text"} else text for text in value])


_PAIR: Final = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}
_CLASSIFIED: Final = one_of(TEXT, TOKEN_IDS, {"type": "array", "items": one_of(TEXT, TOKEN_IDS, _PAIR), "minItems": 1})
_OF_TEMPLATE: Final = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "continue_final_message")
_SIDE: Final = one_of(TEXT, TEXTS)
_DOCUMENTS: Final = {"type": "array", "items": one_of(TEXT, record(("text",), text=TEXT)), "minItems": 1}
_PAIRS: Final = {
    "properties": {name: one_of(_SIDE, NULL) for name in _SIDES},
    "oneOf": [
        {
            "required": list(names),
            "properties": {name: _SIDE if name in names else NULL for name in _SIDES},
        }
        for names in PAIR_NAMES
    ],
}


def _with_names(schema: dict[str, Any]) -> None:
    """Add the other names of the two sides to a body's JSON schema."""
    schema["properties"] |= _PAIRS["properties"]
    schema["required"] = [name for name in schema["required"] if name not in _SIDES]
    schema["oneOf"] = _PAIRS["oneOf"]


def _check_given_inputs(value: Any) -> Any:
    return () if value is None or value == () else check_inputs(value, _check_input)


def _check_input(value: Any) -> str | tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not any(isinstance(text, str) for text in value):
        return check_text_or_ids(value)
    if len(value) != 2 or not all(isinstance(text, str) and text for text in value):
        raise invalid("must be a pair of two texts that are not empty")
    return tuple(value)


_NONE: Final = {"type": "array", "maxItems": 0}


def _check_choices(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(choice, str) for choice in value):
        raise invalid("must be a list of strings")
    if not all(value):
        raise invalid("holds an empty string; remove it")
    if len(set(value)) < len(value):
        raise invalid("holds a string twice; remove one")
    return tuple(value)


def _with_prompts(schema: dict[str, Any]) -> None:
    """Require one of the fields that hold what is classified."""
    schema["properties"]["prompt"] = one_of(_CLASSIFIED, NULL)
    none: dict[str, Any] = {"input": NULL, "prompt": NULL, "messages": {"enum": [None, []]}}
    schema["oneOf"] = [
        {"required": ["input"], "properties": {**none, "input": _CLASSIFIED}},
        {"required": ["prompt"], "properties": {**none, "prompt": _CLASSIFIED}},
        {
            "required": ["messages", "choices"],
            "properties": {**none, "messages": {"type": "array", "minItems": 1}, "choices": TEXTS},
        },
    ]


class ScoringBody(BaseModel):
    """The common fields.

    Attributes:
        truncate_prompt_tokens: the tokens of a sequence beyond which its end is cut off (of a pair, that of the longer
            text); -1: those that the model takes. None: a longer sequence is refused.
        use_activation: apply the model's activation; false: the numbers before it (logits).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    use_activation: Annotated[bool, defaulting(True)] = True
    user: str | None = None

    @property
    def sequences(self) -> Sequences:
        """What the model reads, in order."""
        raise NotImplementedError

    @property
    def num_sequences(self) -> int:
        """The sequences that the model computes."""
        return len(self.sequences)

    def name_of(self, index: int) -> str:
        """The field that holds a sequence, for messages."""
        raise NotImplementedError


class PairBody(ScoringBody):
    """The common fields of scores and rankings.

    Attributes:
        instruction: what makes a document relevant, for a chat template that reads pairs.
        chat_template_kwargs: variables of this template.
    """

    instruction: Annotated[str | None, only(_check_instruction, one_of(TEXT, NULL))] = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)


class ScoreBody(PairBody):
    """Body of /v1/score: a score for each pair. One query goes with each document; as many queries as documents go in
    pairs. The sides are also taken as `text_1` and `text_2`, `data_1` and `data_2`, or `queries` and `items`."""

    model_config = ConfigDict(json_schema_extra=_with_names)

    queries: Annotated[tuple[str, ...], only(_check_side, _SIDE)]
    documents: Annotated[tuple[str, ...], only(_check_side, _SIDE)]

    @property
    def sequences(self) -> Sequences:
        queries = self.queries * len(self.documents) if len(self.queries) == 1 else self.queries
        return tuple(zip(queries, self.documents, strict=True))

    def name_of(self, index: int) -> str:
        return "documents" if len(self.documents) == 1 else f"documents[{index}]"

    @model_validator(mode="before")
    @classmethod
    def _take_sides(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: fields[name] for name in _SIDES if fields.get(name) is not None}
        others = {name: value for name, value in fields.items() if name not in _SIDES}
        for names in PAIR_NAMES:
            if given.keys() == set(names):
                return others | {"queries": given[names[0]], "documents": given[names[1]]}
        for names in PAIR_NAMES:
            if given.keys() < set(names):
                missing = next(name for name in names if name not in given)
                raise invalid("is missing; add it", missing)
        raise invalid("goes with one other: queries and documents; keep these two", list(given)[-1])

    @model_validator(mode="after")
    def _check_counts(self) -> ScoreBody:
        queries, documents = len(self.queries), len(self.documents)
        if queries not in (1, documents):
            raise invalid(f"holds {queries} texts for {documents} documents; give one, or one for each", "queries")
        return self


class RerankBody(PairBody):
    """Body of /v1/rerank: documents by their relevance to the query.

    Attributes:
        documents: texts, or objects with a `text`.
        top_n: the number of results; 0: all.
        return_documents: results contain their documents.
    """

    query: Annotated[str, only(_check_text, TEXT)]
    documents: Annotated[tuple[str, ...], only(_check_documents, _DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX), defaulting(0)] = 0
    return_documents: Annotated[bool, defaulting(True)] = True

    @property
    def sequences(self) -> Sequences:
        return tuple((self.query, document) for document in self.documents)

    def name_of(self, index: int) -> str:
        return f"documents[{index}]"


class ClassifyBody(ScoringBody):
    """Body of /v1/classify: the label of each input, and the probability of each label.

    A classifier has labels of its own. With `choices`, a model that generates takes them as labels, by the probability
    of each as the continuation of the prompt: of each `input` (also as `prompt`), or of a conversation.

    Attributes:
        input: texts, their token ids, or pairs of texts, which a classifier reads together.
        messages: a conversation, and variables of the model's chat template as in `ChatBody`; only with `choices`.
        normalize: compare choices by the sum of their tokens' log-probabilities, or by the mean.
    """

    model_config = ConfigDict(json_schema_extra=_with_prompts)

    input: Annotated[
        tuple[str | tuple[int, ...] | tuple[str, str], ...], only(_check_given_inputs, one_of(_CLASSIFIED, NULL))
    ] = ()
    messages: Annotated[tuple[ChatMessage, ...], Strict(False), defaulting(())] = ()
    choices: Annotated[tuple[str, ...], only(_check_choices, one_of(TEXTS, NULL, _NONE))] = ()
    normalize: Annotated[Literal["sum", "mean"], defaulting("sum")] = "sum"
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    continue_final_message: Annotated[bool, defaulting(False)] = False

    @property
    def sequences(self) -> Sequences:
        return cast("Sequences", tuple(given if _is_pair(given) else (given,) for given in self.input))

    @property
    def prompt_body(self) -> ChatBody | CompletionBody:
        """The request whose answer is one of the choices."""
        if not self.messages:
            prompts = cast("tuple[Prompt, ...]", self.input)  # choices go with no pairs
            return CompletionBody(model=self.model, prompt=prompts, max_tokens=0)
        return ChatBody(
            model=self.model,
            messages=self.messages,
            max_tokens=1,
            chat_template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            reasoning_effort=self.reasoning_effort,
            continue_final_message=self.continue_final_message,
        )

    @property
    def num_sequences(self) -> int:
        """The sequences that the model computes."""
        return max(1, len(self.input)) * max(1, len(self.choices))

    def name_of(self, index: int) -> str:
        return "input" if len(self.input) == 1 else f"input[{index}]"

    @model_validator(mode="before")
    @classmethod
    def _take_prompt(cls, fields: Any) -> Any:
        """Map `prompt` to `input`."""
        if not isinstance(fields, dict) or "prompt" not in fields:
            return fields
        others = {name: value for name, value in fields.items() if name != "prompt"}
        if fields["prompt"] is None:
            return others
        if others.get("input") is not None:
            raise invalid("and input are both set; remove one", "prompt")
        return others | {"input": fields["prompt"]}

    @model_validator(mode="after")
    def _check_combinations(self) -> ClassifyBody:
        if bool(self.input) == bool(self.messages):
            raise invalid("and messages are both set; remove one" if self.input else "is missing; add it", "input")
        needs = dict.fromkeys(("messages", "normalize"), "choices") | dict.fromkeys(_OF_TEMPLATE, "messages")
        for name, other in needs.items():
            if self._is_set(name) and not getattr(self, other):
                raise invalid(f"needs {other}; add it", name)
        if self.choices and any(map(_is_pair, self.input)):
            raise invalid("holds a pair, which can't go with choices; make a text of it", "input")
        for name in ("truncate_prompt_tokens", "use_activation"):
            if self.choices and self._is_set(name):
                raise invalid("can't go with choices; remove it", name)
        if self.messages:
            self._check_messages()
        return self

    def _is_set(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        default: object = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    def _check_messages(self) -> None:
        """Refuse what a chat refuses."""
        try:
            assert self.prompt_body
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            raise invalid(detail["msg"], detail.get("ctx", {}).get("param")) from None


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and isinstance(given[0], str)


PooledBody = EmbeddingBody | ScoreBody | RerankBody | ClassifyBody
"""Answered with numbers for each of the body's `sequences`, and without a text."""

Body = ChatBody | CompletionBody | PooledBody
