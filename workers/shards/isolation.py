"""Isolates poison rows: rows whose step failed or whose process died are tried apart from all others.

`SuspectBisection` decides which rows are tried in one batch. `RowIsolation` adds which shards they belong to, which
notes must be durable before they are tried, and which rows have failed alone. The failure of such a row is final only
after a harmless request, the probe, has succeeded. If no probe succeeds, the engine is broken and no row is blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import structlog

from engine.request import Completion, Request, SamplingParams, as_token_ids
from engine.step_engine import StepEngine
from schemas.requests.errors import RowError, RowErrorCode
from workers.errors import BrokenEngineError
from workers.model.loaded_model import LoadedModel
from workers.rows import ComputedRow, PreparedRow
from workers.shards.bisect import SuspectBisection
from workers.shards.open_shard import OpenShard
from workers.shards.resume import resume_failed

PROOF_SECONDS: Final = 2.0
"""How long a worker must have computed probes or other suspects before it computes a row alone that may have ended a
process. The time doubles with each process that ended while it computed the row alone. A poison row then ends the
process within a second; a harmless one is cleared by its first checkpoint. So a fault that ends workers a certain time
after their start, whatever they compute, ends them before the row is in the engine, or coincides with only one of these
times."""

SUSPECT_AFTER: Final = 2
"""Consecutive attempts that died without progress, after which a shard's rows are tried apart."""

CONDEMNED_AFTER: Final = 3
"""Deaths of a process that computed one row alone, after which the row fails. One or two may be chance. The proofs
before the second and the third death (`PROOF_SECONDS`) differ by more than the time until a row's first
checkpoint, so a fault that ends workers a certain time after their start can't coincide with the row in both."""

MAX_FAILED_PROOFS: Final = 3
"""Consecutive failures of the probe, after which the engine counts as broken."""

PROBE: Final = "probe"
"""Request id of the probe, which shows whether the engine works at all."""

PROBE_TOKENS: Final = as_token_ids([0, 0])
PROBE_PARAMS: Final = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

Member = tuple[OpenShard, PreparedRow]

logger = structlog.get_logger(__name__)


