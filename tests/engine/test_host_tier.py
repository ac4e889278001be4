"""An engine loads the blocks of preempted rows and of evicted prefixes from host memory, and answers alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, EngineStats, Request, SamplingParams, ScheduleConfig
from engine.config import SpeculationConfig
from engine.embedding.engine import check_encoder_config
from engine.errors import EngineError, OutOfMemory, UnsupportedModel
from engine.plan import CacheGroup
from engine.request import as_token_ids
from engine.runner.second_tier import host_blocks
from engine.vllm.settings import _refused

TinyModel = Callable[[str], Path]
BLOCK = 8


def load(path: Path, host_bytes: int | None, num_blocks: int = 14, **changes: Any) -> Engine:
    config = EngineConfig(
        **{"dtype": "float32", "max_model_len": 96, "threads": 1} | changes,
        cache=CacheConfig(BLOCK, num_blocks=num_blocks, host_bytes=host_bytes),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )
    return Engine.load(path, config)


def request(number: int, prompt: int, answer: int, **changes: Any) -> Request:
    ids = as_token_ids(np.random.default_rng(number).integers(3, 200, prompt).tolist())
    params = SamplingParams(max_tokens=answer, temperature=0.8, seed=number, ignore_eos=True)
    return Request(changes.pop("name", str(number)), ids, params, **changes)


def preempted(path: Path, host_bytes: int | None, **changes: Any) -> tuple[dict[str, list[int]], EngineStats]:
    """Answers of requests that are longer than expected, so that rows are preempted."""
    engine = load(path, host_bytes, **changes)
    work = [request(number, 20 + number, 30, expected_tokens=1) for number in range(6)]
    found = {done.request_id: done.choices[0].token_ids.tolist() for done in engine.run(work)}
    engine.scheduler.check_integrity()
    engine.close()
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    return found, stats


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma3", {"async_scheduling": True, "num_blocks": 20}),
        *(
            pytest.param(family, changes, marks=pytest.mark.exhaustive)
            for family, changes in (
                ("llama", {"dtype": "bfloat16", "kv_dtype": "int8"}),
                ("llama", {"speculation": SpeculationConfig("ngram")}),
                ("gemma3", {"num_blocks": 16}),
                ("deepseek-v3", {}),
            )
        ),
    ],
)
@pytest.mark.slow
def test_preempted_rows_load_their_blocks_and_answer_alike(
    family: str, changes: dict[str, Any], tiny_model: TinyModel
) -> None:
    path = tiny_model(family)
    expected, without = preempted(path, None, **changes)
    found, stats = preempted(path, 4 << 20, **changes)
    assert found == expected
    assert without.preemptions > 0
    assert without.host_tier is None
    assert stats.recomputed < without.recomputed
    assert stats.host_tier is not None
    assert stats.host_tier.hits > 0
    assert stats.host_tier.bytes_written > 0


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_a_prefix_that_was_evicted_is_loaded_by_its_tenant_only(family: str, tiny_model: TinyModel) -> None:
    engine = load(tiny_model(family), 4 << 20)

    def answer(number: int, prompt: int, **changes: Any) -> list[int]:
        (done,) = engine.run([request(number, prompt, 4, **changes)])
        ids: list[int] = done.choices[0].token_ids.tolist()
        return ids

    first, others = answer(1, 41, salt=b"one"), [answer(number, 80) for number in range(2, 6)]
    before = engine.stats()
    assert answer(1, 41, salt=b"one") == first
    after = engine.stats()
    assert after.prompt - before.prompt == 1
    assert after.host_tier is not None
    assert before.host_tier is not None
    assert after.host_tier.hits - before.host_tier.hits == 41 // BLOCK + (family == "qwen3-next")
    answer(1, 41, salt=b"another")
    assert engine.stats().prompt - after.prompt == 41
    # Steps that loaded these blocks have evicted, and stored, those of the others.
    assert [answer(number, 80) for number in range(2, 6)] == others


def test_host_memory_and_a_folder_are_used_together(tiny_model: TinyModel, tmp_path: Path) -> None:
    def run(names: str) -> EngineStats:
        config = EngineConfig(
            dtype="float32", max_model_len=96, threads=1,
            cache=CacheConfig(BLOCK, num_blocks=14, host_bytes=4 << 20, tier_folder=str(tmp_path)),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24),
        )  # fmt: skip
        engine = Engine.load(tiny_model("llama"), config, model_digest=lambda: "sha256:00")
        for name in names:
            list(engine.run([request(1, 41, 4, name=name)]))
            list(engine.run([request(ord(name), 88, 4)]))
        engine.close()
        return engine.stats()

    first = run("ab")
    assert first.host_tier is not None
    assert first.tier is not None
    assert first.host_tier.hits > 0
    assert first.cached == 40
    assert first.tier.bytes_written > 0
    assert first.tier.hits == 0
    later = run("c")
    assert later.tier is not None
    assert later.tier.hits == 41 // BLOCK


def test_host_memory_is_divided_as_the_memory_of_the_device_is() -> None:
    groups = (CacheGroup((0,), None, 30), CacheGroup((1,), 8, 10))
    counts = host_blocks(40_000, groups, (100, 300))
    assert counts == [200, 66]
    with pytest.raises(OutOfMemory, match="hold no block of each kind, of 100 and 300 bytes"):
        host_blocks(500, groups, (100, 300))
    with pytest.raises(OutOfMemory, match=r"more than the .* GiB that are free"):
        host_blocks(1 << 60, groups, (100, 300))


def test_what_does_not_go_with_host_memory_is_refused(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    with pytest.raises(EngineError, match=r"\(--kv-offloading-size\) doesn't hold the keys of speculate 'draft'"):
        load(path, 1 << 20, speculation=SpeculationConfig("draft", draft_model=str(path)))
    with pytest.raises(EngineError, match=r"\(--kv-offloading-size\) doesn't run under tensor parallelism"):
        load(path, 1 << 20, tensor_parallel=2)
    config = EngineConfig(cache=CacheConfig(host_bytes=1 << 20))
    with pytest.raises(EngineError, match="needs prefix_caching"):
        Engine.load(path, EngineConfig(cache=CacheConfig(host_bytes=1 << 20, prefix_caching=False)))
    with pytest.raises(UnsupportedModel, match="leave --kv-offloading-size out"):
        check_encoder_config(config)
    assert [name for is_set, name, _ in _refused(config) if is_set] == ["--kv-offloading-size"]
