"""What a job reads: the files of its input, as they were when it was made."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.stored import Count, Sha256, StoredModel


class InputFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


class FileStamp(StoredModel):
    """Changes whenever a file's bytes do, and sometimes when they don't. Times in nanoseconds since 1970; `ctime` is
    the system's own, which no program sets back."""

    mtime: int
    ctime: int
    inode: Count


class InputFile(StoredModel):
    """One file of an input. `size` in bytes; `sha256` where it was computed.

    `stamp` is what the file system said of the file when it was hashed: a file that still has it is not read again.
    `version` (where the bucket keeps versions) and `etag` fix an object in S3, which is not hashed: no other state of
    it is ever read.
    """

    uri: str
    size: Count
    sha256: Sha256 | None = None
    stamp: FileStamp | None = None
    version: Annotated[str, Field(min_length=1)] | None = None
    etag: Annotated[str, Field(min_length=1)] | None = None


class InputRef(StoredModel):
    """What a job reads: the uri as given, and the files behind it in reading order (one, unless it is a folder)."""

    uri: str
    format: InputFormat
    files: Annotated[tuple[InputFile, ...], Field(min_length=1)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
