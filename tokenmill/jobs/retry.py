"""Retries in a root: a job beside the first one, for the workers that are there."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from tokenmill import output
from tokenmill.config.job_options import check_cap

if TYPE_CHECKING:
    from pipeline.jobs.retry import Retry, RetryOverrides
    from pipeline.ports import ObjectStore
    from schemas.jobs.job import Job
    from schemas.jobs.results import RowStatus
    from schemas.settings.settings import Settings
    from tokenmill.jobs.locator import JobLocation


def retry_in_root(
    place: JobLocation,
    settings: Settings,
    statuses: Collection[RowStatus],
    wishes: RetryOverrides,
    *,
    include_invalid: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Make the retry, print its id, and follow it if asked to.

    Raises:
        UserError: what is wished can't be had, or the retry that is watched failed as a whole.
        PipelineError: the first job has not ended or leaves no rows to try, or the root can't be used.
    """
    from pipeline.ingest.intake import Intake
    from pipeline.jobs.retry import NothingToRetry, choose_rows, submit_retry
    from tokenmill.jobs.locator import open_job_readonly
    from tokenmill.jobs.watch import tell_end
    from tokenmill.jobs.watch import watch as follow
    from tokenmill.root import intake_settings, open_root

    with open_job_readonly(place, settings) as ledger:
        first, ended = choose_rows(ledger, statuses, include_invalid=include_invalid), ledger.manifest()
        tell_missing_models(first.job, ledger.store)
    if ended is None:
        raise NothingToRetry(f"{place}: the job has not ended")
    if wishes.max_output_tokens is not None:
        tier = wishes.tier or first.job.tier
        check_cap(wishes.max_output_tokens, settings.max_output_tokens.of(tier), tier)
    with open_root(place.root, settings) as root:
        doors = Intake(root.world, intake_settings(settings))
        made = submit_retry(first, ended, wishes, root.world, partial(doors.expect, first.job.tenant))
        document = {
            "id": made.job.id, "created": made.created, "retry_of": first.job.id, "rows": first.count,
            "left_out": first.left_out,
        }  # fmt: skip
        if not as_json:
            print(made.job.id, flush=True)
        elif not watch:
            output.print_json(document)
        if made.created:
            tell_rows(first)
        else:
            output.say(f"{made.job.id}: was made before by the same command; a retry of it tries what it left")
        if not watch:
            return
        ledger = root.ledger(made.job.id)
        done = follow(ledger)
    if as_json:
        output.print_json(document | {"manifest": done.model_dump(mode="json")})
    tell_end(done, ledger.place())


def tell_rows(first: Retry) -> None:
    """What is tried again, and what isn't."""
    rows = "all rows" if first.count is None else f"{output.count(first.count)} rows"
    output.say(f"trying {rows} of {first.job.id} again")
    if first.left_out:
        why = ", ".join(f"{output.count(count)} {code}" for code, count in sorted(first.left_out.items()))
        output.say(f"left out, since they would be refused again: {why}; --include-invalid tries them all the same")


def tell_missing_models(job: Job, store: ObjectStore) -> None:
    """The retry runs on the very models of the first job; who would wait for one that is served no more is told."""
    from pipeline.models.catalog import Catalog

    served = {entry.pin.key for entry in Catalog(store).entries()}
    for pin in job.models:
        if pin.key not in served:
            output.say(f"no worker offers {pin.name} as it answered in {job.id}: the rows wait until one does")
