"""The rows of a pipeline's steps: the cells of the table, with the columns that earlier steps have committed.

All steps of a pipeline have the same segments. A segment of a step can be planned when the parts of that segment of the
steps that it needs are committed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.jobs.planning import PlanningCancelled
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.planner import RowSource, SourceBatch, SourceRow
from pipeline.planner.segment_sizes import SegmentSizes
from pipeline.ports import PipelineError
from schemas.requests.errors import RowError, RowErrorCode
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import BATCH_ROWS, Frame
from tokenmill.frames.data.kinds import DictsFrame
from tokenmill.frames.jobs.job import TableJob
from tokenmill.frames.jobs.requests import TableRequests
from tokenmill.frames.jobs.results import large, no_results, result_columns
from tokenmill.frames.pipelines.bound import BoundStep
from tokenmill.frames.pipelines.step_jobs import OpenSteps

POLL_SECONDS: Final = 0.05
CACHED_SEGMENTS: Final = 4
"""Of a step, whose cells stay in memory for the function that judges its answers."""

LEFT_OUT: Final = "left_out"
"""In place of an error, while columns are made: the row is not of the step."""


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The committed results of a step as columns of the table.

    Attributes:
        bound: the step.  job: makes the columns.
    """

    bound: BoundStep
    job: TableJob

    def read(self, ledger: JobLedger, parts: Iterable[int], first: int, rows: int) -> pa.Table:
        """The new columns of these rows; all of them null where a row has no result.

        Args:
            parts: that have their results.
        """
        none = no_results(self.bound.call.task)
        tables = [none, *(self._part(ledger, number) for number in parts)]
        results = pa.concat_tables([large(table.select(none.column_names)) for table in tables])
        at = np.full(rows, -1, dtype=np.int64)
        at[results["row"].to_numpy() - first] = np.arange(len(results))
        is_left_out = pa.array(at < 0)
        found = results.take(pa.array(at, mask=at < 0))
        codes = pc.if_else(is_left_out, LEFT_OUT, found["error_code"])
        found = found.set_column(found.column_names.index("error_code"), "error_code", codes)
        made = self.bound.call.columns_of(self.job.answers, found)
        for name in (self.bound.name + "_error", self.bound.name + "_reused"):
            column = made[name]
            nulls = pa.nulls(rows, column.type)
            made = made.set_column(made.column_names.index(name), name, pc.if_else(is_left_out, nulls, column))
        return made

    def nothing(self) -> pa.Table:
        """The columns of a table without rows."""
        return self.bound.call.columns_of(self.job.answers, no_results(self.bound.call.task))

    def _part(self, ledger: JobLedger, number: int) -> pa.Table:
        with ledger.store.open(ledger.prefix + part_key(number)) as stream:
            return pq.ParquetFile(stream).read(result_columns(self.bound.call.task), use_threads=False)


