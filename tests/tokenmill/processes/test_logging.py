"""Logs as JSON documents: our events, and those of libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tokenmill.command_processes import ROOT

PROGRAM = """
import logging, pathlib, warnings
import structlog
from tokenmill.processes.logging import log_to_stderr

print_line = log_to_stderr(LEVEL, FORMAT, "worker")
logger = structlog.get_logger("x")
logger.debug("below the level")
logger.info("shard taken", job="job-1", rows=3, where=pathlib.Path("a"), kinds={1: {"b"}})
logger.info("compiling", notice=True, for_set="avx2")
with structlog.contextvars.bound_contextvars(trace_id="t", span_id="s"):
    logger.warning("two\\nlines", text='"quoted" \\u2028 \\udc80')
try:
    raise ValueError("wrong")
except ValueError:
    logging.getLogger("kafka.client").exception("a library's error %s", 7)
logging.getLogger("kafka.client").info("below the level")
warnings.warn("old", DeprecationWarning, stacklevel=1)
print_line("working for root")
"""


def program(log_format: str, level: str = "logging.INFO") -> str:
    return PROGRAM.replace("FORMAT", repr(log_format)).replace("LEVEL", level)


def logged_lines(log_format: str, level: str = "logging.INFO") -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", program(log_format, level)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout == ""
    return ended.stderr.splitlines()


def test_given_json_then_every_line_of_any_logger_is_a_document() -> None:
    lines = [json.loads(line) for line in logged_lines("json")]
    assert all({"timestamp", "level", "event"} <= line.keys() and line["command"] == "worker" for line in lines)
    taken, compiling, two, error, old, up = lines
    assert "notice" not in compiling
    assert (taken["event"], taken["job"], taken["rows"], taken["where"]) == ("shard taken", "job-1", 3, "a")
    assert taken["kinds"] == {"1": "{'b'}"}
    assert two["text"] == '"quoted" \u2028 \udc80'
    assert (two["event"], two["level"], two["trace_id"], two["span_id"]) == ("two\nlines", "warning", "t", "s")
    assert (error["event"], error["level"], error["logger"]) == ("a library's error 7", "error", "kafka.client")
    assert "ValueError: wrong" in error["exception"]
    assert "DeprecationWarning: old" in old["event"]
    assert (up["event"], up["message"]) == ("up", "working for root")
    assert "trace_id" not in up


def test_given_text_then_it_is_as_people_read_it() -> None:
    lines = logged_lines("text")
    assert lines[0].startswith("timestamp='")
    assert "level='info' event='shard taken' job='job-1' rows=3" in lines[0]
    assert "level='info' event='compiling' for_set='avx2'" in lines[1]
    assert lines[-1] == "working for root"


def test_given_a_command_that_shows_warnings_then_of_infos_it_shows_notices_as_plain_lines() -> None:
    lines = logged_lines("text", "logging.WARNING")
    assert lines[0] == "compiling"
    assert "level='warning'" in lines[1]
    assert not any("shard taken" in line for line in lines)


def test_given_a_full_disk_or_a_closed_pipe_behind_stderr_then_the_work_goes_on() -> None:
    working = program("text") + "print('worked')"
    reader, pipe = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(pipe, "w") as closed:
        for stderr in (full, closed):
            ended = subprocess.run(
                [sys.executable, "-c", working], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                stderr=stderr, text=True, check=True,
            )  # fmt: skip
            assert ended.stdout == "worked\n"
