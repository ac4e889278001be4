"""One history of a root from beginning to end: built from a scenario, run, and judged."""

from __future__ import annotations

import math
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline.adapters.folder.store import FolderStore
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ledger.active_index import sweep
from tests.simulation.disk import Device
from tests.simulation.history import Outcome, memory_folder, silent_logs
from tests.simulation.machine import InvariantViolated, Machine, Process, ProcessClock
from tests.simulation.root.harness import RootHarness
from tests.simulation.root.ingest import Inbox, content
from tests.simulation.root.oracle import RootOracle
from tests.simulation.root.ports import Broker
from tests.simulation.root.scenario import RootScenario
from tests.simulation.root.users import build_users
from tests.simulation.root.watch import RootWatch
from tests.simulation.scenario import Fault

LIMIT = 600.0
"""Simulated seconds from the end of the last fault, and of what comes from outside, to the end of all jobs. An
ingest source that was frozen for 40 s doesn't sweep for ten times as long, and an event may be lost."""


def simulate_root(scenario: RootScenario) -> Outcome:
    """Run one history."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory_folder()))
    try:
        with silent_logs():
            return _History(scenario, folder).run()
    finally:
        shutil.rmtree(folder)


class _History:
    def __init__(self, scenario: RootScenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.root, attic, inputs = folder / "root", folder / "attic", folder / "inputs"
        for path in (self.root, attic, inputs):
            path.mkdir()
        for drop in scenario.drops:
            (inputs / f"{drop.tenant}-{drop.name}").write_bytes(content(drop.lines))
        self.device = Device(self.root, attic, random.Random(f"{scenario.seed}/disk"))
        self.machine = Machine(scenario.seed, scenario.faults, self.look, LIMIT, look_chance=0.015)
        self.machine.last_fault = max(_moments(scenario), default=0.0)
        self.broker = Broker(self.machine, ProcessClock(Process("broker", self.machine, lambda _: None)))
        self.oracle = RootOracle(scenario, self.root, inputs, self.broker, self.machine)
        self.watch = RootWatch(self.oracle.find, self.oracle.deleted)
        self.bucket = None if scenario.folder else FolderStore(self.root)
        self.harness = RootHarness(
            scenario, self.machine, self.device, self.bucket, self.broker, self.oracle, self.watch
        )

    def run(self) -> Outcome:
        machine = self.machine
        machine.power_cut, machine.died = self.cut_power, self.watch.died
        machine.strikes = strikes(self.harness)
        broken, seconds = None, 0.0
        try:
            self.harness.build()
            build_users(self.harness)
            machine.run()
            seconds = max(0.0, machine.now - machine.last_fault)
            if self.scenario.folder:
                machine.record("the power is cut once more, when all is done")
                machine.kill_all(1.0)
                self.cut_power()
                machine.run()
            machine.add("sweeper", self.sweep)
            machine.run()
            if self.bucket is not None:
                self.bucket.close()
            self.look()
            self.oracle.judge(self.watch.sampled, self.watch.commits)
        except InvariantViolated as error:
            unfinished = "; ".join(self.oracle.unfinished()) if str(error).startswith("I7") else ""
            broken = f"{error}\n{unfinished}".strip()
        finally:
            machine.end()
            if self.bucket is not None:
                self.bucket.close()
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                machine.digest.update(path.read_bytes().replace(bytes(self.folder), b""))
        self._count()
        return Outcome(self.scenario.seed, broken, machine.digest.hexdigest(), machine.counters, seconds, machine.trace)

    def look(self) -> None:
        self.oracle.look()
        self.oracle.check_stands(self.watch.acknowledged)

    def cut_power(self) -> None:
        self.broker.clear()
        if self.bucket is not None:
            return
        self.look()
        folders = {job: oracle.folder for job, oracle in self.oracle.oracles.items()}
        lost = {
            job: (self.device.unsynced(folder / "results"), self.device.unsynced(folder))
            for job, folder in folders.items()
        }
        self.device.cut_power()
        self.oracle.forget_lost(lost)
        self.look()

    def sweep(self, process: Process) -> None:
        """All events once more, after the end, and the periodic sweeps."""
        with self.harness.ports(process) as ports:
            intake = self.harness.intake(ports)
            for drop in self.scenario.drops:
                if self.oracle.job_of(drop) not in self.oracle.removed:
                    FileIngestSource(Inbox(drop.tenant, (drop,), process), intake, ports.world).take(drop.name, "v1")
            sweep(ports.world.store)
            self.harness.collect_once(ports)

    def _count(self) -> None:
        machine, oracle, scenario = self.machine, self.oracle, self.scenario
        counters = machine.counters
        counters.update(self.watch.counters)
        counters["port calls"], counters["deaths"], counters["looks"] = machine.calls[""], machine.deaths, oracle.looks
        counters["tokens sampled"] += 0
        counters["jobs"] = len(oracle.oracles)
        for found in oracle.oracles.values():
            counters["completed" if found.outcome == "completed" else f"ended as {found.outcome}"] += 1
            counters["rows blamed"] += len(found.blamed)
            counters["parts"] += len(found.parts)
        counters["messages"] = len(self.broker.topics)
        counters["roots in a folder" if scenario.folder else "roots in a bucket"] = 1
        counters["floods"] = int(scenario.flood)
        counters["records"] = len(scenario.records)
        counters["jobs whose results went"] = len(list(self.root.glob("jobs/*/tombstone.json")))


def _moments(scenario: RootScenario) -> list[float]:
    """When something comes from outside."""
    found = [one.at for one in scenario.records]
    for drop in scenario.drops:
        found += [drop.at, drop.cancel_at or 0.0, drop.remove_at or 0.0, *(at for at, _ in drop.told)]
    return found


def strikes(harness: RootHarness) -> dict[str, Callable[[Process, Fault], None]]:
    """What faults do that are not the machine's own."""
    broker, machine = harness.broker, harness.machine

    def restart(process: Process, fault: Fault) -> None:
        machine.kill_all(fault.amount)
        broker.clear()

    def stop(process: Process, fault: Fault) -> None:
        process.stopping = not process.name.startswith(("user", "catalog", "sweeper"))

    def count(name: str) -> Callable[[Process, Fault], None]:
        def more(process: Process, fault: Fault) -> None:
            setattr(broker, name, getattr(broker, name) + 1)

        return more

    def late(process: Process, fault: Fault) -> None:
        broker.late.append(fault.amount)

    def reorder(process: Process, fault: Fault) -> None:
        broker.reorder = True

    def forget(process: Process, fault: Fault) -> None:
        broker.clear()

    def away(process: Process, fault: Fault) -> None:
        broker.away_until = max(broker.away_until, machine.now + fault.amount)

    def split(process: Process, fault: Fault) -> None:
        broker.split_until = max(broker.split_until, machine.now + fault.amount)

    def unled(process: Process, fault: Fault) -> None:
        broker.holder = ("", 0.0)

    def fail(process: Process, fault: Fault) -> None:
        process.failing += 1

    def break_engine(process: Process, fault: Fault) -> None:
        process.failing = math.inf

    return {
        "restart": restart, "stop": stop, "late": late, "reorder": reorder, "forget": forget, "away": away,
        "split": split, "unled": unled, "fail": fail, "break": break_engine,
        **{name: count(name) for name in ("lose", "double", "refuse", "after", "silent", "mute")},
    }  # fmt: skip
