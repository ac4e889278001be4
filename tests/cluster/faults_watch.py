"""A reader that polls the results during a run, as users may at any moment, and records what it reads and when.

Its records are evidence: a part that it has read must be unchanged at the end, and each read must be whole. It reads
the objects of users (results, manifest, progress) directly, not through the failing proxy.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import JOBS, MANIFEST, PROGRESS, RESULTS
from tests.cluster.cluster import BUCKET, Cluster
from tests.cluster.faults_plan import JobInput

EVERY: Final = 1.0
"""Poll interval in seconds."""


@dataclass
class SeenJob:
    """A job as far as it was seen; times are monotonic.

    Attributes:
        label: that of its input, once a row has been read.
        parts: key -> (size, the store's tag, when it was seen first).
        ended_at: when its manifest was seen.
    """

    label: str | None = None
    parts: dict[str, tuple[int, str, float]] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    ended_at: float | None = None


class Watch:
    """Polls on a thread of its own inside a `with` block.

    Attributes:
        digests: key of each part that was seen -> sha256 of its bytes.
        complaints: violations that it found.
        polls: number of polls.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._s3 = cluster.s3.client()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._lock = threading.Lock()
        self._jobs: dict[str, SeenJob] = {}
        self.digests: dict[str, str] = {}
        self.complaints: list[str] = []
        self.polls = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    # -- observations

    def jobs_of(self, label: str) -> dict[str, SeenJob]:
        """Jobs of an input."""
        with self._lock:
            return {name: job for name, job in self._jobs.items() if job.label == label}

    def done_at(self, job_input: JobInput) -> float | None:
        """When all of the input's rows stood in jobs that have ended; None: not yet."""
        ended = [job for job in self.jobs_of(job_input.label).values() if job.ended_at is not None]
        if sum(sum(job.rows.values()) for job in ended) < job_input.rows:
            return None
        return max(job.ended_at or 0.0 for job in ended)

    def part_at(self, job: str, number: int) -> float | None:
        """When the part was seen first."""
        with self._lock:
            seen = self._jobs.get(job)
            found = None if seen is None else seen.parts.get(f"{JOBS}{job}/{RESULTS}part-{number:05d}.parquet")
        return None if found is None else found[2]

    def still_open(self) -> list[str]:
        """Jobs whose end was not seen."""
        with self._lock:
            return sorted(name for name, job in self._jobs.items() if job.ended_at is None)

    # -- polling

    def _run(self) -> None:
        try:
            while not self._stop.wait(EVERY):
                self.poll()
        except Exception as error:  # noqa: BLE001 - the thread is joined at the end, and then the error is a finding
            self.complaints.append(f"the reader ended: {error!r}")

    def poll(self) -> None:
        """Read every job that hasn't ended."""
        for name in self._folders():
            with self._lock:
                job = self._jobs.setdefault(name, SeenJob())
            if job.ended_at is None:
                self._poll_job(name, job)
        self.polls += 1

    def _poll_job(self, name: str, job: SeenJob) -> None:
        manifest = self._read(f"{JOBS}{name}/{MANIFEST}")  # first: the parts that are listed then are all there are
        standing = {info["Key"]: info for info in self._list(f"{JOBS}{name}/{RESULTS}")}
        for key, (size, tag, _) in job.parts.items():
            now = standing.get(key)
            if now is None or (now["Size"], now["ETag"]) != (size, tag):
                self.complaints.append(f"I2: {key} {'is gone' if now is None else 'has changed'}")
        for key in sorted(standing.keys() - job.parts.keys()):
            self._read_part(key, job)
            with self._lock:
                job.parts[key] = (standing[key]["Size"], standing[key]["ETag"], time.monotonic())
        for record, data in ((MANIFEST, manifest), (PROGRESS, self._read(f"{JOBS}{name}/{PROGRESS}"))):
            if data is not None:
                self._check_counts(f"{name}/{record}", json.loads(data)["counts"])
        if manifest is not None:
            job.ended_at = time.monotonic()

    def _read_part(self, key: str, job: SeenJob) -> None:
        data = self._read(key)
        if data is None:
            self.complaints.append(f"I2: {key} was listed, and is gone")
            return
        self.digests[key] = hashlib.sha256(data).hexdigest()
        try:
            rows = pq.read_table(io.BytesIO(data), columns=["row", "custom_id"], use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            self.complaints.append(f"I4: {key} was no whole Parquet file when it was seen first: {error}")
            return
        labels = Counter((custom_id or "").rpartition("/")[0] for custom_id in rows["custom_id"].to_pylist())
        with self._lock:
            job.rows.update(labels)
            job.label = job.label or next(filter(None, labels), None)

    def _check_counts(self, where: str, counts: dict[str, int]) -> None:
        total = sum(count for name, count in counts.items() if name != "total")
        if total != counts["total"]:
            self.complaints.append(f"I3: {where} counts {counts}")

    def _folders(self) -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=JOBS, Delimiter="/")
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return [prefix.removeprefix(JOBS).rstrip("/") for prefix in found]

    def _list(self, prefix: str) -> Iterator[dict[str, Any]]:
        for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
            yield from page.get("Contents", [])

    def _read(self, key: str) -> bytes | None:
        try:
            data: bytes = self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        except self._s3.exceptions.NoSuchKey:
            return None
        return data
