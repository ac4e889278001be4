"""The job of a table's requests: it runs in this process, as `tokenmill run` does, or is estimated."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.jobs.submit import DifferentJob
from pipeline.planner.estimates.estimate import InputEstimate
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import JobSettings
from schemas.requests.sampling_defaults import answer_limit
from tokenmill import output
from tokenmill.config import job_options
from tokenmill.config.engine_options import EngineOptions, engine_options
from tokenmill.config.former import FormerUnusable
from tokenmill.config.inputs import pin
from tokenmill.errors import InvalidCall
from tokenmill.frames.jobs.estimate import TableEstimate, length_notes
from tokenmill.frames.jobs.folders import write_into_job
from tokenmill.frames.jobs.requests import REQUESTS, line_of, parse_sample
from tokenmill.frames.jobs.results import in_row_order, result_columns
from tokenmill.local.estimate import JobDryRuns
from tokenmill.local.execute import run_with_progress
from tokenmill.local.pricing import price_of_worker
from tokenmill.local.run_job import Load, checked_pin, open_former_answers
from tokenmill.local.run_plan import RunPlan, check_judging, make_plan
from tokenmill.local.tracker import RunTracker
from tokenmill.settings import read_settings
from workers.model.generation_config import sampling_defaults
from workers.model.loaded_model import model_path
from workers.settings import AnswerCheck
from workers.text.chat_options import OWN_CHAT, ChatOptions
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.frames.calls import TableCall


class TableJob:
    """The job of a call with one model, with a check of everything that can be checked without computing.

    Attributes:
        answers: makes the columns of the answers.

    Args:
        model: MODEL or NAME=MODEL, as `tokenmill run --model` has it.
        wanted, engine: None: those of the environment.

    Raises:
        InvalidCall: a field of the requests is invalid, or the model can't give such answers.
        ModelError: the model can't be found or fetched.
    """

    def __init__(
        self,
        call: TableCall,
        model: str,
        wanted: JobSettings | None = None,
        engine: EngineOptions | None = None,
    ) -> None:
        self._call, self._task, self._requests = call, call.task, call.requests
        self._settings = read_settings()
        judging = self._task.judging
        self._wanted = (wanted or job_options.job_settings(self._settings)).model_copy(
            update={"max_tries": judging.max_tries, "answer_check": judging.name}
        )
        self._engine = engine or engine_options(self._settings)
        if judging.find_reason is not None and self._engine.replicas > 1:
            raise InvalidCall(
                "replicas: answers are judged in Python, which is done in this process only; leave out replicas, or "
                f"what judges ({judging.name})"
            )
        self._given_model = model
        name, _ = job_options.split_name(model)
        adapter = _adapter_of_all(self._engine, self._task.adapter_column)
        self._body = {"model": adapter or name, **self._task.body}
        sample = parse_sample(self._task, self._body, self._wanted.limits)
        self._model = job_options.choose_model(model, self._settings.model_cache)
        self.answers = self._task.answers(model_path(self._model.source.path), sample)

    def run(self, folder: Path, reuse: Path | None = None, load: Load | None = None) -> pa.Table:
        """The results; see `results`. A job that a killed run left in the folder goes on.

        Args:
            reuse: former results, whose answers rows with equal keys take.
            load: as of `run_job`; None: a model for this job.

        Raises:
            InvalidCall: the folder holds another job, or there are no such results.
            KeyboardInterrupt: the run was stopped.
            What `run_job` raises.
        """
        self.say_notes()
        path = self.write(folder)
        plan = self.plan(str(path), folder, reuse, self._task.judging.check_of(self._call.frame))
        with explained(folder):
            done = run_with_progress(plan, load)
        if done.manifest is None:
            raise KeyboardInterrupt(f"stopped: {done.progress}; {how_to_go_on(folder)}")
        return self.results(folder)

    def plan(
        self,
        inputs: str | InputRef,
        folder: Path,
        reuse: Path | None,
        check: AnswerCheck | None,
        content_policy: Sequence[str] | None = None,
        chat: ChatOptions | None = None,
    ) -> RunPlan:
        """The parameters of a run whose requests are in `inputs`. Raises what `make_plan` raises."""
        return make_plan(
            inputs, [self._given_model], folder, self._wanted, self._engine, chat or self._task.chat or OWN_CHAT,
            price_per_hour=price_of_worker(self._settings), content_policy=content_policy, reuse=reuse, check=check,
        )  # fmt: skip

    def results(self, folder: Path) -> pa.Table:
        """The results of the job in the folder, which has ended: in the rows' order, with the columns that the answers
        need."""
        stored = pq.ParquetDataset(folder / "results")
        names = [name for name in result_columns(self._task) if name in stored.schema.names]
        return in_row_order(stored.read(columns=names), self._task)

    def line(self, row: int, fields: Mapping[str, Any]) -> Any:
        """The line of a row whose request has these fields, as parsed JSON."""
        return orjson.loads(orjson.dumps(line_of(row, self._task.url, {**self._body, **fields})))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(name for name, _ in self._engine.adapters)

    @property
    def segment_sizes(self) -> SegmentSizes:
        """The sizes of the segments of its plan."""
        return SegmentSizes.of(self._wanted.plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may not expect of this job, each a line."""
        return (*self._requests.notes, *length_notes(self._task.bound, self._body, self._answer_limit))

    def _answer_limit(self) -> int:
        """The most tokens of an answer without `max_tokens`."""
        uses_own = self._engine.generation_config == "auto"
        defaults = sampling_defaults(model_path(self._model.source.path)) if uses_own else None
        return min(answer_limit(defaults, self._wanted.default_max_tokens), self._wanted.max_output_tokens)

    def say_notes(self) -> None:
        """Say them on stderr."""
        for note in self.notes:
            output.say(note)

    def write(self, folder: Path, *, fresh: bool = False) -> Path:
        """Write the requests into a job's folder; see `write_into_job`."""
        return write_into_job(self._requests, folder, self._body, self._call.record(), fresh=fresh)

    def over(self, call: TableCall) -> TableJob:
        """The same job over other rows."""
        return TableJob(call, self._given_model, self._wanted, self._engine)

    def estimate(
        self,
        price_per_hour: float | None = None,
        reuse: Path | None = None,
        content_policy: Sequence[str] | None = None,
        chat: ChatOptions | None = None,
    ) -> TableEstimate:
        """The dry run of the job; of one with `{% fields %}` in both orders.

        Args:
            price_per_hour: of this machine; None: the settings' one.
            reuse: former results, as of `run`.
            content_policy, chat: which the keys of former results have, too; None: those of the settings and the task.

        Raises:
            InvalidCall: there are no such results, or they can't be used.
        """
        options = replace(self._engine, speculate="off")
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as scratch:
            if reuse is None:
                made = self._dry_runs(Path(scratch), options, as_written=False)
            else:
                made = self._dry_runs_with(reuse, Path(scratch), options, content_policy, chat)
            amount, sharing = made.amount(), self._requests.sharing
            as_written = None
            if sharing is not None and reuse is None:
                as_written = self._dry_runs(Path(scratch), options, as_written=True).amount().shared_prefix_tokens
        speed = made.speed_here(self._settings.model_cache)
        seconds = None if speed is None else made.seconds(options, speed)
        seconds = seconds if amount.unique else 0.0
        price = price_of_worker(self._settings, price_per_hour)
        cost = None if seconds is None or price is None else seconds / 3600 * price
        max_tokens = self._max_tokens(amount, chat)
        return TableEstimate(
            amount.rows, amount.unique, amount.prompt_tokens, amount.shared_prefix_tokens,
            min(amount.expected_tokens, max_tokens), max_tokens, seconds, cost, sharing, as_written,
            self._wanted.max_tries, None if reuse is None else amount.reused, price_per_hour=price,
        )  # fmt: skip

    def _max_tokens(self, amount: InputEstimate, chat: ChatOptions | None) -> int:
        """The most tokens of all answers, by their form if it bounds them, and no thought comes before it."""
        bound = self._task.bound
        if bound is None or bound.max_bytes is None:
            return amount.max_tokens
        path = model_path(self._model.source.path)
        if Tokenizer.load(path, chat or OWN_CHAT).reasoning is not None:
            return amount.max_tokens
        return min(amount.max_tokens, amount.unique * (bound.max_bytes + 1))  # 1: the end

    def _dry_runs(self, scratch: Path, options: EngineOptions, *, as_written: bool) -> JobDryRuns:
        path = scratch / REQUESTS
        self._requests.write(path, self._body, as_written=as_written)
        return JobDryRuns.of(pin(str(path)), self._model, self._wanted, options)

    def _dry_runs_with(
        self,
        reuse: Path,
        scratch: Path,
        options: EngineOptions,
        content_policy: Sequence[str] | None,
        chat: ChatOptions | None,
    ) -> JobDryRuns:
        """The dry runs of the rows without a former answer, which are found as a run finds them."""
        path = scratch / REQUESTS
        self._requests.write(path, self._body)
        check = self._task.judging.check_of(self._call.frame)
        plan = self.plan(pin(str(path)), scratch / "job", reuse, check, content_policy, chat)
        assert plan.reuse is not None
        check_judging(plan)
        try:
            with open_former_answers(plan.reuse, plan, scratch, RunTracker()) as former:
                pinned = checked_pin(plan, plan.models[0])
                return JobDryRuns.of(plan.inputs, self._model, plan.settings, options, former=former, pinned=pinned)
        except FormerUnusable as error:
            raise InvalidCall(f"reuse: {error}") from error


