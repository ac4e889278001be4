"""The requests of a table: the rendered texts and one line of a batch for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from schemas.requests.parsing import Body, parse_body
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.field_order import FieldOrder, order_fields, shared_characters
from tokenmill.frames.prompts import ColumnText, check_columns, field_lines
from tokenmill.frames.tasks.task import Task

REQUESTS: Final = "requests.jsonl"
"""The input of the job, in its folder."""


@dataclass(frozen=True, slots=True)
class FieldSharing:
    """What the order of `{% fields %}` saves, in characters of fields that begin a prompt as another one begins.

    Attributes:
        total: characters of all fields.  written: shared in the template's order.  chosen: shared in the chosen orders.
    """

    total: int
    written: int
    chosen: int


class TableRequests:
    """The requests of a frame's rows, rendered at once.

    Attributes:
        sharing: what the fields' order saves; None: the prompt has no `{% fields %}`.

    Raises:
        InvalidCall: a text can't be rendered, or uses a column that is not there.
    """

    def __init__(self, frame: Frame, task: Task) -> None:
        for name, text in task.texts.items():
            check_columns(text, frame.columns)
            if text.fields and name != task.ordered:
                fix = f"belongs into the {task.ordered}" if task.ordered else "is of prompts; write the columns' names"
                raise InvalidCall(f"{text.part}: {{% fields %}} {fix}")
        if task.adapter_column is not None:
            check_columns(ColumnText(task.adapter_column, "adapter_column"), frame.columns)
        self._frame, self._task = frame, task
        self._lines: list[tuple[str, ...]] = []
        self.sharing: FieldSharing | None = None
        self._orders: list[FieldOrder] = []
        if task.ordered is not None and (fields := task.texts[task.ordered].fields):
            self._lines = [field_lines(cells, fields) for cells in frame.cells(fields)]
            self._orders = order_fields(self._lines)
            written = [tuple(range(len(fields)))] * len(self._lines)
            self.sharing = FieldSharing(
                sum(len(line) for lines in self._lines for line in lines),
                shared_characters(self._lines, written),
                shared_characters(self._lines, self._orders),
            )

    @property
    def notes(self) -> list[str]:
        """What a user may not expect of the texts, each a line."""
        texts, rows = self._task.texts.values(), len(self._frame)
        found = []
        if rows > 1 and not any(text.columns for text in texts):
            names = " and ".join(text.part for text in texts)
            found.append(f"{names}: no column is named, such as {{{{ {next(iter(self._frame.columns), 'name')} }}}}, "
                         f"so all {rows:,} rows ask the same")  # fmt: skip
        written = sorted({name for text in texts for name in text.written})
        for name, nulls in self._frame.null_counts(written).items():
            if nulls:
                where = "1 row" if nulls == 1 else f"{nulls:,} rows"
                found.append(f"{name} is null in {where}; it is rendered as empty text")
        return found

    def requests(self, *, as_written: bool = False) -> Iterator[dict[str, Any]]:
        """The fields of each row's request that hold its texts, and the name of its adapter.

        Args:
            as_written: `{% fields %}` in the template's order.

        Raises:
            InvalidCall: a text can't be rendered; the message names the row.
        """
        for row, made in enumerate(self.try_requests(as_written=as_written)):
            if isinstance(made, InvalidCall):
                raise InvalidCall(f"row {row}: {made}") from made
            yield made

    def try_requests(self, *, as_written: bool = False) -> Iterator[dict[str, Any] | InvalidCall]:
        """The same, with the error in place of a request that can't be rendered."""
        texts = self._task.texts
        for row, cells in enumerate(self._frame.cells(self._task.columns)):
            chosen = ""
            if self._lines:
                lines = self._lines[row]
                chosen = "".join(lines if as_written else (lines[index] for index in self._orders[row]))
            try:
                fields = self._task.request({name: text.render(cells, chosen) for name, text in texts.items()})
                yield {**fields, **self._named(cells)}
            except InvalidCall as error:
                yield error

    def _named(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """The field with the name of a row's adapter. Raises `InvalidCall`."""
        name = None if self._task.adapter_column is None else cells[self._task.adapter_column]
        if name is None or name == "":  # CSV has no other null
            return {}
        if not isinstance(name, str):
            raise InvalidCall(f"adapter_column: is {name!r}, but must be the name of an adapter, or null")
        return {"model": name}

    def write(self, path: Path, body: Mapping[str, Any], *, as_written: bool = False) -> None:
        """Write the lines of a batch. Row n is line n, from 0.

        Args:
            body: the fields that every request has.

        Raises:
            InvalidCall: a text can't be rendered.
        """
        with path.open("wb") as file:
            for row, fields in enumerate(self.requests(as_written=as_written)):
                file.write(orjson.dumps(line_of(row, self._task.url, {**body, **fields})) + b"\n")


def line_of(row: int, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a batch with a row's request."""
    return {"custom_id": f"row-{row}", "method": "POST", "url": url, "body": body}


def parse_sample(task: Task, body: Mapping[str, Any], limits: Limits) -> Body:
    """A request of the task, parsed, to check the fields that all have. Raises `InvalidCall`."""
    try:
        return parse_body(task.url, {**body, **task.request(dict.fromkeys(task.texts, "a"))}, limits)
    except RowError as error:
        raise InvalidCall(error.message) from error
