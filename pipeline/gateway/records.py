"""Stored records of the gateway. Each object is created once and never overwritten:

files/ID/content              the file's bytes
files/ID/file.json            the file's metadata; writing it commits the file
files/ID/readers/JOB.json     a job that reads the file; the file can't be deleted while the job is open
files/ID/deleted              the file is being removed and is no longer visible
batches/JOB/order.json        the batch request, written before its job is created
batches/JOB/outcome.json      the output files of the batch, written after all of them are committed
finalizing/JOB                a batch whose outcome isn't written yet
tenants/TENANT/…              index markers of a tenant (`pipeline.ledger.tenant_index`); those of files:
ID.PURPOSE.BYTES
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AwareDatetime, Field

from pipeline.jobs.submit import time_digits
from pipeline.ports import Randomness
from schemas.jobs.inputs import InputFormat
from schemas.stored import Count, Sha256, StoredModel

FILES: Final = "files/"
BATCHES: Final = "batches/"
FINALIZING: Final = "finalizing/"

_ID = re.compile(r"file-[0-9a-v]{17,64}")
_RANDOM_BYTES: Final = 10
_DERIVED_BYTES: Final = 20


class StoredFile(StoredModel):
    """The metadata of a file: `files/ID/file.json`.

    Attributes:
        filename: as the client named it; it is data and never used as a path.  size: in bytes.
        batch: the batch whose results the file holds.
    """

    version: Literal[1] = 1
    id: str
    tenant: str
    filename: Annotated[str, Field(max_length=512)]
    purpose: Literal["batch", "batch_output"]
    size: Count
    sha256: Sha256
    format: InputFormat = InputFormat.JSONL
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    batch: str | None = None

    @property
    def marker(self) -> str:
        """The file's name in the tenant index. It holds what listings and quotas need, so they read no `file.json`."""
        return f"{self.id}.{self.purpose}.{self.size}"


class FileMarker(NamedTuple):
    """The fields that the name of a file's index marker holds. `size` is in bytes."""

    id: str
    purpose: str
    size: int


def read_marker(name: str) -> FileMarker:
    """Parse the name of an index marker; see `StoredFile.marker`."""
    file_id, _, rest = name.partition(".")
    purpose, _, size = rest.partition(".")
    return FileMarker(file_id, purpose, int(size) if size.isdecimal() else 0)


class Reader(StoredModel):
    """A job that reads a file: `files/ID/readers/JOB.json`. The file has been the job's input since `at`."""

    version: Literal[1] = 1
    at: AwareDatetime


class BatchOrder(StoredModel):
    """The fields of a batch request that its job doesn't store: `batches/JOB/order.json`."""

    version: Literal[1] = 1
    tenant: str
    input_file_id: str | None
    endpoint: str
    completion_window: str | None = None
    at: AwareDatetime


class BatchOutcome(StoredModel):
    """The output files of a finished batch, all committed: `batches/JOB/outcome.json`.

    Attributes:
        output_file_id: the file of the rows that succeeded; None: there are none.
        error_file_id: the file of all other rows; None: there are none.
        at: when the files were committed.  in_progress_at: when the first rows could be processed.
    """

    version: Literal[1] = 1
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: AwareDatetime | None = None
    at: AwareDatetime


class IdempotencyRecord(StoredModel):
    """A request with an `Idempotency-Key`: `tenants/TENANT/idempotency/HASH.json`. It was first received `at`; `digest`
    is the sha256 of its content."""

    version: Literal[1] = 1
    at: AwareDatetime
    digest: Sha256


def new_file_id(now: datetime, random: Randomness) -> str:
    """Create a file id that sorts before all earlier ones."""
    return f"file-{time_digits(now)}{_base32(random.token(_RANDOM_BYTES))}"


def derived_file_id(at: datetime, *identity: str) -> str:
    """Derive a file id from its time and identity: the same arguments give the same id. It sorts as an id that
    `new_file_id` creates at that time."""
    digest = hashlib.sha256("\0".join(identity).encode(errors="surrogatepass")).digest()
    return f"file-{time_digits(at)}{_base32(digest[:_DERIVED_BYTES])}"


def is_file_id(text: str) -> bool:
    """Whether the text is a well-formed file id. Other texts must not become part of an object key."""
    return _ID.fullmatch(text) is not None


def _base32(data: bytes) -> str:
    return base64.b32hexencode(data).decode().lower().rstrip("=")
