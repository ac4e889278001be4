"""Checks requests to engines and durable checkpoints: logged tokens must never be computed again.

It reads checkpoints by itself, from the bytes as the format says, and shares no code with the pipeline's reader. Three
things are known exactly, because the simulator sees every port call: what a shard's log held when a worker took the
shard, what each request then goes on from, and how many of a life's sampled tokens were durable when it ended.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from engine.request import Request
from tests.simulation.machine import InvariantViolated, Process
from tests.simulation.scenario import Scenario

CHECKPOINT = re.compile(r"([0-9a-f]{16})-(\d{6,})")
SHARD_KEY = re.compile(r"(?:work/(\d{5})/|results/part-(\d{5})\.parquet)")
HEAD = 8 + 32


@dataclass
class Log:
    """What stands in checkpoints. `finished`: row -> tokens that it cost.  `running`: row -> tokens so far, end tokens
    included; of several attempts the longest."""

    finished: dict[int, int] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)


@dataclass
class Life:
    """One life of a worker.

    Attributes:
        running: requests that the engine has: id -> row.  taken: shard -> what its log held.
        own: attempt -> what this life has logged itself.
        resumed: (shard, row) -> tokens that it came with.
        sampled: tokens.  durable: (shard, row) -> how many of them are in a log or a part.
        waited: seconds that a task of the second thread took at most, or has been waiting when the life ended.
    """

    running: dict[str, int] = field(default_factory=dict)
    taken: dict[int, Log] = field(default_factory=dict)
    own: dict[str, AttemptLog] = field(default_factory=lambda: defaultdict(AttemptLog))
    resumed: dict[tuple[int, int], int] = field(default_factory=dict)
    sampled: int = 0
    durable: dict[tuple[int, int], int] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def lost(self) -> int:
        """Tokens that were sampled and are not durable."""
        return self.sampled - sum(self.durable.values())


class EngineWatch(Protocol):
    """Events that a worker's engine reports, see `Watch`."""

    def added(self, process: Process, request: Request) -> None: ...

    def left(self, process: Process, requests: Iterable[str]) -> None: ...

    def stepped(self, process: Process, sampled: int) -> None: ...

    def step_failed(self, requests: set[str], *, broken: bool) -> None: ...


@dataclass
class Watch:
    """Watches the workers of one history.

    Args:
        folder: the job's, in the store.

    Attributes:
        costs: row -> tokens that its answer takes, if it must succeed; set by the oracle.
        blind: a log was damaged on purpose, so that less may be known than was logged.
        deaths, lonely_deaths: row -> lives that ended while it was in the engine, and while nothing else was.
        failures, lonely_failures: likewise of steps.
        durable_when_whole: tokens in logs and parts, when a part was committed last.
    """

    scenario: Scenario
    folder: Path
    costs: dict[int, int] = field(default_factory=dict)
    blind: bool = False
    lives: dict[tuple[str, int], Life] = field(default_factory=lambda: defaultdict(Life))
    deaths: Counter[int] = field(default_factory=Counter)
    lonely_deaths: Counter[int] = field(default_factory=Counter)
    failures: Counter[int] = field(default_factory=Counter)
    lonely_failures: Counter[int] = field(default_factory=Counter)
    durable_when_whole: int = 0

    def forget(self) -> None:
        """The job begins anew."""
        self.lives.clear()
        self.durable_when_whole = 0

    @property
    def sampled(self) -> int:
        return sum(life.sampled for life in self.lives.values())

    @property
    def durable(self) -> int:
        return sum(sum(life.durable.values()) for life in self.lives.values())

    # -- reported by the ports

    def took(self, process: Process, shard: int) -> None:
        """A worker got the shard's name: what its log holds now must not be computed again."""
        life = self._life(process)
        if shard not in life.taken:
            life.taken[shard] = read_log(_checkpoints(self.folder / "work" / f"{shard:05d}"))

    def created(self, process: Process, key: str, data: bytes | None) -> None:
        """An object of a shard is durable; `data`: of a checkpoint."""
        match = SHARD_KEY.search(key)
        if match is None:
            return
        life, shard = self._life(process), int(match[1] or match[2])
        checkpoint = CHECKPOINT.fullmatch(key.rsplit("/", 1)[-1])
        if checkpoint is not None and data is not None:
            log = life.own[checkpoint[1]]
            log.add(data)
            self._logged(life, shard, log)
        elif "/results/" in key:
            for at, resumed in life.resumed.items():
                if at[0] == shard and at[1] in self.costs:
                    life.durable[at] = self.costs[at[1]] - resumed
            self.durable_when_whole = self.durable
        elif "/ended-" in key:
            life.taken.pop(shard, None)

    def _logged(self, life: Life, shard: int, log: AttemptLog) -> None:
        known = life.taken.setdefault(shard, Log())
        for row, cost in log.finished.items():
            known.finished[row] = cost
            if (shard, row) in life.resumed and cost:
                life.durable[shard, row] = cost - life.resumed[shard, row]
        for row, tokens in log.running.items():
            known.running[row] = max(tokens, known.running.get(row, 0))
            if row not in log.finished:
                life.durable[shard, row] = tokens - life.resumed.get((shard, row), 0)

    def added(self, process: Process, request: Request) -> None:
        """An engine was given a request. Raises `InvariantViolated` when it is to compute what was logged."""
        shard, row = (int(number) for number in request.request_id.rsplit("/", 2)[-2:])
        life = self._life(process)
        life.running[request.request_id] = row
        resumed = sum(len(choice.token_ids) + (choice.stop_token_id is not None) for choice in request.partial)
        life.resumed.setdefault((shard, row), resumed)
        part = self.folder / "results" / f"part-{shard:05d}.parquet"
        if self.blind or part.exists():  # checkpoints go once there is a part
            return
        log = life.taken.get(shard, Log())
        if row in log.finished:
            raise InvariantViolated(f"I5: row {row} is computed again, but was logged as finished")
        if resumed < log.running.get(row, 0):
            raise InvariantViolated(
                f"I5: row {row} goes on from {resumed} tokens, but {log.running[row]} of it were logged"
            )

    def left(self, process: Process, requests: Iterable[str]) -> None:
        """These requests have left the engine."""
        for request in requests:
            self._life(process).running.pop(request, None)

    def stepped(self, process: Process, sampled: int) -> None:
        """A step was computed."""
        self._life(process).sampled += sampled

    def waited(self, process: Process, seconds: float) -> None:
        """What the second thread had to do took so long."""
        life = self._life(process)
        life.waited = max(life.waited, seconds)

    def step_failed(self, requests: set[str], *, broken: bool, alone: bool | None = None) -> None:
        """A step with these requests failed; `broken`: as all steps do, so that no row can be blamed for it. `alone`:
        whether nothing else was in it, where that doesn't follow from them."""
        if not broken:
            rows = {row_of(request) for request in requests}
            _count(rows, self.failures, self.lonely_failures, alone=len(rows) == 1 if alone is None else alone)

    def running(self, process: Process) -> int:
        """How many rows the process has in its engine."""
        life = self.lives.get((process.name, process.life))
        return 0 if life is None else len(set(life.running.values()))

    def died(self, process: Process, *, alone: bool | None = None) -> None:
        """A life ended, whatever ran in it; `alone` as above."""
        life = self.lives.get((process.name, process.life))
        if life is not None:
            rows = set(life.running.values())
            _count(rows, self.deaths, self.lonely_deaths, alone=len(rows) == 1 if alone is None else alone)
            life.running.clear()

    def _life(self, process: Process) -> Life:
        return self.lives[process.name, process.life]


