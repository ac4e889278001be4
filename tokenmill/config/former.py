"""Former results whose answers a run takes again: the folder of a run, or a Parquet file of its results."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JOB, MANIFEST, RESULTS, JobLedger, JobNotFound, LedgerError, ResultsRemoved, part_key
from pipeline.planner import InputError, SourceFile
from pipeline.ports import PipelineError
from pipeline.results.former_answers import ADVICE, StoredFormerAnswers
from pipeline.results.part_files import read_part
from pipeline.results.verification import ResultsDamaged, check_files

SUFFIX: Final = ".parquet"
MAX_RECORD_BYTES: Final = 64 << 20
"""Of `job.json` and `manifest.json`."""


class FormerUnusable(PipelineError):
    """Raised when former results can't be reused: there are none, they are damaged, or written by another program."""


@contextmanager
def open_former(path: Path, scratch: Path, max_rows: int) -> Iterator[StoredFormerAnswers]:
    """The answers of former results. Of a run that has not ended they are those that are committed now.

    Args:
        scratch: a folder for the answers, which are removed at the end.
        max_rows: that the results may have.

    Raises:
        FormerUnusable: the message names the file.  StoreError: the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="former-", dir=scratch) as folder:
        try:
            if path.suffix == SUFFIX and not path.is_dir():
                answers = StoredFormerAnswers([_source(path)], Path(folder), max_rows)
            else:
                files, job = _of_run(path)
                answers = StoredFormerAnswers(files, Path(folder), max_rows, job)
        except (InputError, LedgerError, JobNotFound, ResultsRemoved, ResultsDamaged) as error:
            raise FormerUnusable(f"{error}; {ADVICE}") from error
        yield answers


def _of_run(folder: Path) -> tuple[list[SourceFile], str]:
    """The result files of a run, whole and its own, and the job's id."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    for name in (JOB, MANIFEST, RESULTS.rstrip("/")):
        path = folder / name
        if path.is_symlink():
            raise InputError(f"{path}: is a symbolic link")
        if path.is_file() and path.stat().st_size > MAX_RECORD_BYTES:
            raise InputError(f"{path}: is larger than {MAX_RECORD_BYTES} bytes")
    with FolderStore(folder, read_only=True) as store:
        ledger = JobLedger(store)
        job, manifest = ledger.job(), ledger.manifest()
        ledger.check_results()
        numbers = ledger.result_parts(manifest)
        files = [_source(folder / part_key(number)) for number in numbers]
        if manifest is not None:
            check_files(ledger, manifest, hashes=True)
        for number in numbers:
            read_part(ledger, number)
    return files, job.id


def _source(path: Path) -> SourceFile:
    """A regular file. Raises `InputError` for anything else."""
    with _open(path):
        return SourceFile(str(path), partial(_open, path))


def _open(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else f"can't be read: {error.strerror or error}"
        raise InputError(f"{path}: {reason}") from error
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise InputError(f"{path}: is no regular file")
    return stream
