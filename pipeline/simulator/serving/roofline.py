"""How long a worker's step takes: a roofline of each of its parts, added up, because they run one after the other.

The products of all layers compute two operations a parameter and token, or read the weights once; attention of a
prompt's chunk multiplies queries with all keys and values before them; attention of decoding rows reads these
(Williams et al. 2009, Roofline; Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2). To them comes
a fixed time for launches and the host. What kernels reach of a data sheet's rates is a share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pipeline.planner.estimates.capacity import Hardware, ModelShape, compute_seconds, concurrent_sequences

FLOPS_SHARE: Final = 2 / 3
"""Share of a data sheet's dense rate that products reach (the engine's `step_size.FAST_FLOPS`)."""

BANDWIDTH_SHARE: Final = 0.8
"""Share of a data sheet's bandwidth that whole decode steps reach: docs/gpu.md has 80 % of a bound for an H200."""

LAUNCH_SECONDS: Final = 0.001
"""Of each step, assumed: the host's part, and the launch of a captured graph."""


class PromptChunk(NamedTuple):
    """Tokens of one prompt in a step: `tokens`, behind `start` tokens that are computed or cached."""

    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepRoofline:
    """Times of a model's steps on a worker.

    Attributes:
        model: its shape, `query_elements` included.
        hardware: of the worker; several devices that share the model count as one with the sum of their rates.
        flops_share, bandwidth_share: reached shares of the data sheet's rates, above 0 and at most 1.
        launch_seconds: of each step.
    """

    model: ModelShape
    hardware: Hardware
    flops_share: float = FLOPS_SHARE
    bandwidth_share: float = BANDWIDTH_SHARE
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def kv_tokens(self) -> int:
        """Tokens for whose keys and values there is room beside the weights. Raises `DoesNotFit`."""
        return concurrent_sequences(self.model, self.hardware, tokens=1.0)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens, without attention."""
        return self.flops_share / compute_seconds(self.model, self.hardware, tokens=1)

    @property
    def ridge_tokens(self) -> float:
        """Tokens of a step whose products compute as long as the weights are read."""
        return self._read_seconds(self.model.weight_bytes) * self.tokens_per_second

    def step_seconds(self, rows: int, context_tokens: int, chunks: Iterable[PromptChunk] = ()) -> float:
        """Duration of a step.

        Args:
            rows: that decode one token each.  context_tokens: tokens whose keys and values they read, added up.
            chunks: parts of prompts.
        """
        chunks = tuple(chunks)
        tokens = rows + sum(chunk.tokens for chunk in chunks)
        products = max(tokens / self.tokens_per_second, self._read_seconds(self.model.read_bytes(tokens)))
        attention = sum(self._attention_seconds(chunk) for chunk in chunks)
        return self.launch_seconds + products + attention + self._decode_attention_seconds(context_tokens)

    def prompt_seconds(self, tokens: int, step_tokens: int) -> float:
        """Seconds in which an idle worker computes a prompt, in steps of at most `step_tokens`."""
        starts = range(0, tokens, step_tokens)
        return sum(self.step_seconds(0, 0, [PromptChunk(start, min(step_tokens, tokens - start))]) for start in starts)

    def _attention_seconds(self, chunk: PromptChunk) -> float:
        """Products with the keys and values of all tokens up to each one of the chunk, or reading these once."""
        pairs = chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) / 2
        computing = self._multiply_seconds(pairs)
        return max(computing, self._read_seconds((chunk.start + chunk.tokens) * self.model.kv_bytes_per_token))

    def _decode_attention_seconds(self, context_tokens: int) -> float:
        reading = self._read_seconds(context_tokens * self.model.kv_bytes_per_token)
        return max(reading, self._multiply_seconds(context_tokens))

    def _multiply_seconds(self, pairs: float) -> float:
        """Two products (scores, values) of two operations an element, for so many pairs of query and key."""
        return 4 * self.model.query_elements * pairs / (self.hardware.flops * self.flops_share)

    def _read_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.bandwidth * self.bandwidth_share)


def choose_step_tokens(roofline: StepRoofline) -> int:
    """Tokens of a step as the engine chooses them: what a quarter of a second computes, as a power of two from 2,048 to
    16,384 (`engine/runner/step_size.py`)."""
    computed = int(0.25 * roofline.tokens_per_second)
    return max(2048, min(1 << max(1, computed).bit_length() - 1, 16384))
