"""The form of answers: what a request asks for, and the Arrow type that it becomes.

A JSON schema's objects become structs, its arrays lists, its texts, numbers and truth values those of Arrow. What has
no one Arrow type (any value, alternatives of several types, objects with free keys, recursion) becomes JSON text.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Literal

import orjson
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from tokenmill.errors import InvalidCall
from tokenmill.frames.answer_schemas import ANNOTATIONS, AnswerBound, bound_answer, check_is_schema, find_target

MAX_REFERENCES: Final = 32
"""From a schema to another in a row."""

INTEGER: Final = {"type": "integer", "minimum": -(10**15), "maximum": 10**15}
"""The form of `int`: without bounds small models may write digits without end."""

_Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of all answers.

    Attributes:
        body: the request's fields that ask for it.
        type: of the column.
        parse: makes a value of the column from an answer's text. Raises `ValueError`, and what validators of a pydantic
            model raise.
        load: makes what a function that judges answers gets: a value of the type, such as a pydantic model's instance;
            of a schema the parsed JSON. Raises likewise.
        is_text: whether any text is an answer, also one that was cut off.
        model: the name of the pydantic model or another type, whose validators judge answers; None: there is none.
    """

    body: Mapping[str, Any]
    type: pa.DataType
    parse: Callable[[str], Any]
    load: Callable[[str], Any]
    is_text: bool = False
    categories: tuple[str, ...] = ()
    model: str | None = None

    @property
    def bound(self) -> AnswerBound:
        """How long an answer may be."""
        if self.is_text:
            return AnswerBound(None, ("the text",))
        if "structured_outputs" in self.body:
            return AnswerBound(max(len(text.encode()) for text in self.body["structured_outputs"]["choice"]))
        return bound_answer(self.body["response_format"]["json_schema"]["schema"])

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The column of parsed values; None is null."""
        if self.categories:
            indices = [None if value is None else self.categories.index(value) for value in values]
            return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(self.categories, pa.string()))
        return pa.array(values, self.type)


def answer_form(output: Any) -> AnswerForm:
    """The form that `output` stands for: a type of which pydantic makes a JSON schema, or such a schema. Raises
    `InvalidCall`."""
    if output is str:
        return AnswerForm({}, pa.string(), str, str, is_text=True)
    if typing.get_origin(output) is Literal:
        return _choices(typing.get_args(output))
    if isinstance(output, dict):
        return _of_schema(output)
    if isinstance(output, list | tuple | set | frozenset) and output and all(isinstance(one, str) for one in output):
        values = ", ".join(f'"{one}"' for one in output)
        raise InvalidCall(f"output: texts to choose from are a type: Literal[{values}], with typing's Literal")
    if isinstance(output, type) and issubclass(output, Enum) and (form := _of_enum(output)) is not None:
        return form
    if isinstance(output, type) or typing.get_origin(output) is not None:
        return _of_type(output)
    raise InvalidCall(
        f"output: must be a type (str, bool, int, float, Literal[...], list[str], a pydantic model and so on) or a "
        f"JSON schema as a dict, not {str(output)[:50]!r}"
    )


def _of_schema(schema: dict[str, Any]) -> AnswerForm:
    check_is_schema(schema)
    if (texts := _enum_of_texts(schema)) is not None:
        return _choices(texts)
    kind, convert = _typed(schema, schema)
    return AnswerForm(_request(schema), kind, lambda text: convert(_load(text)), _load)


def _enum_of_texts(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The texts of a schema that says the same as a `Literal` of texts; None: it says something else."""
    texts, rest = schema.get("enum"), schema.keys() - ANNOTATIONS - {"enum"}
    if rest - {"type"} or ("type" in rest and schema["type"] != "string"):
        return None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        return None
    return tuple(texts)


def _choices(values: tuple[Any, ...]) -> AnswerForm:
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, int, bool}:
        raise InvalidCall("output: the values of Literal must all be texts, all whole numbers, or all truth values")
    by_text = {str(value).lower() if isinstance(value, bool) else str(value): value for value in values}
    if "" in by_text:
        raise InvalidCall("output: Literal has an empty text, which a model can't answer; name it")

    def parse(text: str) -> Any:
        if text not in by_text:
            raise ValueError(f"{text[:50]!r} is none of the values of Literal")
        return by_text[text]

    (kind,) = kinds
    is_enum = kind is str
    types: dict[type, pa.DataType] = {str: pa.dictionary(pa.int32(), pa.string()), int: pa.int64(), bool: pa.bool_()}
    body = {"structured_outputs": {"choice": list(by_text)}}
    return AnswerForm(body, types[kind], parse, parse, categories=tuple(by_text) if is_enum else ())


def _of_enum(kind: type[Enum]) -> AnswerForm | None:
    """The form of `Literal` of an enum's values; None: they are not all texts, or all whole numbers."""
    members = {one.value: one for one in kind}
    kinds = {type(value) for value in members}
    if kinds not in ({str}, {int}) or "" in members:
        return None
    form = _choices(tuple(members))
    return replace(form, load=lambda text: members[form.parse(text)])


