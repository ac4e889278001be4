"""Garbage collection of a root in a bucket, abandoned multipart uploads included."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.maintenance.retention import RemovedKind, RetentionSettings, RetentionSweep
from pipeline.ports import World
from tests.pipeline.made_jobs import end_job, order
from tests.servers.moto import MotoServer


def test_given_a_root_in_a_bucket_when_collected_then_old_results_and_uploads_go_and_open_jobs_stay(
    s3_server: MotoServer, unique_name: Callable[[], str]
) -> None:
    bucket = s3_server.make_bucket(f"retention-{unique_name()[-8:]}")
    settings = S3Settings(
        endpoint=s3_server.endpoint,
        region=s3_server.region,
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
        retry_timeout_seconds=5.0,
    )
    with S3Store(bucket, "root", S3Connection(settings)) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        ended, opened = (JobLedger(store, f"jobs/job-{number}/") for number in (1, 2))
        for ledger in (ended, opened):
            submit(order(), ledger, world, job_id=ledger.name)
            ledger.create("results/part-00001.parquet", b"rows")
            ledger.create("work/00001/log", b"log")
        end_job(ended, world.clock.now() - timedelta(hours=1))
        client = s3_server.client()
        client.create_multipart_upload(Bucket=bucket, Key="root/jobs/job-1/results/part-00009.parquet")
        client.create_multipart_upload(Bucket=bucket, Key="elsewhere/large")

        long = timedelta(days=365 * 30)  # this server says of all uploads that they began in 2010
        young = RetentionSweep(world, RetentionSettings(uploads=long)).run()
        assert young.objects[RemovedKind.UPLOAD] == 0
        assert ended.tombstone() is None
        none = timedelta(seconds=-60)
        done = RetentionSweep(world, RetentionSettings(outputs=timedelta(minutes=5), uploads=none)).run()
        assert (done.jobs, done.objects[RemovedKind.UPLOAD]) == (["job-1"], 1)
        left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
        assert [upload["Key"] for upload in left] == ["elsewhere/large"], "others' uploads are none of ours"
        assert {info.key for info in store.list("jobs/job-1/")} == {
            "jobs/job-1/job.json",
            "jobs/job-1/manifest.json",
            "jobs/job-1/tombstone.json",
        }
        assert {"jobs/job-2/results/part-00001.parquet", "jobs/job-2/work/00001/log"} <= {
            info.key for info in store.list("jobs/job-2/")
        }
