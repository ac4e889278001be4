"""Former answers in a table that a call returned: they are written as results, which a run can reuse.

An answer whose columns don't hold all of it is left out, so its row is computed again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow.parquet as pq

from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.requests.request_key import KEY_BYTES
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import BATCH_ROWS, Frame
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.tasks.task import Answers

OF_TABLES: Final = "table"
"""`reused_from` of answers in a table, which has no job's id."""

_KEY: Final = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


def former_results(given: Any, answers: Answers, column: str, scratch: Path) -> Path:
    """The path of former results: the given path, or that of a file in `scratch` with the answers of a table.

    Args:
        column: of the answers, and the beginning of the other columns' names.

    Raises:
        InvalidCall: the table can't be read, or lacks these columns.
    """
    if isinstance(given, str | os.PathLike):
        return Path(given)
    names = {suffix: column + suffix for suffix in (*answers.former, "_error", "_key")}
    try:
        return _write(open_frame(given), names, answers, scratch / "former.parquet")
    except InvalidCall as error:
        raise InvalidCall(f"reuse: {str(error).removeprefix('data: ')}") from error


def _write(frame: Frame, names: Mapping[str, str], answers: Answers, path: Path) -> Path:
    for name in names.values():
        if name not in frame.columns:
            raise InvalidCall(
                f"the table has no column {name!r}; give a table that a former call returned, with the same "
                "output_column, or a former output_dir"
            )
    found = _answers(frame.cells(tuple(names.values())), names, answers)
    with pq.ParquetWriter(path, results_table(()).schema, compression="zstd") as writer:
        while batch := [row for _, row in zip(range(BATCH_ROWS), found, strict=False)]:
            writer.write_table(results_table(batch))
    return path


def _answers(rows: Iterator[dict[str, Any]], names: Mapping[str, str], answers: Answers) -> Iterator[ResultRow]:
    """The answers that can be taken again."""
    for row, values in enumerate(rows):
        cells = {suffix: values[name] for suffix, name in names.items()}
        key = cells["_key"]
        if cells[""] is None or cells["_error"] is not None or key is None:
            continue
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise InvalidCall(f"row {row}: {names['_key']!r} is no key; give the column as the call returned it")
        try:
            found = answers.former_answer(cells)
        except InvalidCall as error:
            raise InvalidCall(f"row {row}: {error}") from error
        if found is None:
            continue
        yield ResultRow(
            None, row, RowStatus.SUCCEEDED, 200, text=found.text, finish_reason=found.finish_reason,
            response=orjson.dumps(found.response, default=str).decode(), embedding=found.embedding, request_key=key,
            reused_from=OF_TABLES,
        )  # fmt: skip