def _of_type(output: Any) -> AnswerForm:
    """The form of a type, by pydantic."""
    name = getattr(output, "__qualname__", str(output))
    if output in (list, tuple, set, frozenset, dict):
        wanted = "a pydantic model, or a TypedDict" if output is dict else "the type of its items too, as list[str]"
        raise InvalidCall(f"output: {name} doesn't say what is in it; give {wanted}")
    try:
        adapter = TypeAdapter(output)
        asked, shown = (adapter.json_schema(mode=mode) for mode in ("validation", "serialization"))
    except (PydanticUserError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidCall(f"output: pydantic makes no JSON schema of {name}: {reason}") from error
    if output in (bool, int, float):
        return _of_schema(INTEGER if output is int else asked)
    kind, convert = _typed(shown, shown)

    def load(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            raise ValueError(first_error(error)) from error

    def parse(text: str) -> Any:
        return convert(adapter.dump_python(load(text), mode="json", by_alias=True))

    return AnswerForm(_request(asked), kind, parse, load, model=name)


def first_error(error: ValidationError) -> str:
    """The first of the errors of a value, with its path."""
    detail = error.errors(include_url=False)[0]
    path = ".".join(map(str, detail["loc"]))
    return f"{path}: {detail['msg']}" if path else detail["msg"]


def _request(schema: Mapping[str, Any]) -> dict[str, Any]:
    name = "answer"
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": name, "schema": _closed(schema), "strict": True},
        }
    }


def _closed(schema: Any) -> Any:
    """The schema whose objects have only their own properties, unless it says otherwise: as OpenAI's strict mode wants
    it. Else a model may go on and write properties that no column has."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(made.get(key), dict):
            made[key] = {name: _closed(inner) for name, inner in made[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(made.get(key), list):
            made[key] = [_closed(inner) for inner in made[key]]
    if "items" in made:
        made["items"] = _closed(made["items"])
    if "properties" in made and not {"additionalProperties", "patternProperties", "allOf"} & made.keys():
        made["additionalProperties"] = False
    return made


def _load(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _typed(schema: Any, root: Mapping[str, Any], above: frozenset[str] = frozenset()) -> tuple[pa.DataType, _Convert]:
    """The Arrow type of a schema's values, and how a parsed value becomes one of it. `above`: the references that led
    here; one that comes again is a recursion."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(pointer := schema.get("$ref"), str):
            break
        if pointer in above:
            return pa.string(), _as_json
        above |= {pointer}
        schema = find_target(pointer, root)
    if not isinstance(schema, dict):
        return pa.string(), _as_json
    wanted = schema.get("type")
    if isinstance(wanted, list) and len(rest := [kind for kind in wanted if kind != "null"]) == 1:
        wanted = rest[0]
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if wanted is None and isinstance(alternatives, list):
        left = [one for one in alternatives if not (isinstance(one, dict) and one.get("type") == "null")]
        return _typed(left[0], root, above) if len(left) == 1 else (pa.string(), _as_json)
    if wanted is None and (values := schema.get("enum", [schema["const"]] if "const" in schema else None)):
        wanted = "string" if all(isinstance(value, str) for value in values) else None
    if wanted == "object" and isinstance(schema.get("properties"), dict) and schema["properties"]:
        if schema.get("additionalProperties") or schema.get("patternProperties"):
            return pa.string(), _as_json
        return _struct(schema["properties"], root, above)
    if wanted == "array" and isinstance(schema.get("items"), dict):
        kind, convert = _typed(schema["items"], root, above)
        return pa.list_(kind), _nullable(lambda value: [convert(one) for one in _checked(value, list)])
    return _SCALARS.get(wanted if isinstance(wanted, str) else "", (pa.string(), _as_json))


def _struct(
    properties: Mapping[str, Any], root: Mapping[str, Any], above: frozenset[str]
) -> tuple[pa.DataType, _Convert]:
    inner = {name: _typed(one, root, above) for name, one in properties.items()}

    def convert(value: Any) -> dict[str, Any]:
        found = _checked(value, dict)
        return {name: convert_field(found.get(name)) for name, (_, convert_field) in inner.items()}

    return pa.struct([pa.field(name, kind) for name, (kind, _) in inner.items()]), _nullable(convert)


def _nullable(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:50]!r} is no {kind.__name__}")  # noqa: TRY004  # of an answer, not of a call
    return value


def _as_json(value: Any) -> Any:
    return None if value is None else orjson.dumps(value).decode()


def _as_integer(value: Any) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{str(value)[:50]} is no whole number of 64 bits")
    return number


def _as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:50]!r} is no number")  # noqa: TRY004  # likewise
    return float(value)


_SCALARS: Final[Mapping[str, tuple[pa.DataType, _Convert]]] = {
    "string": (pa.string(), _nullable(lambda value: _checked(value, str))),
    "integer": (pa.int64(), _nullable(_as_integer)),
    "number": (pa.float64(), _nullable(_as_number)),
    "boolean": (pa.bool_(), _nullable(lambda value: _checked(value, bool))),
    "null": (pa.null(), lambda _: None),
}
