"""From what `run` was told to a finished job: the embedded form, everything in this process, on one folder.

Nothing expensive happens before something cheap could refuse it: the input is looked at before a model is pulled, the
model's header is read before a job is made of it, the plan's first segment stands before weights are loaded, and a job
that has ended loads nothing. What is left to plan is planned beside the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any

from engine.embedding.engine import check_encoder_config
from engine.engine import resolve_device, resolve_model_dtype
from engine.models.load import describe_model, is_encoder
from pipeline.jobs import summarize_job
from pipeline.planner import open_source
from pipeline.planning import plan_job
from pipeline.submit import Order, submit
from schemas.job import Counts, InputRef, JobSettings, Manifest, ModelPin, PlanSegment, Tier
from schemas.progress import Progress
from tokenmill.embedded import Output, Work, dispatch, open_output
from tokenmill.engine_options import EngineOptions
from tokenmill.errors import ModelError
from tokenmill.inputs import open_input
from tokenmill.job_options import ChosenModel, token_counter
from tokenmill.planner_process import PlannerProcess
from tokenmill.processes import settled_heap
from tokenmill.replicas import Replicas, Task, environments
from tokenmill.tracker import RunTracker
from workers.content_policies import NO_POLICIES
from workers.model_host import LoadedModel, dtype_name, model_digest, model_path
from workers.settings import WorkerSettings
from workers.shard_worker import ShardWorker

MIN_TOKENS_PER_SEQUENCE = 256

ROWS_MARGIN = 1.1
"""Rows beyond what the work needs if it could be packed without gaps, and prompts cost no steps."""

ROWS_STEP = 16
"""Rows come in multiples: those of a tile of the matrix units."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run needs to know.

    Attributes:
        output: the job's folder.  fresh: forget the job that stands there.
        chat_template: replaces the model's own.
        price_per_hour: of this machine; None: no cost is shown.  max_cost: that the job may have; None: any.
        worker: how the worker works.
        deadline: counted from the job's acceptance; rows that have no answer by then expire.
        retry_of: the id of the job whose rows are tried again.
        digest: what the model must be, weights and chat template; None: any.
    """

    inputs: InputRef
    model: ChosenModel
    output: Path
    tier: Tier
    settings: JobSettings
    engine: EngineOptions
    chat_template: str | None = None
    fresh: bool = False
    price_per_hour: float | None = None
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    deadline: timedelta | None = None
    max_cost: float | None = None
    retry_of: str | None = None
    digest: str | None = None

    @property
    def price_of_worker(self) -> float | None:
        """What an hour of one replica costs: they share the machine."""
        return None if self.price_per_hour is None else self.price_per_hour / self.engine.replicas


@dataclass(frozen=True, slots=True)
class JobRun:
    """What came of a run.

    Attributes:
        manifest: the outcome; None: the run was stopped before the job's end.
        counts: rows by status; pending ones have no result yet.
        before: rows that had a result from earlier runs.
    """

    manifest: Manifest | None
    counts: Counts
    before: int


Load = Callable[[RunPlan, ModelPin, list[PlanSegment]], LoadedModel]
"""Loads the pinned model for the plan's segments, as far as they stand."""


