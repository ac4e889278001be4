"""Output of commands: results on stdout (a table, or one JSON document), everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from schemas.models import ModelPin
    from tokenmill.bench_results import MeasuredSpeed

PIPED_WIDTH = 4_000
"""Columns of a table that is written to a file or another program, which have no width."""


def stdout() -> Console:
    """The console for results."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def stderr() -> Console:
    """The console for everything else."""
    return Console(file=cast(TextIO, Stderr()), highlight=False, soft_wrap=True)


class Stderr:
    """stderr without its failures: a full disk that it is redirected to, or a closed pipe, costs messages, not the work
    that they are about."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def say(message: str) -> None:
    """Print a line to stderr for the user."""
    stderr().print(Text(message))


def announce_imports() -> None:
    """Say that the engine is imported now, if it isn't yet: torch and its libraries take seconds, and half a minute on
    a busy machine."""
    if "torch" not in sys.modules:
        say("importing the engine")


def print_json(document: Any) -> None:
    """Print the one JSON document of a command. Types that JSON lacks (dates, paths) become text."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, default=_as_json)
    sys.stdout.write("\n")


def _as_json(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> Table:
    """A plain table; `right` names the columns of numbers. Text is never read as markup."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("-" if value is None else str(value)) for value in row))
    return made


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return "-" if value is None else f"{value:,.0f}"


def arithmetic(of: MeasuredSpeed | ModelPin) -> str:
    """A model's dtype and quantization, such as "bfloat16, weights int8, KV int8"."""
    weights = "" if of.quantization == "none" else f", weights {of.quantization}"
    return f"{of.dtype}{weights}" + ("" if of.kv_dtype == "auto" else f", KV {of.kv_dtype}")


def size(num_bytes: float) -> str:
    """A size in bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """A duration in seconds, for people."""
    if seconds < 0.95:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
