"""Execution of several jobs in this process at the same time: the steps of a pipeline, each a job of its own.

The rows of a step are made from the committed parts of other steps, a segment at a time: a thread for each step plans
the next segment as soon as its inputs are there, while one worker computes the shards of all steps with the same model
in one batch. So a step is a job like any other, with its own ledger, and goes on after a kill as one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.jobs.planning import PlanningCancelled, plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import FormerAnswers, RowSource
from pipeline.results.verification import check_files
from schemas.jobs.job import Job
from schemas.models import ModelPin
from tokenmill.config.job_options import token_counter
from tokenmill.frames.pipelines.step_ledgers import ledger_of, progress_of, read_progress
from tokenmill.frames.pipelines.step_models import StepPins, pin_models, plans_by_model
from tokenmill.local.embedded import TICK_SECONDS, EmbeddedWork, Output, ProgressOf, dispatch_jobs, open_output
from tokenmill.local.execute import shown
from tokenmill.local.model_rotation import compute_in_rotation
from tokenmill.local.progress import StepProgress
from tokenmill.local.run_job import open_former_answers
from tokenmill.local.run_plan import LoadAny, RunPlan, check_judging
from tokenmill.local.tracker import RotationObserver, RunTracker
from workers.model.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepJob:
    """The job of a step.

    Attributes:
        name: of the step, and of its folder below `STEPS`.
        plan: its parameters; `output` is its folder.
        load: loads its model.  stays_loaded: the model stays loaded after its turn.
    """

    name: str
    plan: RunPlan
    load: LoadAny
    stays_loaded: bool = False


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """The steps of a pipeline that is being computed.

    Attributes:
        ledgers: of the steps, by name.
        models: the key of each step's loaded model, by name; steps with equal keys are computed in one batch.
        stopping: set when no more rows are wanted.
    """

    ledgers: Mapping[str, JobLedger]
    models: Mapping[str, str]
    stopping: threading.Event


MakeSources = Callable[[OpenSteps], Mapping[str, RowSource]]
"""Makes the source of each step's rows. A source waits until the inputs of a segment are committed; it raises
`PlanningCancelled` once the steps are stopping."""


def run_steps(folder: Path, steps: Sequence[StepJob], make_sources: MakeSources) -> tuple[StepProgress, ...]:
    """Run the steps with progress on stderr to their end, or until Ctrl-C, as `run_with_progress` has it. Returns how
    far each step is then.

    Args:
        folder: the pipeline's.  steps: in their order; a step's rows are made from earlier ones.

    Raises what submitting, planning, loading and working raise; committed results stay.
    """
    for step in steps:
        check_judging(step.plan)
    with shown(steps[0].plan.price_per_hour) as (tracker, stop), ExitStack() as stack:
        tracker.phase("checking the models")
        pins = pin_models({step.name: step.plan for step in steps})
        output = stack.enter_context(open_output(folder))
        formers = {
            step.name: stack.enter_context(
                open_former_answers(step.plan.reuse, step.plan, output.world.scratch, tracker)
            )
            for step in steps
            if step.plan.reuse is not None and ledger_of(output.world.store, step.name).planned_parts() is None
        }
        run = _StepsRun(output, steps, pins, formers, tracker, stop)
        run.run(make_sources)
        return tuple(read_progress(step.name, run.ledgers[step.name]) for step in steps)


class _StepsRun:
    """One run of the steps, in a folder that is held."""

    def __init__(
        self,
        output: Output,
        steps: Sequence[StepJob],
        pins: StepPins,
        formers: Mapping[str, FormerAnswers],
        tracker: RunTracker,
        stop: threading.Event,
    ) -> None:
        self._output, self._steps, self._pins, self._formers = output, steps, pins, formers
        self._tracker, self._stop, self._stopping = tracker, stop, threading.Event()
        self._progress_of: ProgressOf = lambda _: None
        self.ledgers = {step.name: ledger_of(output.world.store, step.name) for step in steps}
        # The last step's job is the oldest, so its shards are dispatched first: rows end early, and find the blocks of
        # the step before in the cache.
        self.jobs = {step.name: self._submit(step) for step in reversed(steps)}

    def _submit(self, step: StepJob) -> Job:
        plan = step.plan
        order = JobOrder(input=plan.inputs, models=self._pins[step.name], settings=plan.settings, tier=plan.tier)
        ledger = self.ledgers[step.name]
        job = submit(order, ledger, self._output.world).job
        manifest = ledger.manifest()
        if manifest is not None:
            check_files(ledger, manifest)
        return job

    def run(self, make_sources: MakeSources) -> None:
        """Compute, until all jobs have ended or the run is stopped."""
        models = {name: pins[0].base_key for name, pins in self._pins.items()}
        sources = make_sources(OpenSteps(self.ledgers, models, self._stopping))
        ledgers = {self.jobs[name].id: ledger for name, ledger in self.ledgers.items()}
        planning: list[Future[None]] = []
        with ThreadPoolExecutor(len(self._steps), "planner") as pool:

            def begin(progress_of: ProgressOf) -> None:
                self._progress_of = progress_of
                self._tracker.set_steps(self._progress)
                self._tracker.phase("planning")
                planning.extend(pool.submit(self._plan, step, sources[step.name]) for step in self._steps)

            try:
                price = self._steps[0].plan.price_of_worker
                dispatch_jobs(self._output, ledgers, begin, self._work, price)
            finally:
                self._stopping.set()
        for planned in planning:
            planned.result()

    def _plan(self, step: StepJob, source: RowSource) -> None:
        """Plan the step's job, on a thread of its own. A failure stops the run."""
        source_of_model, world = Path(self._pins[step.name][0].source), self._output.world
        try:
            plan_job(
                self.ledgers[step.name], self.jobs[step.name], world, token_counter(source_of_model, step.plan.chat),
                former=self._formers.get(step.name), source=source,
            )  # fmt: skip
        except PlanningCancelled:
            return
        except BaseException:
            self._stop.set()
            raise

    def _work(self, given: EmbeddedWork) -> None:
        """The worker's loop, once a shard is open."""
        while (first := self._open_step()) is None:
            if given.finished() or self._stop.is_set():
                return
            self._output.world.clock.sleep(TICK_SECONDS)
        by_model = {self._pins[step.name][0].base_key: step for step in self._steps}
        plans = plans_by_model({step.name: step.plan for step in self._steps}, self._pins)
        first_key = self._pins[first][0].base_key
        all_pins = {pin.key: pin for pins in self._pins.values() for pin in pins}
        wanted = sorted(all_pins.values(), key=lambda pin: pin.base_key != first_key)
        self._tracker.phase("loading the model")
        loaded = by_model[first_key]

        def load_for_turn(pin: ModelPin, turn: int) -> LoadedModel:
            nonlocal loaded
            if turn:
                self._tracker.phase(f"loading {pin.name}")
            loaded = by_model[pin.base_key]
            model = loaded.load(plans[pin.base_key], pin, None)
            self._tracker.computing()
            return model

        def close(model: LoadedModel) -> None:
            if not loaded.stays_loaded:
                model.close()

        checks = {self.jobs[step.name].id: step.plan.worker.check for step in self._steps}
        settings = replace(self._steps[0].plan.worker, check=None, checks=checks)
        observe = partial(RotationObserver, self._tracker.update)
        compute_in_rotation(
            wanted, load_for_turn, given.client, observe, given.queue, self._output.world.clock, settings, self._stop,
            close,
        )  # fmt: skip

    def _open_step(self) -> str | None:
        """The first step with an open shard."""
        for step in self._steps:
            progress = self._progress_of(self.jobs[step.name].id)
            if progress is not None and progress.shards_done < progress.shards_total:
                return step.name
        return None

    def _progress(self) -> tuple[StepProgress, ...]:
        """How far each step is now."""
        found = []
        for step in self._steps:
            progress = self._progress_of(self.jobs[step.name].id)
            if progress is None:
                found.append(read_progress(step.name, self.ledgers[step.name]))
            else:
                found.append(progress_of(step.name, progress.counts, is_planned=progress.tokens_left is not None))
        return tuple(found)
