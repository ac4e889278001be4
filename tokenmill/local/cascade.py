"""Execution of a cascade in one folder: a job of the first model in it, below `cascade/` one for each further step.

Each step is a whole `run` of its own. The rows of a step follow from the results of the steps before it, which are
final. So the same command goes on after a kill at any moment, and no row is lost or answered twice by a model.
`cascade.json` is written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.jobs.cascade import (
    SAMPLED,
    Check,
    StepAnswers,
    Threshold,
    choose_threshold,
    describe_step,
    outcome_of,
    read_answers,
    reject_below,
    sample_rows,
    selection_of,
)
from pipeline.ledger.ledger import JobLedger, parse_stored
from pipeline.results.merged_table import write_merged
from schemas.jobs.cascade import Acceptance, CascadeSettings
from schemas.jobs.cascade_outcome import CascadeOutcome
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.virtual_models import Rule, VirtualModel
from tokenmill.config.job_options import ChosenModel
from tokenmill.local.acceptance import make_check
from tokenmill.local.run_plan import RunPlan

FOLDER: Final = "cascade"
OUTCOME: Final = "cascade.json"
MERGED: Final = "merged.parquet"


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A cascade.

    Attributes:
        first: the run of the first model and its adapters, in the cascade's folder.
        later: the models of further steps.
        accept: which answers are final.
    """

    first: RunPlan
    later: tuple[ChosenModel, ...]
    accept: Acceptance

    @property
    def folder(self) -> Path:
        """The folder of later steps, of the outcome and of the merged results."""
        return self.first.output / FOLDER

    @property
    def requested(self) -> tuple[str, ...]:
        """The names that requests may have: of the first model, unless an adapter is merged into it, and of its
        adapters."""
        engine = self.first.engine
        adapters = tuple(name for name, _ in engine.adapters)
        return adapters if engine.merge_adapter else (self.first.models[0].name, *adapters)


@dataclass(frozen=True, slots=True)
class CascadeEnd:
    """The outcome of a cascade.

    Attributes:
        stopped_at: the step that did not complete, and its manifest (None: it was interrupted); None: all completed.
    """

    outcome: CascadeOutcome | None = None
    stopped_at: tuple[RunPlan, Manifest | None] | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that has completed."""

    model: str
    ledger: JobLedger
    manifest: Manifest
    answers: StepAnswers


class _Stopped(Exception):
    """Raised when a step doesn't complete."""

    def __init__(self, plan: RunPlan, manifest: Manifest | None) -> None:
        super().__init__()
        self.plan = plan
        self.manifest = manifest


