"""The engine's sizes follow from the plan's estimates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.local.embedded import open_output
from tokenmill.local.run_plan import rows_at_once


def plan(folder: Path, bodies: list[dict[str, Any]]) -> list[PlanSegment]:
    source = folder / "in.jsonl"
    lines = []
    for number, extra in enumerate(bodies):
        body = {"model": "m", "prompt": f"question {number}", "temperature": 0, **extra}
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
    source.write_text("\n".join(lines))
    pin = ModelPin(name="m", source="m", dtype="float32")
    order = JobOrder(input=pin_input(source), models=(pin,), settings=JobSettings(), tier=Tier.STANDARD)
    with open_output(folder / "out") as output:
        plan_job(output.ledger, submit(order, output.ledger, output.world).job, output.world)
        return list(output.ledger.segments())


def test_no_more_rows_than_the_work_fills_until_the_longest_answer_ends(tmp_path: Path) -> None:
    # Given one answer of 1,000 tokens that nothing can end, and 39 of up to 500,
    bodies = [{"max_tokens": 1000, "ignore_eos": True}, *({"max_tokens": 500} for _ in range(39))]
    # then 20,500 tokens in 1,000 steps need 20.5 rows, and with the margin two tiles.
    rows = rows_at_once(plan(tmp_path, bodies))
    assert rows == 32
    assert EngineOptions().config(rows=rows).schedule.rows == 32
    assert EngineOptions(max_num_seqs=8).config(rows=rows).schedule.rows == 8


@pytest.mark.parametrize(
    "longest",
    [
        {"max_tokens": 1000},
        {"ignore_eos": True},
        {"max_tokens": 1000, "ignore_eos": True, "stop": ["end"]},
        {"max_tokens": 1000, "ignore_eos": True, "stop_token_ids": [7]},
    ],
)
def test_an_answer_that_may_end_early_limits_nothing(tmp_path: Path, longest: dict[str, Any]) -> None:
    rows = rows_at_once(plan(tmp_path, [longest, *({"max_tokens": 50} for _ in range(9))]))
    assert rows is None
    assert EngineOptions().config(rows=rows).schedule.rows == 128


def test_an_answer_lasts_at_least_its_min_tokens(tmp_path: Path) -> None:
    bodies = [{"max_tokens": 1000, "min_tokens": 500}, *({"max_tokens": 100} for _ in range(140))]
    assert rows_at_once(plan(tmp_path, bodies)) == 48  # 15,000 tokens in 500 steps, and the margin
