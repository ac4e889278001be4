"""What all calls over a table do: check, estimate or compute, and add the new columns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.resident import Model, load_in_turn, name_and_options
from tokenmill.frames.tasks.task import Answers, Task

if TYPE_CHECKING:
    from tokenmill.frames.job import TableEstimate, TableJob
    from tokenmill.frames.records import CallRecord

_COMMON: Final[Mapping[str, Callable[[pa.Table, list[str | None]], pa.Array]]] = {
    "_error": lambda _, errors: pa.array(errors, pa.string()),
    "_prompt_tokens": lambda results, _: pa.array(results["prompt_tokens"].to_pylist(), pa.int32()),
    "_cached_tokens": lambda results, _: pa.array(results["cached_tokens"].to_pylist(), pa.int32()),
    "_completion_tokens": lambda results, _: pa.array(results["completion_tokens"].to_pylist(), pa.int32()),
    "_key": lambda results, _: pa.array(results["request_key"].to_pylist(), pa.string()),
    "_reused": lambda results, _: results["reused_from"].is_valid().combine_chunks(),
    "_tries": lambda results, _: pa.array(results["tries"].to_pylist(), pa.int32()),
}
"""The columns that every task may have, by suffix."""


def run_call(
    data: Any,
    task: Task,
    model: Model,
    *,
    output_column: str,
    output_dir: str | os.PathLike[str] | None,
    reuse: Any,
    dry_run: bool,
    engine: Mapping[str, Any],
) -> Any:
    """The table with its new columns, or with `dry_run` an estimate. Raises as `tokenmill.map`."""
    if isinstance(data, DeferredCall):
        return data.take(task, model, engine)
    call = TableCall(open_frame(data), task, output_column)
    if dry_run:
        return call.estimate(model, engine, reuse)
    return call.frame.with_columns(call.compute(model, output_dir, engine, reuse))


class DeferredCall:
    """In place of the data of a call: it is checked, and taken to be run later.

    Attributes:
        task, model, engine: of the call.
    """

    task: Task
    model: Model
    engine: Mapping[str, Any]

    def take(self, task: Task, model: Model, engine: Mapping[str, Any]) -> None:
        """Take the call."""
        self.task, self.model, self.engine = task, model, engine


class TableCall:
    """A call that is checked as far as it can be without a model.

    Attributes:
        requests: of its rows.  column: of the answers, and the beginning of the other new columns' names.

    Raises:
        InvalidCall: a column is missing, a new one is there already, or a text can't be rendered.
    """

    def __init__(self, frame: Frame, task: Task, output_column: str) -> None:
        from tokenmill.frames.requests import TableRequests

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
        self, model: Model, output_dir: str | os.PathLike[str] | None, engine: Mapping[str, Any], reuse: Any = None
    ) -> pa.Table:
        """The new columns. A table without rows loads nothing. Raises as `tokenmill.map`."""
        from tokenmill.frames.former import former_results
        from tokenmill.frames.job import job_folder

        job = self._job(model, engine)
        if not len(self.frame):
            return self.columns(job.answers, job.no_results())
        given = None if output_dir is None else Path(output_dir)
        with job_folder(given) as folder, tempfile.TemporaryDirectory() as scratch, load_in_turn(model) as load:
            former = None if reuse is None else former_results(reuse, job.answers, self.column, Path(scratch))
            results = job.run(folder, former, load)
        return self.columns(job.answers, results)

    def estimate(self, model: Model, engine: Mapping[str, Any], reuse: Any = None) -> TableEstimate:
        """What `compute` would take. Raises as `tokenmill.map`."""
        if reuse is not None:
            raise InvalidCall("reuse: an estimate is of all rows; leave out reuse or dry_run")
        return self._job(model, engine).estimate()

    def columns(self, answers: Answers, results: pa.Table) -> pa.Table:
        """The new columns from the results of all rows."""
        if results.num_rows != len(self.frame):
            rows = len(self.frame)
            raise InvalidCall(f"the job has {results.num_rows} results for {rows} rows; give another output_dir")
        return self.columns_of(answers, results)

    def columns_of(self, answers: Answers, results: pa.Table) -> pa.Table:
        """The new columns from these results."""
        codes, messages = results["error_code"].to_pylist(), results["error_message"].to_pylist()
        errors = [None if code is None else f"{code}: {message}" for code, message in zip(codes, messages, strict=True)]
        own = answers.columns(results, errors)
        columns = [own[suffix] if suffix in own else _COMMON[suffix](results, errors) for suffix in self._names]
        return pa.table(columns, names=list(self.names))

    def record(self) -> CallRecord:
        """What the call asks, for its job's folder."""
        from tokenmill.frames.records import CallRecord

        texts = {name: text.source for name, text in self.task.texts.items()}
        return CallRecord(url=self.task.url, column=self.column, texts=texts, body=dict(self.task.body))

    def _job(self, model: Model, engine: Mapping[str, Any]) -> TableJob:
        from tokenmill.frames.job import TableJob, engine_of

        name, options = name_and_options(model, engine)
        return TableJob(self, name, engine=engine_of(options))

    def _free(self) -> str:
        """An output column without a clash."""
        base, number = self.column, 2
        while any(f"{base}_{number}{suffix}" in self.frame.columns for suffix in self.task.suffixes):
            number += 1
        return f"{base}_{number}"
