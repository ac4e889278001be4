"""The outcome of a job, for people: rows by status, tokens by kind, speed, time, cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tokenmill.output import count, duration, stderr

if TYPE_CHECKING:
    from schemas.jobs.cascade_outcome import CascadeOutcome
    from schemas.jobs.outcome import Counts, Manifest


def summary_table(manifest: Manifest, max_cost: float | None = None) -> Table:
    """The table of a manifest for the end of a run, with the spending limit."""
    counts, usage = manifest.counts, manifest.usage
    rows: list[tuple[str, str]] = [("rows", count(counts.total))]
    by_status = (("failed", counts.failed), ("expired", counts.expired), ("cancelled", counts.cancelled))
    rows.append(("  succeeded", count(counts.succeeded)))
    rows += [(f"  {name}", count(number)) for name, number in by_status if number]
    rows += [("  reused", count(manifest.reused))] if manifest.reused else []
    share = f" ({100 * usage.cached / usage.prompt:.0f} %)" if usage.prompt and usage.cached else ""
    rows += [
        ("input tokens", count(usage.prompt)),
        ("  cached", count(usage.cached) + share),
        ("output tokens", count(usage.completion)),
    ]
    rows += [(f"  {name}", count(number)) for name, number in (("repeated", usage.repeated),) if number]
    if usage.drafted:
        rows.append(("  accepted", f"{count(usage.accepted)} of {count(usage.drafted)} draft tokens"))
    if manifest.tokens_per_second is not None:
        rows.append(("output tokens/s", count(manifest.tokens_per_second)))
    if manifest.total_tokens_per_second is not None:
        rows.append(("all tokens/s", count(manifest.total_tokens_per_second)))
    rows += [("engine time", duration(manifest.engine_seconds)), ("wall time", duration(manifest.wall_seconds))]
    if manifest.cost is not None:
        price = "" if manifest.price_per_hour is None else f" (at {manifest.price_per_hour:.4g} an hour)"
        rows += [("busy time", duration(manifest.busy_seconds)), ("cost", f"{manifest.cost:.4f}{price}")]
        rows += [("  cost limit", f"{max_cost:g}")] if max_cost is not None else []
        rows += [
            (f"  of a million tokens{name and f', {name}'}", f"{value:.4f}") for name, value in _per_million(manifest)
        ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _per_million(manifest: Manifest) -> list[tuple[str, float]]:
    """The costs of a million tokens, by model where there are several."""
    several = len(manifest.spending) > 1
    found = [(f", {one.model}" if several else "", one.cost_per_million_tokens) for one in manifest.spending]
    return [(model, value) for model, value in found if value is not None]


def show_cascade(outcome: CascadeOutcome, merged: Path) -> None:
    """Print a cascade's outcome on stderr."""
    grid = Table(box=None, pad_edge=False)
    for name in ("model", "rows", "final", "busy time", "cost"):
        grid.add_column(name, justify="left" if name == "model" else "right")
    for step in outcome.steps:
        cost = "" if step.cost is None else f"{step.cost:.4f}"
        grid.add_row(step.model, count(step.rows), count(step.accepted), duration(step.busy_seconds), cost)
        for reason, number in step.rejected.items():
            grid.add_row(f"  not final: {reason}", count(number))
    console = stderr()
    console.print(grid)
    if outcome.sampled_rows:
        least = "none" if outcome.min_mean_logprob is None else f"{outcome.min_mean_logprob:.4f}"
        console.print(f"min_mean_logprob {least}, chosen on {count(outcome.sampled_rows)} rows", markup=False)
    if outcome.saved_busy_seconds is not None:
        alone = outcome.busy_seconds + outcome.saved_busy_seconds
        times = f"{duration(outcome.busy_seconds)}, against an estimated {duration(alone)}"
        console.print(f"busy time {times} of {outcome.steps[-1].model} alone", markup=False)
    console.print(f"{merged}: {count(outcome.steps[0].rows)} rows", markup=False)


def reused_rows(reused: int, total: int, *, whole: bool = True) -> str:
    """How many rows took former answers. `whole`: whether the total is that of the job, not of its first rows."""
    return f"reused {count(reused)} of {'' if whole else 'the first '}{count(total)} rows"


def last_line(counts: Counts, output: Path | str) -> str:
    """The last line of a run, which always has the number of failed rows. `output`: the job's folder or URL."""
    not_good = counts.total - counts.succeeded
    what = [f"{count(counts.succeeded)} of {count(counts.total)} rows succeeded", f"{count(counts.failed)} failed"]
    if not_good > counts.failed:
        what.append(f"{count(not_good - counts.failed)} expired or cancelled")
    return f"{results_of(output)}: {', '.join(what)}"


def results_of(output: Path | str) -> str:
    """The location of the results of the job at this folder or URL."""
    return f"{str(output).rstrip('/')}/results"


def as_document(manifest: Manifest, output: Path | str) -> dict[str, Any]:
    """The manifest for `--json`, with the job's location."""
    return {"output": str(output), "results": results_of(output), **manifest.model_dump(mode="json")}


def show(manifest: Manifest, output: Path, max_cost: float | None = None) -> None:
    """Print summary and last line on stderr."""
    console = stderr()
    console.print(summary_table(manifest, max_cost))
    console.print(last_line(manifest.counts, output), markup=False)
