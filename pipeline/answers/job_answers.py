"""Answers of jobs in the answer store: an ended job's parts become answers, and a planner takes answers of others.

Planning reads each file that has a wanted answer once, whole, before it takes an answer from it. So a file that is
damaged, or that retention removes meanwhile, costs a computation and never the job.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from numpy.typing import NDArray

from pipeline.answers.index import AnswerIndex, find_or_none
from pipeline.answers.segments import (
    KEY_TYPE,
    AnswerFile,
    AnswersDamaged,
    KeySegment,
    answer_space,
    read_answers,
)
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ledger.records import PartSummary
from pipeline.planner import BrokenInput, SourceFile
from pipeline.planner.validate import ValidRow
from pipeline.ports import ObjectNotFound, StoreError
from pipeline.results.former_answers import StoredFormerAnswers
from pipeline.results.part_files import PartEntry
from schemas.jobs.job import Job
from schemas.jobs.outcome import FileEntry, Manifest
from schemas.jobs.results import RowStatus
from schemas.requests.request_key import KEY_BYTES

_POLICIES: Final = "content_policies"
_FINGERPRINT: Final = re.compile(r"\((\w+)\)$")
_COLUMNS: Final = ["status", "request_key", "reused_from"]

logger = structlog.get_logger(__name__)


def store_job(
    index: AnswerIndex, ledger: JobLedger, job: Job, manifest: Manifest, parts: Mapping[int, PartEntry]
) -> None:
    """Make the answers of a job with this outcome available to later jobs and requests of its tenant. Answers that it
    took from others stay theirs. A failure is logged: the job ends all the same.

    Args:
        parts: the job's parts, by number.
    """
    try:
        files = {file.path: file for file in manifest.files}
        for policies, mine in _by_policies(parts.values()).items():
            named = [(part, files[part_key(part.number)]) for part in mine]
            _store_parts(index, ledger, job, manifest, named, policies)
    except Exception as error:  # noqa: BLE001 - answers that aren't stored are computed again
        logger.warning("answers_not_stored", job=job.id, reason=f"{type(error).__name__}: {error}")


@contextmanager
def answers_for(index: AnswerIndex, job: Job, policies: str | None, scratch: Path) -> Iterator[SharedAnswers]:
    """The stored answers that the job may take.

    Args:
        policies: the fingerprint of the content policies that would judge the job's answers.
        scratch: for the files that are read, which are removed at the end.
    """
    space = answer_space(job.tenant, policies)
    with TemporaryDirectory(prefix="answers-", dir=scratch) as folder:
        yield SharedAnswers(index, space, Path(folder), job.settings.limits.max_rows)
    try:
        index.merge(space)
    except StoreError as error:
        logger.warning("stored_answers_not_merged", reason=str(error))


class SharedAnswers:
    """`FormerAnswers` of the answer store. Requests that are sampled without a seed find none.

    Args:
        space: of the tenant.  folder: an empty one, for the files.  max_rows: of a file.
    """

    def __init__(self, index: AnswerIndex, space: str, folder: Path, max_rows: int) -> None:
        self._index = index
        self._space = space
        self._folder = folder
        self._max_rows = max_rows
        self._files: dict[str, tuple[int, StoredFormerAnswers] | None] = {}  # with its first index; None: unusable
        self._opened: list[StoredFormerAnswers] = []
        self._firsts = [0]

    def find(self, keys: Sequence[bytes], shareable: Sequence[bool]) -> NDArray[np.int64]:
        """See `FormerAnswers`."""
        found = np.full(len(keys), -1, dtype=np.int64)
        wanted = np.flatnonzero(np.asarray(shareable, dtype=bool)).tolist()
        files = find_or_none(self._index, self._space, [keys[row] for row in wanted])
        by_file: defaultdict[AnswerFile, list[int]] = defaultdict(list)
        for row, file in zip(wanted, files, strict=True):
            if file is not None:
                by_file[file].append(row)
        for file, rows in by_file.items():
            opened = self._open(file)
            if opened is not None:
                first, answers = opened
                places = answers.find([keys[row] for row in rows], [True] * len(rows))
                found[rows] = np.where(places >= 0, places + first, -1)
        hits = int((found >= 0).sum())
        self._index.counts.add("hit", hits)
        self._index.counts.add("miss", len(wanted) - hits)
        return found

    def take(self, indices: NDArray[np.int64]) -> pa.Table:
        """See `FormerAnswers`."""
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        files = np.searchsorted(self._firsts, ordered, side="right") - 1
        tables = [
            self._opened[file].take(ordered[files == file] - self._firsts[file]) for file in np.unique(files).tolist()
        ]
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_tables(tables).combine_chunks().take(pa.array(back))

    def accepts(self, rows: Sequence[ValidRow], answers: pa.Table) -> list[bool]:
        """See `FormerAnswers`. Jobs of a root don't judge answers."""
        return [True] * len(rows)

    def mark_given(self, keys: Sequence[bytes]) -> None:
        """See `FormerAnswers`: each of these answers may be given any number of times."""

    def _open(self, file: AnswerFile) -> tuple[int, StoredFormerAnswers] | None:
        """The answers of a file, and the index of its first one; None: it is unusable."""
        if file.key not in self._files:
            self._files[file.key] = None
            try:
                answers = self._read(file)
            except (AnswersDamaged, BrokenInput) as error:
                self._index.counts.add("damaged")
                logger.warning("stored_answers_damaged", reason=str(error))
            except ObjectNotFound:  # its job's results were removed
                pass
            except StoreError as error:
                logger.warning("stored_answers_unavailable", reason=str(error))
            else:
                self._files[file.key] = self._firsts[-1], answers
                self._opened.append(answers)
                self._firsts.append(self._firsts[-1] + len(answers))
        return self._files[file.key]

    def _read(self, file: AnswerFile) -> StoredFormerAnswers:
        folder = self._folder / str(len(self._files))
        folder.mkdir()
        source = SourceFile(file.key, partial(io.BytesIO, read_answers(self._index.store, file)))
        return StoredFormerAnswers([source], folder, self._max_rows, file.origin)


