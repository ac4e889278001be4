"""The planner's main loop: batch by batch through validation, segment by segment to the sink.

A segment counts as soon as it is committed, and its shards are computed while the next one is still being read. If an
invalid line stops the whole job, segments are committed only after the last line was checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.planner.ports import (
    FormerAnswers,
    InvalidInput,
    ModelRouting,
    PlanMismatch,
    PlanSink,
    PlanSummary,
    RowSource,
    SourceBatch,
    TokenCounter,
)
from pipeline.planner.rejected_lines import error_rows
from pipeline.planner.reuse import take_reusable
from pipeline.planner.seen_ids import SeenIds
from pipeline.planner.segment import SegmentBuilder, SegmentTexts
from pipeline.planner.segment_sizes import SegmentSizes
from pipeline.planner.tokens import TokenEstimator
from pipeline.planner.validate import CheckedBatch, Validator
from pipeline.ports import World
from schemas.jobs.job import Job, OnInvalid
from schemas.jobs.outcome import JobError
from schemas.jobs.plan import PlanSegment, RejectsRef, ShardRef


def plan(
    source: RowSource,
    job: Job,
    sink: PlanSink,
    world: World,
    *,
    attempt: str,
    counter: TokenCounter | None = None,
    max_segments: int | None = None,
    routing: ModelRouting | None = None,
    former: FormerAnswers | None = None,
) -> PlanSummary:
    """Plan a job: the whole plan is in the sink when this returns.

    From segments that an earlier planner committed only the ids are read again: later lines may repeat them.

    Args:
        attempt: id of this planner's attempt, under which the sink stores shards.
        counter: counts tokens of a sample of the first segment's prompts; None: a rule of thumb.
        max_segments: return when so many segments are committed. A job that invalid lines stop is planned as a whole.
        routing: chooses the models of requests to virtual ones; not needed for a job without any.
        former: answers that rows with the same keys take, so that they are not computed.
    Raises:
        InputError: the input can't be read.
        InvalidInput: lines are invalid and the job's `on_invalid` is "job"; no segment was committed.
        PlanMismatch: a committed segment covers other lines than it would here.
    """
    with tempfile.TemporaryDirectory(prefix="plan-", dir=world.scratch) as folder:
        estimator = TokenEstimator(counter)
        planner = _PlannerRun(source, job, sink, world, attempt, estimator, Path(folder), routing, former)
        return planner.run(max_segments)


def limited(batches: Iterator[SourceBatch], limit: int | None) -> Iterator[SourceBatch]:
    """The batches up to and including the `limit`th non-blank row."""
    left = limit
    for batch in batches:
        if left is not None and len(batch.rows) >= left:
            rows = batch.rows[:left]
            carried = batch.carried.slice(0, left) if batch.carried is not None else None
            yield SourceBatch(batch.first_row, rows[-1].row + 1, rows, carried, batch.name)
            return
        left = left - len(batch.rows) if left is not None else None
        yield batch


class _PlannerRun:
    """One run of the planner."""

    def __init__(
        self,
        source: RowSource,
        job: Job,
        sink: PlanSink,
        world: World,
        attempt: str,
        estimator: TokenEstimator,
        folder: Path,
        routing: ModelRouting | None,
        former: FormerAnswers | None,
    ) -> None:
        self._former = former
        self._source = source
        self._job = job
        self._sink = sink
        self._world = world
        self._attempt = attempt
        self._estimator = estimator
        self._folder = folder
        self._validator = Validator(job, SeenIds(folder), estimator, routing=routing)
        self._errors: list[JobError] = []
        self._invalid = 0
        self._sizes = SegmentSizes.of(job.settings.plan)
        self._number = 0  # of the next part
        self._segments: list[PlanSegment] = []

    @property
    def _strict(self) -> bool:
        return self._job.settings.on_invalid is OnInvalid.JOB

    def run(self, max_segments: int | None) -> PlanSummary:
        segment = self._open(0, 0)
        for batch in limited(self._source.batches(self._sizes), self._job.settings.limit):
            if (index := self._sizes.index(batch.first_row)) != segment.index:
                self._close(segment, last=False)
                if not self._strict and len(self._segments) == max_segments:
                    return summarize(self._segments)
                segment = self._open(index, batch.first_row)
            segment.end_row = batch.end_row
            self._world.on_progress()
            if segment.existing is not None:
                self._validator.remember(batch)
                continue
            checked = self._validator.check(batch)
            segment.reused += self._end_rows(checked)
            segment.add(checked)
        self._close(segment, last=True)
        if self._errors:
            raise InvalidInput(tuple(self._errors), self._invalid)
        if self._strict:
            self._segments = [self._commit(segment) for segment in self._segments]
        return summarize(self._segments)

    def _open(self, index: int, first_row: int) -> _OpenSegment:
        segment = _OpenSegment(self, index, first_row)
        if self._former is not None and segment.existing is not None:
            self._former.mark_given(self._sink.reused_keys(segment.existing))
        return segment

    def _end_rows(self, checked: CheckedBatch) -> int:
        """Write the results of rows that end in planning: invalid lines, and those that take answers of a former job.
        Returns the number of the latter."""
        created_at, now = self._job.created_at, self._world.clock.now()
        carried = self._source.carried
        tables: list[pa.Table] = []
        reused = None
        if checked.rejected and not self._refuse_job(checked):
            rejected = checked.rejected
            tables.append(error_rows(rejected, checked.batch.carried, carried, created_at=created_at, at=now))
        if self._former is not None:
            reused = take_reusable(checked, self._former, carried, created_at=created_at, at=now)
        if reused is not None:
            tables.append(reused)
        if tables:
            self._sink.write_results(tables[0] if len(tables) == 1 else pa.concat_tables(tables).sort_by("row"))
        return 0 if reused is None else int(reused.num_rows)

    def _refuse_job(self, checked: CheckedBatch) -> bool:
        """Count invalid lines; whether they stop the job. Of those that do, the first are collected for its error."""
        self._invalid += len(checked.rejected)
        if not self._strict:
            return False
        room = self._job.settings.plan.max_invalid_errors - len(self._errors)
        self._errors += [
            JobError(code=error.code, message=error.message, line=error.line, param=error.param)
            for error in (rejected.error for rejected in checked.rejected[:room])
        ]
        return True

    def _close(self, segment: _OpenSegment, *, last: bool) -> None:
        """Write a segment's shards and commit it; a strict job commits nothing before all of its lines are read."""
        if self._errors:
            return
        planned = segment.existing
        if planned is not None:
            check_range(planned, segment.first_row, segment.end_row, last=last)
        else:
            written = segment.write(last=last)
            planned = written if self._strict else self._commit(written)
        if planned.index == 0:
            self._estimator.settle(planned.tokens_per_byte)
        self._segments.append(planned)
        self._number = max([self._number - 1, *planned.parts]) + 1

    def _commit(self, written: PlanSegment) -> PlanSegment:
        committed = self._sink.commit_segment(written)
        check_range(committed, written.first_row, written.end_row, last=written.last)
        return committed


