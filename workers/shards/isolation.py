"""Rows tried apart from all others, because a step with them failed or the process died with them.

`SuspectBisection` decides which rows go together; here is known which shards they belong to, what must be noted durably
before they are tried, and which rows have failed alone. Such a row's outcome is held back until a request of the
worker's own
went through: if none does, the engine is broken, and nobody is to blame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import structlog

from engine.request import Completion, Request, SamplingParams, as_token_ids
from workers.errors import BrokenEngineError
from workers.model.loaded_model import LoadedModel
from workers.rows import ComputedRow, PreparedRow
from workers.shards.bisect import SuspectBisection
from workers.shards.resume import resume_failed
from workers.shards.state import OpenShard

PROOF_SECONDS: Final = 2.0
"""For how long a worker must have lived, with harmless requests of its own or with other suspects, before it computes a
row alone that may have ended a process; doubles with each time that the row did so alone. A row that is to blame ends
the process within a second then, or its first checkpoint clears it. So what ends workers some time after their start,
whatever they compute, ends them before the row is in the engine, or else meets one of these times and not the next."""

SUSPECT_AFTER: Final = 2
"""Attempts in a row that died before they had got any further, after which a shard's rows are tried apart."""

MAX_FAILED_PROOFS: Final = 3
"""Harmless requests that fail one after the other, after which the engine counts as broken."""

PROBE: Final = "probe"
"""The request that shows whether the engine works at all, when no row is left that could."""

PROBE_TOKENS: Final = as_token_ids([0, 0])
PROBE_PARAMS: Final = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

Member = tuple[OpenShard, PreparedRow]

logger = structlog.get_logger(__name__)


