"""Checks PromQL queries against the metric definitions: a metric or a label that no process emits is an error.

The check finds names, selectors and groupings by pattern, without parsing PromQL; that is enough to find drift.
Prometheus itself checks the rest (`promtool check rules`, and every dashboard query in `make observability`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pipeline.observability.metric_definitions import BY_NAME, WORKER

_NAME: Final = re.compile(r"\b(tokenmill_[a-z_]+)\b(?:\{([^}]*)\})?")
_GROUPING: Final = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_ON_SCRAPING: Final = frozenset({"instance", "job", "le", WORKER})
"""Labels outside the definitions: Prometheus, a histogram, or a gateway that repeats workers' metrics adds them."""


class DriftError(ValueError):
    """Raised for a query with a metric or a label that no process emits. The message holds it and the query."""


def check(query: str) -> None:
    """Check the metrics and labels of a query. Raises `DriftError`."""
    known = set(_ON_SCRAPING)
    for found in _NAME.finditer(query):
        labels = frozenset(labels_of(found[1], query))
        known |= labels
        for selector in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', found[2] or "")):
            if selector not in labels | _ON_SCRAPING:
                raise DriftError(f"{found[1]} has no label {selector}: {query}")
    for label in _grouped(query):
        if label not in known:
            raise DriftError(f"no metric of the query has the label {label}: {query}")


def names(query: str) -> set[str]:
    """Names of the metrics in a query."""
    return {_metric_name(found[1]) or found[1] for found in _NAME.finditer(query)}


def labels_of(series: str, query: str) -> tuple[str, ...]:
    """Labels of a series, by its name in Prometheus. Raises `DriftError`."""
    name = _metric_name(series)
    if name is None:
        raise DriftError(f"no process emits {series}: {query}")
    return BY_NAME[name].labels


def _metric_name(series: str) -> str | None:
    """The metric of a series; None if there is none. Processes emit a histogram only as its three series."""
    if series in BY_NAME:
        return None if BY_NAME[series].kind == "histogram" else series
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    return base if base in BY_NAME and BY_NAME[base].kind == "histogram" else None


def _grouped(query: str) -> Iterator[str]:
    for found in _GROUPING.finditer(query):
        yield from (label.strip() for label in found[1].split(",") if label.strip())
