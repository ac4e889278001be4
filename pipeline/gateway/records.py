"""What the gateway writes down, once each:

files/ID/content              the bytes
files/ID/file.json            the commit: what is known of them
files/ID/readers/JOB.json     a job that reads them: while it is open they stay
files/ID/deleted              they are being removed, and nobody sees them any more
batches/JOB/order.json        a batch as it was asked for, before its job is made
batches/JOB/outcome.json      the files that its results became, when all of them stand
finalizing/JOB                a batch whose outcome isn't written yet
tenants/TENANT/…              markers: what is whose (`pipeline.ledger.tenant_index`); those of files: ID.PURPOSE.BYTES
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

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
    """`files/ID/file.json`.

    Attributes:
        filename: as its uploader named it: data, and never a path.  size: in bytes.
        batch: whose results it holds.
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
        """Its name among the tenant's markers: it says what listings and quotas need, so they read no file."""
        return f"{self.id}.{self.purpose}.{self.size}"

    def document(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": seconds(self.created_at),
            "expires_at": seconds(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileMarker(NamedTuple):
    """What the name of a marker says."""

    id: str
    purpose: str
    size: int


def read_marker(name: str) -> FileMarker:
    """See `StoredFile.marker`."""
    file_id, _, rest = name.partition(".")
    purpose, _, size = rest.partition(".")
    return FileMarker(file_id, purpose, int(size) if size.isdecimal() else 0)


class Reader(StoredModel):
    """`files/ID/readers/JOB.json`: since `at` the file is that job's input."""

    version: Literal[1] = 1
    at: AwareDatetime


class BatchOrder(StoredModel):
    """`batches/JOB/order.json`: what a batch says that its job doesn't."""

    version: Literal[1] = 1
    tenant: str
    input_file_id: str | None
    endpoint: str
    completion_window: str | None = None
    at: AwareDatetime


class BatchOutcome(StoredModel):
    """`batches/JOB/outcome.json`: all that comes of a batch stands.

    Attributes:
        output_file_id, error_file_id: of rows that succeeded, and of the others; None: there are none.
        at: when.  in_progress_at: when work could begin.
    """

    version: Literal[1] = 1
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: AwareDatetime | None = None
    at: AwareDatetime


class IdempotencyRecord(StoredModel):
    """`tenants/TENANT/idempotency/HASH.json`: a request with this key was heard, first `at`; `digest` of what it
    said."""

    version: Literal[1] = 1
    at: AwareDatetime
    digest: Sha256


def new_file_id(now: datetime, random: Randomness) -> str:
    """An id that sorts before all earlier ones."""
    return f"file-{time_digits(now)}{_letters(random.token(_RANDOM_BYTES))}"


def derived_file_id(at: datetime, *identity: str) -> str:
    """An id that sorts like `new_file_id`'s of that moment, the same whenever these are the same."""
    digest = hashlib.sha256("\0".join(identity).encode(errors="surrogatepass")).digest()
    return f"file-{time_digits(at)}{_letters(digest[:_DERIVED_BYTES])}"


def is_file_id(text: str) -> bool:
    """Whether it may be the id of a file; anything else never becomes part of a key."""
    return _ID.fullmatch(text) is not None


def seconds(at: datetime | None) -> int | None:
    """Whole seconds since 1970, as OpenAI gives moments."""
    return None if at is None else int(at.timestamp())


def _letters(data: bytes) -> str:
    return base64.b32hexencode(data).decode().lower().rstrip("=")
