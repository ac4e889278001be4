"""How a worker works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.worker_client.protocol import CHECKPOINT_SECONDS
from workers.policies.policy import NO_POLICIES, Policies

IDLE_SECONDS: Final = 0.02
"""Pause between looks when there is nothing to compute."""

FIRST_CHECKPOINT_SECONDS: Final = 1.0
"""Before the first checkpoint of an attempt, where the interval is longer."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker works.

    Attributes:
        request_timeout: seconds a request may take, from when the engine is given it; None: for ever. With a timeout
            the engine is given fewer rows ahead, so that waiting hardly counts.
        max_open_shards: shards worked on at once; a long answer at the end of one doesn't keep the next from starting.
        watermark: rows ready or waiting, below which the next shard is fetched; None: twice the running batch.
        report_seconds: between two calls of the observer.
        look_seconds: between two looks for a shard, when there was none.
        checkpoint_seconds: between two checkpoints; the first comes within `FIRST_CHECKPOINT_SECONDS`. 0: after each
            step.
        stuck_seconds: after so long without a turn of the loop its heartbeats end.
        policies: judge prompts and answers.
        traced_step_seconds: between two of the engine's steps that get a span, where there are traces; 0: none does.
    """

    request_timeout: float | None = None
    max_open_shards: int = 4
    watermark: int | None = None
    report_seconds: float = 0.25
    look_seconds: float = IDLE_SECONDS
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    stuck_seconds: float = 300.0
    policies: Policies = NO_POLICIES
    traced_step_seconds: float = 1.0
