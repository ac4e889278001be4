"""Compressed text: it is the same input as the plain one, and damaged or hostile streams end as the job's error."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner import BrokenInput, InputError, SourceBatch, SourceFile, open_source
from pipeline.planner.readers import expansion
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from tests.pipeline.planner.readers.child_reads import read_in_child

LIMITS = Limits(max_line_bytes=200)
SKIPPED_FRAME = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


PACKERS = {".gz": gzip.compress, ".zst": zstd}


def read(data: bytes, name: str, limits: Limits = LIMITS) -> list[SourceBatch]:
    kind = InputFormat.CSV if ".csv" in name else InputFormat.JSONL
    source = open_source([SourceFile(name, lambda: io.BytesIO(data))], kind, limits, "demo")
    return list(source.batches(SegmentSizes(3, 7)))


lines = st.lists(
    st.integers(0, 99).map(lambda n: json.dumps({"n": n}).encode())
    | st.binary(max_size=250).map(lambda data: data.replace(b"\n", b" "))
    | st.sampled_from([b"", b"{", b"\xff"]),
    min_size=1,
    max_size=30,
).map(lambda found: b"{}\n" + b"\n".join(found))


@given(lines, st.lists(st.integers(0, 2_000), max_size=4), st.booleans(), st.booleans())
def test_any_jsonl_is_the_same_plain_as_gzip_and_as_zstd(
    data: bytes, borders: list[int], skipped: bool, named: bool
) -> None:
    """In any number of members or frames, also empty ones and ones that end within a line."""
    cuts = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    plain = read(data, "in.jsonl")
    for suffix, pack in PACKERS.items():
        packed = b"".join(map(pack, pieces))
        if skipped and suffix == ".zst":
            packed = SKIPPED_FRAME + packed + SKIPPED_FRAME
        assert repr(read(packed, "in.jsonl" + suffix * named)) == repr(plain)


@pytest.mark.parametrize("suffix", PACKERS)
def test_csv_is_read_compressed_too(suffix: str) -> None:
    data = b"custom_id,prompt\na,one\nb,two\n"
    plain = read(data, "in.csv")
    assert [row.value for batch in plain for row in batch.rows if isinstance(row.value, dict)][1]["custom_id"] == "b"
    for batch, same in zip(plain, read(PACKERS[suffix](data), "in.csv" + suffix), strict=True):
        assert batch == same


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda packed: packed[:-3], "Truncated"),
        (lambda packed: packed + packed[:9], "Truncated"),
        (lambda packed: packed + b"garbage", "failed"),
        (lambda packed: packed + b"\0" * 512, "failed"),
        (lambda packed: packed[: len(packed) // 2] + b"\xff" * len(packed), "failed|Truncated"),
        (lambda packed: b"{}\n", "failed"),
    ],
    ids=["cut off", "a second one cut off", "garbage behind", "zeros behind", "overwritten", "not compressed"],
)  # fmt: skip
def test_a_damaged_stream_is_the_jobs_error_and_names_file_line_and_byte(suffix: str, change: Any, reason: str) -> None:
    packed = change(PACKERS[suffix](b"".join(b'{"n": %d}\n' % number for number in range(1_000))))
    where = rf"in\.jsonl\{suffix}: can't be decompressed as \w+ after line \d+, within the first \d+ bytes"
    with pytest.raises(BrokenInput, match=f"{where}.*({reason}).*compress it anew"):
        read(packed, "in.jsonl" + suffix)


def test_the_line_before_the_damage_is_named() -> None:
    """As exactly as the pieces of the stream allow."""
    packed = gzip.compress((b"{}" + b" " * 97 + b"\n") * 15_000 + b"{}") + b"garbage"
    with pytest.raises(BrokenInput, match=r"after line (10485|15000), within the first \d+ bytes"):
        read(packed, "in.jsonl.gz")


def test_a_zstd_window_of_gigabytes_is_refused() -> None:
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, 21 << 3]) + b"\x01\0\0"
    with pytest.raises(BrokenInput, match=r"too much memory.*window of at most 128 MiB \(zstd --long=27\)"):
        read(frame, "in.jsonl.zst")


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_utf16_file_is_refused_by_what_is_in_it(suffix: str) -> None:
    with pytest.raises(InputError, match="is UTF-16"):
        read(PACKERS[suffix]("{}".encode("utf-16")), "in.jsonl" + suffix)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_that_decodes_to_far_more_than_it_holds_is_refused(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 100)
    assert read(PACKERS[suffix](b" " * (1 << 20)), "in.jsonl" + suffix)
    packed = PACKERS[suffix](b"{}\n" + b" " * (2 << 20))
    message = rf"in\.jsonl\{suffix}: line 2: {len(packed)} bytes of \w+ decode to more than 1048576 bytes"
    with pytest.raises(BrokenInput, match=f"{message}.*submit it in several smaller files"):
        read(packed, "in.jsonl" + suffix)


def bomb(suffix: str, mebibytes: int) -> bytes:
    """One line of so many MiB, between two others."""
    good, mebibyte = json.dumps({"custom_id": "a"}).encode() + b"\n", b"x" * (1 << 20)
    if suffix == ".zst":
        return zstd(good) + zstd(mebibyte) * mebibytes + zstd(b"\n" + good)
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(part) for part in (good, *[mebibyte] * mebibytes, b"\n", good)]
    return b"".join(parts) + packer.flush()


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_line_of_megabytes_fails_alone(suffix: str) -> None:
    first, large, last = (row for batch in read(bomb(suffix, 8), "in.jsonl" + suffix) for row in batch.rows)
    assert isinstance(large.value, RowError)
    assert "the line is longer than 200 bytes" in large.value.message
    assert (large.line, first.value, last.value) == (2, {"custom_id": "a"}, {"custom_id": "a"})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bombs_of_gigabytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    paths = []
    for suffix in PACKERS:
        for mebibytes in (1_000, 3_000 if suffix == ".zst" else 1_100):
            paths.append(tmp_path / f"{mebibytes}.jsonl{suffix}")
            paths[-1].write_bytes(bomb(suffix, mebibytes))
            assert paths[-1].stat().st_size < 4 << 20
    rows, grown = read_in_child(InputFormat.JSONL, *paths)
    assert rows == [3, 3, 3, -1], "a line of gigabytes fails alone, but the last file expands too much"
    assert grown < 200, "MiB"


@pytest.mark.parametrize("suffix", PACKERS)
def test_planning_a_compressed_input_goes_on_where_an_interrupted_planner_stopped(suffix: str, tools: Any) -> None:
    data = b"\n".join(tools.line(f"id {number}", f"text {number % 20}") for number in range(50))

    def packed() -> Any:
        file = SourceFile(
            "in.jsonl" + suffix, lambda: io.BytesIO(PACKERS[suffix](data[:999]) + PACKERS[suffix](data[999:]))
        )
        return open_source([file], InputFormat.JSONL, Limits())

    job = tools.job(plan={"segment_rows": 8, "max_shard_rows": 3})
    whole = tools.plan(data, job)
    some = tools.plan(packed(), job, max_segments=2)
    assert some.sink.committed == whole.sink.committed[:2]
    rest = tools.plan(packed(), job, sink=tools.sink(standing=some.sink.standing))
    assert rest.summary == whole.summary
    assert {**some.shards, **rest.shards} == whole.shards
