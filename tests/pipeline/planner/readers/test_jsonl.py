"""The reader never raises and never loses a good line, whatever lies between and however the bytes arrive."""

from __future__ import annotations

import io
import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner import SourceBatch, SourceFile, TooManyRows
from pipeline.planner.readers.jsonl import JsonlSource, nested_deeper
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits

LIMITS = Limits(max_line_bytes=200, max_json_depth=5)


class DrippingStream(io.RawIOBase):
    """A stream that gives at most `step` bytes a read, as a network may."""

    def __init__(self, data: bytes, step: int) -> None:
        self._inner = io.BytesIO(data)
        self._step = step

    def read(self, size: int = -1) -> bytes:
        return self._inner.read(min(self._step, size) if size >= 0 else self._step)


def read(data: bytes, *, segment_rows: int = 1000, step: int = 1 << 20) -> list[SourceBatch]:
    file = SourceFile("in.jsonl", lambda: DrippingStream(data, step))
    return list(JsonlSource([file], LIMITS).batches(SegmentSizes(segment_rows, segment_rows)))


def values(batches: list[SourceBatch]) -> dict[int, Any]:
    rows = [row for batch in batches for row in batch.rows]
    assert all(row.line == row.row + 1 for row in rows)
    return {row.row: row.value for row in rows}


good_lines = st.integers(0, 99).map(lambda n: json.dumps({"n": n}).encode())
junk = st.binary(max_size=60).map(lambda data: data.replace(b"\n", b" ")) | st.sampled_from(
    [b"", b"  ", b"{", b"x" * 201, b"y" * 5000, b"[" * 40, b'"' * 7, b'{"a": "\\', b"\xff", b"null"]
)
ends = st.sampled_from([b"\n", b"\r\n"])


@given(
    st.lists(st.tuples(good_lines | junk, ends), max_size=30),
    good_lines,
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_every_good_line_arrives_on_its_row(
    lines: list[tuple[bytes, bytes]], last: bytes, bom: bool, step: int, segment_rows: int
) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + end for line, end in lines) + last
    batches = read(data, segment_rows=segment_rows, step=step)
    found = values(batches)
    for row, line in enumerate([*(line for line, _ in lines), last]):
        if line.startswith(b'{"n"'):
            assert found[row] == json.loads(line)
        elif not line.strip(b" \t\r\v\f"):
            assert row not in found
        elif len(line.rstrip(b"\r")) > LIMITS.max_line_bytes:
            assert isinstance(found[row], RowError)
            assert "longer than 200 bytes" in found[row].message
    # Batches cover every line once, and end where segments do.
    assert [batch.first_row for batch in batches[1:]] == [batch.end_row for batch in batches[:-1]]
    assert batches[-1].end_row == len(lines) + 1
    assert all(batch.first_row // segment_rows == (batch.end_row - 1) // segment_rows for batch in batches)
    # How the bytes arrived changes nothing.
    whole = read(data, segment_rows=segment_rows)
    assert [(batch.first_row, batch.end_row) for batch in whole] == [(b.first_row, b.end_row) for b in batches]


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_are_read_to_their_end(data: bytes, step: int) -> None:
    batches = read(data, step=step)
    lines = data.count(b"\n") + (not data.endswith(b"\n") if data else 0)
    assert (batches[-1].end_row if batches else 0) == lines


def test_a_line_is_measured_without_its_end_and_the_longest_is_still_read() -> None:
    line = b'{"n": "' + b"x" * (200 - 9) + b'"}'
    assert len(line) == 200
    for end in (b"\n", b"\r\n", b""):
        assert values(read(line + end, step=7)) == {0: json.loads(line)}
    assert isinstance(values(read(line + b" \n"))[0], RowError)


def test_several_files_number_their_lines_and_share_the_rows() -> None:
    files = [SourceFile(f"{n}.jsonl", lambda data=data: io.BytesIO(data)) for n, data in enumerate((b"1\n2", b"3\n"))]
    batches = list(JsonlSource(files, LIMITS).batches(SegmentSizes(1000, 1000)))
    assert [(row.row, row.line, batch.name) for batch in batches for row in batch.rows] == [
        (0, 1, "0.jsonl"),
        (1, 2, "0.jsonl"),
        (2, 1, "1.jsonl"),
    ]


nested = st.recursive(
    st.text(alphabet='[]{}"\\a', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=40,
)


@given(nested, st.integers(0, 8))
def test_depth_is_counted_as_a_parser_would(value: Any, limit: int) -> None:
    def depth(value: Any) -> int:
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    assert nested_deeper(json.dumps(value).encode(), limit) == (depth(value) > limit)


def test_given_more_lines_than_a_job_may_have_when_they_are_read_then_reading_ends_at_the_first_beyond() -> None:
    """Blank lines count: a file of nothing else is as long to read."""
    files = [
        SourceFile("1.jsonl", lambda: io.BytesIO(b"{}\n" * 50)),
        SourceFile("2.jsonl", lambda: io.BytesIO(b"\n" * 50)),
    ]
    sizes = SegmentSizes(10, 10)
    assert sum(len(batch.rows) for batch in JsonlSource(files, Limits(max_rows=100)).batches(sizes)) == 50
    batches = JsonlSource(files, Limits(max_rows=80)).batches(sizes)
    assert [batch.end_row for batch in islice(batches, 8)] == [10, 20, 30, 40, 50, 60, 70, 80]
    with pytest.raises(TooManyRows, match=r"2\.jsonl: line 31: the input has more than 80 rows; split it"):
        next(batches)
