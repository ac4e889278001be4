"""Logs go to stderr, beside the progress: stdout belongs to results."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Set up this process's logs, once, before the parts start: one event a line, from `level` up."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
