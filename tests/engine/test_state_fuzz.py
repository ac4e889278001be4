"""Any mix of requests to a model whose layers have states gives each answer of a run alone: chunks, blocks, pools that
are nearly too small, shared prefixes, several choices, drafts, cancellations and resumptions are drawn at random."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    CacheConfig,
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    PartialChoice,
    Request,
    SamplingParams,
    ScheduleConfig,
    as_token_ids,
)
from engine.speculative.draft_lengths import FixedLengths
from tests.engine.scheduler.test_resume import joined
from tests.engine.test_speculation import ReplayProposer, given_of
from tests.tiny_models import WITH_STATES

FIRST_SEED, NUM_SEEDS = int(os.environ.get("FIRST_SEED", "0")), int(os.environ.get("NUM_SEEDS", "6"))
"""Settings of a longer run, of the environment."""

LONGEST = 120
"""Tokens of a sequence."""

MOST_STEPS = 5000
"""An engine that takes more for what is drawn is stuck."""


def load(path: Path, attention: str, cache: CacheConfig, schedule: ScheduleConfig, **changes: Any) -> Engine:
    config = EngineConfig(
        dtype="float32", attention=attention, threads=1, max_model_len=LONGEST, cache=cache, schedule=schedule
    )
    return Engine.load(path, replace(config, **changes))


def draw_requests(chance: random.Random) -> list[Request]:
    """Prompts that begin with parts of a few texts, some of them whole blocks long, of two owners."""
    texts = [[chance.randrange(3, 257) for _ in range(LONGEST)] for _ in range(3)]
    requests = []
    for i in range(chance.randint(3, 14)):
        head = chance.choice(texts)[: chance.choice([0, 1, 8, 16, 32, 33, 47, 64])]
        prompt = head + [chance.randrange(3, 257) for _ in range(chance.choice([0, 1, 2, 5, 16, 30]))] or [3]
        params = SamplingParams(
            max_tokens=chance.randint(1, min(40, LONGEST - len(prompt))),
            temperature=chance.choice([0.0, 0.7]),
            seed=i,
            n=chance.choice([1, 1, 1, 3]),
            ignore_eos=chance.random() < 0.8,
        )
        retain = ((len(prompt), 60.0),) if chance.random() < 0.2 else ()
        requests.append(
            Request(
                str(i), as_token_ids(prompt), params, priority=chance.randint(0, 2), retain=retain,
                expected_tokens=chance.choice([None, 1, 30]), salt=chance.choice([b"", b"other"]),
            )
        )  # fmt: skip
    return requests


def draw_engine(chance: random.Random, path: Path, answers: dict[str, Completion]) -> Engine:
    """An engine with room for little more than the longest sequence."""
    block = chance.choice([4, 8, 16, 32])
    cache = CacheConfig(
        block_size=block,
        num_blocks=-(-LONGEST // block) + chance.randint(0, 12),
        prefix_caching=chance.random() < 0.8,
        tokens_per_sequence=chance.choice([None, 20]),
    )
    schedule = ScheduleConfig(
        max_num_seqs=chance.randint(1, 7),
        max_num_batched_tokens=chance.choice([7, 16, 33, 64, 256]),
        max_chunk_tokens=chance.choice([None, 5, 24]),
    )
    ahead = chance.random() < 0.3
    engine = load(path, chance.choice(["native", "paged-sdpa"]), cache, schedule, async_scheduling=ahead)
    if chance.random() < 0.6:
        engine.scheduler.speculate(ReplayProposer(engine, answers), FixedLengths(chance.choice([1, 3, 9, 20])))
    return engine


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_any_mix_of_requests_gives_the_answers_of_each_alone(
    seed: int, family: str, tiny_model: Callable[[str], Path]
) -> None:
    chance, path = random.Random(f"{family} {seed}"), tiny_model(family)
    requests = draw_requests(chance)
    # Given the answers of each request by itself, its prompt in one chunk,
    plain = load(
        path, "native", CacheConfig(block_size=16, num_blocks=64, prefix_caching=False), ScheduleConfig(8, 256)
    )
    alone = {request.request_id: next(iter(plain.run([request]))) for request in requests}
    # When all come in waves, and some are cancelled, or interrupted and resumed by another engine,
    done: dict[str, Completion] = {}
    logs: dict[str, tuple[PartialChoice, ...]] = {}
    for limit in (*(chance.randint(1, 30) for _ in range(chance.randint(0, 2))), None):
        engine = draw_engine(chance, path, alone)
        left = [replace(one, partial=logs.get(one.request_id, ())) for one in requests if one.request_id not in done]
        waiting, steps = chance.sample(left, len(left)), 0
        added: list[Request] = []
        while (waiting or engine.has_work) and (limit is None or steps < limit):
            for _ in range(min(len(waiting), chance.choice([0, 1, 1, 5]) if engine.has_work else 1)):
                added.append(waiting.pop())
                engine.add(added[-1])
            if chance.random() < 0.03:
                engine.cancel(chance.choice(added).request_id, chance.choice([None, 0]))
            done |= {completion.request_id: completion for completion in engine.step()}
            engine.scheduler.check_integrity()
            steps += 1
            assert steps < MOST_STEPS
        for request in added if limit is not None else ():
            if request.request_id not in done:
                known = logs.get(request.request_id, ())
                logs[request.request_id] = joined(known, engine.partial(request, given_of(known)))
    # Then each answer is the one that it has alone, up to its end if it was cancelled, and every slot is free.
    assert done.keys() == alone.keys()
    for name, completion in done.items():
        assert completion.error is None
        for found, wanted in zip(completion.choices, alone[name].choices, strict=True):
            tokens, whole = found.token_ids.tolist(), wanted.token_ids.tolist()
            if found.finish_reason is FinishReason.CANCELLED:
                assert tokens == whole[: len(tokens)], name
            else:
                assert (tokens, found.stop_token_id) == (whole, wanted.stop_token_id), name
    stats = engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.total_blocks, 0)
