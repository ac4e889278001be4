"""The scheduler's counters, and the snapshot of them that others read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduler.slo_control import SloStats
from engine.speculative.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start, and the state now.

    Attributes:
        steps, step_rows, computed_tokens: planned steps, their rows and their tokens.
        prompt_tokens: of them, positions of prompts.
        recomputed_tokens: of them, positions that had been computed before a preemption.
        prefix_queried_tokens, prefix_hit_tokens: known tokens of admitted sequences that may read the prefix cache,
            and those not computed because they were found there.
        free_blocks, cached_blocks, total_blocks: per cache group; cached ones are free and can still be hit.
        generated_tokens: sampled tokens, end tokens included.
        speculation: counts of drafts and accepted drafts.
        slo: SLO statistics of class 0; None: it has no SLO.
        oldest_waiting: arrival of the head of the queue, seconds; None when nothing waits.
    """

    running: int
    waiting: int
    steps: int
    step_rows: int
    computed_tokens: int
    prompt_tokens: int
    recomputed_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    finished: int
    free_blocks: tuple[int, ...]
    cached_blocks: tuple[int, ...]
    total_blocks: tuple[int, ...]
    oldest_waiting: float | None
    generated_tokens: int
    speculation: SpeculationStats
    slo: SloStats | None


class Counters:
    """The planner's counters since the start."""

    __slots__ = (
        "computed_tokens",
        "ended",
        "generated_tokens",
        "preemptions",
        "prefix_hit_tokens",
        "prefix_queried_tokens",
        "prompt_tokens",
        "recomputed_tokens",
        "step_rows",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.step_rows = 0
        self.computed_tokens = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.recomputed_tokens = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self.ended = 0
