"""The forms of answers: what is requested, the column's type, and its values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal, NotRequired

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from tokenmill.errors import InvalidCall
from tokenmill.frames.answer_schemas import AnswerBound, bound_answer
from tokenmill.frames.answers import INTEGER, answer_form


class Part(BaseModel):
    name: str
    size: float | None = None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Verdict(BaseModel):
    same: bool
    count: int = Field(alias="n")
    parts: list[Part]
    colour: Colour | None
    kind: Literal["a", "b"]
    other: int | str
    free: dict[str, int]

    @field_validator("count")
    @classmethod
    def not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("is negative")
        return value


class Node(BaseModel):
    name: str
    left: Node | None
    right: Node | None


TEXT = (
    '{"same": true, "n": 3, "parts": [{"name": "a", "size": 1}, {"name": "b"}], "colour": "red", "kind": "a",'
    ' "other": "x", "free": {"k": 1}}'
)


def test_given_a_model_when_parsed_then_the_column_is_a_struct_by_the_schemas_names() -> None:
    form = answer_form(Verdict)

    part = pa.struct({"name": pa.string(), "size": pa.float64()})
    assert form.type == pa.struct({
        "same": pa.bool_(), "n": pa.int64(), "parts": pa.list_(part), "colour": pa.string(), "kind": pa.string(),
        "other": pa.string(), "free": pa.string(),
    })  # fmt: skip
    assert form.column([form.parse(TEXT), None]).to_pylist() == [
        {
            "same": True, "n": 3, "parts": [{"name": "a", "size": 1.0}, {"name": "b", "size": None}], "colour": "red",
            "kind": "a", "other": '"x"', "free": '{"k":1}',
        },
        None,
    ]  # fmt: skip
    schema = form.body["response_format"]["json_schema"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Part"]["additionalProperties"] is False
    assert schema["properties"]["free"]["additionalProperties"] == {"type": "integer"}


def test_given_a_validator_or_a_broken_answer_when_parsed_then_it_says_what_is_wrong() -> None:
    form = answer_form(Verdict)

    with pytest.raises(ValueError, match="n: Value error, is negative"):
        form.parse(TEXT.replace('"n": 3', '"n": -3'))
    with pytest.raises(ValueError, match="Invalid JSON"):
        form.parse(TEXT[:-5])


def test_given_a_recursive_model_when_typed_then_the_recursion_is_json_text() -> None:
    form = answer_form(Node)

    assert form.type == pa.struct({"name": pa.string(), "left": pa.string(), "right": pa.string()})
    leaf = '{"name": "b", "left": null, "right": null}'
    found = form.parse(f'{{"name": "a", "left": {leaf}, "right": null}}')
    assert found == {"name": "a", "left": leaf.replace(" ", ""), "right": None}


@pytest.mark.parametrize(
    ("output", "kind", "text", "value"),
    [
        (str, pa.string(), "any", "any"),
        (Literal["no", "yes"], pa.dictionary(pa.int32(), pa.string()), "yes", "yes"),
        (Literal[1, 2, -3], pa.int64(), "-3", -3),
        (Literal[True, False], pa.bool_(), "false", False),
        ({"type": "integer"}, pa.int64(), "3.0", 3),
        ({"type": ["number", "null"]}, pa.float64(), "null", None),
        ({"enum": ["a", "b"]}, pa.dictionary(pa.int32(), pa.string()), "a", "a"),
        ({"enum": ["a", ""]}, pa.string(), '"a"', "a"),
        ({"enum": ["a", 1]}, pa.string(), "1", "1"),
        ({"type": "array", "items": {"type": "boolean"}}, pa.list_(pa.bool_()), "[true]", [True]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "number"}}}, pa.float64(), "2", 2.0),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, pa.string(), "2", "2"),
        ({"$ref": "#/nowhere"}, pa.string(), "2", "2"),
        ({}, pa.string(), '{"a": [1]}', '{"a":[1]}'),
        ({"type": "object"}, pa.string(), "{}", "{}"),
    ],
)
def test_given_an_output_when_parsed_then_type_and_value_fit(output: Any, kind: Any, text: str, value: Any) -> None:
    form = answer_form(output)

    assert form.type == kind
    column = form.column([form.parse(text), None])
    assert column.type == kind
    assert column.to_pylist() == [value, None]


@pytest.mark.parametrize("more", [{}, {"type": "string"}, {"title": "Mood", "description": "of a review"}])
def test_given_a_schema_of_texts_when_made_then_it_is_the_form_of_literal(more: dict[str, str]) -> None:
    form, literal = answer_form({"enum": ["good", "bad"], **more}), answer_form(Literal["good", "bad"])

    assert (form.body, form.type, form.categories) == (literal.body, literal.type, literal.categories)
    assert form.load("bad") == "bad"


@pytest.mark.parametrize("more", [{"minLength": 4}, {"type": ["string", "null"]}, {"not": {"const": "bad"}}])
def test_given_a_schema_that_says_more_than_its_texts_when_made_then_answers_are_json(more: dict[str, Any]) -> None:
    form = answer_form({"enum": ["good", "bad"], **more})

    assert "response_format" in form.body
    assert form.parse('"good"') == "good"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"type": "integer"}, "9223372036854775808"),
        ({"type": "integer"}, "1e30"),
        ({"type": "integer"}, "true"),
        ({"type": "number"}, '"1"'),
        ({"type": "string"}, r'"\ud800"'),
        ({"type": "array", "items": {"type": "string"}}, '{"a": 1}'),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, "[]"),
        (Literal["a"], "b"),
    ],
)
def test_given_an_answer_of_another_type_when_parsed_then_only_its_row_fails(output: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|JSON|none of"):
        answer_form(output).parse(text)


@dataclass
class Place:
    city: str
    zip_code: int | None


class Tags(TypedDict):
    tags: list[str]
    colour: NotRequired[Colour]


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    ONE = 1
    TWO = "two"


@pytest.mark.parametrize(
    ("output", "kind", "text", "value", "loaded"),
    [
        (bool, pa.bool_(), "true", True, True),
        (int, pa.int64(), "7", 7, 7),
        (float, pa.float64(), "7", 7.0, 7),
        (list[str], pa.list_(pa.string()), '["a", "b"]', ["a", "b"], ["a", "b"]),
        (int | None, pa.int64(), "null", None, None),
        (Colour, pa.dictionary(pa.int32(), pa.string()), "red", "red", Colour.RED),
        (Level, pa.int64(), "2", 2, Level.HIGH),
        (Mixed, pa.string(), '"two"', '"two"', Mixed.TWO),
        (list[Colour], pa.list_(pa.string()), '["red"]', ["red"], [Colour.RED]),
        (
            Tags, pa.struct({"tags": pa.list_(pa.string()), "colour": pa.string()}), '{"tags": []}',
            {"tags": [], "colour": None}, {"tags": []},
        ),
        (
            Place, pa.struct({"city": pa.string(), "zip_code": pa.int64()}), '{"city": "a", "zip_code": 1}',
            {"city": "a", "zip_code": 1}, Place("a", 1),
        ),
    ],
)  # fmt: skip
def test_given_a_type_when_parsed_then_the_column_is_that_of_a_field_and_judges_get_its_value(
    output: Any, kind: Any, text: str, value: Any, loaded: Any
) -> None:
    form = answer_form(output)

    assert form.column([form.parse(text), None]).to_pylist() == [value, None]
    assert form.column([]).type == form.type == kind
    assert form.load(text) == loaded


def test_given_types_that_say_the_same_when_made_then_their_requests_are_the_same() -> None:
    assert answer_form(Colour).body == answer_form(Literal["red", "blue"]).body
    assert answer_form(bool).body == answer_form({"type": "boolean"}).body
    assert answer_form(int).body == answer_form(INTEGER).body
    assert answer_form(int).model is None, "there is nothing to judge in Python"
    assert answer_form(Place).model == "Place"


class Short(BaseModel):
    word: str = Field(max_length=4)
    many: list[bool] = Field(max_length=3)


class Bare(BaseModel):
    words: list[str]
    inner: Short
    parts: list[Part] = Field(max_length=2)
    stars: int


@pytest.mark.parametrize(
    ("output", "max_bytes", "unbounded"),
    [
        (Literal["no", "ä"], 2, ()),
        (bool, 5, ()),
        (int, 17, ()),
        (float, None, ()),
        (str, None, ("the text",)),
        (list[str], None, ("the answer",)),
        (dict[str, int], None, ("the answer",)),
        (Node, None, ("name", "left", "right")),
        (Bare, None, ("words", "parts[].name")),
        ({"anyOf": [{"const": "ä"}, {"enum": [1, None]}]}, 4, ()),
    ],
)
def test_given_a_form_when_bounded_then_it_has_the_longest_answer_or_what_has_no_bound(
    output: Any, max_bytes: int | None, unbounded: tuple[str, ...]
) -> None:
    assert answer_form(output).bound == AnswerBound(max_bytes, unbounded)


class CountedSchema(dict[str, Any]):
    """A schema that counts how often its type is looked at."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += key == "type"
        return super().get(key, default)


