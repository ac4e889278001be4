"""The ledgers of a pipeline's steps, and how far each step is by its own."""

from __future__ import annotations

from typing import Final

from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import ObjectStore
from schemas.jobs.outcome import Counts
from tokenmill.local.progress import StepProgress

STEPS: Final = "steps/"
"""Prefix of the steps' jobs in the pipeline's folder."""


def ledger_of(store: ObjectStore, name: str) -> JobLedger:
    """The ledger of a step in the store of its pipeline."""
    return JobLedger(store, f"{STEPS}{name}/")


def read_progress(name: str, ledger: JobLedger) -> StepProgress:
    """How far a step is, by its ledger. Raises `JobNotFound`."""
    summary = summarize_job(ledger)
    is_planned = summary.manifest is not None or ledger.planned_parts() is not None
    has_ended = summary.manifest is not None
    return progress_of(name, summary.counts or Counts(), is_planned=is_planned, has_ended=has_ended)


def progress_of(name: str, counts: Counts, *, is_planned: bool, has_ended: bool = False) -> StepProgress:
    """How far a step with these counts is."""
    done = counts.total - counts.pending
    return StepProgress(name, counts.total, done, counts.failed, is_planned=is_planned, has_ended=has_ended)
