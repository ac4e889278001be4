"""Arrow that is damaged or made to do harm: each ends as the job's or a row's error, in bounded memory."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.planner import BrokenInput, InputError, SourceFile, TooManyRows, open_source
from pipeline.planner.readers import arrow as arrow_reading
from pipeline.planner.readers import arrow_messages, expansion
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from tests.pipeline.planner.readers.arrow_files import FORMS, arrow
from tests.pipeline.planner.readers.child_reads import read_in_child
from tests.pipeline.planner.readers.damage import read_damaged

SIZES = SegmentSizes(100, 1_000)
NOT_UTF8 = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe"))


def read(data: bytes, limits: Limits | None = None) -> list[object]:
    source = open_source([SourceFile("in.arrow", lambda: io.BytesIO(data))], InputFormat.ARROW, limits or Limits(), "m")
    return [row.value for batch in source.batches(SIZES) for row in batch.rows]


def prompts(rows: int, **more: Any) -> pa.Table:
    ids = pa.array([str(number) for number in range(rows)])
    return pa.table({"custom_id": ids, "prompt": ids} | more)


def repeated(value: str, rows: int) -> pa.Array:
    """One value that is stored once and occurs in each row."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


def views(value: str, rows: int) -> pa.Array:
    """As `repeated`, as views of one text."""
    view = struct.pack("<i4sii", len(value), value[:4].encode(), 0, 0)
    return pa.Array.from_buffers(
        pa.string_view(), rows, [None, pa.py_buffer(view * rows), pa.py_buffer(value.encode())]
    )


