"""Prompt templates: columns, fields, the sandbox, and what is refused before anything runs."""

from __future__ import annotations

import re

import pytest

from tokenmill.errors import InvalidCall
from tokenmill.frames.prompts import MAX_TEMPLATE_CHARS, PromptTemplate, check_columns, field_lines


def test_given_a_template_when_rendered_then_cells_stand_in_it_and_null_is_nothing() -> None:
    template = PromptTemplate("{% if old %}old: {{ old }}\n{% endif %}{{ text }}|{{ tags }}|{{ pair.a }}")

    assert template.columns == ("old", "pair", "tags", "text")
    cells = {"old": None, "text": None, "tags": ["ä", None], "pair": {"a": 1}}
    assert template.render(cells) == '|["ä", null]|1'
    assert template.render({**cells, "old": 3, "text": "{{ 7 }} <b>"}) == 'old: 3\n{{ 7 }} <b>|["ä", null]|1'


def test_given_fields_when_rendered_then_the_lines_stand_where_the_tag_does() -> None:
    template = PromptTemplate('Facts:\n{% fields text, "other name" %}\nSame?')

    assert template.fields == ("text", "other name")
    assert template.columns == template.written == ("other name", "text")
    lines = field_lines({"text": None, "other name": [1]}, template.fields)
    assert lines == ("text: \n", "other name: [1]\n")
    assert template.render({}, "".join(reversed(lines))) == "Facts:\nother name: [1]\ntext: \nSame?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a text"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "shorten it"),
        ("\n{{ a", "line 2: "),
        ("{% fields %}", "names each of its columns once"),
        ("{% fields a, a %}", "names each of its columns once"),
        ("{% fields a %}{% fields b %}", "stands once in a prompt"),
        ("{% fields a b %}", "expected token ','"),
        ("{% fields a, 1 %}", "expected token 'name'"),
        ("{{ a | upcase }}", "upcase"),
    ],
)
def test_given_a_bad_template_when_made_then_the_message_says_where(text: str, message: str) -> None:
    with pytest.raises(InvalidCall, match=f"^prompt.*{re.escape(message)}"):
        PromptTemplate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ a.__class__.__mro__ }}", "unsafe"),
        ("{{ a.append(1) }}", "unsafe"),
        (
            "{% for n in range(999) %}{% for m in range(999) %}{{ 'xxxxxxxxxxxx' }}{% endfor %}{% endfor %}",
            "longer",
        ),
        ("{{ range(10000000) }}", "too big"),
        ("{{ a.b.c }}", "no attribute"),
        ("{{ a + 1 }}", "concatenate"),
    ],
)
def test_given_a_template_that_fails_when_rendered_then_it_is_the_calls_error(text: str, message: str) -> None:
    with pytest.raises(InvalidCall, match=message):
        PromptTemplate(text).render({"a": []})


def test_given_unknown_columns_when_checked_then_the_nearest_name_is_offered() -> None:
    with pytest.raises(InvalidCall, match="no column 'reviw'; did you mean 'review'"):
        check_columns(PromptTemplate("{{ reviw }}"), ["id", "review"])
    with pytest.raises(InvalidCall, match="system: the data has no column 'x'; there are: id, review"):
        check_columns(PromptTemplate("{{ x }}", "system"), ["id", "review"])
    with pytest.raises(InvalidCall, match="several columns 'id'"):
        check_columns(PromptTemplate("{% fields id %}"), ["id", "id"])
    check_columns(PromptTemplate("{% set x = id %}{{ x }}{{ range(3) }}"), ["id"])


def test_given_the_braces_of_an_f_string_when_checked_then_those_of_templates_are_offered() -> None:
    for text in ("Good? {review}", "{ review }{% if id %}x{% endif %}"):
        with pytest.raises(InvalidCall, match=r"prompt: \{review\} is not replaced .* write \{\{ review \}\}"):
            check_columns(PromptTemplate(text), ["id", "review"])
    for text in ("{other} {}", "{{ review }}, as JSON: {review}", "{{ '{review}' }}{{ id }}", '{"review": 1}'):
        check_columns(PromptTemplate(text), ["id", "review"])
