"""Holds questions in PromQL against the table of what is told: a name or a label that nobody tells is a mistake.

No parser of PromQL: names, selectors and groupings are found by their shape, which is enough to catch what drifts.
Prometheus itself judges the rest (`promtool check rules`, and every dashboard's question in `make observability`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pipeline.observability.metric_definitions import BY_NAME, WORKER

_NAME: Final = re.compile(r"\b(tokenmill_[a-z_]+)\b(?:\{([^}]*)\})?")
_GROUPING: Final = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_ON_SCRAPING: Final = frozenset({"instance", "job", "le", WORKER})
"""Labels that don't come from us, or that come with a histogram."""


class DriftError(ValueError):
    """Raised for a question about what nobody tells. Names the name or the label, and the question."""


def check(question: str) -> None:
    """Raises `DriftError`."""
    asked = set(_ON_SCRAPING)
    for found in _NAME.finditer(question):
        labels = frozenset(labels_of(found[1], question))
        asked |= labels
        for selector in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', found[2] or "")):
            if selector not in labels | _ON_SCRAPING:
                raise DriftError(f"{found[1]} has no label {selector}: {question}")
    for label in _grouped(question):
        if label not in asked:
            raise DriftError(f"nothing asked for here has the label {label}: {question}")


def names(question: str) -> set[str]:
    """The names of the table that it asks for."""
    return {_table_name(found[1]) or found[1] for found in _NAME.finditer(question)}


def labels_of(series: str, question: str) -> tuple[str, ...]:
    """Labels of a series, by its name as Prometheus has it; raises `DriftError`."""
    name = _table_name(series)
    if name is None:
        raise DriftError(f"nobody tells {series}: {question}")
    return BY_NAME[name].labels


def _table_name(series: str) -> str | None:
    """A histogram is three series, of which only these are told."""
    if series in BY_NAME:
        return None if BY_NAME[series].kind == "histogram" else series
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    return base if base in BY_NAME and BY_NAME[base].kind == "histogram" else None


def _grouped(question: str) -> Iterator[str]:
    for found in _GROUPING.finditer(question):
        yield from (label.strip() for label in found[1].split(",") if label.strip())
