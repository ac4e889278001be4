"""End tokens, stop tokens and max_tokens, checked for all rows at once. Stop strings need text: the worker checks them
(`workers.text.stop_strings`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import NO_TOKEN
from engine.request import SamplingParams


class StopDecisions(NamedTuple):
    """Whether the newest token ends each row."""

    stopped: NDArray[np.bool_]  # the token is a stop token: it ends the row and is not part of the output
    full: NDArray[np.bool_]  # with this token the row reaches max_tokens


class StopTable:
    """Row-indexed stop rules.

    Most rows have few end tokens: `_WIDTH` of them are compared in one vectorised operation, padded with `NO_TOKEN`.
    Rows with more also have a set, and only those are checked one by one.
    """

    _WIDTH = 8

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._ids = np.full((num_rows, self._WIDTH), NO_TOKEN, dtype=np.int32)
        self._many: dict[int, frozenset[int]] = {}
        self._has_many = np.zeros(num_rows, dtype=np.bool_)
        self.min_known = np.zeros(num_rows, dtype=np.int32)
        self.max_known = np.zeros(num_rows, dtype=np.int32)

    def load(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        """Set the rules of the row's new owner."""
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(self._eos)
        self._many.pop(row, None)
        self._ids[row] = NO_TOKEN
        self._has_many[row] = len(ends) > self._WIDTH
        if len(ends) > self._WIDTH:
            self._many[row] = frozenset(ends)
        else:
            self._ids[row, : len(ends)] = sorted(ends)
        self.min_known[row] = prompt_len + params.min_tokens
        self.max_known[row] = prompt_len + params.max_tokens

    def check(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], known: NDArray[np.int32]) -> StopDecisions:
        """Check each row's newest token.

        Args:
            rows: int32 [B].  tokens: int32 [B], just sampled.  known: int32 [B], tokens known before them.
        """
        stopped = (self._ids[rows] == tokens[:, None]).any(axis=1)
        if self._many:
            for i in np.flatnonzero(self._has_many[rows]).tolist():
                stopped[i] = int(tokens[i]) in self._many[int(rows[i])]
        stopped &= known >= self.min_known[rows]
        return StopDecisions(stopped, known + 1 >= self.max_known[rows])
