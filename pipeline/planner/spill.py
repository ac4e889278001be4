"""A scratch file of rows: they are written in batches, and read by their index through a memory map."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.ports import StoreError

SPARE_BYTES: Final = 256 << 20
"""Bytes of the disk that stay free for other uses of the machine; uploads leave as much."""


class SpilledRows:
    """Writes rows to one Arrow file.

    Raises:
        StoreError: the disk has only `SPARE_BYTES` left, or can't be written.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._path = path
        self._writer = pa.ipc.new_file(str(path), schema)
        self._starts = [0]

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows of `schema`."""
        if shutil.disk_usage(self._path.parent).free < batch.nbytes + SPARE_BYTES:
            raise StoreError(
                f"{self._path.parent}: planning would leave less than {SPARE_BYTES} bytes; free some space"
            )
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise StoreError(f"{self._path}: can't write rows: {error.strerror or error}; free some space") from error
        self._starts.append(self._starts[-1] + batch.num_rows)

    def open(self) -> SpilledRowReader:
        """A reader of the rows; none can be added from then on."""
        self._writer.close()
        return SpilledRowReader(self._path, np.array(self._starts, dtype=np.int64))


class SpilledRowReader:
    """Rows of a scratch file by their index. Its mapped pages are the file's: the system may evict them at any time,
    and they are released batch by batch, so that memory doesn't grow with the file."""

    def __init__(self, path: Path, starts: NDArray[np.int64]) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._map)))
        self._starts = starts

    def take(self, indices: NDArray[np.int64]) -> pa.Table:
        """The rows at `indices`, in that order; each batch of the file is read once."""
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        batches = np.searchsorted(self._starts, ordered, side="right") - 1
        begins = np.flatnonzero(np.concatenate(([True], batches[1:] != batches[:-1])))
        parts = []
        for begin, end in zip(begins, np.append(begins[1:], len(ordered)), strict=True):
            number = int(batches[begin])
            part = self._file.get_batch(number).take(pa.array(ordered[begin:end] - self._starts[number]))
            parts.append(part)
            if hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pa.Table.from_batches(parts).combine_chunks().take(pa.array(back))
