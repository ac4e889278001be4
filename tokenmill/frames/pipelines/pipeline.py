"""`tokenmill.pipeline`: several columns of a table, made from its columns and from each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import pyarrow as pa

from pipeline.adapters.folder.store import FolderStore
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.interrupts import interrupts_plainly
from tokenmill.frames.options import EngineKeywords, check_options
from tokenmill.frames.pipelines.bound import BoundStep, bind
from tokenmill.frames.pipelines.record import check_same, read_pipeline, record_of, write_pipeline
from tokenmill.frames.pipelines.step_ledgers import STEPS, ledger_of
from tokenmill.frames.pipelines.steps import Filter, Step
from tokenmill.frames.pipelines.watching import RETRIES, all_runs, read_pipeline_progress
from tokenmill.frames.resident import Model, ResidentModel, load_in_turn, name_and_options
from tokenmill.output import announce_imports

if TYPE_CHECKING:
    from schemas.jobs.inputs import InputRef
    from tokenmill.frames.jobs.job import TableJob
    from tokenmill.frames.pipelines.estimate import PipelineEstimate
    from tokenmill.frames.pipelines.rows import PipelineRows, StepColumns
    from tokenmill.frames.pipelines.step_jobs import StepJob
    from tokenmill.local.progress import StepProgress
    from tokenmill.local.run_plan import LoadAny

FIRST_SEGMENT_ROWS: Final = 1_000
SEGMENT_ROWS: Final = 16_000
"""Of a step: its rows go on to the next step when so many are committed; equal prompts and shared prefixes are found
within them."""


def pipeline(
    steps: Sequence[Step | Filter], *, model: Model | None = None, **options: Unpack[EngineKeywords]
) -> Pipeline:
    """Several columns of a table, made from its columns and from each other.

    Args:
        steps: `tokenmill.step` for each column, and `tokenmill.filter`, in their order.
        model: of the steps that name none, as `tokenmill.map` takes it.
        **options: the engine's, of all steps that don't give them.

    Raises:
        InvalidCall: an argument can't be used.

    Example:
        >>> answered = tm.pipeline(  # doctest: +SKIP
        ...     [
        ...         tm.step("answer", prompt="{{ question }}", max_tokens=200),
        ...         tm.step("grade", prompt="{{ question }}\\n{{ answer }}\\nRight?", output=Literal["yes", "no"]),
        ...         tm.filter(lambda row: row["grade"] == "yes"),
        ...         tm.step("summary", prompt="Shorten: {{ answer }}"),
        ...     ],
        ...     model="demo",
        ... )
        >>> print(answered.plan(frame))  # doctest: +SKIP
        >>> frame = answered.run(frame, output_dir="answered")  # doctest: +SKIP
    """
    return Pipeline(steps, model, check_options(options, EngineKeywords))


class Pipeline:
    """Steps that make columns; made by `pipeline`. It holds no rows, and may run over several tables.

    Raises:
        InvalidCall: a step has no model, or there are no steps, or two of one name.
    """

    def __init__(self, steps: Sequence[Step | Filter], model: Model | None, engine: Mapping[str, Any]) -> None:
        self._steps = tuple(steps)
        self._model, self._engine = model, engine
        for one in self._steps:
            if not isinstance(one, Step | Filter):
                raise InvalidCall(f"steps: must be made by tokenmill.step or filter, not be a {type(one).__name__}")
        made = [one for one in self._steps if isinstance(one, Step)]
        if not made:
            raise InvalidCall("steps: there is none; give tokenmill.step for each column")
        for one in made:
            if [each.name for each in made].count(one.name) > 1:
                raise InvalidCall(f"steps: two have the name {one.name!r}; rename one")
            if one.model is None and model is None:
                raise InvalidCall(f"step {one.name!r}: has no model; give it one, or the pipeline")

    def __repr__(self) -> str:
        model = self._model.name if isinstance(self._model, ResidentModel) else self._model
        return f"pipeline([{', '.join(map(repr, self._steps))}], model={model!r})"

    @interrupts_plainly
    def run(self, data: Any, *, output_dir: str | os.PathLike[str] | None = None, reuse: Any = None) -> Any:
        """Compute the columns.

        All steps run at the same time: the rows of a step start as soon as the columns that they use are committed, and
        steps with the same model are computed in one batch.

        Args:
            data: as `tokenmill.map` takes it.
            output_dir: the pipeline's folder. The same call after a kill goes on there, and computes no committed row
                of a column again. None: a temporary one.
            reuse: the `output_dir` of a former run of this or another pipeline. Rows of a step of which that has an
                answer to an equal request, in the step of the same name, take it.

        Returns:
            The same kind of table (of a path: an Arrow table), with all rows in their order and the columns of each
            step added, as its function adds them. A row that a filter left out is null in the columns behind it. A row
            whose inputs failed has an error `input_failed` there.

        Raises:
            As `tokenmill.map`.
        """
        frame, steps = self._bound(data)
        announce_imports()
        from tokenmill.frames.jobs.folders import job_folder
        from tokenmill.frames.jobs.job import explained, how_to_go_on
        from tokenmill.frames.pipelines.rows import StepColumns

        jobs = [StepColumns(one, self._job(one)) for one in steps]
        if not len(frame):
            return frame.with_columns(_joined([one.nothing() for one in jobs]))
        with job_folder(None if output_dir is None else Path(output_dir)) as folder:
            runs = all_runs(folder)
            former = runs[-2] if len(runs) > 1 else None if reuse is None else _former(reuse, folder)
            with explained(folder):
                progress = self._run(frame, jobs, runs[-1], former)
            if not all(step.has_ended for step in progress):
                done = ", ".join(map(str, progress))
                raise KeyboardInterrupt(f"stopped: {done} are committed; {how_to_go_on(folder)}")
            return frame.with_columns(_read(jobs, runs[-1], len(frame)))

    @interrupts_plainly
    def retry_failed(self, data: Any, *, output_dir: str | os.PathLike[str]) -> Any:
        """Compute the rows anew that failed in a column, and what depends on them. All other answers are taken from the
        run in `output_dir`, which has ended: their requests are equal. The same call after a kill goes on.

        Args:
            data, output_dir: those of the run.

        Returns:
            The whole table, as `run` does; so does `run` from now on. Answers that were taken have `_reused` true, and
            no tokens.

        Raises:
            As `run`; `InvalidCall` also if the run has not ended.
        """
        frame, steps = self._bound(data)
        folder = Path(output_dir).expanduser()
        runs = all_runs(folder)
        check_same(read_pipeline(runs[0]), record_of(steps, frame), runs[0])
        progress = read_pipeline_progress(folder)
        if not progress.has_ended and len(runs) == 1:
            raise InvalidCall(f"output_dir: {folder} has a run that has not ended; call run first")
        if progress.has_ended and any(step.failed for step in progress.steps):
            (folder / RETRIES / f"{len(runs):04d}").mkdir(parents=True)
        return self.run(data, output_dir=output_dir)

    def plan(self, data: Any = None) -> PipelineEstimate:
        """An estimate of each step over a table, with nothing computed.

        The texts of steps behind others are not known: each answer is assumed to be a text of the length that its
        step's estimate expects, and every filter to let all rows through.

        Raises:
            InvalidCall: there is no table, or it can't be used.
        """
        if data is None:
            raise InvalidCall("data: is missing; an estimate is of a table: plan(data), with the data of run(data)")
        frame, steps = self._bound(data)
        announce_imports()
        from tokenmill.frames.pipelines.estimate import estimate_steps

        return estimate_steps(frame, [(one, self._job(one)) for one in steps])

    def _bound(self, data: Any) -> tuple[Frame, tuple[BoundStep, ...]]:
        frame = open_frame(data)
        return frame, bind(self._steps, frame)

    def _model_of(self, bound: BoundStep) -> Model:
        model = bound.step.model if bound.step.model is not None else self._model
        assert model is not None, "checked at the start"
        return model

    def _job(self, bound: BoundStep) -> TableJob:
        """The job of a step. Raises `InvalidCall`, with its name."""
        from tokenmill.config.job_options import job_settings
        from tokenmill.frames.jobs.job import TableJob, engine_of
        from tokenmill.settings import read_settings

        model, given = self._model_of(bound), dict(bound.step.engine)
        if not isinstance(model, ResidentModel):
            given = {**self._engine, **given}
        try:
            name, options = name_and_options(model, given)
            if options.get("replicas", 1) != 1:
                raise InvalidCall("replicas: must be 1, since one engine computes all steps of a pipeline")
            wanted = job_settings(read_settings())
            plan = wanted.plan.model_copy(
                update={
                    "first_segment_rows": min(wanted.plan.first_segment_rows, FIRST_SEGMENT_ROWS),
                    "segment_rows": min(wanted.plan.segment_rows, SEGMENT_ROWS),
                }
            )
            return TableJob(bound.call, name, wanted.model_copy(update={"plan": plan}), engine_of(options))
        except InvalidCall as error:
            raise InvalidCall(f"step {bound.name!r}: {error}") from error

    def _run(
        self, frame: Frame, steps: Sequence[StepColumns], folder: Path, former: Path | None
    ) -> tuple[StepProgress, ...]:
        """Run the steps in this folder. `former`: the folder of a run whose answers are taken."""
        from tokenmill.frames.pipelines.rows import PipelineRows
        from tokenmill.frames.pipelines.step_jobs import run_steps

        bound = [one.bound for one in steps]
        with FolderStore(folder) as store:
            inputs = write_pipeline(record_of(bound, frame), store, folder)
        rows = PipelineRows(frame, steps, steps[0].job.segment_sizes)
        with ExitStack() as turns:
            loads = {model: turns.enter_context(load_in_turn(model)) for model in self._models(bound)}
            jobs = [self._step_job(one, rows, inputs, folder, former, loads) for one in steps]
            return run_steps(folder, jobs, rows.sources)

    def _models(self, bound: Sequence[BoundStep]) -> list[Model]:
        """The models of the steps, each once, in an order that is the same for all pipelines with them."""
        models = {id(model): model for one in bound if isinstance(model := self._model_of(one), ResidentModel)}
        return [models[key] for key in sorted(models)]

    def _step_job(
        self, one: StepColumns, rows: PipelineRows, inputs: InputRef, folder: Path, former: Path | None,
        loads: Mapping[Model, LoadAny | None],
    ) -> StepJob:  # fmt: skip
        from tokenmill.frames.pipelines.step_jobs import StepJob
        from tokenmill.local.run_plan import load_model

        bound = one.bound
        to = folder / STEPS / bound.name
        reuse = None if former is None else former / STEPS / bound.name
        check = bound.step.task.judging.check_with(partial(rows.cells_of, bound))
        plan = one.job.plan(inputs, to, reuse if reuse is not None and reuse.is_dir() else None, check)
        load = loads.get(self._model_of(bound))
        return StepJob(bound.name, plan, load or load_model, stays_loaded=load is not None)


def _former(reuse: Any, folder: Path) -> Path:
    if not isinstance(reuse, str | os.PathLike):
        raise InvalidCall(f"reuse: is a {type(reuse).__name__}, but must be the output_dir of a former run")
    former = Path(reuse).expanduser()
    if former.resolve() == folder.resolve():
        raise InvalidCall("reuse: is the output_dir itself; give another output_dir, or leave reuse out")
    read_pipeline(former)
    return all_runs(former)[-1]


def _read(steps: Sequence[StepColumns], folder: Path, rows: int) -> pa.Table:
    """The new columns of a run that has ended."""
    with FolderStore(folder, read_only=True) as store:
        ledgers = [(one, ledger_of(store, one.bound.name)) for one in steps]
        return _joined([one.read(each, each.result_parts(each.manifest()), 0, rows) for one, each in ledgers])


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    columns = [
        (name, column) for table in tables for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.table([column for _, column in columns], names=[name for name, _ in columns])
