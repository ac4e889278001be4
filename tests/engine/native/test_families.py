"""The kernels compute every family that the fused decoder knows: transformers' log-probabilities at float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.native.build import INSTRUCTION_SETS
from tests.engine.oracle import make_prompts
from tests.native_paths import native_path
from tests.tiny_models import FUSED

IN_PARTS = ("granite4-mamba-moe", "nemotron-h")
"""Families whose layers are computed call by call."""

PROMPTS = make_prompts(seed=9, count=5, vocab_size=257, shared=30, longest=60)


@pytest.fixture(scope="module")
def wanted(tiny_model: Callable[[str], Path]) -> Callable[[str], list[np.ndarray[Any, Any]]]:
    """transformers' log-probability of each token of the prompts but the first; made once for a family."""
    made: dict[str, list[np.ndarray[Any, Any]]] = {}

    def wanted(family: str) -> list[np.ndarray[Any, Any]]:
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
            with torch.inference_mode():
                logits = [model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]
            made[family] = [
                rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
                for rows, prompt in zip(logits, PROMPTS, strict=True)
            ]
        return made[family]

    return wanted


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("family", [*FUSED, *IN_PARTS])
def test_log_probabilities_are_those_of_transformers(
    family: str,
    instruction_set: str,
    tiny_model: Callable[[str], Path],
    wanted: Callable[[str], list[np.ndarray[Any, Any]]],
) -> None:
    native_path(instruction_set)  # or skip
    config = EngineConfig(
        dtype="float32",
        attention="native",
        instruction_set=instruction_set,
        max_model_len=128,
        threads=1,
        cache=CacheConfig(block_size=16, num_blocks=100),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=37),
    )
    engine = Engine.load(tiny_model(family), config)
    assert engine.attention_name == f"native ({instruction_set})"
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    done = engine.run([Request(str(i), as_token_ids(prompt), params) for i, prompt in enumerate(PROMPTS)])
    tables = {completion.request_id: completion.prompt_logprobs for completion in done}
    for i, expected in enumerate(wanted(family)):
        table = tables[str(i)]
        assert table is not None
        np.testing.assert_allclose(table.chosen[1:], expected, atol=3e-4, rtol=1e-4)
