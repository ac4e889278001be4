"""A prompt that one engine computed is continued by another engine with the same tokens, from the imported blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.block_exchange import BlockExchange
from engine.cache.block_tier import BlockKey, Bytes
from engine.errors import EngineError
from engine.request import as_token_ids

TinyModel = Callable[[str], Path]
BLOCK = 8
PROMPT = 45
ANSWER = 24


def load(path: Path, exchange_bytes: int | None = 64 << 20, **changes: Any) -> Engine:
    config = EngineConfig(
        **{"dtype": "float32", "max_model_len": 96, "threads": 1} | changes,
        cache=CacheConfig(BLOCK, num_blocks=40, exchange_bytes=exchange_bytes),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )
    return Engine.load(path, config, model_digest=lambda: "sha256:00")


def request(number: int = 1, prompt: int = PROMPT, **changes: Any) -> Request:
    ids = as_token_ids(np.random.default_rng(number).integers(3, 200, prompt).tolist())
    params = SamplingParams(max_tokens=ANSWER, temperature=0.8, seed=number, ignore_eos=True)
    return Request(str(number), ids, params, **{"salt": b"tenant"} | changes)


def exchange(engine: Engine) -> BlockExchange:
    assert engine.block_exchange is not None
    return engine.block_exchange


def answer(engine: Engine, work: Request) -> list[int]:
    (done,) = engine.run([work])
    ids: list[int] = done.choices[0].token_ids.tolist()
    return ids


def computed_prompt(engine: Engine, work: Request) -> tuple[Request, list[tuple[BlockKey, Bytes]]]:
    """Compute a request up to its first token; returns it with this token, and its exported blocks."""
    engine.add(work)
    while not (partial := engine.partial(work)):
        engine.step()
    exported = exchange(engine).export_blocks(work.request_id)
    groups, names = len(exchange(engine).block_bytes), exchange(engine).block_keys(replace(work, partial=partial))
    assert all(names[block.index * groups + block.key.group] == block.key for block in exported)
    blocks = [(block.key, block.content().copy()) for block in exported]
    assert engine.cancel(work.request_id)
    engine.step()
    engine.scheduler.check_integrity()
    return replace(work, partial=partial), blocks


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "qwen3-next",
        pytest.param("deepseek-v3", marks=pytest.mark.exhaustive),
        pytest.param("gpt-oss", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_another_engine_continues_with_the_same_tokens(family: str, tiny_model: TinyModel) -> None:
    path = tiny_model(family)
    expected = answer(load(path, None), request())
    prefill, decode = load(path), load(path)
    handed_over, blocks = computed_prompt(prefill, request())
    assert {key.digest for key, _ in blocks} <= {key.digest for key in exchange(decode).block_keys(handed_over)}

    exchange(decode).import_blocks(blocks)
    assert answer(decode, handed_over) == expected
    decode.scheduler.check_integrity()
    stats = decode.stats()
    assert stats.imported is not None
    assert stats.imported.hits == len(blocks) > 0
    assert stats.prompt == PROMPT % BLOCK, "whole blocks are not computed again"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.slow
def test_blocks_that_the_engine_holds_need_no_import(family: str, tiny_model: TinyModel) -> None:
    path = tiny_model(family)
    work = request()
    expected = answer(load(path, None), work)
    prefill, decode = load(path), load(path)
    handed_over, exported = computed_prompt(prefill, work)
    assert exchange(decode).num_cached(handed_over) == 0

    answer(decode, replace(work, request_id="0", prompt_token_ids=work.prompt_token_ids[: 3 * BLOCK + 1]))
    num_held = exchange(decode).num_cached(handed_over)
    assert num_held == 3
    before = decode.stats().prompt
    exchange(decode).import_blocks(missing(decode, handed_over, exported, num_held))
    assert answer(decode, handed_over) == expected
    assert decode.stats().prompt - before == PROMPT % BLOCK
    decode.scheduler.check_integrity()
    assert exchange(decode).num_cached(handed_over) == PROMPT // BLOCK
    assert exchange(decode).num_cached(replace(handed_over, salt=b"another")) == 0


@pytest.mark.slow
def test_held_blocks_that_are_evicted_are_computed(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    work = request()
    expected = answer(load(path, None), work)
    prefill, decode = load(path), load(path)
    handed_over, exported = computed_prompt(prefill, work)
    answer(decode, replace(work, request_id="0", prompt_token_ids=work.prompt_token_ids[: 3 * BLOCK + 1]))
    num_held = exchange(decode).num_cached(handed_over)
    for number in range(2, 8):  # they need all blocks of the pool
        answer(decode, request(number))
    assert exchange(decode).num_cached(handed_over) < num_held
    exchange(decode).import_blocks(missing(decode, handed_over, exported, num_held))
    assert answer(decode, handed_over) == expected
    decode.scheduler.check_integrity()


def missing(
    engine: Engine, work: Request, exported: Sequence[tuple[BlockKey, Bytes]], num_held: int
) -> list[tuple[BlockKey, Bytes]]:
    """The exported blocks without those that are held."""
    names = exchange(engine).block_keys(work)[num_held * len(exchange(engine).block_bytes) :]
    return [(key, data) for key, data in exported if key in names]


def test_lost_blocks_are_computed(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    prefill, decode = load(path), load(path)
    handed_over, blocks = computed_prompt(prefill, request())
    expected = answer(load(path, None), request())
    exchange(decode).import_blocks(blocks[:2] + blocks[3:])  # behind a gap nothing can be hit
    assert answer(decode, handed_over) == expected
    assert decode.stats().prompt == PROMPT - 2 * BLOCK


def test_blocks_are_of_one_tenant_and_one_prompt(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    prefill, decode = load(path), load(path)
    handed_over, blocks = computed_prompt(prefill, request())
    names = exchange(decode).block_keys
    assert [key for key, _ in blocks] == names(handed_over)
    assert not {*names(handed_over)} & {*names(replace(handed_over, salt=b"another"))}
    exchange(decode).import_blocks(blocks)
    answer(decode, replace(handed_over, salt=b"another"))
    assert decode.stats().prompt == PROMPT


def test_without_a_sampled_token_the_last_one_is_computed(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    prefill, decode = load(path), load(path)
    work = request(prompt=5 * BLOCK)
    handed_over, blocks = computed_prompt(prefill, work)
    assert len(blocks) == 5
    assert exchange(decode).block_keys(work) == exchange(decode).block_keys(handed_over) == [key for key, _ in blocks]
    exchange(decode).import_blocks(blocks)
    answer(decode, work)
    assert decode.stats().prompt == BLOCK


def test_what_no_request_loads_is_dropped(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    prefill = load(path)
    work: list[tuple[Request, Sequence[tuple[BlockKey, Bytes]]]] = [
        computed_prompt(prefill, request(number)) for number in (1, 2, 3)
    ]
    size = sum(len(data) for _, data in work[0][1])
    decode = load(path, 2 * size)
    for _, blocks in work:
        exchange(decode).import_blocks(blocks)
    for handed_over, _ in work:
        answer(decode, handed_over)
    assert decode.stats().prompt == PROMPT + 2 * (PROMPT % BLOCK)


def test_engines_that_compute_otherwise_have_another_identity(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    assert exchange(load(path)).identity == exchange(load(path)).identity
    others = [
        load(path, dtype="bfloat16"),
        load(tiny_model("gemma3")),
        Engine.load(path, load(path).config, model_digest=lambda: "sha256:01"),
    ]
    assert len({exchange(engine).identity for engine in (load(path), *others)}) == 4


def test_what_cannot_exchange_blocks_is_refused(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    with pytest.raises(EngineError, match=r"\(--role\) doesn't run under tensor parallelism"):
        load(path, tensor_parallel=2)
    config = EngineConfig(cache=CacheConfig(exchange_bytes=1 << 20))
    with pytest.raises(EngineError, match=r"\(--role\) finds blocks by the model's digest"):
        Engine.load(path, config)