class PipelineRows:
    """The rows of all steps, made from a table and from what the steps have committed.

    Args:
        sizes: of the segments of all steps.
    """

    def __init__(self, frame: Frame, steps: Sequence[StepColumns], sizes: SegmentSizes) -> None:
        self.total = len(frame)
        self._frame, self._sizes = frame, sizes
        self._ranges: dict[int, tuple[int, int]] = {}
        first = 0
        while first < self.total:
            end = min(sizes.end(first), self.total)
            self._ranges[sizes.index(first)] = first, end
            first = end
        self._columns = {one.bound.name: one for one in steps}
        self._cached: dict[str, OrderedDict[int, list[dict[str, Any]]]] = {
            name: OrderedDict() for name in self._columns
        }
        self._cache_lock = threading.Lock()
        self._open: OpenSteps | None = None

    def sources(self, opened: OpenSteps) -> dict[str, RowSource]:
        """The sources of the steps' rows (`MakeSources`)."""
        self._open = opened
        return {name: _StepSource(self, one.bound, opened.ledgers[name]) for name, one in self._columns.items()}

    def cells_of(self, step: BoundStep, row: int) -> dict[str, Any]:
        """A row's cells, for the function that judges its answer."""
        index = self._sizes.index(row)
        with self._cache_lock:
            cached = self._cached[step.name]
            if index not in cached:
                cached[index] = self._cells(step, index)
                while len(cached) > CACHED_SEGMENTS:
                    cached.popitem(last=False)
            return dict(cached[index][row - self._ranges[index][0]])

    def requests(self, step: BoundStep, index: int) -> Iterator[SourceRow]:
        """The rows of a segment that are the step's, once those that it needs are committed."""
        self._wait(step, index)
        first, _ = self._ranges[index]
        cells = self._cells(step, index)
        verdicts = [_verdict(step, one) for one in cells]
        asked = [row for row, verdict in enumerate(verdicts) if verdict is True]
        job = self._columns[step.name].job
        frame = DictsFrame([cells[row] for row in asked])
        frame.columns = step.call.frame.columns
        made = TableRequests(frame, step.step.task).try_requests()
        for row, verdict in enumerate(verdicts):
            value: object = verdict
            if verdict is True:
                fields = next(made)
                value = (
                    RowError(RowErrorCode.INVALID_REQUEST, str(fields))
                    if isinstance(fields, InvalidCall)
                    else job.line(first + row, fields)
                )
            if value is not False:
                yield SourceRow(first + row, first + row + 1, value)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """The index, first row and end of each segment."""
        for index, (first, end) in self._ranges.items():
            yield index, first, end

    def _cells(self, step: BoundStep, index: int) -> list[dict[str, Any]]:
        """The cells of a segment's rows that the step may read."""
        assert self._open is not None, "the steps are open"
        first, end = self._ranges[index]
        cells = list(self._frame.slice(first, end - first).cells(step.columns))
        for name in step.needs:
            ledger = self._open.ledgers[name]
            segment = ledger.segment(index)
            assert segment is not None, "the step has waited for it"
            added = self._columns[name].read(ledger, segment.parts, first, end - first)
            for row, more in zip(cells, added.to_pylist(), strict=True):
                row.update(more)
        return cells

    def _wait(self, step: BoundStep, index: int) -> None:
        """Wait until the segment of each step that it needs is committed; where that has another model, until all of
        that step is, so that a model is loaded once. Raises `PlanningCancelled`."""
        opened = self._open
        assert opened is not None, "the steps are open"

        def until(ledger: JobLedger, is_true: Callable[[], bool]) -> None:
            while not is_true():
                if opened.stopping.is_set():
                    raise PlanningCancelled(f"{step.name}: stopped")
                if ledger.has_ended() and not is_true():
                    raise PipelineError(f"{ledger.location()}: has ended before all of its rows were planned")
                time.sleep(POLL_SECONDS)

        for name in step.needs:
            ledger = opened.ledgers[name]
            if opened.models[name] != opened.models[step.name]:
                until(ledger, ledger.has_ended)
            until(ledger, lambda: ledger.segment(index) is not None)  # noqa: B023  # called before the next one
            segment = ledger.segment(index)
            assert segment is not None
            until(ledger, partial(_has_parts, ledger, list(segment.parts)))


class _StepSource:
    """The rows of one step (`RowSource`)."""

    carried = None

    def __init__(self, rows: PipelineRows, step: BoundStep, ledger: JobLedger) -> None:
        self._rows, self._step, self._ledger = rows, step, ledger

    def batches(self, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        """The rows, a segment at a time. Those of a segment that is planned are not made again."""
        for index, first, end in self._rows.segments():
            if self._ledger.segment(index) is not None:
                yield SourceBatch(first, end, [])
                continue
            rows = list(self._rows.requests(self._step, index))
            for at in range(first, end, BATCH_ROWS):
                upto = min(at + BATCH_ROWS, end)
                yield SourceBatch(at, upto, [row for row in rows if at <= row.row < upto])


def _verdict(step: BoundStep, cells: Mapping[str, Any]) -> bool | RowError:
    """Whether a row is the step's; an error: it can't be computed."""
    failed = [name for name in step.needs if _has_failed(cells, name)]
    for one in step.filters:
        try:
            if isinstance(one.condition, str):
                if one.condition in failed:
                    return _input_failed(one.condition)
                is_true = bool(cells[one.condition])
            else:
                is_true = bool(one.condition(dict(cells)))
        except Exception as error:  # noqa: BLE001 - a mistake in the function is the row's error
            if failed:
                return _input_failed(failed[0])
            what = f"the filter {one.name} failed with {type(error).__name__}: {error}"
            return RowError(RowErrorCode.INPUT_FAILED, what)
        if not is_true:
            return False
    lacking = next((name for name in step.inputs if name in failed), None)
    return True if lacking is None else _input_failed(lacking)


def _has_failed(cells: Mapping[str, Any], name: str) -> bool:
    return cells[name] is None and cells[name + "_error"] is not None


def _has_parts(ledger: JobLedger, numbers: list[int]) -> bool:
    """Whether all of these parts are committed. Those that are go out of the list, and are not looked for again."""
    while numbers and ledger.has_part(numbers[-1]):
        numbers.pop()
    return not numbers


def _input_failed(column: str) -> RowError:
    return RowError(RowErrorCode.INPUT_FAILED, f"the column {column!r} has no value in this row, see {column}_error")