class RowIsolation:
    """What is tried apart; meanwhile nothing else should enter the engine.

    Args:
        max_num_seqs: rows that the engine runs together, which are tried together first.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._suspects = SuspectBisection()
        self._owner: dict[str, OpenShard] = {}
        self._trying = False
        self._failed_proofs = 0
        self._noted: dict[str, OpenShard] = {}  # attempts whose rows are noted one by one
        self._verdicts: list[tuple[OpenShard, ComputedRow]] = []
        self._doubted = False  # a request that is no row's failed with a step
        self._began: float | None = None  # monotonic: rows that may have ended a process are tried since then

    def __bool__(self) -> bool:
        """Whether there are rows to try."""
        return bool(self._suspects)

    @property
    def trying(self) -> bool:
        """Whether the last group that was given out may still be in the engine, where no others may join it."""
        return self._trying

    @property
    def undecided(self) -> bool:
        """Whether something has failed, and it isn't known yet whether that was the engine's fault."""
        return bool(self._verdicts) or self._doubted

    @property
    def noted(self) -> bool:
        """Whether it is noted which rows are computed."""
        return bool(self._noted)

    def release(self) -> None:
        """The last group has left the engine."""
        self._trying = False

    def open(self, shard: OpenShard) -> None:
        """Take out of the shard's waiting rows those that may have ended its earlier attempts' processes."""
        history = shard.work.history
        cornered = [row for row in shard.waiting if row.names[0].row in history.cornered]
        if cornered:
            groups = [[row] for row in cornered]
            shard.waiting = deque(row for row in shard.waiting if row.names[0].row not in history.cornered)
        elif history.silent >= SUSPECT_AFTER and shard.waiting:
            count = min(len(shard.waiting), self._max_num_seqs)
            groups = [[shard.waiting.popleft() for _ in range(count)]]
        else:
            return
        self._owner.update((row.request.request_id, shard) for group in groups for row in group)
        self._suspects.suspect(groups)
        rows, work = sum(map(len, groups)), shard.work
        logger.warning(
            "attempts died: rows are tried apart", job=work.job.id, shard=work.shard, rows=rows, alone=bool(cornered)
        )

    def proof_seconds(self) -> float:
        """For how long the machine must be proved before the next rows are tried: 0 unless it is one row alone that
        may have ended a process."""
        rows = self._suspects.peek()
        if len(rows) != 1:
            return 0.0
        history = self._owner[rows[0].request.request_id].work.history
        row = rows[0].names[0].row
        if not (history.silent or history.cornered):
            return 0.0
        return PROOF_SECONDS * 2.0 ** history.blamed.get(row, 0)

    def is_proving(self, now: float) -> bool:
        """Whether the machine is to compute a harmless request before the next row is tried."""
        seconds = self.proof_seconds()
        if not seconds:
            return False
        if self._began is None:
            self._began = now
        self._trying = True
        return now < self._began + seconds

    def next_group(self) -> list[Member]:
        """The rows to try next, together; to be called when the engine is empty."""
        group = [(self._owner.pop(row.request.request_id), row) for row in self._suspects.next_group()]
        self._trying = bool(group)
        return group

    def notes(self, group: Sequence[Member]) -> list[tuple[OpenShard, list[int]]]:
        """What must be durable before the group is tried (none: before anything else is): for each shard whose attempts
        have died, the rows that are computed, and no others."""
        due = dict(self._noted)
        for shard, _ in group:
            history = shard.work.history
            if history.silent or history.cornered:
                due[shard.work.attempt_id] = shard
        notes = [(shard, [row.names[0].row for owner, row in group if owner is shard]) for shard in due.values()]
        self._noted = {shard.work.attempt_id: shard for shard, rows in notes if rows}
        return notes

    def step_failed(self, reason: str) -> None:
        """A step raised; completions whose error is `reason` are suspects."""
        self._suspects.step_failed(reason)

    def doubt(self, error: str | None) -> None:
        """A request beside the rows ended with this error. Where a step failed with it the engine has to show that it
        works: there may be no rows, and nobody else would notice."""
        if self._suspects.concerns(error):
            self._doubted = self._trying = True

    def proved(self, error: str | None) -> list[tuple[OpenShard, ComputedRow]]:
        """How a harmless request did: if well, the rows that failed alone did so by themselves, and are returned.
        Raises `BrokenEngineError` when it failed too often."""
        if error is not None:
            self._failed_proofs += 1
            if self._failed_proofs >= MAX_FAILED_PROOFS:
                raise BrokenEngineError(f"the engine fails with every request, last with: {error}")
            return []
        self._failed_proofs = 0
        self._doubted = False
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def take(self, shard: OpenShard, row: PreparedRow, completion: Completion) -> bool:
        """Whether the failed row is kept here, to be tried again or because it has failed alone; False: its outcome
        stands."""
        if not self._suspects.concerns(completion.error):
            return False
        if self._suspects.take(resume_failed(row, completion)):
            self._owner[completion.request_id] = shard
        else:
            self._verdicts.append((shard, ComputedRow(row, completion)))
        return True

    def drop(self, shards: Iterable[OpenShard]) -> None:
        """Forget what belongs to these shards."""
        gone = {id(shard) for shard in shards}
        rows = {name for name, shard in self._owner.items() if id(shard) in gone}
        self._suspects.drop(rows)
        for name in rows:
            del self._owner[name]
        self._noted = _without(self._noted, gone)
        self._verdicts = [verdict for verdict in self._verdicts if id(verdict[0]) not in gone]


def _without(noted: Mapping[str, OpenShard], gone: set[int]) -> dict[str, OpenShard]:
    return {name: shard for name, shard in noted.items() if id(shard) not in gone}


def probe(model: LoadedModel) -> Request:
    """A harmless request that any engine in order can compute."""
    embedding = model.limits.embedding
    if model.limits.generates or embedding is None:
        return Request(PROBE, PROBE_TOKENS, PROBE_PARAMS)
    params = SamplingParams(max_tokens=0, temperature=0.0)
    return Request(PROBE, PROBE_TOKENS, params, pooling=embedding.pooling)
