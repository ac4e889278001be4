"""Loggers of the engine: structlog's, as all of tokenmill has them, or the standard library's where that is missing.

The engine is a library that others use alone, and on a machine that has torch and little else.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol


class Logger(Protocol):
    """The logger interface of the engine: one event a line, and values by name. An info with `notice=True` explains a
    wait: commands that show no other infos show it too, as a plain line."""

    def info(self, event: str, **values: object) -> object: ...

    def warning(self, event: str, **values: object) -> object: ...

    def error(self, event: str, **values: object) -> object: ...


class PlainLogger:
    """Logs an event and its values on one line (`event key=value …`) with the standard library's logger."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, **values: object) -> None:
        self._logger.info("%s", _line(event, values))

    def warning(self, event: str, **values: object) -> None:
        self._logger.warning("%s", _line(event, values))

    def error(self, event: str, **values: object) -> None:
        self._logger.error("%s", _line(event, values))


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    if find_spec("structlog") is None:
        return PlainLogger(name)
    logger: Logger = import_module("structlog").get_logger(name)
    return logger


def _line(event: str, values: dict[str, object]) -> str:
    return " ".join([event, *(f"{key}={value!r}" for key, value in values.items())])


def only_errors() -> None:
    """Log errors only, in all of this process."""
    if find_spec("structlog") is None:
        logging.getLogger("engine").setLevel(logging.ERROR)
        return
    structlog = import_module("structlog")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
