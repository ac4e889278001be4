"""Jobs that are closed while workers commit their parts: cancelled by several at once, and tried again by several."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.retry import NothingToRetry, choose_rows
from pipeline.jobs.submit import JobOrder, derived_job_id, submit
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ports import World
from schemas.jobs.outcome import JobStatus
from tests.cluster.cluster import Cluster, settings_of
from tests.cluster.faults_load import Senders
from tests.cluster.faults_plan import JobInput
from tests.cluster.faults_watch import Watch
from tests.waiting import wait_for

BEGIN_SECONDS: Final = 200.0
"""Timeout for the first rows of a job, in seconds."""

END_SECONDS: Final = 200.0
"""Timeout for the end of a cancelled job, in seconds."""


class Races:
    """Sends a job, and closes it when its first rows stand."""

    def __init__(self, cluster: Cluster, senders: Senders, watch: Watch) -> None:
        self._cluster = cluster
        self._senders = senders
        self._watch = watch

    def cancel(self, job_input: JobInput) -> str:
        """Cancel it twice at once; the job."""
        self._senders.send(job_input)
        jobs = wait_for(
            lambda: self._watch.jobs_of(job_input.label), f"{job_input.label} has no rows", seconds=BEGIN_SECONDS
        )
        job = min(jobs)
        with ThreadPoolExecutor(2) as pool:
            for found in [pool.submit(self._senders.cancel, job, f"{job_input.label}-{n}") for n in range(2)]:
                found.result()
        return job

    def retry(self, job_input: JobInput) -> None:
        """Cancel it, and try its rows again as soon as it has ended: two at once, of whom one makes the job."""
        job = self.cancel(job_input)
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(self._retry, job) for _ in range(2)]
            ids = {found.result() for found in made}
        assert len(ids) == 1, f"two who tried {job} again have made {ids}"

    def _retry(self, job: str) -> str | None:
        """Make the job that tries the rows of `job` again, once that has ended; None: the cancel came too late."""
        settings = settings_of(self._cluster.s3)
        with S3Store.from_url(self._cluster.root, settings) as store:
            world = World(store, SystemClock(), SystemRandomness(), store.scratch)
            first = JobLedger(store, f"{JOBS}{job}/")
            until = time.monotonic() + END_SECONDS
            while True:
                try:
                    chosen = choose_rows(first)
                    break
                except NothingToRetry:
                    manifest = first.manifest()
                    if manifest is not None and manifest.status is JobStatus.COMPLETED:
                        return None
                    if time.monotonic() > until:
                        raise
                time.sleep(0.05)
            order = JobOrder(
                input=chosen.job.input, models=chosen.job.models, tenant=chosen.job.tenant, tier=chosen.job.tier,
                settings=chosen.job.settings.model_copy(update={"rows": chosen.rows}), retry_of=job,
            )  # fmt: skip
            name = derived_job_id(chosen.job.created_at, "retry", job)
            return submit(order, JobLedger(store, f"{JOBS}{name}/"), world, job_id=name).job.id
