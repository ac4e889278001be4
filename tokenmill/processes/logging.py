"""Logs go to stderr, beside the progress: stdout belongs to results.

Two forms of the same events, one a line: `key=value` for people, JSON for programs. In JSON what libraries say (Kafka's
client, Celery, the HTTP server) and what the command says to a person come as events, too, so that each line is a
document. Where traces are on, lines of what has a span bear `trace_id` and `span_id`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

import structlog

from tokenmill.output import say

LogFormat = Literal["text", "json"]
_ORDER: Final = ["timestamp", "level", "event"]


def log_to_stderr(
    level: int = logging.WARNING, log_format: LogFormat = "text", command: str | None = None
) -> Callable[[str], None]:
    """Set up this process's logs, once, before the parts start: one event a line, from `level` up.

    Args:
        command: in JSON each event says which one it is of.

    Returns:
        What tells a person that the process is up: a plain line, or an event.
    """
    before: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "text":
        after: list[structlog.types.Processor] = [structlog.processors.KeyValueRenderer(key_order=_ORDER)]
    else:

        def of_command(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
            event["command"] = command
            return event

        before += [of_command, structlog.processors.format_exc_info]
        after = [structlog.processors.JSONRenderer(_one_line)]
        _catch_libraries(before, after)
    structlog.configure(
        processors=[*before, *after],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return say if log_format == "text" else _event


def _event(message: str) -> None:
    structlog.get_logger(__name__).info("up", message=message)


def _catch_libraries(before: list[structlog.types.Processor], after: list[structlog.types.Processor]) -> None:
    """What goes through Python's own logging, from warnings up, in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    drop: structlog.types.Processor = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    named: structlog.types.Processor = structlog.stdlib.add_logger_name
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[*before, named], processors=[drop, *after])
    )
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(capture=True)


def _one_line(event: Any, **_how: Any) -> str:
    """In ASCII: whatever a name of a file holds, half letters and line ends of other scripts included, is one line."""
    return json.dumps(event, default=str, skipkeys=True)
