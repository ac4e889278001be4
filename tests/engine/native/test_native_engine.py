"""Guarantees of an engine on the native kernels: a request's answer has the same bits in any batch, at every
precision; its quantized forms are near the plain one; and what is chosen is what serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine import CacheConfig, Completion, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.models.decoder import FusedDecoder
from engine.models.native import NativeDecoder
from engine.native.build import INSTRUCTION_SETS
from engine.native.library import NativeLibrary
from tests.engine.models.test_experts import upcycle
from tests.engine.oracle import make_prompts
from tests.native_paths import native_path

TinyModel = Callable[[str], Path]

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "bf16, int8 cache": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "int8 weights": {"dtype": "bfloat16", "quantize": "int8-weight-only"},
}

IN_CI = {
    *product(["llama"], PRECISIONS),
    *product(["gemma3"], ("float32", "bf16, int8 cache")),
    *product(["qwen2-moe"], ("float32", "int8", "int8 weights")),
}
"""Of families and precisions; the others are exhaustive."""


def answers(engine: Engine, prompts: list[list[int]], at_once: int) -> list[Completion]:
    """Greedy and seeded answers with log-probabilities, `at_once` requests in the engine at a time."""
    done: dict[str, Completion] = {}
    for begin in range(0, len(prompts), at_once):
        requests = [
            Request(
                str(i),
                as_token_ids(prompts[i]),
                SamplingParams(max_tokens=9, temperature=0.8 * (i % 2), seed=i, logprobs=3, ignore_eos=True),
            )
            for i in range(begin, min(begin + at_once, len(prompts)))
        ]
        for completion in engine.run(requests):
            done[completion.request_id] = completion
    return [done[str(i)] for i in range(len(prompts))]


def load(path: Path, batch: int, chunk: int, **settings: Any) -> Engine:
    return Engine.load(
        path,
        EngineConfig(
            attention="native",
            max_model_len=256,
            cache=CacheConfig(block_size=16, num_blocks=400, prefix_caching=False),
            schedule=ScheduleConfig(max_num_seqs=batch, max_num_batched_tokens=chunk),
            **settings,
        ),
    )


class LogitsRecorder:
    """Records the bits of every row of logits that decoders of a class compute."""

    def __init__(self, patch: pytest.MonkeyPatch, decoder: type[NativeDecoder | FusedDecoder] = NativeDecoder) -> None:
        self._patch = patch
        self._decoder: Any = decoder
        self._logits = decoder.logits
        self.rows: set[bytes] = set()

    def watch(self) -> set[bytes]:
        """Start a new set, which fills from now on."""
        self.rows = set()
        logits = self._logits

        def seen(decoder: Any, hidden: Tensor) -> Tensor:
            found = logits(decoder, hidden)
            self.rows.update(row.numpy().tobytes() for row in found)
            return found

        self._patch.setattr(self._decoder, "logits", seen)
        return self.rows


def assert_same_answers(ours: list[Completion], theirs: list[Completion]) -> None:
    """Tokens are the same; log-probabilities too but for a last digit: torch adds them up by the batch's shape."""
    for one, other in zip(ours, theirs, strict=True):
        [first], [second] = one.choices, other.choices
        assert list(first.token_ids) == list(second.token_ids)
        assert first.logprobs is not None
        assert second.logprobs is not None
        np.testing.assert_allclose(first.logprobs.chosen, second.logprobs.chosen, rtol=5e-7)


