"""`tokenmill run --prompt`: `tokenmill.map` with the table, the templates and the schema in files or as texts.

The job is the one that `tokenmill.map` makes. Its answers become columns of OUT/table.parquet when it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.inputs.regular_files import open_regular
from schemas.jobs.job import JobSettings
from tokenmill import output
from tokenmill.config.engine_options import EngineOptions, named_values
from tokenmill.errors import InvalidCall, UserError
from tokenmill.frames.calls import TableCall
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.jobs.estimate import TableEstimate
from tokenmill.frames.jobs.job import TableJob
from tokenmill.frames.options import MapOptions, split_options
from tokenmill.frames.prompts import MAX_TEMPLATE_CHARS
from tokenmill.frames.tasks.chat import chat_task
from workers.text.chat_options import ChatOptions

TABLE: Final = "table.parquet"
"""The table with its answers, in the job's folder."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """The command's options for tables.

    Attributes:
        prompt, system: templates, in files or as their texts.  output_schema: a JSON schema likewise; None: answers are
            text.
        output_column: None: "answer".  sampling: each NAME=VALUE.
        adapter_column: the column with each row's adapter; None: all have the same.
        limit: only so many of the first rows.
    """

    prompt: str
    system: str | None = None
    output_schema: str | None = None
    output_column: str | None = None
    sampling: Sequence[str] = ()
    adapter_column: str | None = None
    limit: int | None = None


class TableRun:
    """The job of a table, checked as far as it can be without computing.

    Args:
        data: the path or glob of the table's files.  model: MODEL or NAME=MODEL.
        wanted, engine: see `TableJob`.

    Raises:
        InvalidCall: an argument can't be used.  UserError: a file can't be read, or the model can't be found.
        IrregularFile: a file is a FIFO, a device or a folder.
    """

    def __init__(
        self, data: str, model: str, options: TableOptions, wanted: JobSettings, engine: EngineOptions
    ) -> None:
        prompt, prompt_name = _template(options.prompt, "--prompt")
        system, system_name = (None, "") if options.system is None else _template(options.system, "--system")
        form: Any = str if options.output_schema is None else _schema(options.output_schema)
        given = named_values(options.sampling, "--sampling", "temperature=0")
        sampling, others = split_options({name: _value(text) for name, text in given.items()}, MapOptions)
        for name in others:
            raise InvalidCall(f"--sampling {name}: is an option of its own; give --{name.replace('_', '-')}")
        frame = open_frame(data)
        self._frame = frame if options.limit is None else frame.slice(0, options.limit)
        column = "answer" if options.output_column is None else options.output_column
        task = chat_task(
            prompt, system, form, sampling, max_tries=wanted.max_tries, adapter_column=options.adapter_column,
            parts=(prompt_name, system_name),
        )  # fmt: skip
        self._call = TableCall(self._frame, task, column)
        self._job = TableJob(self._call, model, wanted, engine)

    def estimate(
        self,
        price_per_hour: float | None,
        reuse: Path | None,
        content_policy: Sequence[str] | None,
        chat: ChatOptions,
    ) -> TableEstimate:
        """See `TableJob.estimate`."""
        found = self._job.estimate(price_per_hour, reuse, content_policy, chat)
        return replace(found, notes=self._job.notes)

    def write_requests(self, folder: Path, *, fresh: bool) -> Path:
        """Write the requests into the job's folder; `fresh`: in place of another job's. Raises as `write_into_job`."""
        self._job.say_notes()
        path = self._job.write(folder, fresh=fresh)
        if fresh:
            (folder / TABLE).unlink(missing_ok=True)
        return path

    def write_table(self, folder: Path) -> None:
        """Write the table with the answers of the job, which has ended. The file appears complete, in place of an older
        one. Raises `UserError`."""
        added = self._call.columns(self._job.answers, self._job.results(folder))
        to = folder / TABLE
        temporary = to.with_name(f".{TABLE}.part")
        try:
            pq.write_table(self._frame.with_columns(added), temporary, compression="zstd")
            temporary.replace(to)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{to}: can't be written: {error}; the same command tries it again") from error
        finally:
            temporary.unlink(missing_ok=True)
        answered = output.count(added.num_rows - added.column(0).null_count)
        output.say(f"{to}: {answered} of {output.count(added.num_rows)} rows have an answer")


def _schema(given: str) -> dict[str, Any]:
    text, name = _text_of(given, "--output-schema", "a JSON object", is_text=given.lstrip().startswith("{"))
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{name}: is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidCall(f"{name}: must be a JSON object")
    return schema


def _template(given: str, option: str) -> tuple[str, str]:
    """A template, and its name for messages."""
    return _text_of(given, option, "a text with {{ COLUMN }}", is_text="{{" in given or "{%" in given)


def _text_of(given: str, option: str, accepted: str, *, is_text: bool) -> tuple[str, str]:
    """An option's text, and its name for messages. The option is the path of a file, or the text itself where it looks
    like one and there is no such file. `accepted`: what text it takes, for messages. Raises `UserError`."""
    is_file = os.path.lexists(given)
    in_place = is_text and not is_file
    name = option if in_place else f"{option} {given}"
    try:
        data = os.fsencode(given) if in_place else _read(Path(given))
        if len(data) > MAX_TEMPLATE_CHARS:
            raise UserError(f"{name}: has more than {MAX_TEMPLATE_CHARS} bytes; shorten it")
        return data.decode(), name
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "" if is_file or in_place else f"; it takes the path of a file, or {accepted}"
        raise UserError(f"{name}: can't be read: {reason}{hint}") from error


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(MAX_TEMPLATE_CHARS + 1)


def _value(text: str) -> Any:
    """A value of --sampling: JSON, or else the text itself."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
