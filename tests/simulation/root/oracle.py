"""The oracle of a root checks a history independently, from stored objects and sent messages.

Each job is held to all that a job alone is held to (`Oracle`), and the root to this:
    I1  each dropped file is one job, with the tenant, tier and deadline that it was given; each record is a row of
        one job, and a resend of none
    I2  an object whose creation was acknowledged stays until it is not needed any more (`deleted`)
    I4  a listing of the jobs can be read at any moment
    I5  no more repeated work is reported than was done; where no process died and no message came twice, none was
    I7  all that came in has ended, and is published, and no tenant or tier waited for the others' end
    the committed offset is never ahead of what is durable; nothing is marked as sent that was not (`PublishedMessages`)
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.adapters.folder.store import FolderStore
from pipeline.jobs.summaries import list_jobs
from tests.simulation.machine import InvariantViolated, Machine
from tests.simulation.oracle import Oracle
from tests.simulation.root.ingest import DROPS, TOPIC, uri_of
from tests.simulation.root.ports import ROOT, Broker
from tests.simulation.root.published import PublishedMessages
from tests.simulation.root.scenario import KAFKA_TENANT, Drop, RootScenario
from tests.simulation.scenario import Line, Poison
from tests.simulation.watch import Watch

OVER_POLL_SECONDS = 0.5
"""Simulated seconds between two polls whether all is over."""


class RootOracle:
    """Watches the history of one root.

    Args:
        root: the folder in which the store's objects really lie.  inputs: that in which the dropped files do.

    Attributes:
        oracles: of the jobs that were met.  watches: theirs.  drops: job -> the drop that it is of.
        retried: jobs that are second tries.  removed: jobs that a user removed.
        settled: events that came to an end, see `Events`.
        sampled, commits: as `RootWatch` has them, given at the end.
    """

    def __init__(self, scenario: RootScenario, root: Path, inputs: Path, broker: Broker, machine: Machine) -> None:
        self.scenario = scenario
        self.root = root
        self.oracles: dict[str, Oracle] = {}
        self.watches: dict[str, Watch] = {}
        self.drops: dict[str, Drop] = {}
        self.retried: set[str] = set()
        self.removed: set[str] = set()
        self.settled: set[tuple[str, int]] = set()
        self.looks = 0
        self._inputs = inputs
        self._broker = broker
        self._machine = machine
        self._published = PublishedMessages(root, broker)
        self._by_uri = {uri_of(drop): drop for drop in scenario.drops}
        self._over = False
        self._next_poll = 0.0
        self._plans: dict[Path, bytes] = {}
        self._covered = 0  # the highest offset that was seen to be committed, and covered

    # -- queries of the processes

    def path_of(self, uri: str) -> Path:
        """The real path of an input."""
        if uri.startswith(DROPS):
            return self._inputs / uri.removeprefix(DROPS).replace("/", "-")
        return self.root / uri.removeprefix(ROOT)

    def find(self, job: str) -> Watch | None:
        """The watch of a job that stands, if it is to be watched."""
        self.meet(job)
        return None if job in self.removed else self.watches.get(job)

    def poison_of(self, request: str) -> Poison | None:
        """What is poisonous of a request."""
        job, _, row = request.partition("/")
        oracle = self.oracles.get(job)
        return None if oracle is None else oracle.scenario.poisonous.get(int(row.rpartition("/")[2]))

    def job_of(self, drop: Drop) -> str | None:
        """The job that a drop has become."""
        for job in self._jobs():
            self.meet(job)
        return next((job for job, found in self.drops.items() if found is drop and job not in self.retried), None)

    @property
    def over(self) -> bool:
        """Whether all that came in has come to its end."""
        now = self._machine.now
        if now >= self._next_poll or self._over:
            self._next_poll = now + OVER_POLL_SECONDS
            self._over = next(self.unfinished(), None) is None
        return self._over

    def unfinished(self) -> Iterator[str]:
        """What is still to come to an end."""
        scenario = self.scenario
        yield from (process.name for process in self._machine.processes
                    if process.name.startswith("user") and not process.done)  # fmt: skip
        for drop in scenario.drops:
            if self.job_of(drop) is None:
                yield f"{drop.name} is no job"
        if self._broker.committed < len(scenario.records):
            yield f"the offset is {self._broker.committed} of {len(scenario.records)}"
        for job in self._jobs():
            folder = self.root / "jobs" / job
            if (folder / "job.json").exists() and not (folder / "manifest.json").exists():
                yield f"{job} is open"
            elif job not in self.removed and not (self.root / "announced" / "jobs" / job).exists():
                yield f"{job} is not published"

    # -- meeting jobs

    def meet(self, job: str) -> None:
        """Create the oracle and the watch of a stored job."""
        if job in self.oracles or job in self.removed:
            return
        path = self.root / "jobs" / job / "job.json"
        if not path.exists():
            return
        stored_job = json.loads(path.read_bytes())
        if stored_job["id"] != job:
            raise InvariantViolated(f"I1: jobs/{job} holds job {stored_job['id']}")
        lines, poison = self._input_of(job, stored_job)
        requested = tuple(self._requested(stored_job, lines))
        scenario = self.scenario.as_job(requested, tuple(one for one in poison if requested[one.row].text))
        watch = Watch(scenario, path.parent)
        oracle = Oracle(scenario, path.parent, set(), f"jobs/{job}/", watch, alone=False)
        self.watches[job], self.oracles[job] = watch, oracle

    def _input_of(self, job: str, stored_job: dict[str, Any]) -> tuple[tuple[Line, ...], tuple[Poison, ...]]:
        """The lines that a job is to answer; checks its tenant, tier and deadline too."""
        uri = stored_job["input"]["uri"]
        drop = self._by_uri.get(uri)
        if drop is None:
            return self._records_of(job, stored_job), ()
        if stored_job.get("retry_of") is not None:
            self.retried.add(job)
        elif any(found is drop for other, found in self.drops.items() if other not in self.retried | self.removed):
            raise InvariantViolated(f"I1: {drop.name} became another job, {job}")
        self.drops[job] = drop
        if (stored_job["tenant"], stored_job["tier"]) != (drop.tenant, drop.tier):
            raise InvariantViolated(
                f"I1: {job} is {stored_job['tenant']}'s {stored_job['tier']}, but {drop.name} was {drop.tenant}'s"
            )
        if stored_job.get("retry_of") is None:
            span = None
            if "deadline" in stored_job:
                moments = [datetime.fromisoformat(stored_job[name]) for name in ("created_at", "deadline")]
                span = (moments[1] - moments[0]).total_seconds()
            if span != drop.deadline:
                raise InvariantViolated(f"I1: {job} has {span} s, but {drop.name} was given {drop.deadline}")
        return drop.lines, drop.poison

    def _records_of(self, job: str, stored_job: dict[str, Any]) -> tuple[Line, ...]:
        """The lines of a batch of records."""
        path = self.path_of(stored_job["input"]["files"][0]["uri"])
        known = {one.line.text: one for one in self.scenario.records}
        found = [known.get(text) for text in path.read_text().splitlines()]
        tiers = {one.line.text: set[str]() for one in self.scenario.records}
        for one in self.scenario.records:
            tiers[one.line.text].add(one.tier or "standard")
        for one in found:
            if one is None:
                raise InvariantViolated(f"I1: {job} holds a line that no client sent")
            tenant, tier = stored_job["tenant"], stored_job["tier"]
            if tenant != KAFKA_TENANT or tier not in tiers[one.line.text]:
                raise InvariantViolated(f"I1: {job} is {tenant}'s {tier}, but a record of it was not")
        return tuple(one.line for one in found if one is not None)

    def _requested(self, stored_job: dict[str, Any], lines: tuple[Line, ...]) -> Iterator[Line]:
        """The lines, but for those that a second try leaves out; models that the job doesn't have are not found."""
        chosen = _selected(stored_job["settings"].get("rows"), len(lines))
        models = {pin["name"] for pin in stored_job["models"]}
        for row, line in enumerate(lines):
            if not chosen[row]:
                yield Line("")
            elif line.body is not None and line.body["model"] not in models:
                yield replace(line, body=None, error="model_not_found")
            else:
                yield line

    # -- at any moment

    def look(self) -> None:
        """Check what a reader sees now. Raises `InvariantViolated`."""
        self.looks += 1
        for job in self._jobs():
            self.meet(job)
        for job, oracle in self.oracles.items():
            if job not in self.removed and not self._is_buried(job):
                oracle.look()
        self._check_plans()
        self._published.check()
        self._check_offset()
        if self.looks % 4 == 0:
            self._list_jobs()

    def _check_plans(self) -> None:
        """A plan segment that was seen never changes."""
        for job in self.oracles:
            for path in () if job in self.removed else sorted((self.root / "jobs" / job / "plan").glob("*.json")):
                data = path.read_bytes()
                if self._plans.setdefault(path, data) != data:
                    raise InvariantViolated(f"I2: plan/{path.name} of {job} has changed")

    def check_stands(self, acknowledged: set[str]) -> None:
        """Objects whose permanent creation was acknowledged."""
        for key in acknowledged:
            if not (self.root / key).is_file() and not self._may_go(key):
                raise InvariantViolated(f"I2: {key} was reported to stand, and is gone")

    def deleted(self, key: str) -> None:
        """An object is about to go: whether it may."""
        if (self.root / key).is_file() and not self._may_go(key):
            raise InvariantViolated(f"I2: {key} is removed, but is still needed")

    def _may_go(self, key: str) -> bool:
        kind, _, rest = key.partition("/")
        job, _, name = rest.partition("/")
        if kind == "active":
            return True
        if kind != "jobs":
            return kind not in ("catalog", "files", "tenants") and not (kind == "intake" and job == "kafka")
        folder = self.root / "jobs" / job
        ended = (folder / "manifest.json").exists()
        if job in self.removed:
            return True
        if name.startswith("work/"):
            part = folder / "results" / f"part-{name.split('/')[1]}.parquet"
            return ended or part.exists()
        if name.startswith("plans/"):
            return ended
        return name.startswith(("results/", "plan/", "progress.json")) and self._is_buried(job)

    def forget_lost(self, lost: dict[str, tuple[set[str], set[str]]]) -> None:
        """After a power cut. `lost`: job -> names in its results/, and next to it, that may be gone."""
        self._plans = {path: data for path, data in self._plans.items() if path.exists()}
        for job, (parts, records) in lost.items():
            if (self.root / "jobs" / job / "job.json").exists() or "job.json" not in records:
                self.oracles[job].power_was_cut(parts, records)
            else:  # its creation was not acknowledged
                del self.oracles[job], self.watches[job]
                self.drops.pop(job, None)

    def _is_buried(self, job: str) -> bool:
        return (self.root / "jobs" / job / "tombstone.json").exists()

    def _jobs(self) -> list[str]:
        folder = self.root / "jobs"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def _list_jobs(self) -> None:
        """As a user of the command line does."""
        for summary in list_jobs(FolderStore(self.root, read_only=True)):
            if summary.problem is not None and summary.id not in self.removed and summary.id in self.oracles:
                raise InvariantViolated(f"I4: a listing fails: {summary.problem}")

    def _check_offset(self) -> None:
        """All records before the committed offset are in batches that stand."""
        offset = self._broker.committed
        if offset <= self._covered:
            return
        end = 0
        for path in sorted((self.root / "intake/kafka/cluster" / TOPIC / "00000").glob("*.json")):
            batch = json.loads(path.read_bytes())
            if batch["first"] <= end:
                end = max(end, batch["last"] + 1)
        if offset > end:
            raise InvariantViolated(f"I2: offset {offset} is committed, but what is durable ends at {end}")
        self._covered = offset

    # -- at the end

    def judge(self, sampled: int, commits: list[tuple[str, int]]) -> None:
        """Check the outcome. `sampled`: tokens, of all jobs.  `commits`: parts in the order of their creation."""
        self.look()
        left = [what for what in self.unfinished() if not what.startswith("user")]
        if left:
            raise InvariantViolated(f"I7: {left}")
        for job, oracle in self.oracles.items():
            if job not in self.removed and not self._is_buried(job):
                oracle.judge()
                self._published.judge(job, oracle.folder)
        for job in self.removed:
            if (self.root / "active" / job).exists():
                raise InvariantViolated(f"I7: {job} was removed, and is marked as open")
        self._check_records()
        self._check_repeated(sampled)
        self._check_dispatch_order(commits)

    def _check_records(self) -> None:
        """Each record is a row once; one that was sent again may be one more where no consumer could know."""
        lines = Counter[str]()
        for job, oracle in self.oracles.items():
            if job not in self.drops:
                lines.update(line.text for line in oracle.scenario.lines)
        sent = Counter(one.line.text for one in self.scenario.records)
        jumped = any(fault.kind == "jump" for fault in self.scenario.faults)
        for text, times in sent.items():
            if not 1 <= lines[text] <= (times if jumped else 1):
                raise InvariantViolated(f"I1: a record that was sent {times} times is {lines[text]} rows: {text}")

    def _check_repeated(self, sampled: int) -> None:
        manifests = [json.loads(path.read_bytes()) for path in sorted(self.root.glob("jobs/*/manifest.json"))]
        usages = [manifest["usage"] for manifest in manifests]
        committed, repeated = (sum(usage.get(name, 0) for usage in usages) for name in ("completion", "repeated"))
        if repeated > max(0, sampled - committed):
            raise InvariantViolated(f"I5: {repeated} tokens are reported as repeated, but {sampled - committed} were")
        scenario = self.scenario
        if {fault.kind for fault in scenario.faults} <= {"forget"} and scenario.foremen == 1 and sampled != committed:
            bothered = any(
                drop.poison or drop.deadline or drop.cancel_at is not None or drop.remove_at is not None
                for drop in scenario.drops
            )
            if not bothered:
                raise InvariantViolated(f"I5: {sampled - committed} tokens were sampled twice, though no process died")

    def _check_dispatch_order(self, commits: list[tuple[str, int]]) -> None:
        """In a flood the small job's first shard is done long before the flood's last; where both are as urgent, all
        of its shards are."""
        if not self.scenario.flood or len(self.scenario.drops) < 2:
            return
        order = [self.drops[job] for job, part in commits if part]
        few, much = self.scenario.drops[1], self.scenario.drops[0]
        last = len(order) - 1 - order[::-1].index(much)
        mine = [at for at, drop in enumerate(order) if drop is few]
        done = mine[0] if few.tier == "bulk" else mine[-1]
        if done > last - 4:
            who = f"{few.tenant}'s {few.tier} work"
            raise InvariantViolated(
                f"I7: {who} was kept waiting for {much.tenant}'s: its parts are {mine} of {len(order)}"
            )


def _selected(rows: dict[str, Any] | None, count: int) -> list[bool]:
    """Which rows a job is to answer."""
    if rows is None:
        return [True] * count
    bits = zlib.decompress(base64.b64decode(rows["bitmap"]))
    return [row < rows["end"] and bool(bits[row // 8] >> (7 - row % 8) & 1) for row in range(count)]