def _by_policies(parts: Iterable[PartEntry]) -> dict[str | None, list[PartEntry]]:
    """The parts by the fingerprint of the policies that judged their answers. Parts of shards that several attempts
    computed, perhaps under several policies, are left out."""
    found: defaultdict[str | None, list[PartEntry]] = defaultdict(list)
    for part in parts:
        policies = _policies(part.summary)
        if policies is None or part.summary.attempt == 1:
            found[policies].append(part)
    return found


def _policies(summary: PartSummary) -> str | None:
    match = _FINGERPRINT.search(str(summary.engine.get(_POLICIES, "")))
    return None if match is None else match.group(1)


def _store_parts(
    index: AnswerIndex,
    ledger: JobLedger,
    job: Job,
    manifest: Manifest,
    parts: Sequence[tuple[PartEntry, FileEntry]],
    policies: str | None,
) -> None:
    keys, counts, sources = bytearray(), list[int](), list[AnswerFile]()
    for part, file in parts:
        found = _keys_of(ledger, part)
        if found:
            keys += found
            counts.append(len(found) // KEY_BYTES)
            sources.append(
                AnswerFile(key=ledger.prefix + file.path, sha256=file.sha256, at=manifest.finished_at, origin=job.id)
            )
    if sources:
        files = np.repeat(np.arange(len(sources), dtype=np.int32), counts)
        segment = KeySegment.of(np.frombuffer(bytes(keys), dtype=KEY_TYPE), files, sources)
        index.write(answer_space(job.tenant, policies), segment, hashlib.sha256(job.id.encode()).hexdigest()[:16])


def _keys_of(ledger: JobLedger, part: PartEntry) -> bytes:
    """The keys of the rows that the part computed."""
    with ledger.store.open(ledger.prefix + part_key(part.number)) as stream:
        rows = pq.ParquetFile(stream).read(_COLUMNS, use_threads=False)
    own = pc.and_(pc.equal(rows["status"], RowStatus.SUCCEEDED.value), pc.is_null(rows["reused_from"]))
    keys = rows["request_key"].filter(pc.and_(own, pc.is_valid(rows["request_key"])))
    return bytes.fromhex("".join(keys.to_pylist()))
