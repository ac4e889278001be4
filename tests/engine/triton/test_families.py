"""Tiny models of every family that the fused decoder computes, on a GPU against the CPU: log-probabilities of prompts
and of what follows, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine import CacheConfig, Completion, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from tests.tiny_models import FUSED, WITH_STATES, make_tiny_model

PROMPTS = [np.random.default_rng(7).integers(3, 257, length).tolist() for length in (1, 5, 40, 70, 40, 17)]


def completions(folder: Path, device: str) -> list[Completion]:
    """Greedy answers through a batch smaller than the job, with chunks and a graph where the device has them."""
    config = EngineConfig(
        device=device,
        dtype="float32",
        max_model_len=128,
        cache=CacheConfig(memory_bytes=64 << 20, sequences=4, tokens_per_sequence=128),
        schedule=ScheduleConfig(4, 48),
    )
    engine = Engine.load(folder, config)
    wanted = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = {
        each.request_id: each
        for each in engine.run(Request(str(i), as_token_ids(ids), wanted) for i, ids in enumerate(PROMPTS))
    }
    return [found[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: families on a GPU; there is none")
@pytest.mark.parametrize("family", [*FUSED, *WITH_STATES])
def test_a_gpu_computes_what_the_cpu_does(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    for ours, wanted in zip(completions(folder, "cuda"), completions(folder, "cpu"), strict=True):
        assert ours.error is None, ours.error
        assert ours.prompt_logprobs is not None
        assert wanted.prompt_logprobs is not None
        np.testing.assert_allclose(ours.prompt_logprobs.chosen[1:], wanted.prompt_logprobs.chosen[1:], atol=2e-3)
        one, other = ours.choices[0], wanted.choices[0]
        assert one.logprobs is not None
        assert other.logprobs is not None
        unlike = np.flatnonzero(one.token_ids != other.token_ids)
        until = int(unlike[0]) + 1 if len(unlike) else len(one.token_ids)  # two tokens may be as likely as each other
        np.testing.assert_allclose(one.logprobs.chosen[:until], other.logprobs.chosen[:until], atol=2e-3)
