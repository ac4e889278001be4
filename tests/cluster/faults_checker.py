"""Checks a run from outside, by its inputs: reads Kafka, Parquet and the jobs' records with json and pyarrow.

It shares no code with the ledger, the results' readers or the publisher, and reads no internal objects of jobs.

    I1  each line has one terminal result in its job, and its text is that of an undisturbed run; a row is cancelled or
        expired only if closing.json has that reason; an input becomes one job for each time it was sent, and a retry
        has the rows that the first job left; each result is published on Kafka, the same in each repeat, and nothing
        else is; an invalid request is a dead letter
    I2  a part that a reader saw during the run is unchanged
    I3  the manifest's counts are those of the rows and sum to the total; its files are the parts, by size and sha256
    I4  each object under results/ is a whole Parquet file, and was at each read
    I5  repeated tokens are reported, and within the manifest's bound
    I7  every job has ended (the script measures how soon after each fault)
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.cluster.faults_evidence import Evidence, TopicRecord
from tests.cluster.faults_plan import JobInput, Line

PART = re.compile(r"part-\d{5}\.parquet")
STATUSES = ("succeeded", "failed", "expired", "cancelled")
CLOSED = {("cancelled", "batch_cancelled"): "cancel", ("expired", "batch_expired"): "expire"}
ENDINGS = {"cancelled": "cancelled", "expired": "expired"}
Row = dict[str, Any]


@dataclass
class CopiedJob:
    """A job as it is stored. `rows`: all of its results, in order."""

    name: str
    rows: list[Row]
    manifest: dict[str, Any] | None
    closing: str | None
    label: str = ""

    @property
    def created_at(self) -> str:
        return "" if self.manifest is None else str(self.manifest["created_at"])


@dataclass
class Checker:
    """Checks all invariants; `broken` has a line for each violation, which begins with the invariant.

    Attributes:
        notes: oddities that tokenmill doesn't cause.
        outcomes: jobs by how they ended.  rows: by status.  tokens: of committed answers, repeated, and at most.
    """

    evidence: Evidence
    broken: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    repeats_published: int = 0
    notes: list[str] = field(default_factory=list)

    def judge(self) -> list[str]:
        """All violations."""
        self.broken += self.evidence.complaints
        self._check_seen()
        folder = self.evidence.jobs
        jobs = [self._read_job(job_folder) for job_folder in sorted(folder.iterdir())] if folder.is_dir() else []
        by_label: defaultdict[str, list[CopiedJob]] = defaultdict(list)
        for job in jobs:
            by_label[job.label].append(job)
        sent = {job_input.label: job_input for job_input in self.evidence.sent}
        for job in (job for label, of_it in by_label.items() if label not in sent for job in of_it):
            self._report_violation("I1", f"job {job.name} is of no input")
        for label, job_input in sent.items():
            found = sorted(by_label[label], key=lambda job: (job.created_at, job.name))
            if job_input.source == "kafka records":
                self._check_records(job_input, found)
            else:
                self._check_file(job_input, found)
        self._check_published(sent, jobs)
        self._check_dead_letters(sent)
        self._check_sampled()
        return self.broken

    def _report_violation(self, invariant: str, what: str) -> None:
        self.broken.append(f"{invariant}: {what}")

    # -- a job by itself

    def _check_seen(self) -> None:
        for key, digest in sorted(self.evidence.seen.items()):
            path = self.evidence.jobs / key
            if not path.is_file():
                self._report_violation("I2", f"{key} was seen, and is gone")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                self._report_violation("I2", f"{key} is not what was seen")

    def _read_job(self, job_folder: Path) -> CopiedJob:
        rows: list[Row] = []
        files: dict[str, tuple[int, str, int]] = {}
        for path in sorted((job_folder / "results").iterdir()) if (job_folder / "results").is_dir() else ():
            data = path.read_bytes()
            try:
                found = pq.read_table(io.BytesIO(data), use_threads=False).to_pylist()
            except (pa.ArrowInvalid, OSError) as error:
                self._report_violation(
                    "I4", f"{job_folder.name}/results/{path.name} is not a whole Parquet file: {error}"
                )
                continue
            if not PART.fullmatch(path.name):
                self._report_violation("I4", f"{job_folder.name}/results/{path.name} is no part")
            files[f"results/{path.name}"] = (len(data), hashlib.sha256(data).hexdigest(), len(found))
            rows += found
        records = {name: job_folder / f"{name}.json" for name in ("manifest", "closing")}
        read = {name: json.loads(path.read_bytes()) if path.is_file() else None for name, path in records.items()}
        closing = None if read["closing"] is None else str(read["closing"]["kind"])
        labels = {row["custom_id"].rpartition("/")[0] for row in rows if row["custom_id"]}
        if len(labels) > 1:
            self._report_violation("I1", f"job {job_folder.name} has rows of several inputs: {sorted(labels)}")
        job = CopiedJob(job_folder.name, rows, read["manifest"], closing, min(labels, default=""))
        self._check_manifest(job, files)
        return job

    def _check_manifest(self, job: CopiedJob, files: dict[str, tuple[int, str, int]]) -> None:
        manifest = job.manifest
        if manifest is None:
            self._report_violation("I7", f"job {job.name} has not ended")
            return
        statuses = Counter(row["status"] for row in job.rows)
        self.outcomes[manifest["status"]] += 1
        self.rows.update(statuses)
        counts = manifest["counts"]
        shown = {name: counts[name] for name in STATUSES if counts.get(name)}
        if shown != dict(statuses) or counts["total"] != len(job.rows) or counts.get("pending"):
            self._report_violation("I3", f"job {job.name} counts {counts}, but its rows are {dict(statuses)}")
        listed = {entry["path"]: (entry["size"], entry["sha256"], entry["rows"]) for entry in manifest["files"]}
        if listed != files:
            odd = sorted(name for name in listed.keys() | files.keys() if listed.get(name) != files.get(name))
            self._report_violation(
                "I3", f"the manifest of job {job.name} has other files than results/ holds: {odd[:5]}"
            )
        ended = next((ENDINGS[name] for name in ("cancelled", "expired") if statuses[name]), "completed")
        if manifest["status"] != ended:
            self._report_violation("I3", f"job {job.name} ended as {manifest['status']}, but its rows say {ended}")
        usage = manifest["usage"]
        repeated, at_most = usage.get("repeated", 0), manifest.get("repeated_at_most", 0)
        self.tokens.update({"committed": usage.get("completion", 0), "repeated": repeated, "at most": at_most})
        if repeated > at_most:
            self._report_violation("I5", f"job {job.name} reports {repeated} repeated tokens, but at most {at_most}")

    # -- an input and its jobs

    def _check_file(self, job_input: JobInput, jobs: list[CopiedJob]) -> None:
        times = 1
        if job_input.source == "kafka jobs":  # each record in the topic is a job of its own
            name = f"/{job_input.label}.jsonl".encode()
            times = sum(name in record.value for record in self.evidence.references)
        if not times <= len(jobs) <= times + job_input.retries:
            self._report_violation(
                "I1", f"input {job_input.label} ({job_input.source}) came {times} times, but is {len(jobs)} jobs"
            )
        lines = dict(enumerate(job_input.lines))
        for job in jobs[:times]:
            self._check_rows(job, job_input, lines)
        for job in jobs[times:]:
            left = {row["row"] for row in jobs[0].rows if row["status"] in ENDINGS}
            self._check_rows(job, job_input, {at: line for at, line in lines.items() if at in left})

    def _check_rows(self, job: CopiedJob, job_input: JobInput, lines: dict[int, Line]) -> None:
        """Each line has one result, and it is right."""
        found = Counter(row["row"] for row in job.rows)
        self._compare(
            job.name, {at for at, many in found.items() if many > 1}, lines.keys() - found, found.keys() - lines.keys()
        )
        for row in job.rows:
            line = lines.get(row["row"])
            if line is not None:
                self._check_row(f"row {row['row']} of job {job.name}", row, line, job, job_input)

    def _check_records(self, job_input: JobInput, jobs: list[CopiedJob]) -> None:
        """Each request has one result among all jobs that its label has become."""
        stored = {record.value for record in self.evidence.requests}
        lost = [line for line in job_input.lines if line.text not in stored]
        if lost:
            self.notes.append(f"the broker has lost {len(lost)} confirmed records of {job_input.label}")
        lines = {line.custom_id: line for line in job_input.lines if line.error is None and line.text in stored}
        found = Counter(row["custom_id"] for job in jobs for row in job.rows)
        doubled = {name for name, many in found.items() if many > 1}
        self._compare(job_input.label, doubled, lines.keys() - found, found.keys() - lines.keys())
        for job in jobs:
            for row in job.rows:
                if row["custom_id"] in lines:
                    self._check_row(f"row {row['custom_id']}", row, lines[row["custom_id"]], job, job_input)

    def _compare(self, where: str, doubled: Any, missing: Any, unknown: Any) -> None:
        for what, odd in (("are there twice", doubled), ("have no result", missing), ("were never sent", unknown)):
            if odd:
                self._report_violation("I1", f"{len(odd)} rows of {where} {what}, such as {sorted(odd, key=str)[:5]}")

    def _check_row(self, where: str, row: Row, line: Line, job: CopiedJob, job_input: JobInput) -> None:
        if row["custom_id"] != line.custom_id:
            self._report_violation("I1", f"{where} bears {row['custom_id']!r} instead of {line.custom_id!r}")
        ended = (row["status"], row["error_code"])
        if ended in CLOSED:
            if not CLOSED[ended] == job.closing == job_input.closes:
                self._report_violation("I1", f"{where} is {row['status']}, but closing.json says {job.closing}")
            return
        if ended != (("succeeded", None) if line.error is None else ("failed", line.error)):
            self._report_violation(
                "I1", f"{where} ended as {row['status']} ({row['error_code']}: {row['error_message']})"
            )
            return
        if line.error is not None:
            return
        want = self.evidence.reference[line.custom_id or ""]
        content = json.loads(row["response"])["choices"][0]["message"]["content"]
        facts = (row["text"], row["finish_reason"], row["completion_tokens"])
        if facts != (want.text, want.finish_reason, want.completion_tokens) or content != want.text:
            self._report_violation("I1", f"{where} says {facts}, but an undisturbed run says {want}")

    # -- Kafka

    def _check_published(self, sent: dict[str, JobInput], jobs: list[CopiedJob]) -> None:
        """Exactly the results of the jobs from Kafka are published, as committed."""
        by_kafka = {"kafka records", "kafka jobs"}
        rows = {(job.name, row["row"]): row for job in jobs for row in job.rows}
        wanted = {
            (job.name, row["row"])
            for job in jobs
            if job.label in sent and sent[job.label].source in by_kafka
            for row in job.rows
        }
        sources = {record.location: record.value for record in self.evidence.requests}
        values: dict[bytes, bytes] = {}
        published: dict[tuple[str, int], bytes] = {}
        for record in self.evidence.results:
            number = record.headers["result_id"]
            self.repeats_published += number in values
            if values.setdefault(number, record.value) != record.value:
                self._report_violation("I1", f"result {number.decode()} is published in two versions")
                continue
            message = json.loads(record.value)
            at = (message["job"], message["row"])
            if published.setdefault(at, number) != number:
                self._report_violation("I1", f"row {at[1]} of job {at[0]} is published as two results")
            if at not in rows:
                self._report_violation(
                    "I1", f"row {at[1]} of job {at[0]} is published at {record.location}, but no such row is committed"
                )
            else:
                self._check_message(message, rows[at], record)
            source = record.headers.get("source", b"").decode()
            if source and json.loads(sources.get(source, b"{}")).get("custom_id") != message["custom_id"]:
                self._report_violation(
                    "I1", f"what is published at {record.location} has the source {source}, which is another request"
                )
        for name, at in sorted(wanted - published.keys()):
            self._report_violation("I1", f"row {at} of job {name} came by Kafka and is not published there")

    def _check_message(self, message: dict[str, Any], row: Row, record: TopicRecord) -> None:
        response, error = message.get("response"), message.get("error")
        text = None if response is None else response["body"]["choices"][0]["message"]["content"]
        code = None if error is None else error["code"]
        facts = (message["custom_id"], message["status"], text, code)
        if facts != (row["custom_id"], row["status"], row["text"], row["error_code"]):
            self._report_violation("I1", f"what is published at {record.location} is not what is committed: {facts}")

    def _check_dead_letters(self, sent: dict[str, JobInput]) -> None:
        """Exactly the invalid requests are dead letters."""
        dead_letters = {record.value for record in self.evidence.dead_letters}
        stored = {record.value for record in self.evidence.requests}
        wrong = {line.text for job_input in sent.values() for line in job_input.lines if line.error == "invalid_json"}
        for value in sorted((stored & wrong) - dead_letters):
            self._report_violation("I1", f"{value[:60]!r} is no request and no dead letter")
        for value in sorted(dead_letters - (stored & wrong)):
            self._report_violation("I1", f"{value[:60]!r} is a dead letter, but a request")

    def _check_sampled(self) -> None:
        """Sampled tokens without an answer are reported, as far as they could be logged."""
        if self.evidence.sampled is None:
            return
        self.tokens["sampled"] = self.evidence.sampled
        wasted = self.evidence.sampled - self.tokens["committed"]
        if not self.tokens["repeated"] <= wasted <= self.tokens["at most"]:
            self._report_violation(
                "I5",
                f"{wasted} tokens are in no answer, but {self.tokens['repeated']} are reported as repeated, and "
                f"{self.tokens['at most']} at most",
            )
