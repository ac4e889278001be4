"""Prompt templates: Jinja in the sandbox that chat templates have too, over a row's columns.

`{% fields a, b %}` writes these columns as lines NAME: VALUE, in an order that is chosen for each row. It is the only
part of a prompt whose order is not the template's.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.errors import InvalidCall

MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_PROMPT_CHARS: Final = 4 << 20
"""Of a rendered template."""

BRACED: Final = re.compile(r"(?<!\{)\{\s*([^{}\s](?:[^{}]*[^{}\s])?)\s*\}(?!\})")
"""A name between single braces."""

FIELD_LINES: Final = "_field_lines"
"""The variable in place of `{% fields %}`."""


class _FieldsTag(Extension):
    """Parses `{% fields NAME, "OTHER NAME" %}`; the names are left in `environment.field_names`."""

    tags = {"fields"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        names: list[str] = []
        while parser.stream.current.type != "block_end":
            if names:
                parser.stream.expect("comma")
            token = parser.stream.current
            parser.stream.expect("string" if token.type == "string" else "name")
            names.append(str(token.value))
        known: list[str] = self.environment.field_names  # type: ignore[attr-defined]  # of `_Environment`
        if known or not names or len(set(names)) < len(names):
            parser.fail("{% fields %} stands once in a prompt, and names each of its columns once", line)
        known.extend(names)
        return nodes.Output([nodes.Name(FIELD_LINES, "load")], lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, undefined=jinja2.StrictUndefined,
            extensions=[_FieldsTag, "jinja2.ext.loopcontrols"], finalize=as_text,
        )  # fmt: skip
        self.field_names: list[str] = []


class RowText(Protocol):
    """A text of each row.

    Attributes:
        columns: that it uses, sorted.  fields: those of `{% fields %}`; none without it.
        written: columns whose cells are written as they are, without a test of them, sorted.
        braced: texts between single braces, as an f-string has names.
        part: the argument that it is, for messages.  source: as a template.
    """

    columns: tuple[str, ...]
    fields: tuple[str, ...]
    written: tuple[str, ...]
    braced: tuple[str, ...]
    part: str
    source: str

    def render(self, cells: Mapping[str, Any], field_lines: str = "") -> str:
        """The text for a row's cells. Raises `InvalidCall`, without the row."""
        ...


class ColumnText:
    """A column as it stands, under any name; null is the empty text."""

    fields: tuple[str, ...] = ()
    braced: tuple[str, ...] = ()

    def __init__(self, column: str, part: str = "column") -> None:
        if not isinstance(column, str):
            raise InvalidCall(f"{part}: must be the name of a column")
        self.part, self.source = part, f"{{{{ {column} }}}}"
        self.columns: tuple[str, ...] = (column,)
        self.written: tuple[str, ...] = self.columns

    def render(self, cells: Mapping[str, Any], field_lines: str = "") -> str:
        """See `RowText`."""
        text = str(as_text(cells[self.columns[0]]))
        if len(text) > MAX_PROMPT_CHARS:
            raise InvalidCall(f"{self.part}: is longer than {MAX_PROMPT_CHARS} characters; shorten it")
        return text


class PromptTemplate:
    """A template over columns.

    Attributes:
        columns, fields, written, braced: as of `RowText`.

    Args:
        part: the argument that it is, for messages.
    """

    def __init__(self, text: str, part: str = "prompt") -> None:
        if not isinstance(text, str) or not text.strip():
            raise InvalidCall(f"{part}: must be a text with something in it")
        if len(text) > MAX_TEMPLATE_CHARS:
            raise InvalidCall(f"{part}: has {len(text)} characters, and may have {MAX_TEMPLATE_CHARS}; shorten it")
        self.part, self.source = part, text
        environment = _Environment()
        try:
            tree = environment.parse(text)
            used = jinja2.meta.find_undeclared_variables(tree)
            environment.field_names.clear()
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidCall(f"{part}, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise InvalidCall(f"{part}: is nested too deep; write it flatter") from error
        self.fields = tuple(environment.field_names)
        self.columns = tuple(sorted((used - {FIELD_LINES}) | set(self.fields)))
        self.written = tuple(sorted((_written(tree) & used - {FIELD_LINES}) | set(self.fields)))
        literals = (data.data for data in tree.find_all(nodes.TemplateData))
        self.braced = tuple(name for text in literals for name in BRACED.findall(text))

    def render(self, cells: Mapping[str, Any], field_lines: str = "") -> str:
        """The text for a row's cells. Raises `InvalidCall`, without the row."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate({**cells, FIELD_LINES: field_lines}):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise InvalidCall(f"{self.part}: is longer than {MAX_PROMPT_CHARS} characters; shorten it")
                pieces.append(piece)
        except InvalidCall:
            raise
        except Exception as error:  # the template's own code: a filter, an operator
            raise InvalidCall(f"{self.part}: can't be rendered: {error or type(error).__name__}") from error
        return "".join(pieces)


def _written(tree: nodes.Template) -> set[str]:
    """The names that are written by themselves, and that no condition tests."""
    tests = [*(one.test for one in tree.find_all(nodes.If)), *(one.test for one in tree.find_all(nodes.CondExpr))]
    names = (name for test in tests for name in (test, *test.find_all(nodes.Name)))
    tested = {name.name for name in names if isinstance(name, nodes.Name)}
    outputs = (one for output in tree.find_all(nodes.Output) for one in output.nodes)
    return {one.name for one in outputs if isinstance(one, nodes.Name)} - tested


def check_columns(text: RowText, known: Sequence[str]) -> None:
    """Raise `InvalidCall` if a used column is missing or ambiguous; the message has the nearest name. So it does if a
    column stands in the braces of an f-string only."""
    for name in text.braced:
        if name in known and name not in text.columns:
            raise InvalidCall(
                f"{text.part}: {{{name}}} is not replaced by the column; write {{{{ {name} }}}} (a template of Jinja)"
            )
    for name in text.columns:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known[:20]) or 'none'}"
            raise InvalidCall(f"{text.part}: the data has no column {name!r}; {hint}")
        if list(known).count(name) > 1:
            raise InvalidCall(f"{text.part}: the data has several columns {name!r}; rename all but one")


def as_text(value: Any) -> Any:
    """A cell as prompts have it: nothing for null, JSON for lists and structs."""
    if value is None:
        return ""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


def field_lines(cells: Mapping[str, Any], fields: Iterable[str]) -> tuple[str, ...]:
    """The lines of `{% fields %}` in the given order, each with its line's end."""
    return tuple(f"{name}: {as_text(cells[name])}\n" for name in fields)