class RowIsolation:
    """The rows that are tried apart. While there are any, no other row should enter the engine.

    Args:
        max_num_seqs: rows of the engine's running batch; the first group of suspects is as large.
    """

    def __init__(self, engine: StepEngine, max_num_seqs: int) -> None:
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._suspects = SuspectBisection()
        self._owners: dict[str, OpenShard] = {}
        self._is_trying = False
        self._failed_proofs = 0
        self._noted: dict[str, OpenShard] = {}  # attempts with a durable note of which rows are computed
        self._verdicts: list[tuple[OpenShard, ComputedRow]] = []
        self._is_engine_suspect = False  # a request of the side work failed with a step
        self._proving_since: float | None = None  # monotonic: when the first row that may have ended a process was due

    def __bool__(self) -> bool:
        """Whether there are rows to try."""
        return bool(self._suspects)

    @property
    def is_trying(self) -> bool:
        """Whether the last group may still be in the engine, where no other rows may join it."""
        return self._is_trying

    @property
    def is_undecided(self) -> bool:
        """Whether a probe must show if the engine caused the last failure."""
        return bool(self._verdicts) or self._is_engine_suspect

    @property
    def has_notes(self) -> bool:
        """Whether there are durable notes of which rows are computed."""
        return bool(self._noted)

    def release(self) -> None:
        """Record that the last group has left the engine."""
        self._is_trying = False

    def open(self, shard: OpenShard) -> None:
        """Move the shard's rows that may have ended earlier processes from its waiting rows to the suspects."""
        history = shard.work.history
        isolated = [row for row in shard.waiting if row.names[0].row in history.isolated_rows]
        if isolated:
            groups = [[row] for row in isolated]
            shard.waiting = deque(row for row in shard.waiting if row.names[0].row not in history.isolated_rows)
        elif history.silent >= SUSPECT_AFTER and shard.waiting:
            count = min(len(shard.waiting), self._max_num_seqs)
            groups = [[shard.waiting.popleft() for _ in range(count)]]
        else:
            return
        self._owners.update((row.request.request_id, shard) for group in groups for row in group)
        self._suspects.suspect(groups)
        rows, work = sum(map(len, groups)), shard.work
        logger.warning(
            "rows are tried apart after attempts died",
            job=work.job.id,
            shard=work.shard,
            rows=rows,
            alone=bool(isolated),
        )

    def proof_seconds(self) -> float:
        """How long the machine must be proved before the next rows are tried; 0 unless the next group is a single row
        that may have ended a process."""
        rows = self._suspects.peek()
        if len(rows) != 1:
            return 0.0
        history = self._owners[rows[0].request.request_id].work.history
        row = rows[0].names[0].row
        if not (history.silent or history.isolated_rows):
            return 0.0
        return PROOF_SECONDS * 2.0 ** history.blamed.get(row, 0)

    def is_proving(self, now: float) -> bool:
        """Whether the engine must compute a probe before the next row is tried."""
        seconds = self.proof_seconds()
        if not seconds:
            return False
        if self._proving_since is None:
            self._proving_since = now
        self._is_trying = True
        return now < self._proving_since + seconds

    def next_group(self) -> list[Member]:
        """Remove and return the rows to try next, in one batch. Call it when the engine is empty."""
        group = [(self._owners.pop(row.request.request_id), row) for row in self._suspects.next_group()]
        self._is_trying = bool(group)
        return group

    def notes(self, group: Sequence[Member]) -> list[tuple[OpenShard, list[int]]]:
        """The notes that must be durable before the group is tried (an empty group: before any other row is): for each
        shard whose attempts have died, the only rows of it that are computed."""
        noted = dict(self._noted)
        for shard, _ in group:
            history = shard.work.history
            if history.silent or history.isolated_rows:
                noted[shard.work.attempt_id] = shard
        notes = [(shard, [row.names[0].row for owner, row in group if owner is shard]) for shard in noted.values()]
        self._noted = {shard.work.attempt_id: shard for shard, rows in notes if rows}
        return notes

    def step_failed(self, reason: str) -> None:
        """Record that a step raised; rows whose completion has the error `reason` are suspects."""
        self._suspects.step_failed(reason)

    def suspect_engine(self, error: str | None) -> None:
        """A request of the side work ended with this error. If a step failed with it, a probe must show that the engine
        works: there may be no rows that would show it."""
        if self._suspects.is_step_failure(error):
            self._is_engine_suspect = self._is_trying = True

    def proved(self, error: str | None) -> list[tuple[OpenShard, ComputedRow]]:
        """Process the probe's outcome. If it succeeded, the engine works: returns the rows that failed alone, whose
        failure is final. Raises `BrokenEngineError` when the probe failed `MAX_FAILED_PROOFS` times."""
        if error is not None:
            self._failed_proofs += 1
            if self._failed_proofs >= MAX_FAILED_PROOFS:
                raise BrokenEngineError(f"the engine fails with every request, last with: {error}")
            return []
        self._failed_proofs = 0
        self._is_engine_suspect = False
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def take(self, shard: OpenShard, row: PreparedRow, completion: Completion) -> bool:
        """Isolate the failed row: it is tried again, or has failed alone. False: no step failed with its error, so its
        outcome is final."""
        if not self._suspects.is_step_failure(completion.error):
            return False
        if self._suspects.take(resume_failed(self._engine, row, completion)):
            self._owners[completion.request_id] = shard
        else:
            self._verdicts.append((shard, ComputedRow(row, completion)))
        return True

    def remove(self, shards: Iterable[OpenShard]) -> None:
        """Remove the rows of these shards."""
        removed = {id(shard) for shard in shards}
        rows = {name for name, shard in self._owners.items() if id(shard) in removed}
        self._suspects.remove(rows)
        for name in rows:
            del self._owners[name]
        self._noted = _without(self._noted, removed)
        self._verdicts = [verdict for verdict in self._verdicts if id(verdict[0]) not in removed]


def _without(noted: Mapping[str, OpenShard], removed: set[int]) -> dict[str, OpenShard]:
    return {name: shard for name, shard in noted.items() if id(shard) not in removed}


def probe(model: LoadedModel) -> Request:
    """The harmless request that any working engine can compute."""
    pooling = model.limits.pooling
    if model.limits.generates or pooling is None:
        return Request(PROBE, PROBE_TOKENS, PROBE_PARAMS)
    params = SamplingParams(max_tokens=0, temperature=0.0)
    return Request(PROBE, PROBE_TOKENS, params, pooling=pooling)


def condemn(deaths: int) -> RowError | None:
    """The final error of a row with which alone a process died `deaths` times; None while the row may be tried."""
    if deaths < CONDEMNED_AFTER:
        return None
    return RowError(
        RowErrorCode.ENGINE_ERROR,
        f"the process died {deaths} times while it computed this row and no other; see the system's log for the reason",
    )
