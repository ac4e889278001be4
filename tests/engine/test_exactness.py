"""Greedy tokens at float32 equal transformers', however the work is cut: batches, chunks, blocks, prefix cache,
preemption. Tiny random models of each family; the real models are in tests/models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.native.build import INSTRUCTION_SETS
from tests.engine.oracle import (
    Answer,
    Setting,
    all_settings,
    check_equal,
    covering_settings,
    engine_answers,
    greedy_answer,
    make_prompts,
)
from tests.native_paths import native_path

MAX_TOKENS = 6
SHARED = 40
LONGEST = 90
EOS = (2,)
FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3")
NEWER = ("smollm3", "phi3-partial", "glm4", "granite", "olmo2", "olmo3", "cohere2")
"""One family for each way in which the newer ones differ from Llama."""
LATENT = ("deepseek-v2", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite", "minicpm3")
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe-mixed", "glm4-moe-grouped", "gpt-oss")
STATES = ("qwen3-next", "qwen3.5-moe", "lfm2-moe", "granite4-mamba", "nemotron-h")
SHAPES = ("gemma4-small", "gemma4", "gemma4-moe")
"""Whose layers differ in their heads."""
NUM_PROMPTS = {1: 8, 7: 20, 64: 70}

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(seed=7, count=70, vocab_size=257, shared=SHARED, longest=LONGEST)


@pytest.fixture(scope="module")
def answers(tiny_model: TinyModel, prompts: list[list[int]]) -> Callable[[str], list[Answer]]:
    """transformers' answers of a family to all prompts, made once."""
    made: dict[str, list[Answer]] = {}

    def answers(family: str) -> list[Answer]:
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
            made[family] = [greedy_answer(model, prompt, MAX_TOKENS, EOS) for prompt in prompts]
        return made[family]

    return answers


def run(
    path: Path, setting: Setting, prompts: list[list[int]], want: list[Answer], **changes: Any
) -> tuple[Engine, int]:
    """Run the setting on as many prompts as its batch deserves; every block is free at the end."""
    engine = Engine.load(path, setting.config(max_model_len=256, **changes))
    count = NUM_PROMPTS[setting.batch_size]
    got = engine_answers(engine, prompts[:count], MAX_TOKENS)
    ties = check_equal(want[:count], got)
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    return engine, ties


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("llama", covering_settings(), id="llama, pairs"),
        *(
            pytest.param(family, all_settings(), id=family, marks=pytest.mark.exhaustive)
            for family in (*FAMILIES, *MIXTURES)
        ),
    ],
)
def test_every_cut_of_the_work_gives_the_same_tokens(
    family: str,
    settings: list[Setting],
    tiny_model: TinyModel,
    prompts: list[list[int]],
    answers: Callable[[str], list[Answer]],
) -> None:
    want = answers(family)
    ties, hits = 0, 0
    for setting in settings:
        engine, stopped = run(tiny_model(family), setting, prompts, want)
        ties += stopped
        hits += engine.stats().cached
        assert engine.stats().cached == 0 or setting.prefix_caching
    assert hits > 0
    assert ties < 0.02 * sum(NUM_PROMPTS[setting.batch_size] for setting in settings)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["paged-sdpa", *INSTRUCTION_SETS])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3"),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("qwen3", "gpt2", "mixtral", "qwen2-moe", "gpt-oss", "deepseek-v2", *SHAPES, *NEWER)
        ),
    ],
)
def test_every_path_gives_the_same_tokens(
    family: str, path: str, tiny_model: TinyModel, prompts: list[list[int]], answers: Callable[[str], list[Answer]]
) -> None:
    if path in INSTRUCTION_SETS:
        native_path(path)  # or skip
        changes = {"attention": "native", "instruction_set": path}
    else:
        changes = {"attention": path}
    settings, ties = covering_settings(), 0
    for setting in settings:
        engine, stopped = run(tiny_model(family), setting, prompts, answers(family), **changes)
        ties += stopped
        assert engine.stats().generated > 0
    assert ties < 0.02 * sum(NUM_PROMPTS[setting.batch_size] for setting in settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama3-rope",
        "qwen2-moe",
        "glm4-moe-grouped",
        "gpt-oss",
        "qwen3.5",
        "deepseek-v2",
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                *("mistral", "qwen2", "qwen3", "gpt2", "phi", "mixtral", "qwen3-moe-mixed"),
                *(*STATES, *NEWER, *LATENT[1:], *SHAPES),
            )
        ),
    ],
)
def test_every_family_is_as_exact(
    family: str, tiny_model: TinyModel, prompts: list[list[int]], answers: Callable[[str], list[Answer]]
) -> None:
    settings, ties = covering_settings(), 0
    for setting in settings:
        engine, stopped = run(tiny_model(family), setting, prompts, answers(family))
        ties += stopped
        assert engine.stats().generated > 0
    assert ties < 0.02 * sum(NUM_PROMPTS[setting.batch_size] for setting in settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "gemma3", "gpt2", "glm4-moe-grouped", "qwen3.5", "deepseek-v3", SHAPES[0]),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("llama3-rope", "qwen2", "qwen3", "phi", "qwen3-moe-mixed", "nemotron-h", *NEWER)
        ),
    ],
)
@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_preempted_sequences_go_on_as_if_nothing_happened(
    family: str,
    prefix_caching: bool,
    tiny_model: TinyModel,
    prompts: list[list[int]],
    answers: Callable[[str], list[Answer]],
) -> None:
    # Given a pool that holds little more than the longest sequence, and wrong length estimates of every size
    blocks = -(-(LONGEST + MAX_TOKENS) // 4) + 6
    config = Setting(64, 256, 4, prefix_caching, num_blocks=blocks).config(max_model_len=LONGEST + MAX_TOKENS)
    # (so that states, which short sequences need as many of, leave room for more sequences than keys do)
    engine = Engine.load(tiny_model(family), replace(config, cache=replace(config.cache, tokens_per_sequence=20)))
    got = engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)
    check_equal(answers(family), got)
    engine.scheduler.check_integrity()
    if family != "mistral":  # its pool of windows is smaller than what running out would take
        assert engine.stats().preemptions > 0


def test_the_covering_array_covers_all_pairs() -> None:
    settings = covering_settings()
    assert len(settings) < 14
    assert len(all_settings()) == 54
    for one in ("batch_size", "chunk_size", "block_size", "prefix_caching"):
        for other in ("batch_size", "chunk_size", "block_size", "prefix_caching"):
            if one < other:
                seen = {(getattr(s, one), getattr(s, other)) for s in settings}
                every = {(getattr(s, one), getattr(s, other)) for s in all_settings()}
                assert seen == every
