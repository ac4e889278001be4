"""Parquet files that are damaged or made to do harm: each ends as the job's or a row's error, in bounded memory."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.planner import BrokenInput, SourceFile, TooManyRows, open_source
from pipeline.planner.readers import expansion, parquet
from pipeline.planner.readers.columns import ColumnSource
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from tests.pipeline.planner.readers.child_reads import read_in_child
from tests.pipeline.planner.readers.damage import read_damaged

SIZES = SegmentSizes(100, 1_000)
IDS = pa.array(["a"])
NOT_UTF8 = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe"))
SIXTEEN_BYTES = b"PAR1\xff\xff\xff\xff\x04\0\0\0PAR1"


def written(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def source(data: bytes, limits: Limits | None = None) -> ColumnSource:
    file = SourceFile("in.parquet", lambda: io.BytesIO(data))
    opened = open_source([file], InputFormat.PARQUET, limits or Limits(), "demo")
    assert isinstance(opened, ColumnSource)
    return opened


def read(data: bytes, limits: Limits | None = None) -> list[object]:
    return [row.value for batch in source(data, limits).batches(SIZES) for row in batch.rows]


def repeated(value: str, rows: int, **more: Any) -> bytes:
    """A column `prompt` of one value that is stored once in the file and occurs in each of its rows."""
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    table = pa.table({"custom_id": [f"r{row}" for row in range(rows)], "prompt": prompts, **more})
    return written(
        table, compression="zstd", dictionary_pagesize_limit=64 << 20, store_schema=False, write_statistics=False
    )


def test_a_file_that_decodes_to_far_more_than_it_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 100)
    small, large = repeated("A" * 10_000, 100), repeated("A" * 10_000, 200)
    assert len(read(small)) == 100
    with pytest.raises(BrokenInput, match=rf"in\.parquet: row group 1 of 1: {len(large)} bytes of Parquet decode to"):
        read(large)
    rows = [f"{row}{'A' * 10_000}" for row in range(200)]  # the same rows in a file large enough
    assert len(read(written(pa.table({"custom_id": rows, "prompt": rows}), compression="none"))) == 200


@pytest.mark.parametrize(
    "data",
    [
        SIXTEEN_BYTES,
        b"PAR1" + b"\xff" * 8 + struct.pack("<I", 8) + b"PAR1",
        written(pa.table({"custom_id": IDS, "prompt": IDS, "zzzz": IDS})).replace(b"zzzz", b"\xff\xfe\xfd\xfc"),
        written(pa.table({"custom_id": IDS, "prompt": IDS, "more": NOT_UTF8})),
    ],
    ids=["no footer", "footer of ones", "column name not UTF-8", "carried text not UTF-8"],
)
def test_what_cant_be_decoded_is_the_jobs_error_and_names_the_file(data: bytes) -> None:
    with pytest.raises(BrokenInput, match=r"in\.parquet.*can't be decoded"):
        read(data)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (NOT_UTF8, "the column prompt is not UTF-8: byte 1 is 0xff"),
        (pa.array([2**62], pa.int64()).cast(pa.timestamp("us"), safe=False), "can't be represented"),
        (pa.array([2**31 - 1], pa.int32()).cast(pa.date32()), "can't be represented"),
        (pa.array([2**62]).cast(pa.duration("s")), "can't be represented"),
    ],
    ids=["text", "timestamp", "date", "duration"],
)
def test_a_cell_that_python_cant_hold_is_its_rows_error(prompts: pa.Array, message: str) -> None:
    data = written(
        pa.table(
            {"custom_id": ["a", "b"], "prompt": pa.concat_arrays([prompts, prompts.take(pa.array([None], pa.int64()))])}
        )
    )
    broken, empty = read(data)
    assert isinstance(broken, RowError)
    assert message in broken.message
    assert isinstance(empty, RowError)
    assert "is null" in empty.message


def test_a_custom_id_that_is_not_utf8_is_its_rows_error() -> None:
    ids = pa.concat_arrays([NOT_UTF8, pa.array(["b"])])
    broken, good = read(written(pa.table({"custom_id": ids, "prompt": ["x", "y"]})))
    assert isinstance(broken, RowError)
    assert broken.param == "custom_id"
    assert isinstance(good, dict)
    assert good["custom_id"] == "b"


def test_given_pages_that_are_overwritten_when_they_are_read_then_the_error_names_file_and_row_group() -> None:
    table = pa.table({"custom_id": [str(row) for row in range(3000)], "prompt": [str(row) * 9 for row in range(3000)]})
    data = bytearray(written(table, row_group_size=1000, compression="snappy", use_dictionary=False))
    start = pq.read_metadata(io.BytesIO(data)).row_group(1).column(1).data_page_offset
    data[start : start + 400] = b"\xff" * 400
    with pytest.raises(BrokenInput, match=r"in\.parquet: row group 2 of 3"):
        read(bytes(data))


def test_a_cell_longer_than_a_line_may_be_is_refused_before_it_is_a_value() -> None:
    long, short = read(
        written(pa.table({"custom_id": ["a", "b"], "prompt": ["x" * 500, "y"]})), Limits(max_line_bytes=400)
    )
    assert isinstance(long, RowError)
    assert "the column prompt is longer than 400 bytes" in long.message
    assert isinstance(short, dict)
    nested = pa.table({"custom_id": ["a", "b"], "messages": [[{"role": "user", "content": "x" * 500}], []]})
    long, short = read(written(nested), Limits(max_line_bytes=400))
    assert isinstance(long, RowError)
    assert "the column messages is longer than 400 bytes" in long.message
    assert isinstance(short, dict)


@pytest.mark.parametrize("kind", ["text", "nested", "fixed"])
def test_a_row_that_carries_too_much_is_refused_and_carries_nothing(kind: str) -> None:
    values: dict[str, pa.Array] = {
        "text": pa.array(["x" * 50, "y" * 500, None]),
        "nested": pa.array([[{"a": "x" * 50}], [{"a": "y" * 500}], None]),
        "fixed": pa.array([b"x" * 200] * 3, pa.binary(200)),
    }
    table = pa.table({"custom_id": ["a", "b", "c"], "prompt": ["p"] * 3, "note": values[kind], "n": [1, 2, 3]})
    (batch,) = source(written(table), Limits(max_carried_bytes=150 if kind == "fixed" else 300)).batches(SIZES)
    assert batch.carried is not None
    refused = [0, 1, 2] if kind == "fixed" else [1]
    for index, row in enumerate(batch.rows):
        carried = {name: batch.carried.column(name)[index].as_py() for name in ("note", "n")}
        if index in refused:
            assert isinstance(row.value, RowError)
            assert "are carried through hold" in row.value.message
            assert "limits.max_carried_bytes" in row.value.message
            assert carried == {"note": None, "n": None}
        else:
            assert isinstance(row.value, dict)
            assert carried == {"note": values[kind][index].as_py(), "n": index + 1}


@pytest.mark.parametrize("rows", [300, 5_000])
@pytest.mark.slow
def test_batches_are_the_same_however_rows_are_divided_into_row_groups(rows: int) -> None:
    table = pa.table({"custom_id": [str(row) for row in range(rows)], "prompt": [f"p {row}" for row in range(rows)]})
    found = [
        [(batch.first_row, batch.end_row) for batch in source(written(table, row_group_size=size)).batches(SIZES)]
        for size in (7, 1_000, rows)
    ]
    for borders in found:
        assert [start for start, _ in borders[1:]] == [end for _, end in borders[:-1]]
        assert (borders[0][0], borders[-1][1]) == (0, rows)
        assert all(SIZES.index(start) == SIZES.index(end - 1) for start, end in borders)
    assert len(found[2]) < 12, "small pieces are put together again"


def test_given_one_large_value_in_every_row_when_it_is_read_then_few_rows_are_held_at_once() -> None:
    data = repeated("A" * (1 << 20), 60)
    assert len(data) < 10_000
    sizes = [len(batch.rows) for batch in source(data).batches(SIZES)]
    assert sum(sizes) == 60
    assert max(sizes) <= 16


def test_rows_that_take_more_than_a_row_may_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "MAX_ROW_BYTES", 1 << 20)
    data = repeated("A" * (600 << 10), 2, note=repeated_column("B" * (600 << 10), 2))
    with pytest.raises(BrokenInput, match=r"in\.parquet: row group 1 of 1: its rows may take 12\d+ bytes each"):
        read(data)


def repeated_column(value: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


@pytest.mark.slow
def test_files_of_a_few_kilobytes_that_stand_for_gigabytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    large = "A" * (1 << 20)
    files = {
        "prompts": repeated(large, 1_000),
        "carried": repeated("hi", 1_000, note=repeated_column(large, 1_000)),
    }
    for name, data in files.items():
        assert len(data) < 20_000
        (tmp_path / name).write_bytes(data)

    rows, grown = read_in_child(InputFormat.PARQUET, *(tmp_path / name for name in files))
    assert rows == [1_000, 1_000]
    assert grown < 300, "MiB; whole they are 1,000 each"


def damaged(base: bytes, chosen: random.Random) -> bytes:
    """The file with one to eight changes, most of them in its footer."""
    data = bytearray(base)
    for _ in range(chosen.choice((1, 1, 2, 4, 8))):
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        low = footer if chosen.random() < 0.6 and 4 < footer < len(data) - 9 else 4
        at = chosen.randrange(low, max(low + 1, len(data) - 1))
        change = chosen.randrange(6)
        if change == 0:
            data[at] ^= 1 << chosen.randrange(8)
        elif change == 1:
            data[at] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif change == 2:
            value = struct.pack("<Q", chosen.choice((0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 2**40)))
            data[at : at + 8] = value[: len(data) - at]
        elif change == 3:
            del data[at : at + chosen.randrange(1, 9)]
        elif change == 4:
            data[at:at] = chosen.randbytes(chosen.randrange(1, 9))
        elif chosen.random() < 0.1:
            del data[chosen.randrange(12, len(data)) :]
        if len(data) < 16:
            break
    return bytes(data)


def whole_files() -> list[bytes]:
    table = pa.table(
        {
            "custom_id": [f"r{row}" for row in range(50)],
            "messages": [[{"role": "user", "content": "hi"}]] * 50,
            "k": list(range(50)),
            "d": pa.array(["a", "b"] * 25).dictionary_encode(),
        }
    )
    flat = pa.table({"custom_id": [f"r{row}" for row in range(50)], "prompt": ["hi", "ho"] * 25})
    forms = [("snappy", "2.6", True), ("zstd", "2.6", False), ("gzip", "1.0", True), ("none", "2.6", True)]
    return [
        written(
            each, compression=how, version=version, use_dictionary=coded, data_page_version="2.0" if coded else "1.0"
        )
        for how, version, coded in forms
        for each in (table, flat)
    ]


def test_damaged_files_are_read_or_refused() -> None:
    found = read_damaged(whole_files(), damaged, read, 150, seed=1)
    assert found["read"] > 10, found
    assert found["refused"] > 50, found


@pytest.mark.exhaustive
def test_thousands_of_damaged_files_are_read_or_refused() -> None:
    found = read_damaged(whole_files(), damaged, read, 2_000, seed=2)
    assert found["refused"] > 500, found


def many(rows: int) -> bytes:
    texts = [str(row) for row in range(rows)]
    return written(pa.table({"custom_id": texts, "prompt": texts}), store_schema=False)


def test_given_a_footer_that_declares_too_many_rows_then_nothing_of_the_file_is_decoded() -> None:
    data = bytearray(many(100))
    data[4:400] = b"\xff" * 396  # pages that nothing could decode
    limits = Limits(max_rows=99)
    with pytest.raises(TooManyRows, match=r"in\.parquet: the input has more than 99 rows; split it.*limits\.max_rows"):
        source(bytes(data), limits)
    with pytest.raises(BrokenInput, match="can't be decoded"):
        read(bytes(data), Limits(max_rows=100))


def test_rows_of_all_files_count_together() -> None:
    files = [SourceFile(name, lambda: io.BytesIO(many(50))) for name in ("1.parquet", "2.parquet")]
    assert open_source(files, InputFormat.PARQUET, Limits(max_rows=100), "demo")
    with pytest.raises(TooManyRows, match=r"2\.parquet: the input has more than 99 rows"):
        open_source(files, InputFormat.PARQUET, Limits(max_rows=99), "demo")


FILE_ROWS = b"\x16\xc8\x01\x19\x1c"
"""In a footer: the file has 100 rows, and a list of one row group follows."""


def test_a_footer_that_contradicts_itself_declares_the_larger_number_of_rows() -> None:
    data = many(100)
    assert data.count(FILE_ROWS) == 1
    lying = data.replace(FILE_ROWS, b"\x16\x84\x00\x19\x1c")
    assert pq.read_metadata(io.BytesIO(lying)).num_rows == 2
    with pytest.raises(TooManyRows):
        source(lying, Limits(max_rows=99))


def test_given_more_rows_than_are_declared_when_they_are_read_then_reading_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = source(many(600), Limits(max_rows=600))
    monkeypatch.setattr(opened, "_limits", Limits(max_rows=300))
    with pytest.raises(TooManyRows):
        list(opened.batches(SIZES))
