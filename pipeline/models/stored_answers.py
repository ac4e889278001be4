"""Which stored answers a job may take: those of its tenant, judged by the content policies that its models have now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from pipeline.answers.index import AnswerIndex
from pipeline.answers.job_answers import SharedAnswers, answers_for
from pipeline.ledger.ledger import LedgerError
from pipeline.models.catalog import Catalog, version_name
from schemas.jobs.job import Job
from schemas.models import CatalogEntry, ModelPin

logger = structlog.get_logger(__name__)


@contextmanager
def open_answers(index: AnswerIndex, scratch: Path, job: Job) -> Iterator[SharedAnswers | None]:
    """The stored answers that the job may take; None: it doesn't use the store, or has models with different policies.

    Args:
        scratch: for files that are read.
    """
    entries: list[CatalogEntry | None] = []
    if index.options.includes(job.cache):
        catalog = Catalog(index.store)
        try:
            entries = [_entry(catalog, pin) for pin in job.models]
        except LedgerError as error:
            logger.warning("stored_answers_unavailable", job=job.id, reason=str(error))
    policies = {entry.policies for entry in entries if entry is not None}
    if len(policies) != 1 or None in entries:
        yield None
        return
    with answers_for(index, job, policies.pop(), scratch) as answers:
        yield answers


def _entry(catalog: Catalog, pin: ModelPin) -> CatalogEntry | None:
    """The entry of the pinned version; None: it was never served."""
    entry = catalog.find(pin.name)
    if (entry is None or entry.pin.key != pin.key) and pin.digest is not None:
        entry = catalog.find(version_name(pin))
    return entry if entry is not None and entry.pin.key == pin.key else None
