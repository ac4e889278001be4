"""Former answers in a table that `tokenmill.map` returned: they are written as results, which a run can reuse.

The texts are made from the typed answers, in JSON's notation. An answer whose column doesn't hold all of it (parts of a
schema that became JSON text) is left out, so its row is computed again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.requests.request_key import KEY_BYTES
from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import AnswerForm
from tokenmill.frames.data import BATCH_ROWS, Frame, open_frame

OF_TABLES: Final = "table"
"""`reused_from` of answers in a table, which has no job's id."""

_KEY: Final = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


def former_results(given: Any, form: AnswerForm, column: str, scratch: Path) -> Path:
    """The path of former results: the given path, or that of a file in `scratch` with the answers of a table.

    Args:
        form: of the answers.  column: of the answers, and the beginning of the other columns' names.

    Raises:
        InvalidCall: the table can't be read, or lacks these columns.
    """
    if isinstance(given, str | os.PathLike):
        return Path(given)
    names = (column, f"{column}_error", f"{column}_finish_reason", f"{column}_key")
    try:
        return _write(open_frame(given), names, form, scratch / "former.parquet")
    except InvalidCall as error:
        raise InvalidCall(f"reuse: {str(error).removeprefix('data: ')}") from error


def _write(frame: Frame, names: tuple[str, ...], form: AnswerForm, path: Path) -> Path:
    for name in names:
        if name not in frame.columns:
            raise InvalidCall(
                f"the table has no column {name!r}; give a table that map returned, with the same output_column, or a "
                "former output_dir"
            )
    answers = _answers(frame.cells(names), names, form)
    with pq.ParquetWriter(path, results_table(()).schema, compression="zstd") as writer:
        while batch := [row for _, row in zip(range(BATCH_ROWS), answers, strict=False)]:
            try:
                writer.write_table(results_table(batch))
            except (pa.ArrowException, TypeError) as error:
                raise InvalidCall(f"{names[2]!r} must be a text in each row; give it as map returned it") from error
    return path


def _answers(cells: Iterator[dict[str, Any]], names: tuple[str, ...], form: AnswerForm) -> Iterator[ResultRow]:
    """The answers that can be taken again."""
    for row, values in enumerate(cells):
        value, error, reason, key = (values[name] for name in names)
        if value is None or error is not None or key is None:
            continue
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise InvalidCall(f"row {row}: {names[3]!r} is no key; give the column as map returned it")
        text = _text(value, form)
        if text is None:
            continue
        message = {"role": "assistant", "content": text}
        response = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
        yield ResultRow(
            None, row, RowStatus.SUCCEEDED, 200, text=text, finish_reason=reason,
            response=orjson.dumps(response, default=str).decode(), request_key=key, reused_from=OF_TABLES,
        )  # fmt: skip


def _text(value: Any, form: AnswerForm) -> str | None:
    """A text with this value; None: there is none."""
    try:
        text = value if isinstance(value, str) and (form.is_text or form.categories) else orjson.dumps(value).decode()
        return text if form.parse(text) == value else None
    except (TypeError, ValueError):
        return None
