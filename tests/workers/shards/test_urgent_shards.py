"""More urgent shards overtake bulk work at once, and bulk work ends all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup
from engine.runner.null_runner import NullRunner
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=400,
    max_position=256, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip


@pytest.fixture
def host(byte_level: Tokenizer, kit: Any) -> Any:
    """Makes a model whose steps cost nothing."""

    def host(max_num_seqs: int) -> LoadedModel:
        config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=max_num_seqs))
        groups = (CacheGroup((0,), None, 400),)
        engine = Engine(
            config, SPEC, groups, 256, lambda scheduler: NullRunner(scheduler.rows, SPEC.vocab_size),
            kit.FakeClock().monotonic,
        )  # fmt: skip
        limits = ModelLimits(256, SPEC.vocab_size, SPEC.eos_token_ids)
        return LoadedModel("tiny", "tiny", engine, byte_level, limits, "float32", max_num_seqs)

    return host


class TieredSource:
    """A source with a queue for each tier; `later`: number of polls -> the shard that arrives then."""

    def __init__(self, shards: list[ShardWork], later: dict[int, ShardWork]) -> None:
        self.queues: dict[Tier, list[ShardWork]] = {tier: [] for tier in BY_URGENCY}
        for shard in shards:
            self.queues[shard.tier].append(shard)
        self.later = later
        self.polls = 0
        self.taken: list[int] = []

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        self.polls += 1
        for poll in [poll for poll in self.later if poll <= self.polls]:
            shard = self.later.pop(poll)
            self.queues[shard.tier].append(shard)
        for tier in tiers:
            if self.queues[tier]:
                shard = self.queues[tier].pop(0)
                self.taken.append(shard.shard)
                return shard
        return None

    def finished(self) -> bool:
        return not self.later and not any(self.queues.values())


def shard(kit: Any, number: int, tier: Tier, rows: int = 40, tokens: int = 60) -> ShardWork:
    job = kit.make_job().model_copy(update={"tier": tier})
    bodies = [kit.chat(f"{number} {row}", max_tokens=tokens, ignore_eos=True) for row in range(rows)]
    work: ShardWork = kit.make_work(bodies, shard=number, first_row=1_000 * number, job=job)
    return work


def run(kit: Any, model: Any, source: TieredSource) -> Any:
    sink = kit.MemorySink()
    settings = WorkerSettings(poll_interval_seconds=0.0)
    ShardWorker(model, source, sink, kit.FakeClock(), settings, None, kit.InlineExecutor()).run()
    return sink


@pytest.mark.slow
def test_an_urgent_shard_is_opened_before_full_bulk_ones_and_its_rows_start_first(host: Any, kit: Any) -> None:
    # Given a machine that is full of bulk work, with more than it may open, when an urgent shard comes,
    model = host(max_num_seqs=4)
    bulk = [shard(kit, number, Tier.BULK) for number in range(1, 8)]
    source = TieredSource(bulk, {12: shard(kit, 9, Tier.STANDARD, rows=4, tokens=5)})
    sink = run(kit, model, source)
    # then it is the next that is taken, and done, before any other bulk shard,
    order = list(sink.parts)
    assert source.taken.index(9) < len(bulk)
    assert order.index(9) == 0
    # and every row of the others has its whole answer.
    assert sorted(order) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert all(row.completion_tokens == 60 for row in sink.rows.values() if row.row < 8_000)


def test_a_bulk_shard_of_the_floor_is_as_urgent_as_standard_ones(host: Any, kit: Any) -> None:
    model = host(max_num_seqs=4)
    floor = replace(shard(kit, 1, Tier.BULK, rows=4, tokens=5), as_tier=Tier.STANDARD)
    source = TieredSource([floor, shard(kit, 2, Tier.STANDARD, rows=60, tokens=30)], {})
    sink = run(kit, model, source)
    assert list(sink.parts) == [1, 2]


def test_standard_shards_are_not_fetched_beyond_max_open_shards(host: Any, kit: Any) -> None:
    model = host(max_num_seqs=2)
    shards = [shard(kit, number, Tier.STANDARD, rows=20, tokens=10) for number in range(1, 9)]

    class CountingSource(TieredSource):
        most = 0

        def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
            taken = super().take(timeout, tiers)
            self.most = max(self.most, len(self.taken) - len(sink.parts))
            return taken

    source, sink = CountingSource(shards, {}), kit.MemorySink()
    ShardWorker(model, source, sink, kit.FakeClock(), WorkerSettings(), None, kit.InlineExecutor()).run()
    assert len(sink.parts) == 8
    assert source.most <= WorkerSettings().max_open_shards + 2
