"""Tests an applied gateway with OpenAI's client: key, file, batch, single completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from infra.pipeline_check import SECONDS, Installation, requests
from tests.cluster.null_worker import ExpectedAnswers


def try_gateway(made: Installation, model: Path, name: str) -> str:
    """Run the checks; returns a summary. Raises `AssertionError` and the client's errors."""
    url = f"http://127.0.0.1:{made.ports['gateway']}"
    made.wait(lambda: _ready(url), "no gateway is ready")
    refused = httpx2.get(f"{url}/v1/models").status_code
    assert refused == 401, f"a request without a key got {refused}"
    client = OpenAI(base_url=f"{url}/v1", api_key=_make_key(made), max_retries=0)
    data, bodies = requests(name)
    texts = ExpectedAnswers(model).texts(bodies)
    file = client.files.create(file=("rows.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    begun = time.monotonic()
    until = begun + SECONDS
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        made.running()
        assert time.monotonic() < until, f"the batch is {batch.status} after {SECONDS:.0f} s"
        time.sleep(0.3)
    assert batch.status == "completed", batch.errors
    found = _texts(client.files.content(str(batch.output_file_id)).text)
    assert found == {f"r{row}": text for row, text in enumerate(texts)}, "the batch's texts are wrong"
    took = time.monotonic() - begun
    answer = client.completions.create(model=name, prompt=bodies[0]["prompt"], max_tokens=16)
    assert answer.choices[0].text == texts[0], "the text of a single request is wrong"
    client.files.delete(file.id)
    return f"the gateway requires a key; a batch of {len(bodies)} rows took {took:.1f} s; a single request succeeded"


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


def _make_key(made: Installation) -> str:
    """Create a key as an operator does, from any machine that may write to the bucket."""
    variables = made.overrides("operator", {"TOKENMILL_REDIS_URL": "rediss://:x@unused:6379"})
    command = [
        "-m",
        "tokenmill",
        "keys",
        "create",
        "--root",
        str(made.outputs["root"]),
        "--tenant",
        "default",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return str(json.loads(done.stdout)["key"])


def _texts(lines: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
