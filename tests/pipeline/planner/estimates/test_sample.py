"""A sample of shards: all of a small job, as planned; of a large one no more than is allowed, from everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.planner import InputEstimate, ShardSample, measure

PLAN = {"segment_rows": 400, "first_segment_rows": 100, "shard_tokens": 1000, "min_group_rows": 4}


def data(tools: Any, rows: int) -> bytes:
    """Rows of which every third begins as ten others do."""
    header = "Answer in one word, as in these examples. " * 10
    made = []
    for n in range(rows):
        text = f"{header if n % 3 == 0 else ''}{n // 30 if n % 3 == 0 else ''} question {n}"
        made.append(tools.line(str(n), text, max_tokens=10 + n % 40))
    return b"\n".join(made)


def sampled(tools: Any, lines: bytes, **limits: int) -> tuple[ShardSample, InputEstimate]:
    sample = ShardSample(**limits)
    with tools.world() as world:
        return sample, measure(tools.source(lines), tools.job(plan=PLAN), world, sample=sample)


def rows_of(tables: list[Any]) -> list[int]:
    return [row for table in tables for row in table.column("row").to_pylist()]


def test_of_a_small_job_the_sample_is_the_shards_that_planning_makes(tools: Any) -> None:
    lines = data(tools, 300)
    planned = tools.plan(lines, tools.job(plan=PLAN))
    sample, estimate = sampled(tools, lines, piece_tokens=200)

    tables, whole = sample.shards()

    assert sample.whole
    assert whole == pytest.approx(1.0)
    assert [table.to_pylist() for table in tables] == [planned.shards[number] for number in sorted(planned.shards)]
    assert len(tables) == estimate.shards > 4
    assert estimate.segments == len(planned.summary.segments)
    assert estimate.sequences == 300


@pytest.mark.slow
def test_of_a_large_job_the_sample_stays_small_and_comes_from_everywhere(tools: Any) -> None:
    lines = data(tools, 3000)
    sample, estimate = sampled(tools, lines, max_tokens=20_000, piece_tokens=500)

    tables, whole = sample.shards()
    rows = rows_of(tables)
    held = sum(table.column("estimated_prompt_tokens").to_numpy().sum() for table in tables)
    held += sum(table.column("expected_tokens").to_numpy().sum() for table in tables)

    assert not sample.whole
    assert 10_000 < held <= 20_000
    assert held * whole == pytest.approx(estimate.prompt_tokens + estimate.expected_tokens)
    assert len(rows) == len(set(rows))
    quarters = [sum(q * 750 <= row < (q + 1) * 750 for row in rows) / len(rows) for q in range(4)]
    assert min(quarters) > 0.15
    assert 0.2 < sum(row % 3 == 0 for row in rows) / len(rows) < 0.5
    again, _ = sampled(tools, lines, max_tokens=20_000, piece_tokens=500)
    assert rows_of(again.shards()[0]) == rows


def test_one_of_several_workers_gets_its_part(tools: Any) -> None:
    sample, estimate = sampled(tools, data(tools, 300))
    tables, whole = sample.shards(3)
    assert len(tables) == -(-estimate.shards // 3)
    assert whole == pytest.approx(1.0, rel=0.3)
    alone, whole = sample.shards(10**6)
    assert len(alone) == 1
    assert whole < 0.1


def test_a_tiny_request_weighs_something(tools: Any) -> None:
    lines = b"\n".join(tools.line(str(n), f"{n}", max_tokens=1) for n in range(2000))
    sample, _ = sampled(tools, lines, max_tokens=20_000, piece_tokens=500)
    assert len(rows_of(sample.shards()[0])) <= 20_000 / 64
