"""Hostile Parquet files as bytes: built with pyarrow, and mutated from what it builds."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

ROWS: Final = 4
TINY: Final = b"PAR1" + b"\xff" * 4 + struct.pack("<I", 4) + b"PAR1"
"""Sixteen bytes: a footer of four bytes that is no Thrift."""
FOOTER_MUTATIONS: Final = 0.6
EXTREMES: Final = (0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def written(columns: dict[str, Any], **options: Any) -> bytes:
    """The columns as a Parquet file; with `custom_id` unless they have it."""
    rows = len(next(iter(columns.values())))
    columns = {"custom_id": pa.array([f"r{row}" for row in range(rows)])} | columns
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)
    return buffer.getvalue()


def bodies(rows: int = ROWS) -> pa.Array:
    """A column `body` of chats with answers of one token."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
    return pa.array([json.dumps(body)] * rows)


def bases() -> list[bytes]:
    """Good files of several compressions, versions and page formats."""
    kinds = (("snappy", "2.6", True), ("zstd", "2.6", False), ("gzip", "1.0", True), ("none", "2.6", True),
             ("lz4", "2.6", True))  # fmt: skip
    columns = {
        "body": bodies(),
        "carried": pa.array(range(ROWS)),
        "coded": pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
        "nested": pa.array([[{"x": row, "y": "z"}] for row in range(ROWS)]),
    }
    return [
        written(columns, compression=compression, version=version, use_dictionary=coded,
                data_page_version="2.0" if coded else "1.0")
        for compression, version, coded in kinds
    ]  # fmt: skip


def mutated(seed: int, count: int) -> Iterator[bytes]:
    """So many files, each a good one with one to eight changes, most of them in the footer."""
    drawn, good = random.Random(seed), bases()
    for _ in range(count):
        yield _mutated(drawn, bytearray(drawn.choice(good)))


def dictionary_bomb(megabytes: int, rows: int, column: str = "prompt") -> bytes:
    """One dictionary value of so many MiB in each row: kilobytes that decode to megabytes * rows."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["A" * (megabytes << 20)]))
    columns: dict[str, Any] = {column: value}
    if column != "prompt":
        columns = {"prompt": pa.array(["hi"] * rows), **columns}
    return written(
        columns, compression="zstd", use_dictionary=True, dictionary_pagesize_limit=64 << 20, store_schema=False,
        write_statistics=False,
    )  # fmt: skip


def huge_page(megabytes: int) -> bytes:
    """One row, one page, one value of so many MiB, which zstd makes small."""
    value = pa.array(["A" * (megabytes << 20)], pa.large_string())
    return written(
        {"prompt": value}, compression="zstd", use_dictionary=False, write_statistics=False, data_page_size=1 << 30
    )


def carried_values(rows: int, kilobytes: int) -> bytes:
    """Rows that each carry so many KiB of random bytes to their result."""
    drawn = random.Random(rows)
    value = pa.array([drawn.randbytes(kilobytes << 10) for _ in range(rows)], pa.binary())
    return written({"body": bodies(rows), "note": value}, compression="none", use_dictionary=False)


def deep(levels: int) -> bytes:
    """A carried column of lists in lists."""
    kind, value = pa.int8(), 1
    nested: Any = value
    for _ in range(levels):
        kind, nested = pa.list_(kind), [nested]
    return written({"body": bodies(1), "deep": pa.array([nested], kind)})


def wide(fields: int) -> bytes:
    """So many carried columns."""
    return written({"body": bodies(1), **{f"c{number}": pa.array([1]) for number in range(fields)}})


def invalid_strings() -> list[bytes]:
    """A string column that holds bytes which are no UTF-8: as content, as custom_id, and carried."""
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe"))
    good = pa.array(["a"])
    return [
        written({"custom_id": good, "prompt": bad}),
        written({"custom_id": bad, "prompt": good}),
        written({"custom_id": good, "body": bad}),
    ]


def invalid_column_name() -> bytes:
    return written({"body": bodies(1), "zzzz": pa.array([1])}).replace(b"zzzz", b"\xff\xfe\xfd\xfc")


def out_of_range() -> list[bytes]:
    """Moments and durations that Python's datetime can't hold, as content."""
    large = pa.array([2**62], pa.int64())
    return [
        written({"prompt": large.cast(pa.timestamp("us"), safe=False)}),
        written({"prompt": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())}),
        written({"prompt": large.cast(pa.duration("s"))}),
    ]


def mismatched() -> list[bytes]:
    """Columns of the wrong type, missing ones, and several contents."""
    good = pa.array(["a"])
    return [
        written({"custom_id": pa.array([1]), "prompt": good}),
        written({"custom_id": good}),
        written({"prompt": good, "body": good}),
        written({"messages": pa.array([7])}),
        written({"prompt": pa.array([{"x": 1}])}),
    ]


def encrypted_footer() -> bytes:
    """A file that claims at both ends that its footer is encrypted."""
    good = written({"body": bodies(1)})
    return b"PARE" + good[4:-4] + b"PARE"


def _mutated(drawn: random.Random, data: bytearray) -> bytes:
    for _ in range(drawn.choice((1, 1, 2, 4, 8))):
        if len(data) < 16:
            break
        first = 0
        if drawn.random() < FOOTER_MUTATIONS:
            footer = struct.unpack("<I", data[-8:-4])[0] % len(data)
            first = max(4, len(data) - footer - 8)
        at = drawn.randrange(first, len(data) - 1)
        kind = drawn.randrange(6)
        if kind == 0:
            data[at] ^= 1 << drawn.randrange(8)
        elif kind == 1:
            data[at] = drawn.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", drawn.choice(EXTREMES))[: len(data) - at]
        elif kind == 3:
            del data[at : at + drawn.randrange(1, 9)]
        elif kind == 4:
            data[at:at] = drawn.randbytes(drawn.randrange(1, 9))
        elif drawn.random() < 0.1:
            del data[drawn.randrange(1, len(data)) :]
    # The first bytes say that it is Parquet; else it would be read as JSONL.
    return b"PAR1" + bytes(data[4:])
