"""Logging to stderr; stdout is for results.

Events have two formats, one a line: `key=value` for people, JSON for programs. In JSON the logs of libraries (Kafka's
client, Celery, the HTTP server) and the command's messages are events, too, so that each line is a document. With
traces on, log lines within a span have its `trace_id` and `span_id`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal, TextIO, cast

import structlog

from tokenmill.output import Stderr, say

LogFormat = Literal["text", "json"]
_ORDER: Final = ["timestamp", "level", "event"]


def log_to_stderr(
    level: int = logging.WARNING, log_format: LogFormat = "text", command: str | None = None
) -> Callable[[str], None]:
    """Set up this process's logs, once, before the parts start: one event a line, from `level` up. Of infos below it
    only notices (see `engine.logs.Logger`) are shown, as plain lines.

    Args:
        command: name of the command, for JSON events.

    Returns:
        A function that reports that the process is up: by a plain line, or an event.
    """

    def filter_infos(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        is_notice = event.pop("notice", False)
        if method != "info" or level <= logging.INFO:
            return event
        if is_notice:
            say(event["event"])
        raise structlog.DropEvent

    before: list[structlog.types.Processor] = [
        filter_infos,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "text":
        after: list[structlog.types.Processor] = [structlog.processors.KeyValueRenderer(key_order=_ORDER)]
    else:

        def add_command(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
            event["command"] = command
            return event

        before += [add_command, structlog.processors.format_exc_info]
        after = [structlog.processors.JSONRenderer(_one_line)]
        _catch_libraries(before, after)
    structlog.configure(
        processors=[*before, *after],
        wrapper_class=structlog.make_filtering_bound_logger(min(level, logging.INFO)),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Stderr())),
    )
    return say if log_format == "text" else _log_up


def _log_up(message: str) -> None:
    structlog.get_logger(__name__).info("up", message=message)


def _catch_libraries(before: list[structlog.types.Processor], after: list[structlog.types.Processor]) -> None:
    """Format the events of Python's own logging, from warnings up, in the same way."""
    handler = logging.StreamHandler(sys.stderr)
    remove_meta: structlog.types.Processor = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    add_name: structlog.types.Processor = structlog.stdlib.add_logger_name
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[*before, add_name], processors=[remove_meta, *after])
    )
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(capture=True)


def _one_line(event: Any, **_how: Any) -> str:
    """JSON in ASCII, so that any file name (with surrogates, or other scripts' line ends) stays on one line."""
    return json.dumps(event, default=str, skipkeys=True)
