"""Fifty thousand rows are planned in a few times what reading them takes; memory does not follow the bodies' size."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from pipeline.planner import SourceFile, StoredShard, open_source, plan
from schemas.jobs.inputs import InputFormat
from schemas.jobs.plan import PlanSegment
from schemas.requests.limits import Limits

ROWS = 50_000


class GeneratedFile(io.RawIOBase):
    """A file that is made while it is read, so that the test holds none of it."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._rest = b""
        self._first: bytes | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the start, once its first bytes were read."""
        assert (offset, whence) == (0, 0)
        assert self._first is not None
        self._rest, self._first = self._first + self._rest, b""
        return 0

    def read(self, size: int = -1) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < size and (line := next(self._lines, None)) is not None:
            parts.append(line)
            have += len(line)
        whole = b"".join(parts)
        self._rest = whole[size:]
        if self._first is None:
            self._first = whole[:size]
        return whole[:size]


class DiscardingSink:
    """A sink that only counts."""

    def __init__(self) -> None:
        self.rows = 0
        self.largest = 0

    def existing_segment(self, index: int) -> PlanSegment | None:
        return None

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        self.rows += table.num_rows
        self.largest = max(self.largest, table.nbytes)
        return StoredShard(str(number), "0" * 64, table.nbytes)

    def reused_keys(self, segment: PlanSegment) -> list[bytes]:
        return []

    def write_results(self, table: pa.Table) -> None:
        self.rows += table.num_rows

    def store_results(self, number: int) -> StoredShard:
        return StoredShard(str(number), "0" * 64, 0)

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        return segment


def lines(count: int, content_bytes: int) -> Iterator[bytes]:
    for number in range(count):
        system = f"system prompt {number % 50} " * 20
        content = f"{number % (count - 500)} ".ljust(content_bytes, "x")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        body = {"model": "demo", "messages": messages, "max_tokens": 16 + number % 64, "temperature": 0}
        line = {"custom_id": f"id {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode() + b"\n"


def plan_generated(tools: Any, count: int, content_bytes: int) -> tuple[DiscardingSink, Any]:
    sink = DiscardingSink()
    file = SourceFile("in.jsonl", lambda: GeneratedFile(lines(count, content_bytes)))
    source = open_source([file], InputFormat.JSONL, Limits())
    with tools.world() as world:
        return sink, plan(source, tools.job(), sink, world, attempt="a")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fifty_thousand_rows(tools: Any) -> None:
    sink, summary = plan_generated(tools, ROWS, 50)
    assert sink.rows == summary.total == ROWS
    assert summary.segments[0].prefix_groups == 50


@pytest.mark.slow
def test_memory_does_not_follow_the_bodies(tools: Any) -> None:
    """Given twice the rows of 20 kB each, then the peak grows by numbers only, far less than by their bodies."""
    peaks = []
    pool = pa.default_memory_pool()
    for count in (1000, 2000):
        tracemalloc.start()
        arrow = pool.bytes_allocated()
        sink, _ = plan_generated(tools, count, 20_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sink.rows == count
        assert pool.bytes_allocated() - arrow < 1_000_000
        assert sink.largest < 8_000_000
    assert peaks[1] - peaks[0] < 4_000_000
