"""Segments of the answer store: sorted request keys, each with the stored file that has its answer.

    answers/TENANT/POLICIES/keys/TIME-COUNT-NAME.parquet   a segment
    answers/TENANT/POLICIES/http/TIME-SIZE-NAME.parquet    answers over HTTP, as results

The answers of a job stay where they are, in its parts; a segment of 16 bytes for each key is all that is added. It is
derived from committed files, created if absent, and never changed. TENANT and POLICIES (the fingerprint of the content
policies that judged the answers) are folders, so that no lookup of another tenant reads them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import AwareDatetime, Field

from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.ledger.tenant_index import TENANTS, tenant_folder
from pipeline.ports import ObjectInfo, ObjectStore, PipelineError
from schemas.requests.request_key import KEY_BYTES
from schemas.stored import Sha256, StoredModel

ANSWERS: Final = "answers/"
KEYS: Final = "keys/"
HTTP: Final = "http/"
SUFFIX: Final = ".parquet"
KEY_TYPE: Final = f"S{KEY_BYTES}"
NO_POLICIES: Final = "none"
_TIME: Final = "%Y%m%dT%H%M%S"
_FOOTER: Final = b"tokenmill"
_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(KEY_BYTES), nullable=False), pa.field("file", pa.int32(), nullable=False)]
)

Keys = NDArray[np.bytes_]
"""Request keys, `KEY_TYPE`."""


class AnswersDamaged(PipelineError):
    """Raised when an object of the answer store, or a file that it names, is not what was written."""


class AnswerFile(StoredModel):
    """A stored file of results.

    Attributes:
        key: in the root.  sha256: of its bytes.
        at: when its answers were computed.
        origin: the id of the job that computed them; None: each row says it.
    """

    key: Annotated[str, Field(max_length=1_024)]
    sha256: Sha256
    at: AwareDatetime
    origin: str | None = None


class AnswerFiles(StoredModel):
    """The footer of a segment: the files that its keys refer to."""

    version: Literal[1] = 1
    files: tuple[AnswerFile, ...]


@dataclass(frozen=True, slots=True)
class StoredName:
    """An object of the store by its name, which says what retention needs. `number`: of a segment's keys, or
    of the bytes of a file of answers."""

    key: str
    at: datetime
    number: int


@dataclass(frozen=True, slots=True)
class KeySegment:
    """The keys of a segment, sorted; `files[i]` is the index in `sources` of the file that answers `keys[i]`."""

    keys: Keys
    files: NDArray[np.int32]
    sources: tuple[AnswerFile, ...]

    @classmethod
    def of(cls, keys: Keys, files: NDArray[np.int32], sources: Sequence[AnswerFile]) -> KeySegment:
        """Sorted, with one file for each key: the first of equal ones."""
        keys, firsts = np.unique(keys, return_index=True)
        return cls(keys, files[firsts], tuple(sources))

    def find(self, keys: Keys) -> NDArray[np.int32]:
        """The index in `sources` for each of these keys, -1 where there is none."""
        if not len(self.keys):
            return np.full(len(keys), -1, dtype=np.int32)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[places] == keys, self.files[places], np.int32(-1))

    def live(self, after: datetime) -> KeySegment:
        """Only the keys of answers that were computed later than `after`."""
        if all(source.at > after for source in self.sources):
            return self
        new = np.cumsum([source.at > after for source in self.sources]) - 1
        is_live = np.array([source.at > after for source in self.sources])[self.files]
        sources = tuple(source for source in self.sources if source.at > after)
        return KeySegment(self.keys[is_live], new.astype(np.int32)[self.files[is_live]], sources)


def joined(segments: Iterable[KeySegment]) -> KeySegment:
    """One segment of all keys; of equal keys those of the first segment count."""
    keys, files, sources = [], [], list[AnswerFile]()
    for segment in segments:
        keys.append(segment.keys)
        files.append(segment.files + np.int32(len(sources)))
        sources += segment.sources
    return KeySegment.of(np.concatenate(keys), np.concatenate(files), sources)


def answer_space(tenant: str, policies: str | None) -> str:
    """The prefix of a tenant's answers under these content policies. Ends with a slash."""
    return f"{ANSWERS}{tenant_folder(tenant).removeprefix(TENANTS)}{policies or NO_POLICIES}/"


