"""A short run of faults on a whole installation; `make cluster-faults` is the long one. `make chaos` runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.faults import Setup, run
from tests.cluster.faults_plan import Scale
from tests.cluster.faults_report import document, show

SMALL = Scale(rows=(60, 200), race_rows=400, max_tokens=(4, 24), expire_seconds=3, at_once=3)


@pytest.mark.exhaustive
def test_given_two_faults_when_jobs_come_from_all_ingest_sources_then_nothing_is_lost_doubled_or_changed(
    folder: Path, model_folder: Path
) -> None:
    outcome = run(Setup(seed=6, faults=2, worker="null", model=str(model_folder), folder=folder / "run", scale=SMALL))
    show(outcome)
    assert outcome.broken == []
    facts = json.loads(json.dumps(document(outcome)))
    assert facts["faults"] == 2
    assert facts["rows"]["succeeded"] > 0
    assert facts["tokens"]["repeated"] <= facts["tokens"]["sampled"] - facts["tokens"]["committed"]
