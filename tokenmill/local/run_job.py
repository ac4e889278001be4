"""Execution of `run`'s job in this process, on one folder.

Cheap checks come before expensive steps: the input is read before a model is pulled, the model's header is read before
the job is created, the plan's first segment is committed before weights are loaded, and a job that has ended loads
nothing. The rest of the plan is made while the first part is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.embedding.engine import check_encoder_config
from engine.engine import resolve_device, resolve_dtype, resolve_model_dtype
from engine.models.load import describe_model, is_encoder
from engine.vllm.settings import pinned_options
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.jobs.summaries import summarize_job
from pipeline.planner import open_source
from pipeline.planner.validate import ValidRow
from pipeline.results.former_answers import StoredFormerAnswers
from pipeline.results.verification import check_files
from schemas.jobs.outcome import Counts, Manifest
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.jobs.progress import Progress
from schemas.models import ModelPin
from schemas.requests.parsing import ChatBody, load_body
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.former import FormerUnusable, open_former
from tokenmill.config.inputs import open_input
from tokenmill.config.job_options import ChosenModel, token_counter
from tokenmill.errors import ModelError
from tokenmill.local.data_parallel import divide
from tokenmill.local.embedded import EmbeddedWork, Output, dispatch, open_output
from tokenmill.local.model_rotation import compute_in_rotation
from tokenmill.local.run_plan import RunPlan, check_judging, load_model
from tokenmill.local.summary import reused_rows
from tokenmill.local.tracker import RotationObserver, RunTracker
from tokenmill.models.adapters import with_adapters
from tokenmill.output import count, say
from tokenmill.processes.planner_process import PlannerProcess
from workers.model.generation_config import sampling_defaults
from workers.model.loaded_model import LoadedModel, check_vllm, dtype_name, engine_of, model_digest, model_path
from workers.shards.answer_judge import find_rejection
from workers.structured.form_check import is_judged
from workers.text.chat_options import ChatOptions


@dataclass(frozen=True, slots=True)
class JobRun:
    """The result of a run.

    Attributes:
        manifest: the job's outcome; None: the run was stopped before the job's end.
        counts: rows by status; pending ones have no result yet.
        before: rows that had a result from earlier runs.
        done: rows with an answer, also those whose shard has others left and is not committed.
    """

    manifest: Manifest | None
    counts: Counts
    before: int
    done: int = 0

    @property
    def progress(self) -> str:
        """How far a run is that was stopped."""
        committed = self.counts.total - self.counts.pending
        more = f", and {count(self.done - committed)} more are computed" if self.done > committed else ""
        return f"{count(committed)} of {count(self.counts.total)} rows are committed{more}"


Load = Callable[[RunPlan, ModelPin, list[PlanSegment]], LoadedModel]
"""Loads the pinned model for the committed segments of the plan."""


def run_job(plan: RunPlan, tracker: RunTracker, stop: threading.Event, load: Load = load_model) -> JobRun:
    """Run a job to its end, or until `stop` is set.

    Args:
        load: called only if shards are open.

    Raises what submitting, planning, loading and working raise; committed results stay.
    """
    check_judging(plan)
    tracker.phase("checking the model")
    only_name = plan.settings.model or (plan.models[0].name if len(plan.models) == 1 else None)
    open_source(open_input(plan.inputs).files(), plan.inputs.format, plan.settings.limits, only_name)
    pins = with_adapters([checked_pin(plan, model) for model in plan.models], plan.engine.config())
    order = JobOrder(
        input=plan.inputs, models=pins, settings=plan.settings, tier=plan.tier, deadline=plan.deadline,
        max_cost=plan.max_cost, retry_of=plan.retry_of,
    )  # fmt: skip
    with open_output(plan.output) as output, ExitStack() as formers:
        former = None
        if plan.reuse is not None and (plan.fresh or not _is_planned(output, plan)):
            former = formers.enter_context(open_former_answers(plan.reuse, plan, output.world.scratch, tracker))
        submitted = submit(order, output.ledger, output.world, fresh=plan.fresh)
        manifest = output.ledger.manifest()
        if manifest is not None:
            check_files(output.ledger, manifest)
            _say_reused(plan, manifest)
            return JobRun(manifest, manifest.counts, manifest.counts.total)
        if not _is_planned(output, plan):
            tracker.phase("planning")
            counter = token_counter(Path(pins[0].source), plan.chat)
            plan_job(
                output.ledger, submitted.job, output.world, counter, max_segments=None if _judges_former(plan) else 1,
                open_input=open_input, former=former,
            )  # fmt: skip
        formers.close()
        segments = list(output.ledger.segments())
        if plan.reuse is not None:
            say(_reused_rows(segments))
        is_whole = segments[-1].last
        before, planner = 0, None

        def begin(progress: Progress) -> None:
            nonlocal before, planner
            before = progress.counts.total - progress.counts.pending
            tracker.set_plan(progress.counts, whole=segments[-1].last)
            if not segments[-1].last:
                planner = stack.enter_context(
                    PlannerProcess(
                        plan.output, output.lock, output.ledger, plan.inputs, tracker.add_segment, stop.set, plan.reuse
                    )
                )

        def work(given: EmbeddedWork) -> None:
            wanted = models_by_need(output, segments, pins)
            tracker.phase("loading the model")
            if plan.engine.replicas > 1:
                divide(plan, wanted, given, tracker, stop)
                return

            def load_for_turn(pin: ModelPin, turn: int) -> LoadedModel:
                if turn:
                    tracker.phase(f"loading {pin.name}")
                model = load(plan, pin, segments)
                tracker.computing()
                return model

            compute_in_rotation(
                wanted, load_for_turn, given.client, partial(RotationObserver, tracker.update), given.queue,
                output.world.clock, plan.worker, stop,
            )  # fmt: skip

        with ExitStack() as stack:
            manifest = dispatch(output, begin, work, plan.price_of_worker, plan.engine.replicas)
            if planner is not None:
                planner.check()
        if manifest is not None and not is_whole:
            _say_reused(plan, manifest)
        counts = _counts(output) if manifest is None else manifest.counts
        return JobRun(manifest, counts, 0 if submitted.created else before, tracker.snapshot().done)


def pin_model(model: ChosenModel, path: Path, options: EngineOptions, chat: ChatOptions) -> ModelPin:
    """Pin a job's model: the weights' digest, the computed dtype, and the quantization of weights and cache. It checks
    the header first, and then reads every byte of the weights (which are then in the page cache for loading)."""
    engine, engine_version = engine_of(path, model.engine)
    device = resolve_device(options.device)
    if engine == "vllm":
        check_vllm(path, options.config(), options.vllm)
        dtype = resolve_dtype(options.dtype, device)
    else:
        if is_encoder(path):
            check_encoder_config(options.config())
        wanted = resolve_model_dtype(path, options.dtype, device)
        dtype = describe_model(path, dtype=wanted, own_models=engine != "transformers").spec.dtype
    return ModelPin(
        name=model.name,
        source=str(path),
        digest=model_digest(path, chat),
        revision=model.source.revision,
        dtype=dtype_name(dtype),
        quantization=options.quantize,
        kv_dtype=options.kv_dtype,
        engine=engine,
        engine_version=engine_version,
        engine_options=pinned_options(options.vllm) if engine == "vllm" else (),
        sampling_defaults=sampling_defaults(path) if options.generation_config == "auto" else None,
    )


def checked_pin(plan: RunPlan, model: ChosenModel) -> ModelPin:
    """The pin of one of the plan's models. Raises `ModelError` if its digest is not the required one."""
    path = model_path(model.source.path)
    pin = pin_model(model, path, plan.engine, plan.chat)
    if model.digest is not None and pin.digest != model.digest:
        raise ModelError(
            f"{path}: its weights or its chat template are not those that answered in {plan.retry_of}; "
            "give the same --chat-template, or choose a model with --model"
        )
    return pin