def test_frequencies_that_follow_a_rows_length_are_those_of_torch(tiny_model: TinyModel) -> None:
    # Given prompts on both sides of a context of 16 tokens, behind which frequencies change
    prompts = [[(7 * i + length) % 250 + 1 for i in range(length)] for length in (4, 15, 16, 17, 30)]
    config = EngineConfig(
        dtype="float32", max_model_len=64, cache=CacheConfig(block_size=16, num_blocks=40),
        schedule=ScheduleConfig(max_num_seqs=3, max_num_batched_tokens=11),
    )  # fmt: skip
    ours, torchs = (
        answers(Engine.load(tiny_model("llama-dynamic"), replace(config, attention=name)), prompts, at_once=5)
        for name in ("native", "paged-sdpa")
    )
    for one, other in zip(ours, torchs, strict=True):
        assert one.choices[0].token_ids.tolist() == other.choices[0].token_ids.tolist()
        assert one.choices[0].logprobs is not None
        assert other.choices[0].logprobs is not None
        np.testing.assert_allclose(one.choices[0].logprobs.chosen, other.choices[0].logprobs.chosen, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(*each, marks=() if each in IN_CI else pytest.mark.exhaustive)
        for each in product(("llama", "gemma3", "qwen2-moe", "olmo2", "cohere2", "ministral3"), PRECISIONS)
    ],
)
def test_other_rows_of_the_batch_change_no_bit(
    family: str, instruction_set: str, precision: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_path(instruction_set)  # or skip
    settings = {"instruction_set": instruction_set, **PRECISIONS[precision]}
    prompts = make_prompts(seed=3, count=14, vocab_size=257, shared=40, longest=90)
    seen = LogitsRecorder(monkeypatch)
    bits_alone = seen.watch()
    alone = answers(load(tiny_model(family), 1, 23, threads=1, **settings), prompts, at_once=1)
    bits_together = seen.watch()
    together = answers(load(tiny_model(family), 14, 512, threads=2, **settings), prompts, at_once=14)
    assert len(bits_alone) > 100
    assert bits_alone == bits_together
    assert_same_answers(alone, together)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *(("qwen3.5", "float32"), ("granite4-mamba", "bf16"), ("nemotron-h", "int8"), ("gemma4-moe", "int8")),
        ("deepseek-v3", "float32"),
        *(
            pytest.param(family, precision, marks=pytest.mark.exhaustive)
            for family, precision in (
                *(("qwen3.5", "int8"), ("granite4-mamba", "float32"), ("nemotron-h", "float32")),
                *(("lfm2-moe", "float32"), ("lfm2-moe", "bf16"), ("gemma4-small", "float32")),
                *(("gemma4", "bf16, int8 cache"), ("gemma4-moe", "float32")),
                *(("youtu", "float32"), ("deepseek-v3", "int8")),
            )
        ),
    ],
)
def test_other_rows_change_no_bit_where_layers_are_computed_call_by_call(
    family: str, precision: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(seed=3, count=8, vocab_size=257, shared=40, longest=90)
    seen = LogitsRecorder(monkeypatch, FusedDecoder)
    bits_alone = seen.watch()
    alone = answers(load(tiny_model(family), 1, 512, threads=1, **PRECISIONS[precision]), prompts, at_once=1)
    bits_together = seen.watch()
    together = answers(load(tiny_model(family), 8, 512, threads=2, **PRECISIONS[precision]), prompts, at_once=8)
    assert len(bits_alone) > 60
    assert bits_alone == bits_together
    assert_same_answers(alone, together)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-moe"])
def test_unread_positions_are_left_out_of_the_last_layer(
    family: str, precision: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    forward = NativeLibrary.forward

    def watched(self: NativeLibrary, *args: Any) -> None:
        steps.append((args[4].tokens, args[4].num_wanted))
        forward(self, *args)

    monkeypatch.setattr(NativeLibrary, "forward", watched)
    prompts = make_prompts(seed=5, count=6, vocab_size=257, shared=40, longest=90)
    # Given prompts in chunks, once in a batch with a request that wants every position's logits, and once not,
    whole = load(tiny_model(family), 8, 40, threads=2, **PRECISIONS[precision])
    whole.add(Request("all", as_token_ids(list(range(3, 200))), SamplingParams(max_tokens=40, prompt_logprobs=0)))
    seen = LogitsRecorder(monkeypatch)
    bits = seen.watch()
    everything = answers(whole, prompts, at_once=6)
    assert any(wanted in (-1, tokens) for tokens, wanted in steps)
    steps.clear()
    bits_only = seen.watch()
    only = answers(load(tiny_model(family), 8, 40, threads=2, **PRECISIONS[precision]), prompts, at_once=6)
    # then without it only sampled positions go through the last layer, and their bits are the same.
    assert any(wanted == 0 for _, wanted in steps)
    assert any(0 < wanted < tokens for tokens, wanted in steps)
    assert sum(tokens if wanted < 0 else wanted for tokens, wanted in steps) == 6 * 9
    assert len(bits_only) > 50
    assert bits_only <= bits
    assert_same_answers(everything, only)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "float32"])
def test_small_forms_stay_near_the_plain_one(precision: str, tiny_model: TinyModel) -> None:
    prompts = make_prompts(seed=4, count=6, vocab_size=257, shared=40, longest=90)

    def scored(**settings: Any) -> np.ndarray[Any, Any]:
        engine = load(tiny_model("llama"), 6, 512, **settings)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        found = engine.run([Request(str(i), as_token_ids(p), params) for i, p in enumerate(prompts)])
        tables = {c.request_id: c.prompt_logprobs for c in found}
        return np.concatenate([tables[str(i)].chosen[1:] for i in range(len(prompts))])  # type: ignore[union-attr]

    exact = scored(dtype="float32")
    small = scored(**PRECISIONS[precision])
    assert not np.array_equal(small, exact)
    assert np.abs(small - exact).mean() < 0.1
    assert abs(small.mean() - exact.mean()) < 0.02


def test_the_engine_reports_its_backend(tiny_model: TinyModel) -> None:
    engine = load(tiny_model("llama"), 2, 64, instruction_set="avx2", dtype="float32")
    assert engine.attention_name == "native (avx2)"


def test_rows_are_counted_by_layer_and_expert(tiny_model: TinyModel) -> None:
    # Given a model whose three layers send each token through two of four experts
    engine = load(tiny_model("qwen3-moe"), 4, 512, threads=1, dtype="float32")
    prompt = as_token_ids(list(range(3, 40)))
    list(engine.run([Request("0", prompt, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))]))
    counted = engine.expert_load()
    assert counted is not None
    rows = counted.rows
    # In the last layer only positions whose logits are read are computed.
    assert rows.shape == (3, 4)
    assert rows.sum(1).tolist() == [2 * 45, 2 * 45, 2 * 9]


@pytest.mark.parametrize("router_scale", [0.0, 0.3])
def test_a_dense_model_copied_into_eight_experts_is_the_dense_model(
    router_scale: float, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = upcycle(tiny_model("llama"), tmp_path / "m", router_scale)
    prompts = make_prompts(seed=6, count=10, vocab_size=257, shared=40, longest=90)
    seen = LogitsRecorder(monkeypatch)
    bits, tokens = [], []
    for path in (tiny_model("llama"), mixture):
        bits.append(seen.watch())
        engine = load(path, 10, 100, threads=2, dtype="float32")
        tokens.append([list(done.choices[0].token_ids) for done in answers(engine, prompts, at_once=10)])
    assert tokens[0] == tokens[1]
    if router_scale == 0:  # half of the output, twice, is the output
        assert bits[0] == bits[1]
        assert len(bits[0]) > 50
