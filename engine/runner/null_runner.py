"""A runner without a model. It answers at once, so that only the scheduler and its callers take time."""

from __future__ import annotations

import numpy as np

from engine.plan import NO_TOKEN, RowState, StepOutput, StepPlan


class NullRunner:
    """Samples for each row a token that depends on its position and last token alone, never below `first_token`."""

    def __init__(self, rows: RowState, vocab_size: int, first_token: int = 256) -> None:
        self._rows = rows
        self._first = min(first_token, vocab_size - 1)
        self._span = vocab_size - self._first

    def execute(self, plan: StepPlan) -> StepOutput:
        at = plan.starts + plan.counts
        last = self._rows.token_ids[plan.rows, at - 1].astype(np.int64)
        tokens = self._first + (last * 31 + at * 7) % self._span
        token_ids = np.where(plan.samples, tokens, NO_TOKEN).astype(np.int32)
        return StepOutput(token_ids, np.zeros(len(plan.rows), dtype=np.bool_), {}, {}, {})
