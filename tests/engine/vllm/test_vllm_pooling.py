"""Vectors of vLLM's hidden states, beside those of this project's encoder on the same weights (real vLLM)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.embedding.engine import EncoderEngine
from engine.models.encoders.settings import required_settings
from engine.step_engine import StepEngine
from engine.vllm.engine import VLLMEngine
from engine.vllm.pooling import pool

CONFIG = EngineConfig(dtype="float32", schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64))


def vectors(engine: StepEngine, prompts: list[Any], pooling: Any) -> dict[str, Any]:
    for number, ids in enumerate(prompts):
        engine.add(Request(str(number), ids, SamplingParams(max_tokens=0, temperature=0.0), pooling=pooling))
    done: dict[str, Any] = {}
    while engine.has_work:
        done.update((completion.request_id, completion) for completion in engine.step())
    return done


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm")
def test_vectors_are_those_of_our_encoder(tiny_encoders: Any, tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "num_attention_heads": 2}
    folder = tiny_encoders.make_embedding_model("bert", tmp_path / "embeds", max_seq_length=24, config_changes=changes)
    mode = required_settings(folder).pooling
    draw = np.random.default_rng(3)
    prompts = [as_token_ids(draw.integers(5, 60, length).tolist()) for length in (3, 9, 20, 1, 14, 7)]
    ours = vectors(EncoderEngine.load(folder, CONFIG), prompts, mode)
    engine = VLLMEngine.load(folder, CONFIG, pools=True)
    try:
        theirs = vectors(engine, prompts, mode)
    finally:
        engine.close()
    for name, completion in ours.items():
        assert theirs[name].error is None
        np.testing.assert_allclose(theirs[name].pooled, completion.pooled, atol=1e-4)
        assert theirs[name].prompt_tokens == completion.prompt_tokens


def test_the_modes_of_pooling() -> None:
    states = np.array([[1, 5], [2, 1], [6, 0]], dtype=np.float32)
    expected = {
        "cls": [1, 5], "last": [6, 0], "max": [6, 5], "mean": [3, 2], "mean_sqrt_len": [9 / 3**0.5, 6 / 3**0.5],
        "weightedmean": [23 / 6, 7 / 6],
    }  # fmt: skip
    for mode, vector in expected.items():
        np.testing.assert_allclose(pool(states, mode), vector, rtol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(pool(states, "mean", 1), [4, 0.5])
    np.testing.assert_allclose(pool(states, "weightedmean", 1), [22 / 5, 2 / 5])