@dataclass
class AttemptLog:
    """What the checkpoints of one attempt amount to, given one after the other. `running`: row -> tokens, end tokens
    included, the most that it ever had; what follows a gap doesn't count. `finished`: as in `Log`."""

    finished: dict[int, int] = field(default_factory=dict)
    running: Counter[int] = field(default_factory=Counter)
    choices: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # tokens and end tokens so far

    def add(self, data: bytes) -> None:
        """One more checkpoint; one that is damaged says nothing."""
        if hashlib.sha256(data[HEAD:]).digest() != data[8:HEAD]:
            return
        length = int.from_bytes(data[HEAD : HEAD + 4], "big")
        stream = pa.BufferReader(data[HEAD + 4 + length :])
        finished = pa.ipc.open_stream(stream).read_all()
        running = pa.ipc.open_stream(stream).read_all()
        self.finished.update(zip(finished["row"].to_pylist(), finished["usage_completion"].to_pylist(), strict=True))
        for line in running.select(["row", "choice", "start", "token_ids", "stop_token_id"]).to_pylist():
            at, start = (line["row"], line["choice"]), line["start"]
            if start in (0, self.choices.get(at, (0, 0))[0]):
                self.choices[at] = start + len(line["token_ids"]), int(line["stop_token_id"] is not None)
        for row in set(running["row"].to_pylist()):
            total = sum(sum(tokens) for (owner, _), tokens in self.choices.items() if owner == row)
            self.running[row] = max(self.running[row], total)


def read_log(attempts: Iterable[Iterable[bytes]]) -> Log:
    """What the checkpoints of several attempts amount to, each attempt's in order."""
    log = Log()
    for checkpoints in attempts:
        attempt = AttemptLog()
        for data in checkpoints:
            attempt.add(data)
        log.finished.update(attempt.finished)
        for row, tokens in attempt.running.items():
            log.running[row] = max(tokens, log.running.get(row, 0))
    return log


def _checkpoints(folder: Path) -> Iterable[Iterable[bytes]]:
    found: dict[str, dict[int, bytes]] = defaultdict(dict)
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := CHECKPOINT.fullmatch(path.name):
            found[match[1]][int(match[2])] = path.read_bytes()
    return ([data for _, data in sorted(pieces.items())] for pieces in found.values())


def row_of(request: str) -> int:
    """The input's row; -1 of the worker's own request."""
    row = request.rsplit("/", 1)[-1]
    return int(row) if row.isdigit() else -1


def _count(rows: set[int], together: Counter[int], lonely: Counter[int], *, alone: bool) -> None:
    together.update(rows)
    if alone:
        lonely.update(rows)
