"""`python -m tokenmill run` as a process: read while it runs, stopped with Ctrl-C, and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

ROWS = 160
ROWS_PER_PART = 4

# A run that is to be interrupted computes one row at a time, and has tens of seconds of work on any machine. The one
# that goes on computes many at once.
SLOWLY = ("--max-num-seqs", "1")
FAST = ("--max-num-seqs", "64")

Chat = Callable[..., dict[str, Any]]
Start = Callable[[tuple[str, ...]], subprocess.Popen[str]]


@pytest.fixture
def command(folder: Path, model_folder: Path, chat: Chat, write_lines: Callable[..., Path]) -> list[str]:
    """A run with many small parts, and a few bad lines."""
    lines: list[Any] = [chat(f"r{i}", text=f"number {i}", max_tokens=200, ignore_eos=True) for i in range(ROWS)]
    path = write_lines(*lines, "not json", chat("r0"))
    run = [sys.executable, "-m", "tokenmill", "run", str(path), "--model", f"tiny={model_folder}"]
    return [*run, "--output", str(folder / "out"), "--threads", "1"]


@pytest.fixture
def start(folder: Path, command: list[str]) -> Iterator[Start]:
    """Starts the run; it is killed at the test's end."""
    environment = {**os.environ, "TOKENMILL_PLAN__MAX_SHARD_ROWS": str(ROWS_PER_PART)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[4])
    started: list[subprocess.Popen[str]] = []

    def begin(how: tuple[str, ...]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, *how], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def parts(out: Path) -> dict[str, str]:
    """The committed parts and their digests."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.glob("results/*.parquet")}


def wait_for_parts(process: subprocess.Popen[str], out: Path, count: int) -> None:
    until = time.monotonic() + HANG_SECONDS
    while len(parts(out)) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "no parts appear"
        time.sleep(0.02)


def custom_ids(out: Path) -> dict[str, list[str | None]]:
    """The current view of each reader."""
    folder = out / "results"
    with duckdb.connect() as database:
        found = database.sql(f"select custom_id from '{folder}/*.parquet'").fetchall()  # noqa: S608 - our own path
    return {
        "pyarrow": pq.read_table(folder)["custom_id"].to_pylist(),
        "pandas": [name if isinstance(name, str) else None for name in pd.read_parquet(folder)["custom_id"]],
        "polars": pl.read_parquet(folder)["custom_id"].to_list(),
        "duckdb": [row[0] for row in found],
    }


@pytest.mark.exhaustive
def test_given_a_run_when_it_is_read_meanwhile_and_stopped_then_the_same_command_goes_on(
    folder: Path, start: Start
) -> None:
    out = folder / "out"

    first = start(SLOWLY)
    wait_for_parts(first, out, 4)
    seen = custom_ids(out)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=HANG_SECONDS)
    committed = parts(out)

    # While it ran, every reader saw whole parts, and no request twice but for the refused duplicate.
    for reader, names in seen.items():
        assert len(names) >= 3 * ROWS_PER_PART, reader
        assert len([name for name in names if name != "r0"]) == len({name for name in names if name != "r0"}), reader
    assert first.returncode == 130
    assert "interrupted: " in err.splitlines()[-1]
    assert "the same command goes on from there" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert 4 <= len(committed) < ROWS / ROWS_PER_PART
    assert not (out / "manifest.json").exists()

    second = start(FAST)
    printed, err = second.communicate(timeout=HANG_SECONDS)

    # What was committed was not touched; everything is there once; every reader agrees.
    assert second.returncode == 0, err
    assert printed == ""
    assert "\x1b" not in err
    assert "had a result from an earlier run" in err
    after = parts(out)
    assert {name: after[name] for name in committed} == committed
    expected = sorted([f"r{i}" for i in range(ROWS)] + ["r0"])
    for reader, names in custom_ids(out).items():
        assert sorted(name for name in names if name is not None) == expected, reader
        assert names.count(None) == 1, reader
    # A shard computed twice would have lost against its part, and its tokens would be counted as repeated.
    assert json.loads((out / "manifest.json").read_text())["usage"].get("repeated", 0) == 0
    assert list(out.glob("work/0*/*")) == []
    assert f"{ROWS} of {ROWS + 2} rows succeeded, 2 failed" in err.splitlines()[-1]


@pytest.mark.exhaustive
def test_given_a_killed_run_when_the_same_command_runs_then_it_finishes_and_committed_parts_stand(
    folder: Path, start: Start
) -> None:
    out = folder / "out"
    first = start(SLOWLY)
    wait_for_parts(first, out, 3)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=HANG_SECONDS)
    committed = parts(out)

    second = start(FAST)
    _, err = second.communicate(timeout=HANG_SECONDS)

    assert second.returncode == 0, err
    after = parts(out)
    assert {name: after[name] for name in committed} == committed
    assert len(pq.read_table(out / "results")) == ROWS + 2


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "run",
        "estimate",
        "bench",
        "jobs",
        "jobs list",
        "jobs show",
        "jobs cancel",
        "jobs retry",
        "jobs export",
        "models",
        "models list",
        "models pull",
    ],
)
def test_given_help_when_called_then_it_is_printed_and_nothing_heavy_is_imported(folder: Path, arguments: str) -> None:
    script = (
        "import sys; from tokenmill.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'pyarrow', 'pydantic_settings', 'numpy'} & set(sys.modules); "
        "print('HEAVY', sorted(heavy)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments.split(), "--help"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Usage: tokenmill" in done.stdout
    assert "HEAVY []" in done.stdout
