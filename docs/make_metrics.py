"""Writes the table of names in docs/operations/metrics-and-alerts.md, between its two marks,
from `pipeline.observability.metric_definitions`.

python docs/make_metrics.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pipeline.observability.metric_definitions import METRICS

PAGE: Final = Path(__file__).parent / "operations/metrics-and-alerts.md"
BEGIN: Final = "<!-- metrics: made by docs/make_metrics.py -->\n"
END: Final = "<!-- end of metrics -->\n"


def table() -> str:
    """The table, in Markdown."""
    rows = ["| name | kind | labels | reported by | |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(metric.labels) or "none"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {', '.join(metric.by)} | {metric.help} |")
    return "\n".join(rows) + "\n"


def page_with_table(page: str) -> str:
    """The page with the table as it is now. Raises ValueError where the marks are missing."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} lacks its marks, {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
