"""`submit` and `jobs` where the installation is reached over HTTP: the same commands, and OpenAI's batch objects."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
from rich.live import Live
from rich.text import Text

from tokenmill import output
from tokenmill.errors import InputUnusable, StoppedWatching, UserError
from tokenmill.jobs.http_client import GatewayClient, Json, open_gateway, path_of
from tokenmill.jobs.watch import LOOK_SECONDS, MOST_ERRORS

ENDED: Final = ("completed", "failed", "expired", "cancelled")
DEFAULT_WINDOW: Final = "24h"
CHAT: Final = "/v1/chat/completions"
_PAGE: Final = 100
_MOST_FIRST_LINE: Final = 1 << 20


def submit(
    given: str, url: str, options: Mapping[str, Any], endpoint: str | None, *, watch: bool, as_json: bool
) -> None:
    """Upload the file, make a batch of it, and print its id. Raises `UserError`."""
    source = Path(given).expanduser()
    if "://" in given or not source.is_file():
        raise InputUnusable(f"{given}: is no local file; over HTTP a file is sent, JSONL or Parquet")
    chosen = dict(options)
    window = chosen.pop("deadline", DEFAULT_WINDOW)
    with open_gateway(url) as gateway:
        file = gateway.upload(source)
        body = {
            "input_file_id": file["id"],
            "endpoint": endpoint or first_url(source) or CHAT,
            "completion_window": window,
            "tokenmill": chosen,
        }
        batch = gateway.post("/v1/batches", body, key=f"batch-{uuid.uuid4().hex}")
        place = f"{gateway.url}/v1/files/{file['id']}"
        if not watch:
            output.print_json({"job": batch["id"], "submitted": place, "root": None}) if as_json else print(batch["id"])
            output.say(f"{place}: submitted")
            return
        if not as_json:
            print(batch["id"], flush=True)
        _tell(gateway, _followed(gateway, batch["id"]), as_json=as_json)


def list_jobs(url: str, limit: int, *, active: bool, as_json: bool) -> None:
    """Print the newest batches. Raises `UserError`."""
    with open_gateway(url) as gateway:
        found: list[Json] = []
        for batch in _batches(gateway, limit + 1):
            if not active or batch["status"] not in ENDED:
                found.append(batch)
            if len(found) > limit:
                break
        where = gateway.url
    shown = found[:limit]
    if as_json:
        output.print_json(shown)
    else:
        columns = ("job", "status", "model", "rows", "done", "failed", "should be done")
        output.stdout().print(output.table(None, columns, [_row(batch) for batch in shown], right=columns[3:6]))
    if len(found) > limit:
        output.say(f"only the newest {limit}; --limit shows more")
    if not found:
        output.say(f"no open jobs at {where}" if active else f"no jobs at {where}; 'tokenmill submit' makes one")


def show(url: str, job: str, *, as_json: bool) -> None:
    """Print how a batch stands. Raises `UserError`."""
    with open_gateway(url) as gateway:
        batch = gateway.get(path_of(job))
    if as_json:
        output.print_json(batch)
        return
    output.stdout().print(output.table(None, ("", ""), _facts(batch)))
    for wrong in _errors(batch):
        output.stdout().print(Text(wrong))


def watch(url: str, job: str, every: float, *, as_json: bool) -> None:
    """Tell how a batch stands until it has ended. Raises `UserError`, also for one that failed as a whole."""
    with open_gateway(url) as gateway:
        _tell(gateway, _followed(gateway, job, every), as_json=as_json)


def cancel(url: str, job: str, *, as_json: bool) -> None:
    """End a batch before its time. Raises `UserError`."""
    with open_gateway(url) as gateway:
        batch = gateway.get(path_of(job))
        if batch["status"] != "cancelled":  # again changes nothing
            batch = gateway.post(f"{path_of(job)}/cancel", {})
    if as_json:
        output.print_json(batch)
    output.say(f"{job}: {batch['status']}")


def retry(
    url: str, job: str, body: Mapping[str, Any], *, watch: bool, as_json: bool, every: float = LOOK_SECONDS
) -> None:
    """A batch of the rows that got no answer; the same again finds it. Raises `UserError`."""
    with open_gateway(url) as gateway:
        batch = gateway.post(f"{path_of(job)}/retry", dict(body))
        if not as_json:
            print(batch["id"], flush=True)
        if watch:
            _tell(gateway, _followed(gateway, batch["id"], every), as_json=as_json)
        elif as_json:
            output.print_json(batch)


def export(url: str, job: str, to: Path, errors_to: Path | None, *, as_json: bool) -> None:
    """Write what is committed. Files appear whole, or not at all. Raises `UserError`."""
    done = [0, 0]
    with open_gateway(url) as gateway, ExitStack() as closing:
        good = closing.enter_context(_Output(to))
        bad = good if errors_to is None else closing.enter_context(_Output(errors_to))
        with gateway.stream("GET", f"{path_of(job)}/results") as answer:
            incomplete = answer.headers.get("x-incomplete") == "true"
            for line in _lines(answer.iter_bytes()):
                failed = _failed(gateway, line)
                done[failed] += 1
                (bad if failed else good).write(line)
    if as_json:
        output.print_json({"to": to, "errors_to": errors_to, "succeeded": done[0], "others": done[1]})
        return
    output.say(f"{to}: {output.count(done[0])} rows succeeded, {output.count(done[1])} did not")
    if incomplete:
        output.say(f"{job}: has not ended; more may come")


def first_url(source: Path) -> str | None:
    """The `url` of the first line of a JSONL file; None where it says none."""
    with source.open("rb") as stream:
        line = stream.readline(_MOST_FIRST_LINE)
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    url = document.get("url") if isinstance(document, dict) else None
    return url if isinstance(url, str) else None


class _Output:
    """A file that is there when the block has ended well."""

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


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines. What comes after the last newline is none: the answer was cut off there."""
    held = b""
    for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        yield from whole
    if held:
        raise UserError("the results broke off in the middle of a line; export again")


