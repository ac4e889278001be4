"""Submits a file by uploading it to the installation's bucket, waits for the job's manifest, and reads its Parquet.

python examples/from_a_bucket.py BUCKET MODEL   needs boto3; AWS_ENDPOINT_URL names another server than Amazon's
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq


def main(bucket: str, model: str) -> None:
    s3 = boto3.client("s3")
    # The id of this upload's job is not known here, so the new job is found by its input.
    key = f"incoming/questions-{time.time_ns()}.jsonl"
    lines = [
        {
            "custom_id": f"question-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Name {number} rivers."}],
                "max_tokens": 32,
            },
        }
        for number in (2, 3, 5)
    ]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    s3.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"deadline": "1h"})
    print(f"uploaded s3://{bucket}/{key}")
    prefix = wait_for_job(s3, bucket, f"s3://{bucket}/{key}")
    manifest = wait_for_object(s3, bucket, f"{prefix}manifest.json")  # written last: all results are there
    print(f"{prefix}: {json.loads(manifest)['counts']}")
    for item in s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}results/")["Contents"]:
        part = s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for row in pq.read_table(pa.BufferReader(part)).to_pylist():
            print(f"{row['custom_id']}: {(row['text'] or row['error_message'])!r}")


def wait_for_job(s3: Any, bucket: str, uri: str) -> str:
    """The prefix of the job whose input is `uri`."""
    while True:
        for found in s3.list_objects_v2(Bucket=bucket, Prefix="jobs/", Delimiter="/").get("CommonPrefixes", []):
            prefix: str = found["Prefix"]
            if json.loads(wait_for_object(s3, bucket, f"{prefix}job.json"))["input"]["uri"] == uri:
                return prefix
        time.sleep(1)


def wait_for_object(s3: Any, bucket: str, key: str) -> bytes:
    """The object, as soon as it exists."""
    while True:
        try:
            data: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            return data
        except s3.exceptions.NoSuchKey:
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