def _judges_former(plan: RunPlan) -> bool:
    """Whether former answers are judged. This process does that, so it makes the whole plan before it computes."""
    return plan.reuse is not None and plan.settings.max_tries is not None


def _is_planned(output: Output, plan: RunPlan) -> bool:
    """Whether as much is planned as this process plans before it computes."""
    if not _judges_former(plan):
        return output.ledger.segment(0) is not None
    return any(segment.last for segment in output.ledger.segments())


def open_former_answers(
    former: Path, plan: RunPlan, scratch: Path, tracker: RunTracker
) -> AbstractContextManager[StoredFormerAnswers]:
    """The former results of `reuse`. Raises `FormerUnusable` if they are the run's own."""
    if former.resolve() == plan.output.resolve():
        raise FormerUnusable(f"{former}: is the output itself; give another output, or leave reuse out")
    tracker.phase("reading the former answers")
    return open_former(
        former, scratch, plan.settings.limits.max_rows, partial(_accepts, plan) if _judges_former(plan) else None
    )


def _accepts(plan: RunPlan, row: ValidRow, text: str, finish_reason: str | None) -> bool:
    """Whether a row may have a former answer; if not, it is computed."""
    body = load_body(row.url, row.body)
    if not isinstance(body, ChatBody) or not is_judged(row.url, body):
        return True
    try:
        return find_rejection(body, row.row, text, plan.worker.check, is_cut_off=finish_reason == "length") is None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the check fails with it; of a new answer that is the row's error
        return False


def _say_reused(plan: RunPlan, manifest: Manifest) -> None:
    """Say how many rows of the job took former answers, also if none did."""
    if plan.reuse is not None:
        say(reused_rows(manifest.reused, manifest.counts.total))


def _reused_rows(segments: Sequence[PlanSegment]) -> str:
    """The rows that take former answers, of those that are planned."""
    return reused_rows(
        sum(segment.reused for segment in segments), sum(segment.total for segment in segments), whole=segments[-1].last
    )


def open_shards(output: Output, segments: list[PlanSegment]) -> list[ShardRef]:
    """The planned shards without a part."""
    committed = {number for number, _ in output.ledger.parts()}
    return [shard for segment in segments for shard in segment.shards if shard.number not in committed]


def models_by_need(output: Output, segments: list[PlanSegment], pins: Sequence[ModelPin]) -> list[ModelPin]:
    """The models with open shards first, since the first one is loaded at once."""
    needed = {shard.model for shard in open_shards(output, segments)} if len(pins) > 1 else set()
    return sorted(pins, key=lambda pin: pin.name not in needed)


def _counts(output: Output) -> Counts:
    counts = summarize_job(output.ledger).counts
    assert counts is not None  # a job that can't be read raises instead
    return counts
