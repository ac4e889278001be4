"""What a run was told, and the shape that its engine takes for it: no more rows and blocks than the job can use."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path

from schemas.jobs.inputs import InputRef
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings

MIN_TOKENS_PER_SEQUENCE = 256

ROWS_MARGIN = 1.1
"""Rows beyond what the work needs if it could be packed without gaps, and prompts cost no steps."""

ROWS_STEP = 16
"""Rows come in multiples: those of a tile of the matrix units."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run needs to know.

    Attributes:
        models: what answers; one of them is loaded at a time.
        output: the job's folder.  fresh: forget the job that stands there.
        chat_template: replaces the model's own.
        price_per_hour: of this machine; None: no cost is shown.  max_cost: that the job may have; None: any.
        worker: how the worker works.
        deadline: counted from the job's acceptance; rows that have no answer by then expire.
        retry_of: the id of the job whose rows are tried again.
    """

    inputs: InputRef
    models: tuple[ChosenModel, ...]
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

    @property
    def price_of_worker(self) -> float | None:
        """What an hour of one replica costs: they share the machine."""
        return None if self.price_per_hour is None else self.price_per_hour / self.engine.replicas


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
