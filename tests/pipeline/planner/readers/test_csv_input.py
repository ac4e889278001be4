"""CSV as input: its columns mean what they mean in Parquet, and a bad row fails alone where that is possible."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner import BrokenInput, InputError, RowSource, SourceBatch, SourceFile, TooManyRows, open_source
from pipeline.planner.readers import csv as csv_reading
from pipeline.planner.readers import expansion
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from tests.pipeline.planner.readers.child_reads import read_in_child

SIZES = SegmentSizes(100, 1_000)
HEADER = b"custom_id,prompt\n"
MESSAGES = [{"role": "user", "content": 'say "hi", twice'}]


def source(*datas: bytes, limits: Limits | None = None, model: str | None = "demo") -> RowSource:
    files = [SourceFile(f"{number}.csv", lambda data=data: io.BytesIO(data)) for number, data in enumerate(datas)]
    return open_source(files, InputFormat.CSV, limits or Limits(), model)


def read(*datas: bytes, limits: Limits | None = None) -> list[SourceBatch]:
    return list(source(*datas, limits=limits).batches(SIZES))


def values(*datas: bytes, limits: Limits | None = None) -> dict[int, Any]:
    """The value of each line."""
    return {row.line: row.value for batch in read(*datas, limits=limits) for row in batch.rows}


def message_of(value: object) -> str:
    assert isinstance(value, RowError)
    return value.message


def written(rows: list[dict[str, str | None]], line_end: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator=line_end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def wide_header(columns: int) -> bytes:
    return b"custom_id,prompt" + b"".join(b",n%d" % number for number in range(columns - 2)) + b"\n"


cells = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20).map(lambda text: text or None)


@given(
    st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=20),
    st.sampled_from(["prompt", "messages", "body", "input"]),
    st.sampled_from(["\n", "\r\n"]),
)
@pytest.mark.slow
def test_any_csv_is_read_as_the_same_columns_of_parquet(
    rows: list[tuple[str | None, str | None, str | None]], content: str, line_end: str
) -> None:
    table = [dict(zip(("custom_id", content, "note"), row, strict=True)) for row in rows]
    parquet = io.BytesIO()
    schema = pa.schema([(name, pa.string()) for name in table[0]])
    pq.write_table(pa.Table.from_pylist(table, schema), parquet)
    file = SourceFile("0.parquet", lambda: io.BytesIO(parquet.getvalue()))
    same = open_source([file], InputFormat.PARQUET, Limits(), "demo").batches(SIZES)
    for batch, expected in zip(read(written(table, line_end)), same, strict=True):
        assert repr([(row.row, row.value) for row in batch.rows]) == repr(
            [(row.row, row.value) for row in expected.rows]
        )
        assert batch.carried == expected.carried


def test_messages_and_bodies_are_json_texts_in_cells(tools: Any) -> None:
    chat = written([{"custom_id": "a", "messages": json.dumps(MESSAGES), "n": "7"}], "\n")
    (row,) = tools.plan(source(chat)).rows
    assert (json.loads(row["body"])["messages"], row["n"]) == (MESSAGES, "7")
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 3}
    (row,) = tools.plan(source(written([{"custom_id": "a", "body": json.dumps(body), "url": ""}], "\n"))).rows
    assert (json.loads(row["body"]), row["url"]) == (body, "/v1/chat/completions")


def test_a_bad_row_between_good_ones_fails_alone_and_rows_name_their_lines() -> None:
    data = (
        b"\xef\xbb\xbf"
        + HEADER
        + b'a,"x ""q"" y"\r\nb,"two\nlines"\n\nc,\nd,x,y\ne\nf,\xff\ng,"a"b\nh,x\ry\ni,nul\0l\n'
    )
    found = values(data)
    assert {line: value["custom_id"] for line, value in found.items() if isinstance(value, dict)} == {
        2: "a", 3: "b", 12: "i",
    }  # fmt: skip
    assert found[2]["body"]["prompt"] == 'x "q" y'
    assert found[3]["body"]["prompt"] == "two\nlines"
    assert found[12]["body"]["prompt"] == "nul\0l"
    for line, message in {
        6: "the column prompt is null; fill it",
        7: "the row has 3 cells, but the header has 2",
        8: "the row has 1 cells, but the header has 2",
        9: "the row is not UTF-8: byte 3 of line 9 is 0xff; save the file as UTF-8",
        10: "double the quotes inside of texts",
        11: "a carriage return outside of quotes",
    }.items():
        assert message in message_of(found[line])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"0\.csv is empty; begin it with a header"),
        (b"\n\n", r"0\.csv is empty"),
        (b"id,prompt\na,b\n", r"lacks the column custom_id \(it has: id, prompt\)"),
        (b"a,what is this\nb,and this\n", "lacks the column custom_id"),
        (b"custom_id,prompt,prompt\n", r"columns of the same name \(prompt\); rename them"),
        (b"custom_id;prompt\n", "the header has ';' between names; separate the columns by commas"),
        (b"custom_id,pr\xffmpt\n", "line 1: the header can't be read: the row is not UTF-8"),
        (b'custom_id,"prompt"x\n', "line 1: the header can't be read"),
        ("custom_id,prompt\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"PAR1" + HEADER, "is a Parquet file"),
        (HEADER + b'a,"open\nb,c\n', "line 2: a quote that is open.*isn't closed properly up to line 3"),
        (HEADER + b'a,"open\nb,"c\n', "line 2: a quote that is open.*isn't closed properly up to line 3"),
        (HEADER + b'a,"open' + b"\nb,c" * 500 + b"\n", "line 2: the row is longer than 800 bytes; close its quotes"),
        (HEADER + b"a," + b"x" * 900 + b"\n", "line 2: the row is longer than 800 bytes"),
        (HEADER + b'a,"' + b"\n" * 900 + b'"\n', "line 2: the row is longer than 800 bytes"),
        (b'custom_id,"' + b"\n" * 900 + b'"\n', "line 1: the row is longer than 800 bytes"),
    ],
)  # fmt: skip
def test_what_leaves_the_rows_unclear_is_the_jobs_error(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(data, limits=Limits(max_line_bytes=200))


def test_more_columns_than_results_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match="has 20002 columns, but 10000 are allowed; leave some out"):
        read(b"custom_id,prompt" + b",x" * 20_000 + b"\n")


def test_a_header_is_bounded_before_its_columns_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    schema = pa.schema
    monkeypatch.setattr(csv_reading.pa, "schema", lambda fields: made.append(len(fields)) or schema(fields))
    with pytest.raises(InputError, match="has 500001 columns, but 10000 are allowed"):
        read(b"," * 500_000 + b"\n")
    with pytest.raises(BrokenInput, match="line 2: the row is longer than 1048576 bytes; close its quotes, shorten it"):
        read(b"\n" + b"," * (1 << 20) + b",\n")
    assert made == []
    wide = b"custom_id,prompt," + b"n" * 1_000_000 + b"\n"
    assert values(wide + b"a,b,c\n")[2]["custom_id"] == "a"


@pytest.mark.slow
def test_rows_are_counted_by_what_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_EXPANSION", 50)
    wide, whole = wide_header(500), b"a,b" + b"," * 498 + b"\n"
    assert len(values(wide + (b"x\n" + whole) * 50)) == 100
    assert len(values(wide + whole * 3_000)) == 3_000, "they are 1.5 MB"
    packed = SourceFile("0.csv.gz", lambda: io.BytesIO(gzip.compress(wide + whole * 2_000)))
    with pytest.raises(BrokenInput, match=r"0\.csv\.gz: line \d+: \d+ bytes of CSV decode to more than 1048576 bytes"):
        list(open_source([packed], InputFormat.CSV, Limits(), "demo").batches(SIZES))


@pytest.mark.slow
def test_rows_without_all_cells_are_counted_before_their_columns_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    make = csv_reading.CsvColumns._piece

    def made(file: csv_reading.CsvColumns, rows: list[Any], limit: Any) -> Any:
        pieces.append(len(rows))
        return make(file, rows, limit)

    monkeypatch.setattr(csv_reading.CsvColumns, "_piece", made)
    monkeypatch.setattr(csv_reading, "MAX_REFUSED_CELLS", 500_000)
    wide, whole = wide_header(1_000), b"a,b" + b"," * 998 + b"\n"
    assert len(values(wide + b"x\n" * 500)) == 500
    assert len(values(wide + (b"x\n" + whole) * 2_000)) == 4_000, "as many bytes as refused cells"
    message = r": line 503: too many rows lack cells, or can't be read: 502 up to here, with 1000 columns each; "
    pieces.clear()
    with pytest.raises(BrokenInput, match=r"0\.csv" + message):
        read(wide + b"x\n" * 100_000)
    packed = SourceFile("0.csv.gz", lambda: io.BytesIO(gzip.compress(wide + b"\xff\n" * 100_000)))
    with pytest.raises(BrokenInput, match=r"0\.csv\.gz" + message):
        list(open_source([packed], InputFormat.CSV, Limits(), "demo").batches(SIZES))
    assert pieces == [256, 256], "one of each file"


def test_names_of_columns_are_escaped_and_cut_in_messages() -> None:
    name = b"a\0\x1b[2J\xe2\x80\xae" + b"x" * 900
    for header in (name + b",prompt\n", b"custom_id,prompt," + name + b"," + name + b"\n"):
        with pytest.raises(InputError, match=r"'a\\x00\\x1b\[2J\\u202ex+'…") as found:
            read(header)
        assert str(found.value).isprintable()
        assert len(str(found.value)) < 400
    (large,) = values(b"custom_id,prompt," + name + b"\na,b,long\n", limits=Limits(max_carried_bytes=3)).values()
    assert isinstance(large, RowError)
    assert large.param is not None
    assert large.param.isprintable()
    assert len(large.param) < 200


def test_a_cell_longer_than_a_line_may_be_fails_alone() -> None:
    found = values(HEADER + b"a,b\nb," + b"x" * 300 + b"\nc,d\n", limits=Limits(max_line_bytes=200))
    assert "the column prompt is longer than 200 bytes" in message_of(found[3])
    assert found[4]["custom_id"] == "c"


def test_rows_and_lines_of_several_files(tools: Any) -> None:
    planned = tools.plan(source(HEADER + b"a,one\nb,\n", HEADER + b'c,"two\nlines"\nd\n'))
    assert {row["row"]: row["custom_id"] for row in planned.rows} == {0: "a", 2: "c"}
    assert planned.error_of[1][1].startswith("line 3: 0.csv: ")
    assert planned.error_of[3][1].startswith("line 4 of the input: 1.csv: the row has 1 cells")
    with pytest.raises(InputError, match=r"1\.csv has other columns than 0\.csv"):
        source(HEADER, b"custom_id,prompt,n\n")
    with pytest.raises(TooManyRows, match="more than 2 rows"):
        read(HEADER + b"a,b\n" * 3, limits=Limits(max_rows=2))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_quote_that_is_never_closed_in_a_large_file_is_found_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    with path.open("wb") as stream:
        stream.write(HEADER + b'a,"open\n')
        for _ in range(300):
            stream.write(b"b,c\n" * (1 << 18))
    rows, grown = read_in_child(InputFormat.CSV, path)
    assert rows == [-1]
    assert grown < 250, "MiB"


def test_closing_a_reader_early_closes_the_file() -> None:
    opened: list[io.BytesIO] = []

    def open_file() -> io.BytesIO:
        opened.append(io.BytesIO(HEADER + b"a,b\n" * 10_000))
        return opened[-1]

    batches = open_source([SourceFile("in.csv", open_file)], InputFormat.CSV, Limits(), "demo").batches(SIZES)
    assert next(iter(batches))
    del batches
    assert all(stream.closed for stream in opened)


def test_a_header_that_repeats_is_a_row_like_any_other() -> None:
    found = values(HEADER + HEADER)
    assert found[2]["custom_id"] == "custom_id"


def test_an_open_quote_is_not_taken_for_rows() -> None:
    """Rows behind it would be lost in its text."""
    with pytest.raises(BrokenInput, match="line 3"):
        values(HEADER + b'a,b\nc,"d\ne,f\n')
