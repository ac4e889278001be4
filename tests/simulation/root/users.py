"""Users of a root: they cancel a job, retry its failed rows, or remove it in any state."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from pipeline.jobs.retry import NothingToRetry, choose_rows
from pipeline.jobs.submit import JobOrder, clear, derived_job_id, submit
from pipeline.ledger.ledger import ResultsRemoved
from pipeline.ports import PipelineError
from schemas.jobs.job import Closing
from tests.simulation.machine import START, Process
from tests.simulation.root.harness import ProcessPorts, RootHarness
from tests.simulation.root.scenario import Drop


def build_users(harness: RootHarness) -> None:
    """Add them to the machine."""
    for drop in harness.scenario.drops:
        if drop.cancel_at is not None:
            harness.machine.add(f"user-cancels-{drop.name}", _user(harness, drop, _cancel), drop.cancel_at)
        if drop.retry:
            harness.machine.add(f"user-retries-{drop.name}", _user(harness, drop, _retry), drop.at)
        if drop.remove_at is not None:
            harness.machine.add(f"user-removes-{drop.name}", _user(harness, drop, _remove), drop.remove_at)


def _user(
    harness: RootHarness, drop: Drop, act: Callable[[RootHarness, ProcessPorts, str, Drop], bool]
) -> Callable[[Process], None]:
    """A user who acts once the drop is a job, and retries when the action failed."""

    def run(process: Process) -> None:
        with harness.ports(process) as ports:
            while True:
                job = harness.oracle.job_of(drop)
                try:
                    if job is not None and act(harness, ports, job, drop):
                        return
                except PipelineError:
                    harness.machine.counters["users that failed"] += 1
                ports.world.clock.sleep(1.0)

    return run


def _cancel(harness: RootHarness, ports: ProcessPorts, job: str, drop: Drop) -> bool:
    ledger = ports.ledger(job)
    if job not in harness.oracle.removed and ledger.manifest() is None:
        ledger.create_closing(Closing(kind="cancel", at=ports.world.clock.now()))
    return True


def _retry(harness: RootHarness, ports: ProcessPorts, job: str, drop: Drop) -> bool:
    """As soon as it has ended."""
    if job in harness.oracle.removed:
        return True
    if ports.ledger(job).manifest() is None:
        return False
    try:
        first = choose_rows(ports.ledger(job))
    except (NothingToRetry, ResultsRemoved):
        return True
    order = JobOrder(
        input=first.job.input, models=first.job.models, tenant=first.job.tenant,
        settings=first.job.settings.model_copy(update={"rows": first.rows}), tier=first.job.tier, retry_of=job,
    )  # fmt: skip
    again = derived_job_id(START + timedelta(seconds=drop.at), "retry", job)
    submit(order, ports.ledger(again), ports.world, job_id=again)
    harness.machine.counters["jobs tried again"] += 1
    return True


def _remove(harness: RootHarness, ports: ProcessPorts, job: str, drop: Drop) -> bool:
    """Once no event of it will come any more: its event would make it anew. Again, when that was interrupted."""
    events = {(drop.name, number) for number in range(len(drop.told))}
    if not events <= harness.oracle.settled:
        return False
    harness.oracle.removed.add(job)
    clear(ports.ledger(job))
    harness.machine.counters["jobs removed"] += 1
    return True
