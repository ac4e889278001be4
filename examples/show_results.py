"""Reads a job's results as any program would, and prints a few: the first answers, and every row that failed.

python examples/show_results.py out/demo
"""

from __future__ import annotations

import sys
from textwrap import shorten

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = ("row", "custom_id", "status", "text", "error_code", "error_message")


def main(folder: str) -> None:
    results = pq.read_table(f"{folder}/results", columns=list(COLUMNS)).sort_by("row").to_pylist()
    answers = Table("custom_id", "text", title=f"the first answers of {folder}/results", title_justify="left")
    for row in [row for row in results if row["status"] == "succeeded"][:8]:
        answers.add_row(row["custom_id"], Text(" ".join((row["text"] or "").split())[:90]))
    failures = Table(
        "line", "custom_id", "error_code", "error_message", title="the rows that failed", title_justify="left"
    )
    for row in [row for row in results if row["status"] != "succeeded"]:
        failures.add_row(
            str(row["row"] + 1),
            row["custom_id"] or "-",
            row["error_code"],
            Text(shorten(row["error_message"], 160, placeholder=" …")),
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(answers, failures if failures.row_count else "no row failed")
    console.print(
        f'pandas: pd.read_parquet("{folder}/results")   duckdb: from "{folder}/results/*.parquet"', markup=False
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/demo")
