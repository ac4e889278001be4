"""The families with short convolutions; see `engine.models.families.registry`."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.description import decoder_spec
from engine.models.families.state_layers import kernel_size, layers_with_states
from engine.models.state_layers.short_conv import ShortConvSpec


def lfm2(config: Any) -> DecoderSpec:
    """LFM2 (Liquid AI, 2025): most layers are short convolutions."""
    return with_convolutions(config, intermediate_size=_intermediate_size(config))


def with_convolutions(config: Any, **differences: Any) -> DecoderSpec:
    """LFM2's decoder, with `differences`."""
    return decoder_spec(
        config,
        activation="silu",
        layer_kinds=("full_attention", "conv"),
        norm_eps=config.norm_eps,
        norms=("operator_norm", None, "ffn_norm", None),
        qk_norm="head",
        state_layers=ShortConvSpec(
            layers_with_states(config, "conv"),
            config.hidden_size,
            kernel_size(config, "conv_L_cache"),
            bool(config.conv_bias),
        ),
        **differences,
    )


def _intermediate_size(config: Any) -> int:
    """What is left of `intermediate_size` where the config has it adjusted: two thirds, rounded up to a multiple."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if (factor := config.block_ffn_dim_multiplier) is None:
        return size
    multiple = config.block_multiple_of
    if multiple < 1 or not 0 < factor < 1e6:
        raise UnsupportedModel(f"block_multiple_of is {multiple} and block_ffn_dim_multiplier {factor}: not above 0")
    return int(-(-int(factor * size) // multiple) * multiple)
