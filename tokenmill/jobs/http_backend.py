"""Jobs behind a gateway, as OpenAI's batch objects over HTTP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from pipeline.planner.ports import SourceFile
from pipeline.planner.readers.decompression import decompressed
from pipeline.planner.readers.lines import lines_of
from tokenmill import output
from tokenmill.errors import InputUnusable, UserError
from tokenmill.jobs.backend import (
    POLL_SECONDS,
    CancelResult,
    ExportRequest,
    ExportResult,
    JobEnd,
    JobList,
    JobView,
    NewJob,
    RetryRequest,
)
from tokenmill.jobs.http_client import GatewayClient, Json, open_gateway, path_of
from tokenmill.jobs.watch import MAX_ERROR_CHARACTERS, follow

ENDED: Final = ("completed", "failed", "expired", "cancelled")
DEFAULT_WINDOW: Final = "24h"
CHAT: Final = "/v1/chat/completions"
_PAGE: Final = 100
_MAX_FIRST_LINE_BYTES: Final = 1 << 20


class HttpJobs:
    """Batches of the gateway at `url`; `job` is the id of one of them."""

    def __init__(self, url: str, job: str) -> None:
        self._url, self._job = url, job

    def list_jobs(self, limit: int, *, active: bool, as_json: bool) -> JobList:  # a gateway sends nothing but JSON
        with open_gateway(self._url) as gateway:
            batches = (batch for batch in _batches(gateway, limit) if not active or batch["status"] not in ENDED)
            found, where = list(islice(batches, limit)), gateway.url
        return JobList(
            found,
            ("job", "status", "model", "rows", "done", "failed", "should be done"),
            [_row(batch) for batch in found],
            f"no open jobs at {where}" if active else f"no jobs at {where}; 'tokenmill submit' makes one",
        )

    def show(self) -> JobView:
        with open_gateway(self._url) as gateway:
            batch = gateway.get(path_of(self._job))
        return JobView(batch, [output.table(None, ("", ""), _facts(batch))], _errors(batch))

    def watch(self, interval_seconds: float = POLL_SECONDS) -> JobEnd:
        with open_gateway(self._url) as gateway:
            path = path_of(self._job)

            def poll() -> tuple[str, Json | None]:
                batch = gateway.get(path)
                return _described(batch), batch if batch["status"] in ENDED else None

            batch = follow(self._job, poll, interval_seconds)
        failure = None
        if batch["status"] == "failed":
            why = "; ".join(_errors(batch))[:MAX_ERROR_CHARACTERS] or "it does not say why"
            failure = f"{batch['id']}: the job failed as a whole: {why}"
        return JobEnd(lambda: batch, f"{gateway.url}, {batch['id']}: {_described(batch)}", failure)

    def cancel(self) -> CancelResult:
        with open_gateway(self._url) as gateway:
            batch = gateway.get(path_of(self._job))
            if batch["status"] != "cancelled":  # again changes nothing
                batch = gateway.post(f"{path_of(self._job)}/cancel", {})
        return CancelResult(batch, [f"{self._job}: {batch['status']}"])

    def retry(self, request: RetryRequest) -> NewJob:
        request.refuse_local_option(self._job, self._url)
        body = {
            "only": request.only, "include_invalid": request.include_invalid or None, "tier": request.tier,
            "completion_window": _window(request.deadline), "max_output_tokens": request.max_output_tokens,
            "max_cost": request.max_cost,
        }  # fmt: skip
        with open_gateway(self._url) as gateway:
            given = {name: value for name, value in body.items() if value is not None}
            batch = gateway.post(f"{path_of(self._job)}/retry", given)
        return NewJob(batch["id"], batch, (), HttpJobs(self._url, batch["id"]).watch)

    def export(self, request: ExportRequest) -> ExportResult:
        """Files appear whole, or not at all."""
        if request.merged or request.in_input_order:
            raise UserError("--merged and --in-input-order need the job's folder or root; leave them out with --url")
        done = [0, 0]
        with open_gateway(self._url) as gateway, ExitStack() as closing:
            good = closing.enter_context(_Output(request.to))
            bad = good if request.errors_to is None else closing.enter_context(_Output(request.errors_to))
            with gateway.stream("GET", f"{path_of(self._job)}/results") as answer:
                incomplete = answer.headers.get("x-incomplete") == "true"
                for line in whole_lines(answer.iter_bytes()):
                    failed = _failed(gateway, line)
                    done[failed] += 1
                    (bad if failed else good).write(line)
        return ExportResult(done[0], done[1], f"{self._job}: has not ended; more may come" if incomplete else None)


def submit(given: str, url: str, options: Mapping[str, Any], endpoint: str | None, token: str) -> NewJob:
    """Upload the file and make a batch of it, or find what was made with this token. Raises `UserError`."""
    source = Path(given).expanduser()
    if "://" in given or not source.is_file():
        raise InputUnusable(f"{given}: is no local file; over HTTP a file is sent: JSONL, Parquet, Arrow or CSV")
    chosen = dict(options)
    window = chosen.pop("deadline", DEFAULT_WINDOW)
    with open_gateway(url) as gateway:
        file = gateway.upload(source, f"file-{token}")
        body = {
            "input_file_id": file["id"],
            "endpoint": endpoint or first_url(source) or CHAT,
            "completion_window": window,
            "tokenmill": chosen,
        }
        batch = gateway.post("/v1/batches", body, key=f"batch-{token}")
        location = f"{gateway.url}/v1/files/{file['id']}"
    document = {"job": batch["id"], "submitted": location, "root": None}
    return NewJob(batch["id"], document, [f"{location}: submitted"], HttpJobs(url, batch["id"]).watch)


def _window(deadline: timedelta | None) -> str | None:
    """A batch's window in whole minutes, never longer than the deadline."""
    if deadline is None:
        return None
    minutes = int(deadline.total_seconds() // 60)
    if minutes < 1:
        raise UserError("--deadline: a gateway takes whole minutes; give 1m at least")
    return f"{minutes}m"


def first_url(source: Path) -> str | None:
    """The `url` of the first line of a JSONL file, also a compressed one; None where it has none."""
    file = decompressed(SourceFile(source.name, lambda: source.open("rb")))
    with closing(lines_of(file, _MAX_FIRST_LINE_BYTES)) as lines:
        line = next(lines, None) or b""
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    url = document.get("url") if isinstance(document, dict) else None
    return url if isinstance(url, str) else None


class _Output:
    """A file that appears at the end of the block, unless that raised."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    def __enter__(self) -> _Output:
        try:
            number, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}; name another file") from error
        self._made: tuple[Path, BinaryIO] = Path(name), os.fdopen(number, "wb")
        return self

    def write(self, line: bytes) -> None:
        try:
            self._made[1].write(line + b"\n")
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}; free some disk") from error

    def __exit__(self, kind: object, *_: object) -> None:
        path, stream = self._made
        try:
            stream.close()
            if kind is None:
                path.chmod(0o666 & ~_umask())
                path.replace(self._path)
        except OSError as error:
            raise UserError(f"{self._path}: can't be written: {error.strerror}; free some disk") from error
        finally:
            path.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Complete lines. Raises `UserError` for text after the last newline, where the response was cut off."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        raise UserError("the results broke off in the middle of a line; export again")


def _failed(gateway: GatewayClient, line: bytes) -> bool:
    try:
        return orjson.loads(line)["error"] is not None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{gateway.url}: a line of the results can't be read; is a tokenmill gateway there?") from error


def _batches(gateway: GatewayClient, limit: int) -> Iterator[Json]:
    """The newest first, page by page."""
    query: dict[str, Any] = {"limit": min(limit, _PAGE)}
    while True:
        page = gateway.get("/v1/batches", **query)
        yield from page["data"]
        if not page["has_more"]:
            return
        query["after"] = page["last_id"]


def _described(batch: Json) -> str:
    counts, eta = batch["request_counts"], batch["tokenmill"]["eta"]
    words = [str(batch["status"])]
    if counts["total"]:
        done = counts["completed"] + counts["failed"]
        words.append(f"{output.count(done)} of {output.count(counts['total'])} rows done")
        words.append(f"{output.count(counts['failed'])} without an answer")
    if eta is not None and batch["status"] not in ENDED:
        seconds = (datetime.fromisoformat(eta) - datetime.now(UTC)).total_seconds()
        words.append(f"about {output.duration(seconds)} left" if seconds > 0 else "should be done now")
    return ", ".join(words)


def _row(batch: Json) -> tuple[object, ...]:
    counts = batch["request_counts"]
    numbers = (counts["total"], counts["completed"] + counts["failed"], counts["failed"])
    return batch["id"], batch["status"], batch["model"], *map(output.count, numbers), batch["tokenmill"]["eta"]


def _facts(batch: Json) -> list[tuple[str, object]]:
    own, usage = batch["tokenmill"], batch["usage"]
    names = ("created", "in_progress", "expires", "completed", "failed", "expired", "cancelled")
    times = [(name.replace("_", " "), _timestamp(batch[f"{name}_at"])) for name in names if batch.get(f"{name}_at")]
    counts = [(name, output.count(value)) for name, value in own["counts"].items() if value]
    more = [(name, value) for name, value in batch["metadata"].items()]
    return [
        ("job", batch["id"]), ("status", batch["status"]), ("model", batch["model"]), ("tier", own["tier"]),
        ("endpoint", batch["endpoint"]), *((f"rows {name}", value) for name, value in counts),
        ("prompt tokens", output.count(usage["input_tokens"])), ("answer tokens", output.count(usage["output_tokens"])),
        ("cost", own["cost"]), ("cost limit", own["max_cost"]),
        ("cost of a million tokens", own["cost_per_million_tokens"]), ("should be done", own["eta"]), *times,
        ("needs attention", own.get("attention")),
        ("retry of", own["retry_of"]),
        ("answers", batch["output_file_id"]), ("errors", batch["error_file_id"]), *more,
    ]  # fmt: skip


def _timestamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _errors(batch: Json) -> list[str]:
    found: Collection[Json] = (batch["errors"] or {}).get("data", ())
    return [f"line {one['line']}: {one['message']}" if one["line"] else str(one["message"]) for one in found]
