"""Users of a root: who cancels a job, tries its failed rows again, or removes it whatever it is at."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from pipeline.jobs.retry import NothingToRetry, choose_rows
from pipeline.jobs.submit import JobOrder, clear, derived_job_id, submit
from pipeline.ledger.ledger import ResultsRemoved
from pipeline.ports import PipelineError
from schemas.jobs.job import Closing
from tests.simulation.machine import START, Process
from tests.simulation.root.harness import Office, RootHouse
from tests.simulation.root.scenario import Drop


def build_users(house: RootHouse) -> None:
    """Add them to the machine."""
    for drop in house.scenario.drops:
        if drop.cancel_at is not None:
            house.machine.add(f"user-cancels-{drop.name}", _user(house, drop, _cancel), drop.cancel_at)
        if drop.retry:
            house.machine.add(f"user-retries-{drop.name}", _user(house, drop, _retry), drop.at)
        if drop.remove_at is not None:
            house.machine.add(f"user-removes-{drop.name}", _user(house, drop, _remove), drop.remove_at)


def _user(
    house: RootHouse, drop: Drop, act: Callable[[RootHouse, Office, str, Drop], bool]
) -> Callable[[Process], None]:
    """Somebody who does it once the drop is a job, and again when it could not be done."""

    def run(process: Process) -> None:
        with house.office(process) as office:
            while True:
                job = house.oracle.job_of(drop)
                try:
                    if job is not None and act(house, office, job, drop):
                        return
                except PipelineError:
                    house.machine.counters["users that failed"] += 1
                office.world.clock.sleep(1.0)

    return run


def _cancel(house: RootHouse, office: Office, job: str, drop: Drop) -> bool:
    ledger = office.ledger(job)
    if job not in house.oracle.removed and ledger.manifest() is None:
        ledger.create_closing(Closing(kind="cancel", at=office.world.clock.now()))
    return True


def _retry(house: RootHouse, office: Office, job: str, drop: Drop) -> bool:
    """As soon as it has ended."""
    if job in house.oracle.removed:
        return True
    if office.ledger(job).manifest() is None:
        return False
    try:
        first = choose_rows(office.ledger(job))
    except (NothingToRetry, ResultsRemoved):
        return True
    order = JobOrder(
        input=first.job.input, models=first.job.models, tenant=first.job.tenant,
        settings=first.job.settings.model_copy(update={"rows": first.rows}), tier=first.job.tier, retry_of=job,
    )  # fmt: skip
    again = derived_job_id(START + timedelta(seconds=drop.at), "retry", job)
    submit(order, office.ledger(again), office.world, job_id=again)
    house.machine.counters["jobs tried again"] += 1
    return True


def _remove(house: RootHouse, office: Office, job: str, drop: Drop) -> bool:
    """Once no event of it will come any more: its event would make it anew. Again, when that was interrupted."""
    told = {(drop.name, number) for number in range(len(drop.told))}
    if not told <= house.oracle.settled:
        return False
    house.oracle.removed.add(job)
    clear(office.ledger(job))
    house.machine.counters["jobs removed"] += 1
    return True
