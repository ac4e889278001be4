"""Cells of columns as Python values. A problem of one row is that row's error; sizes are checked before values
are created."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.requests.errors import RowError, RowErrorCode


def cells_of(column: pa.ChunkedArray, name: str, max_bytes: int) -> list[Any]:
    """The cells' values. A cell that is longer than `max_bytes`, or that Python can't hold, is a `RowError`."""
    large = np.zeros(len(column), dtype=bool) if column.nbytes <= max_bytes else _sizes(column, max_bytes) > max_bytes
    if large.any():
        column = column.take(pa.array(range(len(column)), pa.int64(), mask=large))
    try:
        cells: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        cells = [_cell(scalar, name) for scalar in column]
    for index in large.nonzero()[0].tolist():
        message = f"the column {name} is longer than {max_bytes} bytes; shorten it"
        cells[index] = RowError(RowErrorCode.INVALID_JSON, message, param=name)
    return cells


def row_bytes(table: pa.Table, enough: int) -> NDArray[np.int64]:
    """Bytes of each row, int64 [rows]; nested columns count only if they hold more than `enough` in all."""
    sizes = np.zeros(table.num_rows, dtype=np.int64)
    for column in table.columns:
        sizes += _sizes(column, enough)
    return sizes


def _sizes(column: pa.ChunkedArray, enough: int) -> NDArray[np.int64]:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or _is_large(kind):
        sizes: NDArray[np.int64] = pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
        return sizes
    if not pa.types.is_nested(kind):
        return np.full(len(column), column.nbytes // max(1, len(column)), dtype=np.int64)
    if column.nbytes <= enough:
        return np.zeros(len(column), dtype=np.int64)
    return np.fromiter((column.slice(index, 1).nbytes for index in range(len(column))), np.int64, len(column))


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(kind))


def _cell(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        message = f"the column {name} is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        return RowError(RowErrorCode.INVALID_JSON, f"{message}; write it as UTF-8", param=name)
    except (ValueError, OverflowError) as error:
        message = f"the column {name} holds a {scalar.type} that can't be represented ({error}); write it as text"
        return RowError(RowErrorCode.INVALID_REQUEST, message, param=name)
