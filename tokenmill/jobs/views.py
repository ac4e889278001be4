"""A job that was looked at, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill import output

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary


def facts(summary: JobSummary) -> list[tuple[str, object]]:
    """A summary for people: names and values."""
    found: list[tuple[str, object]] = [("job", summary.id), ("status", summary.status), ("place", summary.place)]
    if summary.attention is not None:
        found.append(("needs attention", summary.attention))
    if summary.job is not None:
        found += [
            ("input", summary.job.input.uri),
            ("model", ", ".join(f"{pin.name} ({output.arithmetic(pin)})" for pin in summary.job.models)),
            ("tier", summary.job.tier),
            ("created", summary.job.created_at.isoformat(timespec="seconds")),
        ]
        if summary.job.deadline is not None:
            found.append(("deadline", summary.job.deadline.isoformat(timespec="seconds")))
        if summary.job.max_cost is not None:
            found.append(("cost limit", f"{summary.job.max_cost:g}"))
        if summary.job.retry_of is not None:
            found.append(("retry of", summary.job.retry_of))
    if summary.results_removed_at is not None:
        found.append(("results", f"removed at {summary.results_removed_at.isoformat(timespec='seconds')}"))
    if summary.manifest is None and summary.counts is not None:
        counts = summary.counts
        found += [
            ("rows", f"{output.count(counts.total - counts.pending)} of {output.count(counts.total)} done"),
            ("failed", output.count(counts.failed)),
            ("shards", f"{summary.shards_done} of {summary.shards_total} done"),
        ]
        if summary.as_of is not None:
            found.append(("as of", summary.as_of.isoformat(timespec="seconds")))
        if summary.cost is not None:
            found.append(("cost", f"{summary.cost:.4f}"))
    if summary.eta is not None:
        found.append(("should be done", summary.eta.isoformat(timespec="seconds")))
    return found


def document(summary: JobSummary) -> dict[str, Any]:
    """A summary for programs."""
    return {
        "id": summary.id,
        "place": summary.place,
        "problem": summary.problem,
        "status": summary.status,
        "attention": summary.attention,
        "counts": summary.counts and summary.counts.model_dump(mode="json"),
        "usage": summary.usage and summary.usage.model_dump(mode="json"),
        "cost": summary.cost,
        "shards": {"done": summary.shards_done, "total": summary.shards_total},
        "as_of": summary.as_of and summary.as_of.isoformat(),
        "eta": summary.eta and summary.eta.isoformat(),
        "job": summary.job and summary.job.model_dump(mode="json"),
        "manifest": summary.manifest and summary.manifest.model_dump(mode="json"),
        "results_removed_at": summary.results_removed_at and summary.results_removed_at.isoformat(),
    }
