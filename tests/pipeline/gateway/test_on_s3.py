"""Files and batches on a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.pipeline.gateway.batches.test_batches import begin, wait
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.pipeline.s3_stores import open_s3, settings_for
from tests.servers.moto import MotoServer


@pytest.mark.slow
def test_a_batch_on_a_bucket(s3_server: MotoServer, unique_name: Callable[[], str], tmp_path: Path) -> None:
    bucket, scratch = unique_name(), tmp_path / "scratch"
    s3_server.make_bucket(bucket)
    parts = {"multipart_bytes": 5 << 20, "part_bytes": 5 << 20}
    store = open_s3(s3_server, bucket, "in/here", scratch, **parts)
    content = lines(6)
    with run_http_harness(tmp_path, s3=(store, settings_for(s3_server, scratch))) as harness, harness.http() as http:
        client = harness.client()
        large = lines(1) + b" " * (6 << 20) + b"\n"  # in parts
        file = client.files.create(file=("large.jsonl", large), purpose="batch")
        part = http.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=6000000-6000009"})
        assert (part.status_code, part.content) == (206, large[6_000_000:6_000_010])
        batch = begin(client, content)
        done = wait(client, batch.id)
        assert done.status == "completed"
        assert done.output_file_id is not None
        received = [
            json.loads(line)["custom_id"] for line in client.files.content(done.output_file_id).text.splitlines()
        ]
        assert sorted(received) == ["r0", "r1", "r2", "r3", "r5"]
        assert len(client.files.list(limit=2).data) == 2
        assert len(list(client.files.list(limit=1))) == 4
        client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)
        assert not list(store.list(f"files/{file.id}/"))
