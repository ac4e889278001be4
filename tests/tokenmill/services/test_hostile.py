"""A short attack with hostile input on `tokenmill serve`; `make hostile` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.deployment import deployed
from tests.hostile.run import Campaign, Options
from tests.hostile.table import chosen

TTFT = "TTFT"
"""A time: `make hostile` judges it, tests don't."""


@pytest.mark.slow
def test_given_hostile_input_when_a_tenant_chats_then_all_is_refused_and_nothing_dies(
    folder: Path, model_folder: Path
) -> None:
    attacks = chosen("serve", quick=True)
    with deployed("serve", folder / "serve", model=str(model_folder)) as deployment:
        outcome = Campaign(deployment, Options(seed=7, quiet_seconds=1.0)).run(attacks)
    assert len(outcome.results) == len(attacks) >= 12
    assert [(result.attack.name, result.wrong) for result in outcome.results if result.wrong] == []
    assert [verdict for verdict in outcome.verdicts() if not verdict.holds and TTFT not in verdict.criterion] == []
    assert [sample.error for sample in outcome.quiet + outcome.attacked if sample.error] == []
