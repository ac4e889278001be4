"""A workload in the planner's order and in the order of arrival, through the real worker and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from order import by_arrival, plan_workload, run
from shared_prefix import best_hits
from workload import load_prompts

from tests.workers.conftest import byte_level_tokenizer

GROUPS = ("alpha beta gamma delta epsilon " * 12, "one two three four five six seven " * 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("served") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=400)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 requests of two groups in turn; the last one has the longest answer."""
    path: Path = tmp_path_factory.mktemp("workload") / "two-groups.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for i in range(24):
            messages = [{"role": "system", "content": GROUPS[i % 2]}, {"role": "user", "content": f"number {i}"}]
            body = {"model": "any", "messages": messages, "max_tokens": 40 if i == 23 else 3 + i % 4}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    return path


def test_given_both_orders_when_they_run_then_tokens_are_equal_and_the_plan_starts_the_longest_early(
    model: Path, workload: Path, tmp_path: Path
) -> None:
    settings = {"dtype": "float32", "threads": 1, "schedule.max_num_seqs": 4, "cache.block_size": 16}
    planned = plan_workload(workload, model, tmp_path, settings)
    prompts = [prompt.token_ids for prompt in load_prompts(workload, model)]
    best = best_hits(prompts, 16)

    found = {order: run(planned, order, best)[0] for order in ("plan", "arrival")}

    wanted = sum(json.loads(line)["body"]["max_tokens"] for line in workload.read_text().splitlines())
    for facts in found.values():
        assert facts["output_tokens"] == wanted
        assert 0 < facts["cached_tokens"] <= best_hits(prompts, 1)
        assert facts["computed_tokens"] == facts["prompt_tokens"] - facts["cached_tokens"] + wanted - 24
        assert 0 < facts["mean_rows_per_step"] <= 4
    assert found["plan"]["steps"] < found["arrival"]["steps"], "the longest answer came last, and ran alone"


def test_given_planned_shards_when_they_are_sorted_by_arrival_then_nothing_of_the_plan_is_left(
    model: Path, workload: Path, tmp_path: Path
) -> None:
    planned = plan_workload(workload, model, tmp_path, {"dtype": "float32"})
    order = [row for shard in planned.shards for row in shard["row"].to_pylist()]

    arrived = by_arrival(planned.shards)

    rows = [row for shard in arrived for row in shard["row"].to_pylist()]
    assert rows == list(range(24)) != order
    assert any(shard["prefix_group"].null_count < len(shard) for shard in planned.shards)
    assert all(shard["prefix_group"].null_count == len(shard) for shard in arrived)
    assert all(shard.schema.equals(planned.shards[0].schema) for shard in arrived)


def test_given_a_limit_when_a_workload_is_planned_then_only_its_first_lines_are_in(
    model: Path, workload: Path, tmp_path: Path
) -> None:
    planned = plan_workload(workload, model, tmp_path, {"dtype": "float32"}, limit=5)

    assert sorted(row for shard in planned.shards for row in shard["row"].to_pylist()) == [0, 1, 2, 3, 4]
