"""Fixtures of the engine's tests: one thread, because tiny models gain nothing from a second one; prompts; a reference
attention and a way to run models through it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.base import ModelSpec
from engine.native.weight_memory import WeightMemory
from engine.states import NO_SLOT, Segments, StateOperator, empty_states

Chunk = tuple[int, int, int]
"""(sequence, first position, position after the last)."""


class DenseAttend:
    """Causal attention by its definition: stores all keys and values, scores all pairs in float64. Of layers with
    states instead each sequence has a slot."""

    def __init__(self, spec: ModelSpec) -> None:
        self.windows = spec.windows
        self.step: Sequence[Chunk] = ()
        self.states = {layer: empty_states(spec.states[layer], 8, torch.device("cpu")) for layer in spec.state_layers}
        self.cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        out, at = q.new_empty(*q.shape[:2], (q if v is None else v).shape[2]), 0
        for sequence, start, stop in self.step:
            count = stop - start
            if k is not None and v is not None:
                keys, values = self.cache.get((layer, sequence), (k[:0], v[:0]))
                assert len(keys) == start, "chunks must follow each other"
                keys, values = torch.cat((keys, k[at : at + count])), torch.cat((values, v[at : at + count]))
                self.cache[layer, sequence] = keys, values
            keys, values = self.cache[layer, sequence]
            assert len(keys) == stop
            query, key = torch.arange(start, stop)[:, None], torch.arange(stop)
            window = self.windows[layer]
            hidden = (key > query) | (key <= query - (window or stop))
            out[at : at + count] = self.chunk(q[at : at + count], keys, values, scale, hidden, sinks)
            at += count
        assert at == len(q)
        return out

    def cache(self, layer: int) -> None:
        """Calls store keys and values."""

    def of_wanted(self) -> None:
        """All tokens are needed."""

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        sequences, starts, stops = np.array(self.step).T
        counts = stops - starts
        at, slots = np.cumsum(counts) - counts, sequences + 1
        order = np.argsort(counts > 1, kind="stable")  # single tokens come first
        segments = Segments(
            *(part[order] for part in (at, counts, np.where(starts > 0, slots, NO_SLOT), slots)),
            int((counts == 1).sum()),
        )
        return operator(self.states[layer], segments, *inputs)

    @staticmethod
    def chunk(
        q: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [t, heads, head_dim], keys and values [n, kv_heads, head_dim], hidden bool [t, n] -> [t, heads,
        values' head_dim]."""
        grouped = q.double().view(len(q), keys.shape[1], -1, q.shape[-1])
        scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys.double()) * scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            of_heads = sinks.double().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, of_heads), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
        attended = torch.einsum("kgtn,nkd->tkgd", weights, values.double())
        return attended.reshape(*q.shape[:2], -1).to(q.dtype)


def run_steps(
    model: Any,
    sequences: Sequence[Tensor],
    steps: Sequence[Sequence[Chunk]],
    prompt_lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return logits of whole sequences [n, vocab], computed step by step over flat batches of chunks."""
    prompt_lengths = prompt_lengths or [len(ids) for ids in sequences]
    attend = DenseAttend(model.spec)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        attend.step = step
        ids = torch.cat([sequences[s][a:b] for s, a, b in step])
        positions = torch.cat([torch.arange(a, b) for _, a, b in step])
        lengths = None
        if model.spec.rope_original_max is not None:
            prompts = torch.cat([torch.full((b - a,), prompt_lengths[s]) for s, a, b in step])
            lengths = torch.maximum(prompts, positions + 1)
        hidden = model.forward(ids, positions, attend, lengths)
        assert hidden.shape == (len(ids), model.spec.hidden_size)
        assert hidden.dtype == model.spec.dtype
        out = model.logits(hidden)
        assert out.dtype == torch.float32
        for (sequence, _, _), part in zip(step, out.split([b - a for _, a, b in step]), strict=True):
            logits[sequence].append(part)
    return [torch.cat(parts) for parts in logits]


def mixed_steps(lengths: Sequence[int], chunk: int) -> list[list[Chunk]]:
    """Return steps in which several sequences advance concurrently, with chunks of varying lengths."""
    done, steps = [0] * len(lengths), []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = []
        for sequence, length in enumerate(lengths):
            stop = min(length, done[sequence] + 1 + (chunk * (sequence + 1 + len(steps))) % (chunk + 3))
            if stop > done[sequence]:
                step.append((sequence, done[sequence], stop))
            done[sequence] = stop
        steps.append(step)
    return steps


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prompts() -> list[Tensor]:
    """Random token ids of three lengths, longer and shorter than the tiny models' windows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 257, (n,), generator=generator) for n in (45, 6, 23)]


@pytest.fixture
def steps_over() -> Callable[..., list[list[Chunk]]]:
    return mixed_steps


@pytest.fixture
def run() -> Callable[..., list[Tensor]]:
    return run_steps


@pytest.fixture
def oracle() -> Callable[..., list[Tensor]]:
    """transformers' own logits for whole sequences, each computed alone."""

    def oracle(folder: Path, sequences: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it takes seconds to import

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        with torch.inference_mode():
            return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]

    return oracle


@pytest.fixture(scope="session", autouse=True)
def weights_lie_apart_under_the_sanitizer() -> Iterator[None]:
    """AddressSanitizer guards the ends of allocations, not those of weights in one area."""
    with pytest.MonkeyPatch.context() as patch:
        if "libasan" in os.environ.get("LD_PRELOAD", ""):
            patch.setattr(WeightMemory, "take", lambda _, size: torch.zeros(size, dtype=torch.uint8))
        yield