def load_model(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
    """The model that was pinned, with a KV cache no larger than these requests can use."""
    return LoadedModel.load(
        Path(pin.source),
        name=pin.name,
        config=plan.engine.config(tokens_per_sequence(segments), sequences(segments), rows_at_once(segments)),
        revision=pin.revision,
        chat_template=plan.chat_template,
        digest=pin.digest,
    )


def run_job(plan: RunPlan, tracker: RunTracker, stop: threading.Event, load: Load = load_model) -> JobRun:
    """Bring a job to its end, or as far as it goes until `stop` is set.

    Args:
        load: only called when there is something to compute.

    Raises what submitting, planning, loading and working raise; what was committed by then stays.
    """
    tracker.phase("checking the model")
    path = model_path(plan.model.source.path)
    open_source(open_input(plan.inputs).files(), plan.inputs.format, plan.settings.limits, plan.model.name)
    pin = pin_model(plan.model, path, plan.engine, plan.chat_template)
    if plan.digest is not None and pin.digest != plan.digest:
        raise ModelError(
            f"{path}: its weights or its chat template are not those that answered in {plan.retry_of}; "
            "give the same --chat-template, or choose a model with --model"
        )
    order = Order(
        input=plan.inputs, models=(pin,), settings=plan.settings, tier=plan.tier, deadline=plan.deadline,
        max_cost=plan.max_cost, retry_of=plan.retry_of,
    )  # fmt: skip
    with open_output(plan.output) as output:
        submitted = submit(order, output.ledger, output.world, fresh=plan.fresh)
        manifest = output.ledger.manifest()
        if manifest is not None:
            return JobRun(manifest, manifest.counts, manifest.counts.total)
        if output.ledger.segment(0) is None:
            tracker.phase("planning")
            counter = token_counter(path, plan.chat_template)
            plan_job(output.ledger, submitted.job, output.world, counter, most_segments=1, open_input=open_input)
        segments = list(output.ledger.segments())
        before, planner = 0, None

        def begin(progress: Progress) -> None:
            nonlocal before, planner
            before = progress.counts.total - progress.counts.pending
            tracker.planned(progress.counts, expected_tokens(output, segments), whole=segments[-1].last)
            if not segments[-1].last:
                planner = stack.enter_context(
                    PlannerProcess(plan.output, output.lock, output.ledger, plan.inputs, tracker.more, stop.set)
                )

        def work(given: Work) -> None:
            tracker.phase("loading the model")
            if plan.engine.replicas > 1:
                _divide(plan, pin, given, tracker, stop)
                return
            model, client = load(plan, pin, segments), given.client()
            tracker.computing()
            with settled_heap():
                ShardWorker(model, client, client, output.world.clock, plan.worker, tracker).run(stop)

        with ExitStack() as stack:
            manifest = dispatch(output, begin, work, plan.price_of_worker, plan.engine.replicas)
            if planner is not None:
                planner.check()
        counts = _counts(output) if manifest is None else manifest.counts
        return JobRun(manifest, counts, 0 if submitted.created else before)


def _divide(plan: RunPlan, pin: ModelPin, given: Work, tracker: RunTracker, stop: threading.Event) -> None:
    """Let replicas compute the job, each the shards that it takes. Raises `UserError` when one of them fails."""
    from tokenmill.replica import compute

    count = plan.engine.replicas
    names = [name for name, _ in plan.worker.policies.named]
    sent = replace(plan, worker=replace(plan.worker, policies=NO_POLICIES))
    tasks = [Task(compute, (sent, pin, names, number)) for number in range(count)]
    methods: dict[str, Callable[..., Any]] = {
        "progress": tracker.told, "finished": given.finished,
        "put": given.queue.put, "take": given.queue.take, "beat": given.heartbeats.beat,
        "leave": given.heartbeats.leave, "tell": given.heartbeats.tell, "figures": given.heartbeats.figures,
        "workers": given.heartbeats.workers, "since": given.heartbeats.since,
    }  # fmt: skip
    own = environments(count, plan.engine.tensor_parallel, on_gpus=plan.engine.on_gpus)
    # None begins before all are loaded, or the first would take most of a small job.
    with Replicas(tasks, own, methods, tracker.computing, keep=(given.output.lock.descriptor,)) as replicas:
        replicas.wait(stop)


def pin_model(model: ChosenModel, path: Path, options: EngineOptions, chat_template: str | None) -> ModelPin:
    """What a job is pinned to: the weights' digest, the dtype they are computed in, and how weights and cache are
    quantized. Reads every byte of the weights (which are then in the page cache when they are loaded), after a look at
    the header said that they can be used."""
    if is_encoder(path):
        check_encoder_config(options.config())
    spec = describe_model(path, dtype=resolve_model_dtype(path, options.dtype, resolve_device(options.device))).spec
    return ModelPin(
        name=model.name,
        source=str(path),
        digest=model_digest(path, chat_template),
        revision=model.source.revision,
        dtype=dtype_name(spec),
        quantization=options.quantize,
        kv_dtype=options.kv_dtype,
    )


def expected_tokens(output: Output, segments: list[PlanSegment]) -> int:
    """Output tokens that the shards without a part are expected to need."""
    standing = {number for number, _ in output.ledger.parts()}
    return sum(s.expected_tokens for segment in segments for s in segment.shards if s.number not in standing)


def sequences(segments: list[PlanSegment]) -> int | None:
    """Of all computed requests; None while more may be planned."""
    return sum(segment.sequences for segment in segments) or None if segments[-1].last else None


def rows_at_once(segments: list[PlanSegment]) -> int | None:
    """Sequences side by side with which the job takes no longer than its longest answer must; None: the more the
    better, or more may be planned.

    Each step gives an answer one token, so the job takes as many steps as the longest one has tokens. With so many rows
    all others are done by then, even if each is as long as it may be; more rows would only stand empty at the end.
    """
    longest = max(segment.certain_tokens for segment in segments)
    if not segments[-1].last:
        return None
    return rows_for(sum(segment.max_tokens for segment in segments), longest)


def rows_for(max_tokens: int, longest: int) -> int | None:
    """The same, of a job whose answers have so many tokens at most, the longest one so many for certain."""
    return ceil(ROWS_MARGIN * max_tokens / longest / ROWS_STEP) * ROWS_STEP if longest else None


def tokens_per_sequence(segments: list[PlanSegment]) -> int | None:
    """The mean length of these sequences if each answer is as long as it may be: with a cache for that, running out of
    blocks, and computing something again for it, stays the exception."""
    count = sum(segment.sequences for segment in segments)
    if not count:
        return None
    prompt = sum(shard.prompt_tokens for segment in segments for shard in segment.shards)
    most = sum(segment.max_tokens for segment in segments)
    return max(MIN_TOKENS_PER_SEQUENCE, -(-(prompt + most) // count))


def _counts(output: Output) -> Counts:
    counts = summarize_job(output.ledger).counts
    assert counts is not None  # a job that can't be read raises instead
    return counts