def how_to_go_on(folder: Path) -> str:
    """The end of the message of a call that was stopped."""
    return f"what is computed is kept, and the same call with output_dir={str(folder)!r} goes on from there"


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise what stops a run in the caller's words: `InvalidCall` for a folder of another job, or former results that
    can't be used; `KeyboardInterrupt` with how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped at once; {how_to_go_on(folder)}") from None
    except DifferentJob as error:
        changed = "; ".join(f"{name} was {old}, now {new}" for name, old, new in error.differences)
        raise InvalidCall(
            f"output_dir: {folder} holds another job: {changed}; give another folder, or remove this one"
        ) from error
    except FormerUnusable as error:
        raise InvalidCall(f"reuse: {error}") from error


def engine_of(keywords: Mapping[str, Any]) -> EngineOptions:
    """The engine's options for checked keywords (`EngineKeywords`). Raises as `engine_options`."""
    folder = keywords.get("kv_cache_dir")
    given = {**keywords, "kv_cache_dir": None if folder is None else Path(folder).expanduser()}
    adapters = {name: os.fspath(source) for name, source in given.pop("adapters", {}).items()}
    return engine_options(read_settings(), adapter=adapters, **given)


def _adapter_of_all(engine: EngineOptions, column: str | None) -> str | None:
    """The adapter that answers all rows; None: a column names that of each row, or there is none. Raises
    `InvalidCall`."""
    names = [name for name, _ in engine.adapters]
    if column is not None and not names:
        raise InvalidCall(f"adapter_column: {column!r} is given without adapters (--adapter); give both, or none")
    if column is not None or not names:
        return None
    if len(names) > 1:
        raise InvalidCall(
            f"adapters: there are several ({', '.join(names)}), and nothing says which one answers a row; give the "
            "column that names it as adapter_column (--adapter-column), or one adapter"
        )
    return names[0]
