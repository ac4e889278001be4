"""What the runs gave: each checked against what was asked, ratios pair by pair, one table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class WrongCount(Exception):
    """An engine made another number of tokens than it was asked for, so its time says nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One timed pass. Rate in output tokens per second; `others` is the mean number of cores in use by others."""

    rate: float
    wall_seconds: float
    output_tokens: int
    peak_rss_bytes: int
    others: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """A peer's run (None where it failed) and our runs just before it, by the names of our settings."""

    peer: Measured | None
    ours: dict[str, Measured]


@dataclass(frozen=True, slots=True)
class Row:
    """All pairs of one peer in one setting.

    Attributes:
        precision: the setting's.  against: names of our settings that it is compared with.
        reason: why there are no pairs, or fewer than were asked for.
    """

    engine: str
    setting: str
    note: str
    precision: str
    against: tuple[str, ...]
    pairs: list[Pair]
    reason: str | None = None


def last_json(stdout: str) -> dict[str, Any]:
    """The last line that is a JSON object with a result. Raises `ValueError` if there is none."""
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "wall_seconds" in found:
                return dict(found)
    raise ValueError("it printed no result")


def check_lengths(names: Sequence[str], asked: Sequence[int], made: Sequence[int]) -> None:
    """Every request has exactly as many output tokens as it asked for; raises `WrongCount` otherwise."""
    if len(made) != len(asked):
        raise WrongCount(f"{len(made)} answers for {len(asked)} requests")
    wrong = [i for i in range(len(asked)) if made[i] != asked[i]]
    if wrong:
        i = wrong[0]
        raise WrongCount(
            f"{len(wrong)} of {len(asked)} requests have a wrong number of output tokens, "
            f"first {names[i]}: asked for {asked[i]}, made {made[i]}"
        )


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and the range where there is more than one value."""
    if not values:
        return "-"
    median = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return median
    return f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratios(row: Row, ours: str) -> list[float]:
    """Ours over the peer, pair by pair."""
    return [pair.ours[ours].rate / pair.peer.rate for pair in row.pairs if pair.peer and ours in pair.ours]


def our_runs(rows: Sequence[Row], ours: str) -> list[Measured]:
    """Every run of one of our settings, over all pairs."""
    return [pair.ours[ours] for row in rows for pair in row.pairs if ours in pair.ours]


def gigabytes(runs: Sequence[Measured]) -> str:
    return f"{max(run.peak_rss_bytes for run in runs) / 1e9:.1f} GB" if runs else "-"


def table(rows: Sequence[Row], ours: dict[str, str]) -> str:
    """Markdown: our settings (name to options) first, then every peer, those that gave no result with their reason."""
    head = [
        "engine",
        "precision",
        "setting",
        "output tok/s",
        *(f"{name} / it" for name in ours),
        "peak RSS",
        "runs",
        "others' cores",
    ]
    lines = [head, ["---"] * len(head)]
    for name, options in ours.items():
        runs = our_runs(rows, name)
        rate = spread([run.rate for run in runs], 0)
        lines.append(["tokenmill", name, f"`{options}`", rate, *["-"] * len(ours), gigabytes(runs), *crowd(runs)])
    for row in rows:
        runs = [pair.peer for pair in row.pairs if pair.peer]
        rate = spread([run.rate for run in runs], 0) if runs else f"no result: {row.reason}"
        compared = [spread(ratios(row, name), 2) for name in ours]
        note = f"{row.setting}: {row.note}" + (f"; then {row.reason}" if runs and row.reason else "")
        lines.append([row.engine, row.precision, note, rate, *compared, gigabytes(runs), *crowd(runs)])
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def crowd(runs: Sequence[Measured]) -> list[str]:
    """How many runs, and the mean number of cores that others used meanwhile (a clean run has under 0.1)."""
    return [str(len(runs)), spread([run.others for run in runs], 2)]


def verdict(rows: Sequence[Row], ours: Sequence[str]) -> list[str]:
    """One sentence for each of our settings: how it stands to the peer that comes nearest to it, pair by pair.

    Nearest by the median ratio: the highest rate alone may be that of the quietest minute.
    """
    comparisons = []
    for name in ours:
        compared = [(ratios(row, name), row) for row in rows if ratios(row, name)]
        if not compared:
            comparisons.append(f"{name}: no peer gave a result")
            continue
        found, best = min(compared, key=lambda pair: statistics.median(pair[0]))
        comparisons.append(f"{name} / best peer ({best.engine} {best.setting}): {spread(found, 2)}")
    return comparisons
