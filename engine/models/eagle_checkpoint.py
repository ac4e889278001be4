"""Reads published EAGLE-3 heads.

Two dialects are read: that of the reference and of SGLang (all in one config, `midlayer.*`), and that of the
speculators library (`transformer_layer_config`, `layers.0.*`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.checkpoints.config import built_config, check_sizes, usable
from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.models.base import ModelSpec
from engine.models.decoder import DecoderSpec
from engine.models.decoder_builder import TorchBuilder, WeightReader
from engine.models.eagle import EagleHead, HeadSpec, HeadWeights
from engine.models.families.dense import llama
from engine.quant.base import Linear
from engine.quant.weight import QWeight

_UNREAD = ("fc_norm", "norm_before_fc", "norm_output", "use_mtp_layernorm", "use_last_layernorm", "parallel_drafting")
"""Settings of later heads that change the result."""

_IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.")
"""Tensors for training only: the head's vocabulary, and copies of the model's own."""


def describe_head(folder: Path) -> HeadSpec:
    """Read a head's config.

    Raises:
        ModelNotFound: there is no config.  UnsupportedModel: it is not of a supported head; names the reason.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"no EAGLE-3 head at {folder}: give a folder with config.json and safetensors")
    with usable(file):
        raw = json.loads(file.read_bytes())
        layer = dict(raw.get("transformer_layer_config") or raw)
        eagle = dict(raw.get("eagle_config") or {})
        _refuse_unread(raw, layer, eagle)
        vocab_size = layer.get("vocab_size")
        given = {
            "hidden_size": raw.get("target_hidden_size") or layer.get("hidden_size"),
            "vocab_size": raw.get("draft_vocab_size") or vocab_size,
        }
        check_sizes(file, given)
    for name in ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"):
        layer.pop(name, None)
    with usable(file):
        if vocab_size is None or given["vocab_size"] is None or given["hidden_size"] is None:
            raise ValueError("it does not say vocab_size and hidden_size, which a head's config must")
        decoder = _decoder(file, built_config(file, "llama", **layer))
        if decoder.ropes[0].dynamic is not None:
            raise ValueError("a head with dynamic rotary scaling is not supported")
        return HeadSpec(
            decoder,
            target_hidden_size=given["hidden_size"],
            draft_vocab_size=given["vocab_size"],
            layers=_wanted_layers(raw, eagle),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
        )


def _decoder(file: Path, config: Any) -> DecoderSpec:
    try:
        return llama(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file} can't be used: {error}") from error


def _refuse_unread(raw: dict[str, Any], layer: dict[str, Any], eagle: dict[str, Any]) -> None:
    if (kind := layer.get("model_type", "llama")) != "llama":
        raise ValueError(f"a head with a layer of type {kind!r} is not supported, only llama's")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"a head has one layer, but this one has num_hidden_layers {layer['num_hidden_layers']!r}")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise ValueError("use_aux_hidden_state is off: a head of an earlier EAGLE, but only EAGLE-3's are supported")
    for name in _UNREAD:
        if raw.get(name) or eagle.get(name):
            raise ValueError(f"{name} is not supported for EAGLE-3 heads")
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise ValueError("quantized heads are not supported; give one in bfloat16, float16 or float32")


def _wanted_layers(raw: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...] | None:
    """Read the layers: at the top level the numbers are of layers whose inputs are read (as in vLLM), inside
    eagle_config of layers whose outputs are (as in SGLang)."""
    name = "eagle_aux_hidden_state_layer_ids"
    top, inner = raw.get(name), eagle.get(name)
    given = top or inner
    if not given:
        return None
    if not isinstance(given, list) or not all(type(layer) is int for layer in given) or len(given) > 64:
        raise ValueError(f"{name} must be a list of layer numbers")
    return tuple(layer + (0 if top else 1) for layer in given)


