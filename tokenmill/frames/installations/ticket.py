"""The submission of a call, in its folder: written before it is sent, so that a call after a kill finds its job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.adapters.folder.durable import LOCAL_DISK, write_durably
from pipeline.adapters.folder.locks import RunLock
from pipeline.inputs.regular_files import IrregularFile, open_regular_below
from tokenmill.errors import InvalidCall, UserError
from tokenmill.frames.jobs.folders import TICKET

MAX_TICKET_BYTES: Final = 1 << 20


class Ticket(BaseModel):
    """A submission.

    Attributes:
        target: of the installation.  options: of the job.
        token: letters that no other submission has; the installation takes the requests once for each.
        job: its id; None: it may not be submitted yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    options: dict[str, Any]
    token: str = Field(pattern="^[0-9a-f]{20}$")
    job: str | None = None


def take_ticket(folder: Path, target: str, options: Mapping[str, Any]) -> Ticket:
    """The folder's ticket, made if there is none.

    Raises:
        InvalidCall: it is of another submission, or can't be read.
        OutputLocked: another call makes one.
    """
    with RunLock(folder):
        found = _read(folder)
        if found is None:
            found = Ticket(target=target, options=dict(options), token=secrets.token_hex(10))
            _write(folder, found)
            return found
    if found.target != target:
        raise InvalidCall(f"output_dir: {folder} holds a job at {found.target}, not at {target}; give another folder")
    for name in sorted(found.options.keys() | options.keys()):
        was, now = found.options.get(name), options.get(name)
        if was != now:
            raise InvalidCall(
                f"output_dir: {folder} holds a job with {name}={was!r}, not {now!r}; give another folder, or remove "
                "this one"
            )
    return found


def note_job(folder: Path, ticket: Ticket, job: str) -> None:
    """Add the job's id to the folder's ticket."""
    if ticket.job != job:
        _write(folder, ticket.model_copy(update={"job": job}))


def _read(folder: Path) -> Ticket | None:
    path = folder / TICKET
    try:
        with open_regular_below(folder, path) as stream:
            return Ticket.model_validate_json(stream.read(MAX_TICKET_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, IrregularFile, ValidationError) as error:
        raise InvalidCall(f"output_dir: {path} can't be read ({type(error).__name__}); give another folder") from error


def _write(folder: Path, ticket: Ticket) -> None:
    """Replace the ticket durably; it appears whole."""
    made = folder / f".{TICKET}-{LOCAL_DISK.new_name()}"
    try:
        write_durably(LOCAL_DISK, made, ticket.model_dump_json(indent=2).encode())
        LOCAL_DISK.rename(made, folder / TICKET)
        LOCAL_DISK.sync_folder(folder)
    except OSError as error:
        raise UserError(f"{folder}: can't be written: {error.strerror}; give another output_dir") from error
