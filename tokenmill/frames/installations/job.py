"""A table's requests as a job of an installation: submitted once, awaited, and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from schemas.jobs.job import OnInvalid
from tokenmill import output
from tokenmill.errors import InvalidCall, StoppedWatching, UserError
from tokenmill.frames.installations.gateway_results import read_from_gateway
from tokenmill.frames.installations.root_results import read_from_root
from tokenmill.frames.installations.target import JobTarget
from tokenmill.frames.installations.ticket import Ticket, note_job, take_ticket
from tokenmill.frames.jobs.folders import TICKET, job_folder, write_into_job
from tokenmill.frames.jobs.requests import REQUESTS, parse_sample
from tokenmill.frames.jobs.results import in_row_order, no_results
from tokenmill.frames.resident import Model, ResidentModel
from tokenmill.frames.tasks.task import Answers
from tokenmill.jobs.backend import JobEnd
from tokenmill.jobs.job_location import open_jobs
from tokenmill.jobs.submit import is_job_in_root, submit
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from tokenmill.frames.calls import TableCall


def answer_there(
    call: TableCall, model: Model, installation: JobTarget, given: Path | None, reuse: Any
) -> tuple[Answers, pa.Table]:
    """The answers and results of the job of a call, whose `model` is a name of the installation.

    Args:
        given: the folder that remembers the job: a call with the same one waits for the same job. None: a temporary
            one, which is left if the call ends before the job.

    Raises:
        InvalidCall: an argument can't be used there, or the folder holds another job.
        UserError: the job can't be submitted or read, or failed as a whole.
        KeyboardInterrupt: the call was stopped; the job goes on.
    """
    name = _checked(call, model, reuse)
    if not len(call.frame):
        results = no_results(call.task)
        return call.task.answers_from(results), results
    submitted: list[str] = []
    with job_folder(given, lambda error: bool(submitted) or isinstance(error, KeyboardInterrupt)) as folder:
        write_into_job(call.requests, folder, {"model": name, **call.task.body}, call.record(), mark=TICKET)
        options = {**installation.options, "on_invalid": OnInvalid.ROW.value}
        if call.task.adapter_column is None:  # else rows name several of its models
            options["model"] = name
        results = _JobThere(call, installation, folder, options).results(submitted)
    return call.task.answers_from(results), results


def _checked(call: TableCall, model: Model, reuse: Any) -> str:
    """The model's name. Raises `InvalidCall` for what only a call in this process has."""
    from workers.text.chat_options import OWN_CHAT

    if isinstance(model, ResidentModel):
        raise InvalidCall("model: is loaded in this process; give the name that the installation has for its own")
    if reuse is not None:
        raise InvalidCall("reuse: an installation takes former answers from its answer store; give cache=True")
    if call.task.judging.name is not None and call.task.judging.max_tries is not None:
        raise InvalidCall("validate: can't be sent to an installation; judge the answers of the returned table")
    if call.task.judging.max_tries is not None:
        raise InvalidCall("max_tries: jobs of installations ask each row once; leave it out")
    if call.task.chat not in (None, OWN_CHAT):
        raise InvalidCall("chat_template, score_tokens: the workers of the installation decide that; leave them out")
    parse_sample(call.task, {"model": model, **call.task.body}, read_settings().limits)
    return model


class _JobThere:
    """The job of a folder's requests."""

    def __init__(self, call: TableCall, installation: JobTarget, folder: Path, options: dict[str, Any]) -> None:
        self._call, self._there, self._folder, self._options = call, installation, folder, options

    def results(self, submitted: list[str]) -> pa.Table:
        """The results, in the rows' order. `submitted`: gets the job's id as soon as there is one."""
        go_on = f"the same call with output_dir={str(self._folder)!r} waits for it"
        job = None
        try:
            ticket = take_ticket(self._folder, self._there.target, self._options)
            job, follow = self._find_or_submit(ticket)
            submitted.append(job)
            note_job(self._folder, ticket, job)
            end = follow()
            if end.failure is not None:
                raise UserError(f"{end.failure}; to submit it anew, give another output_dir, or remove {self._folder}")
            return self._read(job)
        except (KeyboardInterrupt, StoppedWatching) as error:
            if job is None:
                raise KeyboardInterrupt(f"stopped while the job was submitted; {go_on}") from error
            ends = f"'tokenmill jobs cancel {job} {self._there.option}' ends it"
            raise KeyboardInterrupt(f"stopped, but job {job} goes on; {go_on}, and {ends}") from error
        except Exception:
            if job is not None:
                output.say(f"job {job} is not lost: {go_on}")
            raise

    def _find_or_submit(self, ticket: Ticket) -> tuple[str, Callable[[], JobEnd]]:
        """The job's id, and what waits for its end."""
        there = self._there
        root, url = (None, there.target) if there.has_gateway else (there.target, None)
        if ticket.job is not None and (url is not None or is_job_in_root(there.target, ticket.job)):
            return ticket.job, open_jobs(ticket.job, root, url).watch
        path = self._folder / REQUESTS
        endpoint = self._call.task.url if there.has_gateway else None
        made = submit(str(path), there.target, self._options, endpoint, ticket.token)
        output.say(f"{made.job}: submitted to {there.target}")
        return made.job, made.follow

    def _read(self, job: str) -> pa.Table:
        read = read_from_gateway if self._there.has_gateway else read_from_root
        results = in_row_order(read(self._there.target, job, self._call.task), self._call.task)
        rows = len(self._call.frame)
        if results["row"].to_pylist() != list(range(rows)):
            raise UserError(
                f"job {job} ended with {results.num_rows} results for {rows} rows, as one that is cancelled before it "
                f"is planned; to submit it anew, give another output_dir, or remove {self._folder}"
            )
        return results