def stored_name(folder: str, at: datetime, number: int, name: str) -> str:
    """The key of an object in `folder`, as `parse_name` reads it."""
    return f"{folder}{at.astimezone(UTC):{_TIME}}-{number}-{name}{SUFFIX}"


def parse_name(info: ObjectInfo) -> StoredName | None:
    """What the object's name says; None: it isn't the store's."""
    time, _, rest = info.key.rpartition("/")[2].removesuffix(SUFFIX).partition("-")
    number, dash, _ = rest.partition("-")
    try:
        at = datetime.strptime(time, _TIME).replace(tzinfo=UTC)
        return StoredName(info.key, at, int(number)) if dash and info.key.endswith(SUFFIX) else None
    except ValueError:
        return None


def list_newest(store: ObjectStore, folder: str) -> list[StoredName]:
    """The store's objects in a folder, the newest first."""
    found = [name for info in store.list(folder) if (name := parse_name(info)) is not None]
    return found[::-1]


def write_segment(store: ObjectStore, space: str, segment: KeySegment, name: str) -> int:
    """Create a segment; returns its bytes, 0 if it exists. `name`: equal for equal contents."""
    footer = AnswerFiles(files=segment.sources).model_dump_json(exclude_none=True)
    count = len(segment.keys)
    column = pa.FixedSizeBinaryArray.from_buffers(
        _SCHEMA.field("key").type, count, [None, pa.py_buffer(np.ascontiguousarray(segment.keys))]
    )
    table = pa.table([column, pa.array(segment.files, pa.int32())], schema=_SCHEMA)
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, _SCHEMA, compression="zstd", use_dictionary=["file"]) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_FOOTER: footer})
    at = max(source.at for source in segment.sources)
    data = buffer.getvalue()
    return len(data) if store.create(stored_name(f"{space}{KEYS}", at, count, name), data) else 0


def read_segment(store: ObjectStore, key: str) -> KeySegment:
    """Read a segment. Raises `AnswersDamaged`, or `ObjectNotFound` where it was merged or removed meanwhile."""
    where = store.locate(key)
    try:
        with pq.ParquetFile(io.BytesIO(store.read(key))) as file:
            sources = parse_stored(where, (file.metadata.metadata or {}).get(_FOOTER, b""), AnswerFiles).files
            table = file.read(use_threads=False)
        table.validate(full=True)
        if table.schema.types != _SCHEMA.types or any(column.null_count for column in table.columns):
            raise AnswersDamaged(f"{where}: has other columns than a segment")
        column = pa.concat_arrays(table["key"].chunks or [pa.array([], _SCHEMA.field("key").type)])
        start = column.offset * KEY_BYTES
        keys = np.frombuffer(column.buffers()[1] or b"", dtype=KEY_TYPE, count=len(column), offset=start)
        files = table["file"].to_numpy().astype(np.int32)
    except (pa.ArrowException, OSError, LedgerError) as error:
        raise AnswersDamaged(f"{where}: is not a whole segment ({error})") from error
    if len(files) and not 0 <= files.min() <= files.max() < len(sources):
        raise AnswersDamaged(f"{where}: names files that it doesn't list")
    if not (keys[1:] > keys[:-1]).all():
        raise AnswersDamaged(f"{where}: its keys are not sorted")
    return KeySegment(keys, files, sources)


def read_answers(store: ObjectStore, file: AnswerFile) -> bytes:
    """A file of answers as it was committed. Raises `AnswersDamaged`, or `ObjectNotFound` where it was removed."""
    data = store.read(file.key)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise AnswersDamaged(f"{store.locate(file.key)}: is not the file that was committed")
    return data
