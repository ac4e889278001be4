"""Hostile compressed, CSV and Arrow files as bytes."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from tests.hostile.parquet_files import bodies

MIB: Final = 1 << 20
CSV_HEADER: Final = b"custom_id,prompt\n"


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def gzip_line(line: bytes, megabytes: int) -> bytes:
    """A good line, and one of so many MiB."""
    packer, mebibyte = zlib.compressobj(9, wbits=31), b"x" * MIB
    parts = [packer.compress(line), *(packer.compress(mebibyte) for _ in range(megabytes)), packer.flush()]
    return b"".join(parts)


def zstd_lines(line: bytes, megabytes: int) -> bytes:
    """A good line, and so many MiB of blanks, in a frame of some bytes for each MiB."""
    return zstd(line) + zstd(b" " * (MIB - 1) + b"\n") * megabytes


def huge_window() -> bytes:
    """A zstd frame that asks for a window of 2 GiB."""
    return b"\x28\xb5\x2f\xfd" + bytes([0, 21 << 3]) + b"\x01\0\0"


def damaged_streams(line: bytes) -> list[bytes]:
    """Cut off, with garbage behind, with a damaged checksum, and with half a second member."""
    packed = gzip.compress(line * 100)
    return [
        packed[:-5], packed + b"garbage", packed[:-6] + b"\xff" + packed[-5:], packed + packed[:15],
        zstd(line * 100)[:-5], zstd(line * 100) + b"garbage",
    ]  # fmt: skip


def broken_csv() -> list[bytes]:
    """Open quotes, no header, a doubled column, other separators, and 100,000 columns."""
    return [
        CSV_HEADER + b'a,"open\n' + b"b,c\n" * 1_000, CSV_HEADER + b'a,"open' + b"x" * (64 * MIB), b"\0" * 1_000,
        b"a,b\nc,d\n", b"custom_id,prompt,prompt\na,b,c\n", b"custom_id;prompt\na;b\n",
        b"custom_id,prompt" + b"".join(b",c%d" % number for number in range(100_000)) + b"\na,b\n",
    ]  # fmt: skip


def broken_rows() -> bytes:
    """Rows of too many and too few cells, that are not UTF-8, and with a quote in the middle; one is good."""
    return CSV_HEADER + b'a,b,c\nd\ne,\xff\nf,"g"h\ni,\rj\nk,\n"good",hi\n'


def arrow(columns: dict[str, Any], *, stream: bool = False, **options: Any) -> bytes:
    """The columns as an Arrow file or stream; with `custom_id` unless they have it."""
    rows = len(next(iter(columns.values())))
    table = pa.table({"custom_id": pa.array([f"r{row}" for row in range(rows)])} | columns)
    buffer, begin = io.BytesIO(), pa.ipc.new_stream if stream else pa.ipc.new_file
    with begin(buffer, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return buffer.getvalue()


def arrow_dictionary_bomb(megabytes: int, rows: int) -> bytes:
    """One value of so many MiB in each row."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["A" * (megabytes * MIB)]))
    return arrow({"prompt": value}, compression="zstd")


def arrow_view_bomb(megabytes: int, rows: int) -> bytes:
    """As `arrow_dictionary_bomb`, as views of one text."""
    view = struct.pack("<i4sii", megabytes * MIB, b"AAAA", 0, 0) * rows
    value = pa.Array.from_buffers(
        pa.string_view(), rows, [None, pa.py_buffer(view), pa.py_buffer(b"A" * megabytes * MIB)]
    )
    return arrow({"prompt": value}, compression="zstd", stream=True)


def arrow_batch_bomb(megabytes: int) -> bytes:
    """A record batch of so many MiB of zeros."""
    return arrow({"prompt": ["hi"], "note": pa.array([bytes(megabytes * MIB)], pa.large_binary())}, compression="zstd")


def arrow_declared_terabytes() -> bytes:
    """A buffer that declares a decoded size of a terabyte."""
    text = json.dumps({"a": "b" * 1_000})
    data = arrow({"prompt": [text] * 20}, compression="lz4")
    return data.replace(struct.pack("<q", 20 * len(text)), struct.pack("<q", 1 << 40))


def arrow_outside_offsets() -> bytes:
    """Texts whose offsets lie outside of them."""
    offsets = struct.pack("<iii", 0, 4_000_000, 2)
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"ab"))
    return arrow({"prompt": bad})


def mutated_arrow(seed: int, count: int) -> Iterator[bytes]:
    """So many files, each a good file or stream with one to eight changes."""
    drawn = random.Random(seed)
    columns = {
        "body": bodies(),
        "coded": pa.array(["a", "b"] * 2).dictionary_encode(),
        "nested": pa.array([[{"x": 1, "y": "z"}]] * 4),
        "view": pa.array(["short", "longer than twelve bytes"] * 2).cast(pa.string_view()),
    }
    good = [arrow(columns, stream=stream, compression=how) for stream in (False, True) for how in (None, "lz4", "zstd")]
    for _ in range(count):
        data = bytearray(drawn.choice(good))
        for _ in range(drawn.choice((1, 1, 2, 4, 8))):
            at = drawn.randrange(8, len(data) - 1)
            match drawn.randrange(4):
                case 0:
                    data[at] ^= 1 << drawn.randrange(8)
                case 1:
                    data[at] = drawn.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    value = struct.pack("<Q", drawn.choice((0, 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)))
                    data[at : at + 8] = value[: len(data) - at]
                case 3:
                    del data[at : at + drawn.randrange(1, 9)]
        yield bytes(data)
