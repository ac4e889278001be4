"""The input of a job: its files, as they were when the job was created."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.stored import Count, Sha256, StoredModel


class InputFormat(StrEnum):
    """Of a job's input. `STEP`: the rows are made from results of other jobs; their requests are in the shards only."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    ARROW = "arrow"
    STEP = "step"


class FileStamp(StoredModel):
    """A file's metadata, which changes whenever its bytes do and sometimes when they don't. Times in nanoseconds since
    1970; `ctime` is set by the system and can't be set back by programs."""

    mtime: int
    ctime: int
    inode: Count


class InputFile(StoredModel):
    """One file of an input. `size` in bytes; `sha256` where it was computed.

    `stamp` is the file's metadata at the time of hashing: a file that still has it is not read again.
    `version` (in a versioned bucket) and `etag` pin an object in S3, which is not hashed: no other state of it is read.
    """

    uri: str
    size: Count
    sha256: Sha256 | None = None
    stamp: FileStamp | None = None
    version: Annotated[str, Field(min_length=1)] | None = None
    etag: Annotated[str, Field(min_length=1)] | None = None


class InputRef(StoredModel):
    """A job's input: the uri as given, and its files in reading order (one, unless it is a folder)."""

    uri: str
    format: InputFormat
    files: Annotated[tuple[InputFile, ...], Field(min_length=1)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
