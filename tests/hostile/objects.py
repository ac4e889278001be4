"""The root's objects as keys and bytes, in a folder or in S3, for attackers with write access."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.attack import Answer, Target

BUCKET = "tokenmill"


class Objects:
    """Of one root."""

    def __init__(self, root: str, s3_endpoint: str | None) -> None:
        self._folder = None if s3_endpoint else Path(root)
        self._s3: Any = None
        if s3_endpoint:
            import boto3  # noqa: PLC0415 - half a second that attacks on folders don't need

            self._s3 = boto3.session.Session().client(
                "s3", endpoint_url=s3_endpoint, region_name="us-east-1",
                aws_access_key_id="test", aws_secret_access_key="testtest",
            )  # fmt: skip

    def list(self, prefix: str) -> list[str]:
        """Keys below a prefix that ends with "/"."""
        if self._folder is not None:
            below = sorted(path for path in (self._folder / prefix).rglob("*") if path.is_file())
            return [str(path.relative_to(self._folder)) for path in below]
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def read(self, key: str) -> bytes | None:
        if self._folder is not None:
            path = self._folder / key
            return path.read_bytes() if path.exists() else None
        try:
            data: bytes = self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        except self._s3.exceptions.NoSuchKey:
            return None
        return data

    def write(self, key: str, data: bytes) -> None:
        """Whole at once; over what stands there."""
        if self._folder is None:
            self._s3.put_object(Bucket=BUCKET, Key=key, Body=data)
            return
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name[:100]}.hostile")
        hidden.write_bytes(data)
        hidden.replace(path)

    def remove(self, prefix: str) -> None:
        """All below a prefix that ends with "/", or the one object."""
        if self._folder is not None:
            path = self._folder / prefix
            for one in list(path.iterdir()) if prefix.endswith("/") and path.is_dir() else [path]:
                if one.is_dir() and not one.is_symlink():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink(missing_ok=True)
            return
        for key in self.list(prefix) if prefix.endswith("/") else [prefix]:
            self._s3.delete_object(Bucket=BUCKET, Key=key)

    def jobs(self) -> set[str]:
        """Ids of all jobs."""
        if self._folder is not None:
            return {path.name for path in (self._folder / "jobs").glob("*")}
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="jobs/", Delimiter="/")
        return {one["Prefix"].split("/")[1] for page in pages for one in page.get("CommonPrefixes", [])}

    def open_jobs(self) -> set[str]:
        """Ids of the jobs that have not ended; their markers may be stale."""
        marked = {key.removeprefix("active/") for key in self.list("active/")}
        return {job for job in marked if self.read(f"jobs/{job}/manifest.json") is None}

    def dead_letters(self) -> Iterator[dict[str, Any]]:
        for key in self.list("deadletters/"):
            if key.endswith(".json") and ".replay-" not in key:
                yield json.loads(self.read(key) or b"{}")


def objects_of(target: Target) -> Objects:
    return Objects(target.root, target.s3_endpoint)


def outcome_of(objects: Objects, job: str) -> Answer:
    """How a job ended, by its manifest."""
    data = objects.read(f"jobs/{job}/manifest.json")
    if data is None:
        return Answer("job", "open", message=job)
    manifest = json.loads(data)
    error = (manifest.get("errors") or [{}])[0]
    if manifest["status"] == "completed" and manifest["counts"]["failed"]:
        return Answer("job", "rows_failed", message=f"{manifest['counts']['failed']} rows have errors of their own")
    return Answer("job", manifest["status"], error.get("code"), str(error.get("message") or ""))


def dead_letter_about(objects: Objects, name: str, seconds: float = 30.0) -> Answer:
    """The dead letter that a dropped file of this name became."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for one in objects.dead_letters():
            if name in json.dumps(one):
                return Answer("dead_letter", "written", one.get("reason_code"), str(one.get("message")))
        time.sleep(1.0)
    return Answer("dead_letter", "none", message=f"no dead letter names {name} after {seconds:.0f} s")