def run_cascade(plan: CascadePlan, run: Callable[[RunPlan], Manifest | None]) -> CascadeEnd:
    """Run a cascade to its end, or until a step doesn't complete.

    Args:
        run: runs one step; returns None when it was interrupted.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with RunLock(plan.folder), ExitStack() as stack:
        try:
            return CascadeEnd(_CascadeRun(plan, run, stack).run())
        except _Stopped as stopped:
            return CascadeEnd(stopped_at=(stopped.plan, stopped.manifest))


class _CascadeRun:
    """One run of a cascade. `stack` closes the stores of its steps."""

    def __init__(self, plan: CascadePlan, run: Callable[[RunPlan], Manifest | None], stack: ExitStack) -> None:
        self._plan = plan
        self._run = run
        self._stack = stack
        self._check = make_check(plan.accept)
        self._steps: list[_Step] = []

    def run(self) -> CascadeOutcome:
        plan, accept = self._plan, self._plan.accept
        names = tuple(model.name for model in plan.later)
        cascade = CascadeSettings(models=names, accept=accept)
        settings = plan.first.settings.model_copy(update={"cascade": cascade})
        self._complete(
            replace(plan.first, settings=settings), plan.requested[0], self._check,
            wants_texts=accept.agreement is not None,
        )  # fmt: skip
        self._discard_others(self._steps[0].manifest.job)
        threshold = None
        if accept.agreement is not None:
            threshold = self._answer_by_agreement(plan.later[0], accept.agreement)
        else:
            self._answer_by_checks(accept.min_mean_logprob)
        return self._end(threshold)

    def _discard_others(self, job: str) -> None:
        """Remove the outcome and the further steps of another first job, which `fresh` has replaced."""
        whole = self._plan.folder
        with FolderStore(whole) as store:
            if store.info(OUTCOME) is not None and self._outcome(store).steps[0].job != job:
                store.delete(OUTCOME)
                (whole / MERGED).unlink(missing_ok=True)
        for folder in whole.iterdir():
            if folder.name.isdecimal() and (found := _retried_job(folder)) is not None and found != job:
                shutil.rmtree(folder)

    def _outcome(self, store: FolderStore) -> CascadeOutcome:
        return parse_stored(store.locate(OUTCOME), store.read(OUTCOME), CascadeOutcome)

    def _answer_by_checks(self, least: float | None) -> None:
        """Have each model answer the rows that the one before it left."""
        for number, model in enumerate(self._plan.later, start=1):
            answers = self._steps[-1].answers
            if least is not None:
                reject_below(answers, least)
            if not answers.rejected:
                return
            is_last = number == len(self._plan.later)
            self._follow_up(number, model, sorted(answers.rejected), accepts_all if is_last else self._check)

    def _answer_by_agreement(self, model: ChosenModel, agreement: float) -> Threshold:
        """Have the next model answer a sample, choose the threshold, and have it answer the rows below."""
        first = self._steps[0].answers
        sampled = sample_rows(first, self._plan.accept.sample_rows)
        large = StepAnswers()
        if sampled:
            large = self._follow_up(1, model, sampled, accepts_all, wants_texts=True)
        threshold = choose_threshold(first, large, agreement)
        reject_below(first, threshold.value)
        for row in large.texts:
            first.rejected.setdefault(row, SAMPLED)
        rest = sorted(first.rejected.keys() - set(sampled))
        if rest:
            self._follow_up(2, model, rest, accepts_all)
        return threshold

    def _follow_up(
        self, number: int, model: ChosenModel, rows: list[int], check: Check, *, wants_texts: bool = False
    ) -> StepAnswers:
        """Run a further step: requests keep the names of the first model and its adapters, for which this model
        stands."""
        first, names = self._plan.first, [one.name for one in self._plan.later]
        requested = self._plan.requested
        settings = first.settings.model_copy(
            update={
                "rows": selection_of(rows),
                "model": requested[0],
                "virtual_models": tuple(VirtualModel(name=one, rules=(Rule(model=model.name),)) for one in requested),
                "cascade": CascadeSettings(
                    models=tuple(names[names.index(model.name) + 1 :]), accept=self._plan.accept
                ),
            }
        )
        step = replace(
            first, models=(model,), output=self._plan.folder / str(number), settings=settings, fresh=False,
            retry_of=self._steps[0].manifest.job, engine=first.engine.without_adapters,
        )  # fmt: skip
        step.output.parent.mkdir(exist_ok=True)
        return self._complete(step, model.name, check, wants_texts=wants_texts)

    def _complete(self, step: RunPlan, model: str, check: Check, *, wants_texts: bool = False) -> StepAnswers:
        manifest = self._run(step)
        if manifest is None or manifest.status is not JobStatus.COMPLETED:
            raise _Stopped(step, manifest)
        ledger = JobLedger(self._stack.enter_context(FolderStore(step.output, read_only=True)))
        wants_logprobs = self._plan.accept.needs_logprobs and check is not accepts_all
        answers = read_answers(ledger, check, wants_logprobs=wants_logprobs, wants_texts=wants_texts)
        self._steps.append(_Step(model, ledger, manifest, answers))
        return answers

    def _end(self, threshold: Threshold | None) -> CascadeOutcome:
        """Write the merged results, then the outcome, unless these jobs' are there."""
        steps, folder = self._steps, self._plan.folder
        jobs = [step.manifest.job for step in steps]
        with FolderStore(folder) as store:
            if store.info(OUTCOME) is not None and [step.job for step in self._outcome(store).steps] == jobs:
                return self._outcome(store)
            write_merged([step.ledger for step in steps], folder / MERGED)
            described = [describe_step(step.manifest, step.model, step.answers) for step in steps]
            outcome = outcome_of(described, self._plan.later[-1].name, threshold)
            store.replace(OUTCOME, outcome.to_json())
        return outcome


def _retried_job(folder: Path) -> str | None:
    """The job that a step's job in this folder is a retry of; None: there is none yet."""
    with FolderStore(folder, read_only=True) as store:
        job = JobLedger(store).find_job()
    return None if job is None else job.retry_of


def accepts_all(_text: str, _finish_reason: str | None) -> None:
    """The check of a last step, whose answers are final."""