def footer_of(data: bytes) -> bytes:
    size = int.from_bytes(data[-10:-6], "little")
    return data[-10 - size : -10]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "the file ends before|can't be decoded"),
        (lambda data: data[: len(data) // 2], "the file ends before|can't be decoded"),
        (lambda data: data[:20], "the file ends before|can't be decoded"),
        (lambda data: data + b"more", "more follows behind the end|can't be decoded"),
        (lambda data: data + data, "more follows behind the end|in"),
        (lambda data: b"", "is no Arrow message|the file ends"),
        (lambda data: b"custom_id,prompt\na,b\n", "is no Arrow message; write the file anew"),
    ],
    ids=["cut off", "half", "a start", "garbage behind", "twice", "empty", "csv"],
)  # fmt: skip
def test_what_is_damaged_is_the_jobs_error_and_names_the_file(form: str, change: Any, message: str) -> None:
    data = change(arrow(prompts(2_000), form, 500))
    if (
        form == "file"
        and data[:6] == b"ARROW1"
        and len(data) % 2 == 0
        and data[: len(data) // 2] == data[len(data) // 2 :]
    ):
        assert len(read(data)) in (0, 2_000), "the last footer counts, and its blocks are the first file's"
        return
    with pytest.raises(BrokenInput, match=rf"in\.arrow.*({message})"):
        read(data)


def test_a_stream_without_the_mark_of_its_end_may_lack_rows() -> None:
    data = arrow(prompts(10), "stream")
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    with pytest.raises(
        BrokenInput, match=r"in\.arrow: message 3: the file ends before .* or without the mark of its end"
    ):
        read(data[:-8])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_buffer_that_declares_terabytes_is_refused_before_it_is_decoded(form: str, compression: str) -> None:
    table = prompts(2_000)
    data = bytearray(arrow(table, form, 2_000, compression=compression))
    size = struct.pack("<q", sum(len(str(number)) for number in range(2_000)))  # of the texts
    assert data.count(size) >= 1
    for declared in (1 << 40, 1 << 62):
        with pytest.raises(BrokenInput, match=r"in\.arrow.*takes \d{13,} bytes when it is decoded, but 536870912 are"):
            read(bytes(data).replace(size, struct.pack("<q", declared)))
    with pytest.raises(BrokenInput, match="a buffer declares -2 bytes"):
        read(bytes(data).replace(size, struct.pack("<q", -2)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_record_batches_and_dictionaries_are_bounded_together(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_messages, "MAX_BATCH_BYTES", 100_000)
    small = arrow(prompts(10, note=repeated("x" * 60_000, 10)), form, compression="zstd")
    two = arrow(prompts(10, note=repeated("x" * 60_000, 10), more=repeated("y" * 60_000, 10)), form, compression="zstd")
    assert len(read(small)) == 10
    with pytest.raises(BrokenInput, match="fewer rows in a record batch"):
        read(two)
    with pytest.raises(BrokenInput, match="fewer rows in a record batch"):
        read(arrow(prompts(40_000), form, 40_000))
    assert len(read(arrow(prompts(40_000), form, 1_000))) == 40_000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("note", [repeated, views])
def test_a_file_that_decodes_to_far_more_than_it_holds_is_refused(
    form: str, note: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 50)
    assert len(read(arrow(prompts(100, note=note("A" * 10_000, 100)), form))) == 100
    with pytest.raises(BrokenInput, match=r"in\.arrow: record batch 1.*: \d+ bytes of Arrow decode to more than"):
        read(arrow(prompts(300, note=note("A" * 10_000, 300)), form))


@pytest.mark.parametrize("form", FORMS)
def test_batches_without_rows_count_by_what_their_buffers_decode_to(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 50)

    def batches(count: int) -> bytes:
        data = arrow(prompts(77 * count, note=["x" * 3_000] * 77 * count), form, 77, compression="zstd")
        return data.replace(struct.pack("<q", 77), struct.pack("<q", 0))

    assert read(batches(3)) == []
    with pytest.raises(BrokenInput, match=r"in\.arrow: .* decode to more than 1048576 bytes"):
        read(batches(12))


@pytest.mark.parametrize("form", FORMS)
def test_a_large_dictionary_counts_with_each_batch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow validates it with each."""
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 10)
    note = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array(["y", "x" * 90_000]))
    assert len(read(arrow(prompts(8, note=note[:8]), form, 1, compression="zstd"))) == 8
    with pytest.raises(BrokenInput, match=r"in\.arrow: .* decode to more than 1048576 bytes"):
        read(arrow(prompts(40, note=note), form, 1, compression="zstd"))


def test_blocks_of_a_file_that_overlap_are_refused() -> None:
    data = arrow(prompts(30), "file", 10)
    blocks = arrow_messages.parse_footer(footer_of(data))[1]
    assert len(blocks) == 3
    first, second = (data.rfind(struct.pack("<qi", *block[:2])) for block in blocks[:2])
    same = data[:second] + data[first : first + 24] + data[second + 24 :]
    with pytest.raises(BrokenInput, match=r"in\.arrow: can't be decoded: the block at byte \d+ overlaps another"):
        read(same)
    short = data[:second] + struct.pack("<qi4xq", *blocks[1][:2], 8) + data[second + 24 :]
    with pytest.raises(BrokenInput, match=r"record batch 2 of 3: .* a body of \d+ bytes lies in a block of 8"):
        read(short)


@pytest.mark.parametrize("note", [repeated, views])
def test_rows_that_take_more_than_a_row_may_are_refused_before_they_are_decoded(
    note: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_reading, "MAX_ROW_BYTES", 1 << 20)
    with pytest.raises(BrokenInput, match=r"its rows may take 12\d+ bytes each, but 1048576 are allowed"):
        read(arrow(prompts(2, note=note("A" * 600_000, 2), more=note("B" * 600_000, 2))))


def test_nested_codes_are_bounded_before_values_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_messages, "MAX_BATCH_BYTES", 1_000_000)
    for note in (repeated, views):
        many = pa.ListArray.from_arrays(pa.array([0, 50, 100], pa.int32()), note("A" * 5_000, 100))
        more = pa.ListArray.from_arrays(pa.array([0, 50, 300], pa.int32()), note("A" * 5_000, 300))
        assert len(read(arrow(prompts(2, note=many)))) == 2
        with pytest.raises(BrokenInput, match=r"record batch 1 of 1: the column note: takes 15\d+ bytes"):
            read(arrow(prompts(2, note=more)))


def test_offsets_outside_of_their_texts_are_refused_and_not_followed() -> None:
    for offsets in ([0, 4_000_000, 2], [0, -5, 2]):
        bad = pa.StringArray.from_buffers(2, pa.py_buffer(struct.pack("<iii", *offsets)), pa.py_buffer(b"ab"))
        for table in (
            pa.table({"custom_id": ["a", "b"], "prompt": bad}),
            pa.table({"custom_id": ["a", "b"], "prompt": ["x", "y"], "n": bad}),
        ):
            with pytest.raises(BrokenInput, match=r"record batch 1 of 1: can't be decoded"):
                read(arrow(table))


def test_codes_outside_of_their_dictionary_are_refused() -> None:
    bad = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["x"]), safe=False)
    with pytest.raises(BrokenInput, match="can't be decoded"):
        read(arrow(pa.table({"custom_id": ["a", "b"], "prompt": bad})))


def test_a_text_that_is_not_utf8_is_its_rows_error_or_the_jobs_where_it_is_carried() -> None:
    bad = pa.concat_arrays([NOT_UTF8, pa.array(["b"])])
    for table in (
        pa.table({"custom_id": bad, "prompt": ["x", "y"]}),
        pa.table({"custom_id": ["a", "b"], "prompt": bad}),
    ):
        broken, good = read(arrow(table))
        assert isinstance(broken, RowError)
        assert "is not UTF-8: byte 1 is 0xff; write it as UTF-8" in broken.message
        assert isinstance(good, dict)
    with pytest.raises(BrokenInput, match="columns carried through: can't be decoded"):
        read(arrow(pa.table({"custom_id": ["a", "b"], "prompt": ["x", "y"], "note": bad})))


def test_large_cells_and_rows_fail_alone() -> None:
    table = pa.table({"custom_id": ["a", "b", "c"], "prompt": ["x" * 500, "y", "z"], "note": ["", "n" * 900, ""]})
    long, carrying, good = read(arrow(table), Limits(max_line_bytes=400, max_carried_bytes=800))
    assert isinstance(long, RowError)
    assert "the column prompt is longer than 400 bytes" in long.message
    assert isinstance(carrying, RowError)
    assert "are carried through hold" in carrying.message
    assert isinstance(good, dict)


def test_rows_are_counted_while_they_are_read() -> None:
    with pytest.raises(TooManyRows, match=r"in\.arrow: the input has more than 99 rows"):
        read(arrow(prompts(100)), Limits(max_rows=99))


def test_a_column_without_buffers_that_claims_any_number_of_rows_is_refused() -> None:
    """A batch of nulls needs no bytes. The ids do, so their number is the batch's."""
    data = arrow(pa.table({"custom_id": ["a"], "prompt": ["x"], "n": pa.nulls(1)}), "stream")
    one = struct.pack("<q", 1)
    refused = 0
    for at in range(len(data) - 8):
        if data[at : at + 8] == one:
            try:
                assert len(read(data[:at] + struct.pack("<q", 1 << 50) + data[at + 8 :])) == 1
            except InputError:
                refused += 1
    assert refused >= 2, "the batch's number, and a column's"


@pytest.mark.slow
def test_files_of_a_few_kilobytes_that_stand_for_gigabytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    large = "A" * (1 << 20)
    zeros = pa.array([bytes(1 << 28)], pa.large_binary())
    tables = {
        "dictionary": prompts(1_000, note=repeated(large, 1_000)),
        "views": prompts(1_000, note=views(large, 1_000)),
        "batch": prompts(2, note=pa.chunked_array([pa.concat_arrays([zeros, zeros])])),
        "nested": prompts(2, note=pa.ListArray.from_arrays([0, 2_000, 4_000], repeated(large, 4_000))),
    }
    paths = []
    for form in FORMS:
        for name, table in tables.items():
            paths.append(tmp_path / f"{name}-{form}")
            paths[-1].write_bytes(arrow(table, form, compression="zstd"))
            assert paths[-1].stat().st_size < 200_000
    rows, grown = read_in_child(InputFormat.ARROW, *paths)
    assert rows == [1_000, 1_000, -1, -1] * len(FORMS)
    assert grown < 300, "MiB"


def damaged(base: bytes, chosen: random.Random) -> bytes:
    """The file with one to eight changes anywhere."""
    data = bytearray(base)
    for _ in range(chosen.choice((1, 1, 2, 4, 8))):
        at = chosen.randrange(8, max(9, len(data) - 1))
        change = chosen.randrange(6)
        if change == 0:
            data[at] ^= 1 << chosen.randrange(8)
        elif change == 1:
            data[at] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif change == 2:
            at -= at % 8
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
    table = prompts(
        50,
        nested=pa.array([[{"role": "user", "content": "hi"}]] * 50),
        k=pa.array(range(50)),
        d=pa.array(["a", "b"] * 25).dictionary_encode(),
        v=pa.array(["short", "longer than twelve bytes"] * 25).cast(pa.string_view()),
        m=pa.array([[("a", 1)]] * 50, pa.map_(pa.string(), pa.int8())),
        f=pa.array([[1, 2]] * 50, pa.list_(pa.int8(), 2)),
    )
    return [arrow(table, form, 20, compression=how) for form in FORMS for how in (None, "lz4", "zstd")]


@pytest.mark.slow
def test_damaged_files_are_read_or_refused() -> None:
    found = read_damaged(whole_files(), damaged, read, 300, seed=1)
    assert found["read"] > 10, found
    assert found["refused"] > 50, found


@pytest.mark.exhaustive
def test_thousands_of_damaged_files_are_read_or_refused() -> None:
    found = read_damaged(whole_files(), damaged, read, 5_000, seed=2)
    assert found["refused"] > 500, found
