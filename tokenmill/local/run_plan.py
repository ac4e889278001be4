"""The parameters of a run, and the size of its engine: no more rows and blocks than the job can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path

from schemas.jobs.inputs import InputRef
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from schemas.settings.settings import Settings
from tokenmill.config import job_options
from tokenmill.config.engine_choice import choose_engines
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import UserError
from tokenmill.settings import read_settings
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import Policies
from workers.settings import AnswerCheck, WorkerSettings
from workers.text.chat_options import OWN_CHAT, ChatOptions

MIN_TOKENS_PER_SEQUENCE = 256

ROWS_MARGIN = 1.1
"""Factor on the rows that the work needs if it is packed without gaps, and prompts cost no steps."""

ROWS_STEP = 16
"""Rows are multiples of this, the size of a tile of the matrix units."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The parameters of a run.

    Attributes:
        models: one of them is loaded at a time.
        output: the job's folder.  fresh: forget the job in it.
        chat: replaces the models' own template.
        price_per_hour: of this machine; None: no cost is shown.  max_cost: spending limit; None: none.
        worker: the worker's settings.
        deadline: from the job's acceptance; rows that have no answer by then expire.
        retry_of: the id of the job whose rows are retried.
        reuse: former results, whose answers rows with equal keys take when they are planned; see `open_former`.
    """

    inputs: InputRef
    models: tuple[ChosenModel, ...]
    output: Path
    tier: Tier
    settings: JobSettings
    engine: EngineOptions
    chat: ChatOptions = OWN_CHAT
    fresh: bool = False
    price_per_hour: float | None = None
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    deadline: timedelta | None = None
    max_cost: float | None = None
    retry_of: str | None = None
    reuse: Path | None = None

    @property
    def price_of_worker(self) -> float | None:
        """The price of one replica's hour: its share of the machine's."""
        return None if self.price_per_hour is None else self.price_per_hour / self.engine.replicas


def make_plan(
    input_: str | InputRef,
    models: Sequence[str],
    output: Path,
    wanted: JobSettings,
    engine: EngineOptions,
    chat: ChatOptions = OWN_CHAT,
    *,
    tier: Tier = Tier.STANDARD,
    fresh: bool = False,
    price_per_hour: float | None = None,
    deadline: timedelta | None = None,
    max_cost: float | None = None,
    content_policy: Sequence[str] | None = None,
    reuse: Path | None = None,
    check: AnswerCheck | None = None,
) -> RunPlan:
    """The plan of a new job, with the settings of the environment. Cheap checks come before a model is pulled.

    Args:
        input_: to be pinned, or pinned already.
        models: each MODEL or NAME=MODEL.  wanted: see `job_options.job_settings`.
        content_policy: None: those of the settings.
        check: see `WorkerSettings`.

    Raises:
        InputUnusable: the input can't be read.  ModelError: a model can't be found or fetched.
        What loading the policies raises.
    """
    settings = read_settings()
    policies = job_options.content_policies(content_policy, settings)
    pinned = input_ if isinstance(input_, InputRef) else job_options.read_input(input_, None if fresh else output)
    return RunPlan(
        inputs=pinned,
        models=choose_engines(job_options.choose_models(models, settings.model_cache), engine),
        output=output,
        tier=tier,
        settings=wanted.model_copy(update={"content_policies": policies.fingerprint}),
        engine=engine,
        chat=chat,
        fresh=fresh,
        price_per_hour=price_per_hour,
        worker=worker_settings(settings, policies, check),
        deadline=deadline,
        max_cost=max_cost,
        reuse=None if reuse is None else reuse.expanduser(),
    )


def worker_settings(settings: Settings, policies: Policies, check: AnswerCheck | None = None) -> WorkerSettings:
    """The settings of a run's worker."""
    return WorkerSettings(
        request_timeout_seconds=settings.request_timeout_seconds,
        checkpoint_seconds=settings.checkpoint_seconds,
        policies=policies,
        check=check,
    )


def check_judging(plan: RunPlan) -> None:
    """Raise `UserError` if the answers of the job can't be judged as its settings want it."""
    settings = plan.settings
    if settings.max_tries is None:
        return
    if plan.worker.policies.named:
        raise UserError(
            "content policies judge an answer after its last try, so rows can't be asked again; leave out max_tries "
            "(--max-tries), or the policies"
        )
    if settings.answer_check is not None and plan.worker.check is None:
        raise UserError(
            f"the answers of this job are judged by Python ({settings.answer_check}); run it with tokenmill.map, whose "
            "reuse= takes those answers that are accepted"
        )
    if plan.worker.check is not None and plan.engine.replicas > 1:
        raise UserError("a Python function judges answers in this process only; leave out replicas or the function")


LoadAny = Callable[[RunPlan, ModelPin, list[PlanSegment] | None], LoadedModel]
"""Loads the pinned model for the committed segments of the plan; None: for any requests."""


def load_model(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment] | None) -> LoadedModel:
    """Load the pinned model, with a KV cache no larger than these requests can use; None: for any requests."""
    needed = () if segments is None else (tokens_per_sequence(segments), sequences(segments), rows_at_once(segments))
    pin = pin.without_adapter  # the engine's settings name the adapter that is merged
    return LoadedModel.load(
        Path(pin.source),
        name=pin.name,
        config=plan.engine.config(*needed),
        revision=pin.revision,
        chat=plan.chat,
        digest=pin.digest,
        engine_name=pin.engine,
        vllm_options=plan.engine.vllm,
        use_generation_config=plan.engine.generation_config == "auto",
    )


def sequences(segments: list[PlanSegment]) -> int | None:
    """The number of sequences of all computed requests; None while more may be planned."""
    return sum(segment.sequences for segment in segments) or None if segments[-1].last else None


def rows_at_once(segments: list[PlanSegment]) -> int | None:
    """The number of concurrent sequences with which the job takes no longer than its longest answer; None: as many as
    possible, or more may be planned.

    Each step adds one token to an answer, so the job takes as many steps as the longest answer has tokens. With this
    number of rows all others end by then, even if each has its maximum length; more rows would only be idle at the end.
    """
    longest = max(segment.certain_tokens for segment in segments)
    if not segments[-1].last:
        return None
    return rows_for(sum(segment.max_tokens for segment in segments), longest)


def rows_for(max_tokens: int, longest: int) -> int | None:
    """The same for a job with at most `max_tokens` answer tokens, whose longest answer certainly has `longest`."""
    return ceil(ROWS_MARGIN * max_tokens / longest / ROWS_STEP) * ROWS_STEP if longest else None


def tokens_per_sequence(segments: list[PlanSegment]) -> int | None:
    """The mean length of these sequences if each answer has its maximum length. With a cache of that size, preemption
    for lack of blocks stays the exception."""
    count = sum(segment.sequences for segment in segments)
    if not count:
        return None
    prompt = sum(shard.prompt_tokens for segment in segments for shard in segment.shards)
    most = sum(segment.max_tokens for segment in segments)
    return max(MIN_TOKENS_PER_SEQUENCE, -(-(prompt + most) // count))