def load_head(
    folder: Path, target: ModelSpec, embedding: Tensor | None, *, dtype: torch.dtype, device: torch.device,
    max_positions: int,
) -> EagleHead:  # fmt: skip
    """Load a head for a model.

    Args:
        target: the model.  embedding: the model's, for heads without one; None: not available.
        dtype: the model's, of weights and states.  max_positions: maximum length of a sequence.

    Raises:
        ModelNotFound: there is no head.
        UnsupportedModel: it is not supported, or was trained for another model; names the reason.
        CorruptWeights: a tensor is missing, has another shape, can't be read, or is unexpected.
    """
    spec = describe_head(folder)
    for what, has, wants in (
        ("hidden size", target.hidden_size, spec.target_hidden_size),
        ("vocabulary", target.vocab_size, spec.decoder.vocab_size),
    ):
        if has != wants:
            raise UnsupportedModel(
                f"the EAGLE-3 head {folder} was made for a model with a {what} of {wants}, but the model's is {has}; "
                "choose the head that was trained for it"
            )
    try:
        layers = spec.layers_of(target.num_layers)
    except ValueError as error:
        raise UnsupportedModel(f"the EAGLE-3 head {folder} does not fit the model: {error}") from error
    try:
        weights = _read(folder, spec, len(layers), embedding, dtype, device)
    except CorruptWeights as error:
        raise CorruptWeights(f"the EAGLE-3 head {folder} can't be used: {error}") from error
    return EagleHead(spec, layers, weights, dtype, min(max_positions, spec.decoder.max_position))


def _read(
    folder: Path, spec: HeadSpec, num_states: int, embedding: Tensor | None, dtype: torch.dtype, device: torch.device
) -> HeadWeights:
    stored, builder, decoder = SafetensorsCheckpoint(folder), TorchBuilder(), spec.decoder
    reader = WeightReader(stored, builder, dtype, device)
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    layer = "midlayer" if reader.has("midlayer.hidden_norm.weight") else "layers.0"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def product(names: list[str], rows: list[int], columns: int, bias: bool = False) -> Linear:
        return builder.linear(*reader.fused(names, rows, columns, bias))

    targets = _targets(stored, reader, spec, device)
    if reader.has("embed_tokens.weight"):
        own = reader.matrix("embed_tokens.weight", decoder.vocab_size, hidden, "embedding")
        assert not isinstance(own, QWeight), "plain checkpoints hold plain tensors"
        embedding = own
    elif embedding is None or embedding.shape[1] != hidden:
        why = "keeps its own in a form that can't be shared; load it with quantize dense"
        if embedding is not None:
            why = f"has one of {embedding.shape[1]} columns, and the head needs {hidden}"
        raise UnsupportedModel(f"the EAGLE-3 head {folder} holds no embed_tokens.weight, and the model {why}")
    weights = HeadWeights(
        embedding=embedding,
        fc=product(["fc"], [hidden], num_states * spec.target_hidden_size),
        input_norm=reader.norm(f"{layer}.input_layernorm", (hidden,), offset=False),
        hidden_norm=reader.norm(f"{layer}.hidden_norm", (hidden,), offset=False),
        qkv=product(
            [f"{attention}.{part}_proj" for part in "qkv"], list(decoder.qkv_sizes), 2 * hidden, decoder.qkv_bias
        ),
        output=product([f"{attention}.o_proj"], [hidden], decoder.qkv_sizes[0], decoder.output_bias),
        mlp_norm=reader.norm(f"{layer}.post_attention_layernorm", (hidden,), offset=False),
        gate_up=product([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, decoder.mlp_bias),
        down=product([f"{mlp}.down_proj"], [hidden], inner, decoder.mlp_bias),
        norm=reader.norm("norm", (hidden,), offset=False),
        head=product(["lm_head"], [spec.draft_vocab_size], hidden),
        targets=targets,
    )
    reader.finish(_IGNORED)
    return weights


def _targets(
    stored: SafetensorsCheckpoint, reader: WeightReader, spec: HeadSpec, device: torch.device
) -> Tensor | None:
    """Convert the checkpoint's offsets, model id minus head id, to model ids."""
    if not reader.has("d2t"):
        if spec.draft_vocab_size != spec.decoder.vocab_size:
            raise CorruptWeights("tensor d2t is missing from the checkpoint, but the head has a vocabulary of its own")
        return None
    reader.expect("d2t", spec.draft_vocab_size)
    offsets = stored.tensor("d2t")
    reader.forget("d2t")
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise CorruptWeights(f"tensor d2t is {offsets.dtype}, but must hold whole numbers")
    targets = torch.arange(spec.draft_vocab_size) + offsets.long()
    if bool(((targets < 0) | (targets >= spec.decoder.vocab_size)).any()):
        raise CorruptWeights(f"tensor d2t leads outside the model's vocabulary of {spec.decoder.vocab_size} tokens")
    if bool((targets.sort().values.diff() == 0).any()):
        raise CorruptWeights("tensor d2t leads to one of the model's tokens twice")
    return targets.to(device)
