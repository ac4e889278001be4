"""Sends a gateway requests that its OpenAPI document allows, and others, by schemathesis: nothing may break, and every
answer must be as documented.

    python -m tests.pipeline.gateway.fuzzing --examples 200 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.request_builder import InferenceSettings
from schemas.jobs.job import Tier
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.made_jobs import PIN

ROOT = Path(__file__).parents[3]
CONFIG = Path(__file__).with_name("schemathesis.toml")


def names(harness: HttpHarness, key: str) -> dict[str, str]:
    """Ids of existing objects, by the configuration's variables: otherwise most requests would be answered with 404."""
    client = harness.client(key)
    file = client.files.create(file=("a.jsonl", lines(10)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while client.batches.retrieve(batch.id).status != "completed":
        time.sleep(0.02)
    with harness.http(key) as http:
        hello = {"model": PIN.name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        resumable = {**hello, "stream": True, "tokenmill": {"resume": 60}}
        stream = http.post("/v1/chat/completions", json=resumable).headers["x-stream-id"]
    return {"FILE": file.id, "BATCH": batch.id, "STREAM": stream, "MODEL": PIN.name}


@contextmanager
def fuzzed_harness(folder: Path) -> Iterator[HttpHarness]:
    """A gateway with short responses, for fast tests."""
    most = dict.fromkeys(Tier, 64)
    inference = InferenceSettings(caps=most, default_max_tokens=5)
    with run_http_harness(folder, settings=GatewayOptions(max_upload_bytes=1 << 20), inference=inference) as harness:
        yield harness


def fuzz(
    harness: HttpHarness, examples: int, seed: int, *more: str, keys: bool = True
) -> subprocess.CompletedProcess[str]:
    """What schemathesis found, in words, with requests that show it again; its status is 0 if it found nothing.

    Args:
        examples: for each operation, besides those that follow from bounds.
        keys: one is made, and sent; else the installation has none, and lets everybody in.
    """
    key = harness.keys.create("fuzzed", tuple(Scope))[1] if keys else "none"
    found = {f"TOKENMILL_FUZZ_{name}": value for name, value in {"KEY": key, **names(harness, key)}.items()}
    options = ["--max-examples", str(examples), "--seed", str(seed), "--no-color", *more]
    if not keys:
        options += ["--exclude-checks", "ignored_auth,missing_required_header"]
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", CONFIG, "run", f"{harness.url}/openapi.json"]
    return subprocess.run(
        [*program, *options],
        env={**os.environ, **found, "PYTHONPATH": str(ROOT)},
        cwd=harness.world.scratch, capture_output=True, text=True, check=False,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="What else is said goes to schemathesis.")
    parser.add_argument("--examples", type=int, default=200, help="for each operation")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    given, more = parser.parse_known_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    worst = 0
    for keys in (True, False):
        print(f"-- seed {given.seed}, {'with' if keys else 'without'} keys", flush=True)
        with tempfile.TemporaryDirectory() as folder, fuzzed_harness(Path(folder)) as harness:
            found = fuzz(harness, given.examples, given.seed, *more, keys=keys)
        print(found.stdout, found.stderr)
        worst = max(worst, abs(found.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