def test_given_references_that_double_with_each_level_when_bounded_then_each_schema_is_looked_at_once() -> None:
    last = CountedSchema(type="string", maxLength=3)
    levels = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(12)}
    schema = {"$ref": "#/$defs/n0", "$defs": {**levels, "n12": last}}

    assert bound_answer(schema) == AnswerBound(20)
    assert last.looks == 1


def test_given_a_schema_that_is_nested_too_deep_when_bounded_then_it_has_no_bound() -> None:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(2_000):
        schema = {"type": "array", "maxItems": 1, "items": schema}

    assert bound_answer(schema) == AnswerBound(None)


def test_given_bounded_fields_when_bounded_then_no_answer_that_the_grammar_takes_is_longer() -> None:
    blank = "\n" + 48 * " "
    parts = ["{", '"word"', ":", '"' + r"\u0001" * 4 + '"', ",", '"many"', ":", "["]
    longest = blank.join([*parts, "false", ",", "false", ",", "false", "]", "}"])
    assert answer_form(Short).parse(longest) == {"word": "\x01" * 4, "many": [False] * 3}

    bound = answer_form(Short).bound

    assert bound.unbounded == ()
    assert bound.max_bytes is not None
    assert len(longest) <= bound.max_bytes < len(longest) + 4 * len(blank)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("str", "must be a type"),
        (None, "must be a type"),
        (Literal["a", 1], "must all be texts"),
        (Literal["", "a"], "empty text"),
        (["good", "bad"], 'Literal["good", "bad"]'),
        (re.Match, "pydantic makes no JSON schema of Match"),
        ({"a": "str", "n": int}, '"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required"'),
        ({"title": "str"}, "has none of its keywords"),
        (list, "list doesn't say what is in it; give the type of its items too, as list[str]"),
        (dict, "dict doesn't say what is in it; give a pydantic model"),
    ],
)
def test_given_another_output_when_made_then_it_is_refused_with_the_fix(output: Any, message: str) -> None:
    with pytest.raises(InvalidCall, match=f"^output: .*{re.escape(message)}"):
        answer_form(output)