def _failed(gateway: GatewayClient, line: bytes) -> bool:
    try:
        return orjson.loads(line)["error"] is not None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{gateway.url}: a line of the results can't be read; is a tokenmill gateway there?") from error


def _batches(gateway: GatewayClient, most: int) -> Iterator[Json]:
    """The newest first, page by page."""
    query: dict[str, Any] = {"limit": min(most, _PAGE)}
    while True:
        page = gateway.get("/v1/batches", **query)
        yield from page["data"]
        if not page["has_more"]:
            return
        query["after"] = page["last_id"]


def _followed(gateway: GatewayClient, job: str, every: float = LOOK_SECONDS) -> Json:
    """The batch, when it has ended. In a terminal one line that changes, elsewhere a line when something has."""
    console, told = output.stderr(), ""
    try:
        with ExitStack() as closing:
            live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
            if live is not None:
                closing.enter_context(live)
            while (batch := gateway.get(path_of(job)))["status"] not in ENDED:
                line = f"{job}: {_described(batch)}"
                if live is not None:
                    live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
                elif line != told:
                    console.print(Text(line))
                told = line
                time.sleep(every)
            return batch
    except KeyboardInterrupt:
        raise StoppedWatching(f"{job}: no longer watched; the job goes on") from None


def _tell(gateway: GatewayClient, batch: Json, *, as_json: bool) -> None:
    """The end of a batch; raises `UserError` for one that failed as a whole."""
    if as_json:
        output.print_json(batch)
    if batch["status"] == "failed":
        why = "; ".join(_errors(batch))
        raise UserError(f"{batch['id']}: the job failed as a whole: {why[:MOST_ERRORS] or 'it does not say why'}")
    output.say(f"{gateway.url}, {batch['id']}: {_described(batch)}")


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
    figures = (counts["total"], counts["completed"] + counts["failed"], counts["failed"])
    return batch["id"], batch["status"], batch["model"], *map(output.count, figures), batch["tokenmill"]["eta"]


def _facts(batch: Json) -> list[tuple[str, object]]:
    own, usage = batch["tokenmill"], batch["usage"]
    names = ("created", "in_progress", "expires", "completed", "failed", "expired", "cancelled")
    moments = [(name.replace("_", " "), _moment(batch[f"{name}_at"])) for name in names if batch.get(f"{name}_at")]
    counts = [(name, output.count(value)) for name, value in own["counts"].items() if value]
    more = [(name, value) for name, value in batch["metadata"].items()]
    return [
        ("job", batch["id"]), ("status", batch["status"]), ("model", batch["model"]), ("tier", own["tier"]),
        ("endpoint", batch["endpoint"]), *((f"rows {name}", value) for name, value in counts),
        ("prompt tokens", output.count(usage["input_tokens"])), ("answer tokens", output.count(usage["output_tokens"])),
        ("cost", own["cost"]), ("cost limit", own["max_cost"]),
        ("cost of a million tokens", own["cost_per_million_tokens"]), ("should be done", own["eta"]), *moments,
        ("needs attention", own.get("attention")),
        ("retry of", own["retry_of"]),
        ("answers", batch["output_file_id"]), ("errors", batch["error_file_id"]), *more,
    ]  # fmt: skip


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _errors(batch: Json) -> list[str]:
    found: Collection[Json] = (batch["errors"] or {}).get("data", ())
    return [f"line {one['line']}: {one['message']}" if one["line"] else str(one["message"]) for one in found]
