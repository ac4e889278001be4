"""The folder of a table's job: its requests, and a record of the call."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pipeline.adapters.folder.locks import RunLock
from tokenmill.errors import InvalidCall
from tokenmill.frames.jobs.requests import REQUESTS, TableRequests
from tokenmill.frames.records import CallRecord, write_record

JOB: Final = "job.json"
TICKET: Final = "submission.json"


def _is_ctrl_c(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


@contextmanager
def job_folder(given: Path | None, is_left: Callable[[BaseException], bool] = _is_ctrl_c) -> Iterator[Path]:
    """The given folder, or a temporary one. `is_left`: whether that is left after an error, so that the job can go on;
    by default after Ctrl-C."""
    if given is not None:
        yield given.expanduser()
        return
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))
    needed = False
    try:
        yield folder
    except BaseException as error:
        needed = is_left(error)
        if isinstance(error, KeyboardInterrupt):
            error.add_note("This folder is a temporary one; with output_dir a call leaves one that lasts.")
        raise
    finally:
        if not needed:
            shutil.rmtree(folder, ignore_errors=True)


def write_into_job(
    requests: TableRequests, folder: Path, body: Mapping[str, Any], record: CallRecord, *, fresh: bool = False,
    mark: str = JOB,
) -> Path:  # fmt: skip
    """Write the requests into a job's folder, while no run holds it. The same ones are left as they are, so that their
    bytes needn't be hashed again.

    Args:
        record: of the call; it is written beside them.
        fresh: the job in the folder is to be forgotten.
        mark: the file that says that the folder holds a job, of this process (`JOB`) or of an installation (`TICKET`).

    Raises:
        InvalidCall: as `TableRequests.write`; or the folder holds a job of other requests.
        OutputLocked: a run holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REQUESTS
    with RunLock(folder), tempfile.TemporaryDirectory(prefix=".tokenmill-", dir=folder) as scratch:
        new = Path(scratch) / REQUESTS
        requests.write(new, body)
        is_other = not (path.exists() and _same_bytes(path, new))
        for other in {JOB, TICKET} - {mark}:
            if (folder / other).exists():
                where = "in this process" if other == JOB else "by an installation"
                raise InvalidCall(f"{folder}: holds a job that is computed {where}; give another folder")
        if is_other and not fresh and (folder / mark).exists():
            raise InvalidCall(
                f"{folder}: holds a job of other prompts or options; give another folder, and this one as reuse, or "
                "remove it"
            )
        write_record(record, Path(scratch), folder)
        if is_other:
            new.replace(path)
    return path


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while chunk := left.read(1 << 20):
            if chunk != right.read(1 << 20):
                return False
    return True