class _OpenSegment:
    """The segment whose lines are being read."""

    def __init__(self, planning: _PlannerRun, index: int, first_row: int) -> None:
        self.index = index
        self.existing = planning._sink.existing_segment(index)
        self._planning = planning
        self.first_row = self.end_row = first_row
        self._lines = self._rejected = self._unselected = self.reused = 0
        self._path = planning._folder / f"segment-{index}.arrow"
        if self.existing is None:
            spill = SegmentTexts(self._path, planning._source.carried)
            self._builder = SegmentBuilder(spill, [model.name for model in planning._job.models])

    def add(self, checked: CheckedBatch) -> None:
        self._lines += len(checked.batch.rows)
        self._rejected += len(checked.rejected)
        self._unselected += checked.unselected
        if self.existing is None:
            self._builder.add(checked)

    def write(self, *, last: bool) -> PlanSegment:
        planning = self._planning
        job = planning._job
        small_first = self.index == 0 and job.max_cost is not None
        planned = self._builder.finish(job.settings.plan, planning._source.carried, small_first=small_first)
        rejects = self._rejects()
        refs: list[ShardRef] = []
        first = planning._number + (rejects is not None)
        for number, draft in enumerate(planned.shards(), start=first):
            stored = planning._sink.write_shard(number, draft.table)
            refs.append(
                ShardRef(
                    number=number,
                    key=stored.key,
                    sha256=stored.sha256,
                    size=stored.size,
                    rows=draft.table.num_rows,
                    computed_rows=draft.computed_rows,
                    model=draft.model,
                    prompt_tokens=draft.prompt_tokens,
                    expected_tokens=draft.expected_tokens,
                )
            )
        self._path.unlink()
        return PlanSegment(
            job=planning._job.id,
            index=self.index,
            attempt=planning._attempt,
            first_row=self.first_row,
            end_row=self.end_row,
            blank_lines=self.end_row - self.first_row - self._lines,
            unselected=self._unselected,
            rejected=self._rejected,
            reused=self.reused,
            rejects=rejects,
            unique=planned.unique,
            prefix_groups=planned.prefix_groups,
            shared_prefix_tokens=planning._estimator.bytes_to_tokens(planned.shared_bytes),
            max_tokens=planned.max_tokens,
            certain_tokens=self._builder.certain_tokens,
            sequences=planned.sequences,
            tokens_per_byte=planning._estimator.tokens_per_byte,
            shards=tuple(refs),
            last=last,
        )

    def _rejects(self) -> RejectsRef | None:
        """Store the rows that planning ends, if any. Part 0 exists even when it is empty, so that the results can
        always be read."""
        rows = self._rejected + self.reused
        if self.index and not rows:
            return None
        number = self._planning._number
        stored = self._planning._sink.store_results(number)
        return RejectsRef(number=number, key=stored.key, sha256=stored.sha256, size=stored.size, rows=rows)


def check_range(committed: PlanSegment, first_row: int, end_row: int, *, last: bool) -> None:
    """Check that a committed segment covers these rows of the input; raises `PlanMismatch`."""
    if (committed.first_row, committed.end_row, committed.last) != (first_row, end_row, last):
        raise PlanMismatch(committed, f"{first_row} to {end_row}" + (", the last ones" if last else ""))


def summarize(segments: list[PlanSegment]) -> PlanSummary:
    """The totals of the segments."""
    shards = [shard for segment in segments for shard in segment.shards]
    return PlanSummary(
        segments=tuple(segments),
        total=sum(segment.total for segment in segments),
        rejected=sum(segment.rejected for segment in segments),
        reused=sum(segment.reused for segment in segments),
        unique=sum(segment.unique for segment in segments),
        blank_lines=sum(segment.blank_lines for segment in segments),
        prompt_tokens=sum(shard.prompt_tokens for shard in shards),
        shared_prefix_tokens=sum(segment.shared_prefix_tokens for segment in segments),
        expected_tokens=sum(shard.expected_tokens for shard in shards),
        max_tokens=sum(segment.max_tokens for segment in segments),
    )
