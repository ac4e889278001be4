"""Arrow files and streams as bytes."""

from __future__ import annotations

import io
from typing import Any, Final

import pyarrow as pa

FORMS: Final = ("file", "stream")


def arrow(table: pa.Table, form: str = "file", batch_rows: int = 1_000, **options: Any) -> bytes:
    """The table as an Arrow file or stream."""
    buffer = io.BytesIO()
    begin = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    # A file may not replace its dictionaries.
    options = {"unify_dictionaries": True, **options}
    with begin(buffer, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return buffer.getvalue()
