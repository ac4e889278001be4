"""What a call asked, in its job's folder: the templates and parameters behind the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.inputs.regular_files import IrregularFile, open_regular_below
from tokenmill.errors import InvalidCall

RECORD: Final = "call.json"
MAX_RECORD_BYTES: Final = 64 << 20


class CallRecord(BaseModel):
    """A call over a table.

    Attributes:
        url: of its requests.  column: of the answers.
        texts: the templates, by argument.  body: the fields that all requests have, but for the model.
        adapter_column: the column with the adapters' names; None: all rows have the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    column: str
    texts: dict[str, str]
    body: dict[str, Any]
    adapter_column: str | None = None


def write_record(record: CallRecord, scratch: Path, folder: Path) -> None:
    """Write the record into a job's folder; it appears whole."""
    made = scratch / RECORD
    made.write_text(record.model_dump_json(indent=2), encoding="utf-8")
    made.replace(folder / RECORD)


def read_record(folder: Path) -> CallRecord:
    """The record in a job's folder. Raises `InvalidCall`."""
    path = folder / RECORD
    try:
        with open_regular_below(folder, path) as stream:
            data = stream.read(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidCall(f"{path}: is larger than {MAX_RECORD_BYTES} bytes")
        return CallRecord.model_validate_json(data)
    except (OSError, IrregularFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidCall(f"{path}: can't be read: {reason}; give the output_dir of a call over a table") from error
    except ValidationError as error:
        raise InvalidCall(f"{path}: is no record of a call: {error.errors(include_url=False)[0]['msg']}") from error
