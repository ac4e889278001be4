"""Shapes of published decoders, from their `config.json`, for estimates and simulations without a checkpoint.

Norms and biases, less than a thousandth of the parameters, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.planner.estimates.capacity import ModelShape


def decoder_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocabulary: int,
    tied: bool = False,
    experts: int = 1,
    active_experts: int = 1,
) -> ModelShape:
    """The shape of a decoder with grouped queries and gated MLPs, in 16 bits.

    Args:
        intermediate: size of an MLP, or of one expert.  tied: the head is the embedding.
        experts, active_experts: of each layer, and those that a token is computed with; 1: an MLP.
    """
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp, router = 3 * hidden * intermediate, hidden * experts if experts > 1 else 0
    embeddings = vocabulary * hidden * (1 if tied else 2)
    parameters = layers * (attention + experts * mlp + router) + embeddings
    active = layers * (attention + active_experts * mlp + router) + embeddings
    return ModelShape(
        parameters=parameters,
        kv_elements=2 * layers * kv_heads * head_dim,
        active_parameters=active if experts > 1 else None,
        query_elements=layers * heads * head_dim,
    )


PUBLISHED_MODELS: Final[Mapping[str, ModelShape]] = {
    "llama-3.2-1b": decoder_shape(
        layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocabulary=128256, tied=True
    ),
    "llama-3.1-8b": decoder_shape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=128256
    ),
    "llama-3.1-70b": decoder_shape(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocabulary=128256
    ),
    "qwen3-14b": decoder_shape(
        layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=17408, vocabulary=151936
    ),
    "qwen3-32b": decoder_shape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25600, vocabulary=151936
    ),
    "qwen3-30b-a3b": decoder_shape(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, intermediate=768, vocabulary=151936,
        experts=128, active_experts=8,
    ),
}  # fmt: skip
"""By name."""
