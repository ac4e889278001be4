"""Draws what `interactive.py` found: docs/images/interactive.svg.

pip install matplotlib
python benchmarks/interactive_chart.py benchmarks/results/interactive.json docs/images/interactive.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

INK, MAIN, OTHER, SOFT = "#333", "#1a6450", "#8a4b08", "#999"
Run = dict[str, Any]


def share(axes: Any, runs: list[Run], itl: float) -> None:
    """Bulk work over the time between tokens."""
    fixed = [run for run in runs if run["name"].startswith("fixed")]
    places = [(1000 * run["itl"]["p95"], run["bulk_tokens_per_second"]) for run in fixed]
    axes.plot(*zip(*places, strict=True), "o-", color=SOFT, ms=4, lw=1, label="a fixed number of tokens a step")
    for run, place in zip(fixed, places, strict=True):
        axes.annotate(
            run["name"].removeprefix("fixed:"), place, xytext=(4, -11), textcoords="offset points", color=SOFT
        )
    paced = [run for run in runs if run["name"] == "paced"]
    axes.plot(
        [1000 * run["itl"]["p95"] for run in paced], [run["bulk_tokens_per_second"] for run in paced],
        "*", color=MAIN, ms=11, label=f"paced by what is measured, {len(paced)} runs",
    )  # fmt: skip
    for name, mark, label in (("first", "s", "first in each step, nothing held back"), ("none", "X", "no priority")):
        for run in (run for run in runs if run["name"] == name):
            axes.plot(1000 * run["itl"]["p95"], run["bulk_tokens_per_second"], mark, color=OTHER, ms=7, label=label)
    axes.axvline(1000 * itl, color=INK, ls="--", lw=1, label="promised")
    axes.set(xlabel="time between tokens, p95 (ms)", ylabel="bulk tokens/s", xlim=(0, None))
    axes.set_ylim(0, 1.1 * max(run["bulk_tokens_per_second"] for run in runs))
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    axes.set_title("What batch work keeps", loc="left", fontsize=10)


def first(axes: Any, runs: list[Run], ttft: float) -> None:
    """Times to the first token."""
    names = ["idle", "paced", "first", "none"]
    words = ["no batch work", "paced", "first, nothing\nheld back", "no priority"]
    for place, name in enumerate(names):
        for run in (run for run in runs if run["name"] == name):
            times = [run["ttft"][share] for share in ("p50", "p95", "p99")]
            axes.plot(times, [place] * 3, "-", color=SOFT, lw=1, zorder=1)
            for time, mark in zip(times, "o|x", strict=True):
                axes.plot(time, place, mark, color=MAIN if name == "paced" else INK, ms=6, zorder=2)
    axes.axvline(ttft, color=INK, ls="--", lw=1)
    axes.set(xscale="log", xlabel="time to the first token: p50 (o), p95 (|), p99 (x), s", yticks=range(len(names)))
    axes.set_yticklabels(words)
    axes.invert_yaxis()
    axes.set_title("How long somebody waits", loc="left", fontsize=10)


def main(found: Path, output: Path) -> int:
    """See the module's text."""
    facts = json.loads(found.read_text(encoding="utf-8"))
    mpl.rcParams |= {"font.size": 8, "svg.hashsalt": "tokenmill", "axes.spines.top": False, "axes.spines.right": False}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    share(left, facts["runs"], facts["settings"]["itl"])
    first(right, facts["runs"], facts["settings"]["ttft"])
    figure.savefig(output, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
