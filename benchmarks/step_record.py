"""What each step of an engine had to do and how long it took, recorded without touching the engine's code.

The recorder stands where the engine's runner stood, reads each `StepPlan` before it hands it on, and keeps a few
numbers a step. It takes some tens of microseconds a step (`overhead_seconds` says how long in all).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from engine import Engine
from engine.plan import RowState, StepOutput, StepPlan
from engine.runner.runner import StepRunner
from engine.scheduler.step_cost import GroupWork, count_group_work


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        begun, ended: of its computation, on time.perf_counter (seconds).
        running: sequences that held a slot.  rows: of them, those that computed.
        tokens: positions computed.  logits_rows: positions whose logits were wanted.
        attention: per cache group, in the engine's order.
    """

    begun: float
    ended: float
    running: int
    rows: int
    tokens: int
    logits_rows: int
    attention: tuple[GroupWork, ...]


class StepRecorder:
    """A `StepRunner` around an engine's own; `attach` puts it there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inner: StepRunner = engine._runner
        self._rows: RowState = engine.scheduler.rows
        self._windows = tuple(engine.spec.window_layers)
        # Without a model all layers lie in one group, whatever their windows.
        if len(self._rows.block_tables) == 1:
            self._windows = self._windows[:1]
        self._seen = np.zeros(engine.stats().total_blocks + len(self._windows), dtype=np.bool_)
        self.steps: list[StepRecord] = []
        self._taken = engine.stats().steps
        self.overhead_seconds = 0.0

    @classmethod
    def attach(cls, engine: Engine) -> StepRecorder:
        """Record all of the engine's steps from now on."""
        recorder = cls(engine)
        engine._runner = recorder
        return recorder

    def execute(self, plan: StepPlan) -> StepOutput:
        entered = time.perf_counter()
        attention = tuple(
            count_group_work(plan, table, window, self._rows.block_size, self._seen)
            for table, window in zip(self._rows.block_tables, self._windows, strict=True)
        )
        running = self._engine.num_running
        begun = time.perf_counter()
        output = self._inner.execute(plan)
        ended = time.perf_counter()
        logits = int(plan.num_logits.sum())
        self.steps.append(StepRecord(begun, ended, running, len(plan.rows), plan.num_tokens, logits, attention))
        self.overhead_seconds += begun - entered
        return output

    def take(self) -> list[StepRecord]:
        """The steps since the last call (or since `attach`).

        Raises:
            RuntimeError: the engine ran steps that did not pass here.
        """
        steps, self.steps = self.steps, []
        self._taken += len(steps)
        if (ran := self._engine.stats().steps) != self._taken:
            raise RuntimeError(
                f"the engine ran {ran} steps, but {self._taken} were recorded: it no longer asks the runner"
            )
        return steps


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the running batch was.

    Attributes:
        mean_rows: rows computed a step, each step counted by the time until the next one began.
        mean_rows_per_step: the same, each step counted once.
        tail_share: share of the time with under a quarter of the slots busy.
        tail_at_end: of it, the share after the last step with a quarter busy or more.
    """

    mean_rows: float
    mean_rows_per_step: float
    tail_share: float
    tail_at_end: float


def occupancy(steps: list[StepRecord], slots: int, ended: float) -> Occupancy:
    """Of a run's steps, in order; `ended` is when the run did (time.perf_counter).

    Args:
        slots: rows of the running batch.
    """
    begun = np.array([step.begun for step in steps])
    spans = np.diff(np.append(begun, ended))
    rows = np.array([step.rows for step in steps])
    few = np.array([4 * step.running < slots for step in steps])
    last_full = int(np.flatnonzero(~few)[-1]) + 1 if (~few).any() else 0
    total = float(spans.sum())
    return Occupancy(
        mean_rows=float((rows * spans).sum()) / total,
        mean_rows_per_step=float(rows.mean()),
        tail_share=float(spans[few].sum()) / total,
        tail_at_end=float(spans[last_full:].sum()) / total,
    )
