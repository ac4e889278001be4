"""What all calls over a table do: check, estimate or compute, and add the new columns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from schemas.jobs.results import line_of_input
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.options import engine_names
from tokenmill.frames.resident import Model, load_in_turn, name_and_options
from tokenmill.frames.tasks.task import Answers, Task
from tokenmill.output import announce_imports

if TYPE_CHECKING:
    from tokenmill.frames.jobs.estimate import TableEstimate
    from tokenmill.frames.jobs.job import TableJob
    from tokenmill.frames.records import CallRecord

_COMMON: Final[Mapping[str, Callable[[pa.Table, list[str | None]], pa.Array]]] = {
    "_error": lambda _, errors: pa.array(errors, pa.string()),
    "_prompt_tokens": lambda results, _: pa.array(results["prompt_tokens"].to_pylist(), pa.int32()),
    "_cached_tokens": lambda results, _: pa.array(results["cached_tokens"].to_pylist(), pa.int32()),
    "_completion_tokens": lambda results, _: pa.array(results["completion_tokens"].to_pylist(), pa.int32()),
    "_key": lambda results, _: pa.array(results["request_key"].to_pylist(), pa.string()),
    "_reused": lambda results, _: _is_reused(results["reused_from"]),
    "_tries": lambda results, _: pa.array(results["tries"].to_pylist(), pa.int32()),
}
"""The columns that every task may have, by suffix."""


def _is_reused(origins: pa.ChunkedArray) -> pa.Array:
    """Whether each answer is a former one; null where a column without a type says that it is unknown."""
    if pa.types.is_null(origins.type):
        return pa.nulls(len(origins), pa.bool_())
    return origins.is_valid().combine_chunks()


def _at_row(message: str | None, row: int | None) -> str | None:
    """The message of a row's error, with the row's position in the table in place of its request's line."""
    if message is None or row is None:
        return message
    line = f"{line_of_input(row)}: "
    return f"row {row}: {message[len(line) :]}" if message.startswith(line) else message


def run_call(
    data: Any,
    task: Task,
    model: Model,
    *,
    output_column: str,
    output_dir: str | os.PathLike[str] | None,
    reuse: Any,
    dry_run: bool,
    options: Mapping[str, Any],
) -> Any:
    """The table with its new columns, or with `dry_run` an estimate. Raises as `tokenmill.map`."""
    if isinstance(data, DeferredCall):
        return data.take(task, model, options)
    call = TableCall(open_frame(data), task, output_column)
    if dry_run:
        return call.estimate(model, options, reuse)
    return call.frame.with_columns(call.compute(model, output_dir, options, reuse))


class DeferredCall:
    """In place of the data of a call: it is checked, and taken to be run later.

    Attributes:
        task, model, options: of the call.
    """

    task: Task
    model: Model
    options: Mapping[str, Any]

    def take(self, task: Task, model: Model, options: Mapping[str, Any]) -> None:
        """Take the call."""
        self.task, self.model, self.options = task, model, options


class TableCall:
    """A call that is checked as far as it can be without a model.

    Attributes:
        requests: of its rows.  column: of the answers, and the beginning of the other new columns' names.

    Raises:
        InvalidCall: a column is missing, a new one is there already, or a text can't be rendered.
    """

    def __init__(self, frame: Frame, task: Task, output_column: str) -> None:
        from tokenmill.frames.jobs.requests import TableRequests

        self.frame, self.task = frame, task
        self.column = output_column
        self._names = {suffix: output_column + suffix for suffix in task.suffixes}
        for name in self._names.values():
            if name in frame.columns:
                raise InvalidCall(
                    f"output_column: the data has a column {name!r} already; give another one, such as {self._free()!r}"
                )
        self.requests = TableRequests(frame, task)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the new columns."""
        return tuple(self._names.values())

    def compute(
        self, model: Model, output_dir: str | os.PathLike[str] | None, options: Mapping[str, Any], reuse: Any = None
    ) -> pa.Table:
        """The new columns, computed in this process or by an installation, as the options (`RunKeywords`) say. A table
        without rows loads nothing. Raises as `tokenmill.map`."""
        from tokenmill.frames.installations.target import installation_of

        given = None if output_dir is None else Path(output_dir).expanduser()
        installation = installation_of(options)
        if installation is None:
            return self.columns(*self._answer_here(model, given, options, reuse))
        from tokenmill.frames.installations.job import answer_there

        return self.columns(*answer_there(self, model, installation, given, reuse))

    def _answer_here(
        self, model: Model, given: Path | None, options: Mapping[str, Any], reuse: Any
    ) -> tuple[Answers, pa.Table]:
        """The job's answers and results, computed in this process."""
        from tokenmill.frames.former import former_results
        from tokenmill.frames.jobs.folders import job_folder
        from tokenmill.frames.jobs.results import no_results

        job = self._job(model, options)
        if not len(self.frame):
            return job.answers, no_results(self.task)
        with job_folder(given) as folder, tempfile.TemporaryDirectory() as scratch, load_in_turn(model) as load:
            former = None if reuse is None else former_results(reuse, job.answers, self.column, Path(scratch))
            return job.answers, job.run(folder, former, load)

    def estimate(self, model: Model, options: Mapping[str, Any], reuse: Any = None) -> TableEstimate:
        """What `compute` would take in this process. Raises as `tokenmill.map`."""
        from tokenmill.frames.installations.target import installation_of

        if installation_of(options) is not None:
            raise InvalidCall("dry_run: an estimate is of this machine; leave out root and url")
        from tokenmill.frames.former import former_results

        job = self._job(model, options)
        with tempfile.TemporaryDirectory() as scratch:
            former = None if reuse is None else former_results(reuse, job.answers, self.column, Path(scratch))
            return replace(job.estimate(reuse=former), notes=job.notes)

    def columns(self, answers: Answers, results: pa.Table) -> pa.Table:
        """The new columns from the results of all rows."""
        if results.num_rows != len(self.frame):
            rows = len(self.frame)
            raise InvalidCall(f"the job has {results.num_rows} results for {rows} rows; give another output_dir")
        return self.columns_of(answers, results)

    def columns_of(self, answers: Answers, results: pa.Table) -> pa.Table:
        """The new columns from these results."""
        said = (results[name].to_pylist() for name in ("error_code", "error_message", "row"))
        errors = [
            None if code is None else f"{code}: {_at_row(message, row)}"
            for code, message, row in zip(*said, strict=True)
        ]
        own = answers.columns(results, errors)
        columns = [own[suffix] if suffix in own else _COMMON[suffix](results, errors) for suffix in self._names]
        return pa.table(columns, names=list(self.names))

    def record(self) -> CallRecord:
        """What the call asks, for its job's folder."""
        from tokenmill.frames.records import CallRecord

        texts = {name: text.source for name, text in self.task.texts.items()}
        return CallRecord(
            url=self.task.url, column=self.column, texts=texts, body=dict(self.task.body),
            adapter_column=self.task.adapter_column,
        )  # fmt: skip

    def _job(self, model: Model, options: Mapping[str, Any]) -> TableJob:
        announce_imports()
        from tokenmill.frames.jobs.job import TableJob, engine_of

        engine = {name: value for name, value in options.items() if name in engine_names()}
        name, engine_options = name_and_options(model, engine)
        return TableJob(self, name, engine=engine_of(engine_options))

    def _free(self) -> str:
        """An output column without a clash."""
        base, number = self.column, 2
        while any(f"{base}_{number}{suffix}" in self.frame.columns for suffix in self.task.suffixes):
            number += 1
        return f"{base}_{number}"
