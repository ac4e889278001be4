"""Former results whose answers a run takes again: the folder of a run, or a Parquet file of its results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.adapters.folder.store import FolderStore
from pipeline.inputs.regular_files import IrregularFile, open_regular, open_regular_below
from pipeline.ledger.ledger import JOB, MANIFEST, JobLedger, JobNotFound, LedgerError, ResultsRemoved, part_key
from pipeline.planner import InputError, SourceFile
from pipeline.ports import PipelineError
from pipeline.results.former_answers import ADVICE, IsAcceptable, StoredFormerAnswers
from pipeline.results.part_files import read_part
from pipeline.results.verification import ResultsDamaged, check_files

SUFFIX: Final = ".parquet"
MAX_RECORD_BYTES: Final = 64 << 20
"""Of `job.json` and `manifest.json`."""


class FormerUnusable(PipelineError):
    """Raised when former results can't be reused: there are none, they are damaged, or written by another program."""


@contextmanager
def open_former(
    path: Path, scratch: Path, max_rows: int, is_acceptable: IsAcceptable | None = None
) -> Iterator[StoredFormerAnswers]:
    """The answers of former results. Of a run that has not ended they are those that are committed now.

    Args:
        scratch: a folder for the answers, which are removed at the end.
        max_rows: that the results may have.
        is_acceptable: see `StoredFormerAnswers`.

    Raises:
        FormerUnusable: the message names the file.  StoreError: the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="former-", dir=scratch) as folder:
        try:
            if path.suffix == SUFFIX and not path.is_dir():
                source = SourceFile(str(path), partial(open_regular, path))
                answers = StoredFormerAnswers([source], Path(folder), max_rows, None, is_acceptable)
            else:
                files, job = _of_run(path)
                answers = StoredFormerAnswers(files, Path(folder), max_rows, job, is_acceptable)
        except (InputError, IrregularFile, LedgerError, JobNotFound, ResultsRemoved, ResultsDamaged) as error:
            raise FormerUnusable(f"{error}; {ADVICE}") from error
        yield answers


def _of_run(folder: Path) -> tuple[list[SourceFile], str]:
    """The result files of a run, whole and its own, and the job's id."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    for path in filter(Path.exists, (folder / JOB, folder / MANIFEST)):
        with _open(folder, path) as stream:
            if os.fstat(stream.fileno()).st_size > MAX_RECORD_BYTES:
                raise InputError(f"{path}: is larger than {MAX_RECORD_BYTES} bytes")
    with FolderStore(folder, read_only=True) as store:
        ledger = JobLedger(store)
        job, manifest = ledger.job(), ledger.manifest()
        ledger.check_results()
        numbers = ledger.result_parts(manifest)
        paths = [folder / part_key(number) for number in numbers]
        for path in paths:
            _open(folder, path).close()
        if manifest is not None:
            check_files(ledger, manifest, hashes=True)
        for number in numbers:
            read_part(ledger, number)
    return [SourceFile(str(path), partial(_open, folder, path)) for path in paths], job.id


def _open(folder: Path, path: Path) -> BinaryIO:
    try:
        return open_regular_below(folder, path)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
