"""One history from beginning to end: built from a scenario, run, and judged."""

from __future__ import annotations

import logging
import math
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pipeline.adapters.folder.store import FolderStore
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import JobLedger, JobNotFound
from pipeline.ports import PipelineError
from schemas.jobs.inputs import InputRef
from tests.simulation.disk import Device
from tests.simulation.harness import JOB, PREFIX, JobHarness, input_file
from tests.simulation.machine import InvariantViolated, Machine, Process, ProcessClock
from tests.simulation.oracle import Oracle
from tests.simulation.ports import Broker
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.watch import Watch

LIMIT = 400.0
"""Simulated seconds from the last fault's end to the job's."""


@dataclass(frozen=True)
class Outcome:
    """What became of a history.

    Attributes:
        broken: the invariant that was violated, or None.  digest: of the trace, and of every byte that was left.
        seconds: simulated, from the end of the last fault to the end of the job.
    """

    seed: int
    broken: str | None
    digest: str
    counters: Counter[str]
    seconds: float
    trace: list[str] = field(repr=False)

    @property
    def kind(self) -> str:
        """What was broken, without where: failures of one kind are likely to have one cause."""
        words = (self.broken or "").splitlines()[:1]
        return re.sub(r"[0-9a-f]{16}|\d+", "#", words[0])[:60] if words else ""

    def calls_never_made(self, faults: Iterable[Fault]) -> set[str]:
        """The calls at which `faults` strike, but which no port has made: such a fault tests nothing."""
        return {fault.call for fault in faults if fault.call} - {line.split(" ", 3)[2] for line in self.trace}


def memory_folder() -> Path | None:
    """A folder in memory, where files cost no disk access, if the machine has one."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None


def simulate(scenario: Scenario) -> Outcome:
    """Run one history."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory_folder()))
    try:
        with silent_logs():
            return _simulate(scenario, folder)
    finally:
        shutil.rmtree(folder)


@contextmanager
def silent_logs() -> Iterator[None]:
    """Nothing is logged in the block. The configuration is the process's: it is restored after the block."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _simulate(scenario: Scenario, folder: Path) -> Outcome:
    root, attic = folder / "root", folder / "attic"
    root.mkdir()
    attic.mkdir()
    device = Device(root, attic, random.Random(f"{scenario.seed}/disk"))
    acknowledged: set[str] = set()
    job = root / "jobs" / JOB
    watch = Watch(scenario, job)
    oracle = Oracle(scenario, job, acknowledged, PREFIX, watch)
    machine = Machine(scenario.seed, scenario.faults, lambda: look(), LIMIT)
    broker = Broker(machine, ProcessClock(Process("broker", machine, lambda _: None)))
    harness = JobHarness(scenario, machine, device, broker, pinned(input_file(folder, scenario)), acknowledged, watch)
    harness.build()

    def look() -> None:
        if harness.starting_anew:
            return
        oracle.look()
        _list_jobs(root, exact=oracle.looks % 4 == 0)

    def cut_power() -> None:
        look()
        unsynced = device.unsynced(oracle.folder / "results")
        records = device.unsynced(oracle.folder)
        device.cut_power()
        broker.clear()
        oracle.power_was_cut(unsynced, records)
        look()

    def start_anew(process: Process, fault: Fault) -> None:
        harness.starting_anew = True
        machine.kill_all(fault.amount)
        broker.clear()
        watch.forget()
        oracle.forget()

    machine.power_cut = cut_power
    machine.died = watch.died
    machine.strikes = {**_strikes(harness), "fresh": start_anew}
    broken, seconds = None, 0.0
    try:
        machine.run()
        seconds = machine.now - machine.last_fault
        machine.record("the power is cut once more, when all is done")
        cut_power()
        machine.add("sweeper", harness.sweep)
        machine.run()
        oracle.judge()
    except InvariantViolated as error:
        broken = str(error)
    finally:
        machine.end()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            machine.digest.update(path.read_bytes().replace(bytes(folder), b""))
    counters = machine.counters
    counters["lost more than its bound"] = int(oracle.over_the_bound)
    counters["rows blamed"], counters["blamed by coincidence"] = len(oracle.blamed), oracle.coincidences
    counters["port calls"] = machine.calls[""]
    counters["completed" if oracle.outcome == "completed" else f"ended as {oracle.outcome}"] += 1
    counters["tokens sampled"] = watch.sampled
    counters["deaths"], counters["looks"], counters["parts"] = machine.deaths, oracle.looks, len(oracle.parts)
    return Outcome(scenario.seed, broken, machine.digest.hexdigest(), counters, seconds, machine.trace)


def _list_jobs(root: Path, *, exact: bool) -> None:
    """List jobs as the command line does: all that is stored at this moment must be readable."""
    ledger = JobLedger(FolderStore(root, read_only=True), PREFIX)
    try:
        summarize_job(ledger, exact=exact)
    except JobNotFound:
        return
    except PipelineError as error:
        raise InvariantViolated(f"I4: a listing fails: {error}") from error


def pinned(path: Path) -> InputRef:
    """The input, without what differs from one disk to the next."""
    whole = pin_input(path)
    return whole.model_copy(update={"files": tuple(file.model_copy(update={"stamp": None}) for file in whole.files)})


def _strikes(harness: JobHarness) -> dict[str, Callable[[Process, Fault], None]]:
    """What faults do that are not the machine's own."""
    broker, machine = harness.broker, harness.machine

    def stop(process: Process, fault: Fault) -> None:
        process.stopping = process.name.startswith("worker")

    def lose(process: Process, fault: Fault) -> None:
        broker.lose += 1

    def double(process: Process, fault: Fault) -> None:
        broker.double += 1

    def late(process: Process, fault: Fault) -> None:
        broker.late.append(fault.amount)

    def reorder(process: Process, fault: Fault) -> None:
        broker.reorder = True

    def full(process: Process, fault: Fault) -> None:
        harness.device.full += 1

    def fail(process: Process, fault: Fault) -> None:
        process.failing += 1

    def break_engine(process: Process, fault: Fault) -> None:
        process.failing = math.inf

    def forget(process: Process, fault: Fault) -> None:
        broker.forget()

    def plan(process: Process, fault: Fault) -> None:
        machine.add(f"planner-at-{machine.calls['']}", harness.plan)

    def cancel(process: Process, fault: Fault) -> None:
        machine.add(f"canceller-at-{machine.calls['']}", harness.cancel)

    def damage(process: Process, fault: Fault) -> None:
        found = sorted((harness.device.root / PREFIX / "work").glob("*/*-??????"))
        if found:
            path = machine.chance.choice(found)
            data = bytearray(path.read_bytes())
            if data:
                data[machine.chance.randrange(len(data))] ^= 0xFF
                path.write_bytes(data)
                harness.watch.blind = True

    return {
        "stop": stop, "lose": lose, "double": double, "late": late, "reorder": reorder, "full": full, "forget": forget,
        "plan": plan, "cancel": cancel, "damage": damage, "fail": fail, "break": break_engine,
    }  # fmt: skip
