"""Settings of a worker's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.worker_client.ports import CHECKPOINT_SECONDS
from workers.policies.policy import NO_POLICIES, Policies

IDLE_SECONDS: Final = 0.02
"""Poll interval while the engine has nothing to compute."""

FIRST_CHECKPOINT_SECONDS: Final = 1.0
"""Time until an attempt's first checkpoint, unless the interval is shorter."""

AnswerCheck = Callable[[int, str], str | None]
"""Why the answer of a row is not accepted, given its index in the input and the answer's text; None: it is accepted.
What it raises becomes the error of the row, which is not asked again."""


class WrongVerdict(TypeError):
    """Raised by a check whose function returned what says neither that an answer is accepted nor why it isn't.

    Attributes:
        place: the function's file and line.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker's loop.

    Attributes:
        request_timeout_seconds: of a request, from its arrival in the engine; None: no limit. With a time-out the
            engine gets fewer rows ahead, so that the time in its queue hardly counts.
        max_open_shards: shards computed at once. A long answer at the end of one doesn't delay the start of the next.
        watermark: the next shard is opened when fewer rows than this are ready; None: twice the running batch.
        report_interval_seconds: interval of the observer's calls.
        poll_interval_seconds: interval of polling the source while it has no shard.
        checkpoint_seconds: interval of checkpoints; the first comes within `FIRST_CHECKPOINT_SECONDS`. 0: after each
            step.
        stuck_seconds: the heartbeats end after so long without an iteration of the loop.
        policies: check prompts and answers.
        check: judges the answers of a job with `max_tries`, after the check of their form; None: that alone does.
        checks: those of jobs that have one of their own, by the job's id.
        trace_interval_seconds: interval of the engine's steps that get a span, where traces are on; 0: none does.
    """

    request_timeout_seconds: float | None = None
    max_open_shards: int = 4
    watermark: int | None = None
    report_interval_seconds: float = 0.25
    poll_interval_seconds: float = IDLE_SECONDS
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    stuck_seconds: float = 300.0
    policies: Policies = NO_POLICIES
    check: AnswerCheck | None = None
    checks: Mapping[str, AnswerCheck | None] = field(default_factory=dict)
    trace_interval_seconds: float = 1.0

    def check_of(self, job: str) -> AnswerCheck | None:
        """The check of a job's answers."""
        return self.checks.get(job, self.check)
