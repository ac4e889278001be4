"""Any other causal model, through transformers' own modelling code with our paged attention underneath.

transformers lets an attention function be registered by name; with a name that its mask builder does not know, no
mask is built at all. The whole step then runs as one row of tokens. The function finds the step's `attend` in a slot
that is attached to the attention modules of this one model, because not every architecture forwards keyword
arguments that far. Features that can't be right over a flat batch are refused, and the rest is checked once at load.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import DERIVED, SafetensorsCheckpoint, WeightSource, folder_weights
from engine.checkpoints.config import usable
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.base import Attend, ModelSpec
from engine.models.decoder_builder import DecoderBuilder
from engine.models.hf_check import check_against_eager, check_quantized
from engine.models.hf_quant import quantize_linears, restore_quantized

_ATTENTION = "tokenmill"
_SLOT = "tokenmill_slot"
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
_HARMLESS_ARGUMENTS = {
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "use_cache",
}  # fmt: skip
_REPEATS_KEYS = ("jetmoe",)
"""Model types whose attention modules repeat keys and values for each query head before they attend."""


class _Slot:
    """The slot in which one model's attention modules find the running step's `attend`, and their expected settings."""

    __slots__ = ("attend", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.attend: Attend | None = None
        self.spec = spec


class TransformersModel:
    """A `CausalModel` around a transformers model with this engine's attention."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._spec = spec
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._logits_factor = _logits_factor(model.config)
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._slot = _Slot(spec)
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _SLOT, self._slot)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """See `CausalModel.forward`; one call at a time."""
        self._slot.attend = attend
        try:
            with torch.inference_mode():
                output = self._base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
                hidden: Tensor = output.last_hidden_state[0]
                return hidden
        finally:
            self._slot.attend = None

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.logits`."""
        with torch.inference_mode():
            logits: Tensor = self._head(hidden).float()
            if self._logits_factor != 1.0:
                logits *= self._logits_factor
            if self._softcap is not None:
                logits.div_(self._softcap).tanh_().mul_(self._softcap)
            return logits


def describe_transformers_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    eos_token_ids: tuple[int, ...],
    weights: WeightSource,
    max_positions: int | None = None,
) -> ModelSpec:
    """Return the spec of a model that transformers' code computes, from its config (`check_supported`) and the headers
    of its weights.

    Raises:
        UnsupportedModel: its sizes contradict each other.
    """
    parameters = sum(math.prod(weights.shape(name)) for name in weights.names if not name.endswith(DERIVED))
    with usable(folder / "config.json"):
        return _spec(folder, config, dtype, eos_token_ids, parameters, max_positions)


def _spec(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    eos_token_ids: tuple[int, ...],
    parameters: int,
    max_positions: int | None,
) -> ModelSpec:
    heads = config.num_attention_heads
    kv_heads = heads if config.model_type in _REPEATS_KEYS else getattr(config, "num_key_value_heads", None) or heads
    if (hidden := config.hidden_size) % heads and getattr(config, "head_dim", None) is None:
        raise UnsupportedModel(f"{folder}: {heads} attention heads can't share a hidden_size of {hidden} evenly")
    if heads % kv_heads:
        raise UnsupportedModel(f"{folder}: {heads} attention heads can't share {kv_heads} key-value heads evenly")
    return ModelSpec(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=_max_position(config, max_positions),
        windows=_windows(config),
        eos_token_ids=eos_token_ids,
        num_parameters=parameters,
        dtype=dtype,
    )


def load_transformers_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    eos_token_ids: tuple[int, ...],
    max_positions: int | None,
    builder: DecoderBuilder,
) -> TransformersModel:
    """Load a model into transformers' code and check it against that code's own attention; then quantize it, if
    `builder` does, or restore the weights that were stored quantized, where `builder` computes with them.

    Raises:
        UnsupportedModel: the architecture is not supported.  CorruptWeights: tensors are missing or unexpected.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    weights = folder_weights(folder)
    spec = describe_transformers_model(folder, config, dtype, eos_token_ids, weights, max_positions)
    AttentionInterface.register(_ATTENTION, _attention)
    quantized = not isinstance(weights, SafetensorsCheckpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # so that transformers reads the weights as dense, which they are here
    with usable(folder):
        model, report = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
            None if quantized else folder,
            state_dict=_dense(weights, dtype) if quantized else None,
            config=config,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused by name
            output_loading_info=True,
        )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found := sorted(map(str, report[kind])):
            raise CorruptWeights(f"{folder}: tensor {found[0]} is among the {kind.replace('_keys', '')} ones")
    model.to(device).eval()
    if model.base_model is model:
        raise UnsupportedModel(f"{spec.architecture} is not supported: its decoder can't be called without its head")
    with usable(folder):
        wrapped = TransformersModel(model, spec)
        check_against_eager(wrapped, _Eager(model))
        if builder.quantize not in ("none", "dense"):
            quantize_linears(model, builder)
            check_quantized(wrapped, _Eager(model))
        elif quantized and builder.quantize == "none":
            restore_quantized(model, builder, weights)
            check_quantized(wrapped, _Eager(model))
    return wrapped


def _dense(weights: WeightSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors, dequantized."""
    tensors = {}
    for name in weights.names:
        tensors[name] = torch.empty(weights.shape(name), dtype=dtype)
        weights.read(name, tensors[name])
    return tensors


class _Eager:
    """Compute the same model with transformers' own attention, for the duration of a call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.parameters = model.parameters

    def __call__(self, **inputs: Any) -> Any:
        self._model.set_attn_implementation("eager")
        try:
            return self._model(**inputs)
        finally:
            self._model.set_attn_implementation(_ATTENTION)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim]."""
    name = type(module).__name__
    slot: _Slot | None = getattr(module, _SLOT, None)
    if slot is None or slot.attend is None:
        raise UnsupportedModel(f"{name} has no layer_idx, so its keys and values can't be cached")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} attends with a mask of its own")
    scale = arguments.pop("scaling", None)
    if unread := sorted(k for k, v in arguments.items() if v is not None and k not in _HARMLESS_ARGUMENTS):
        raise UnsupportedModel(f"{name} attends with {unread[0]}, which paged attention does not compute")
    if arguments.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name} is not causal")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModel(f"{name} has keys {list(key.shape)} and values {list(value.shape)} of unlike shape")
    spec = slot.spec
    made = query.shape[1], key.shape[1], query.shape[-1]
    if made != (expected := (spec.num_heads, spec.num_kv_heads, spec.head_dim)):
        raise UnsupportedModel(
            "{} {} makes {} query and {} key-value heads of {}, ".format(name, module.layer_idx, *made)
            + "but its config says {} and {} of {}".format(*expected)
        )
    window = arguments.get("sliding_window")
    if window != (said := spec.windows[module.layer_idx]):
        raise UnsupportedModel(f"{name} {module.layer_idx} has a window of {window}, but its config says {said}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return slot.attend(module.layer_idx, q, k, v, float(scale))[None], None


def check_supported(config: Any) -> None:
    """Check that transformers' code can compute the model here.

    Raises:
        UnsupportedModel: names the feature that can't be computed over a flat batch with paged attention.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    name = (config.architectures or [config.model_type])[0]

    def refuse(why: str) -> None:
        raise UnsupportedModel(f"{name} is not supported: {why}")

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder")
    text = config.get_text_config()
    if differing := sorted(getattr(text, "per_layer_attributes", None) or ()):  # the cache has one shape
        refuse(f"its layers differ in {' and '.join(differing)}")
    if text is not config:
        refuse("it takes more than text")
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise UnsupportedModel(f"{name} is not supported: transformers has no causal model for it") from error
    if model_class._is_stateful:
        refuse("it keeps a state beside keys and values")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        refuse(f"it has layers of type {unknown[0]!r}")
    for key in ("attn_logit_softcapping", "kv_lora_rank", "add_cross_attention", "use_bidirectional_attention"):
        if getattr(config, key, None):
            refuse(f"{key}={getattr(config, key)!r}")
    if getattr(config, "is_causal", True) is False:
        refuse("it is not causal")
    if not model_class._supports_attention_backend:
        refuse("its attention can't be replaced")


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's window, as in transformers' masks."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_position(config: Any, wanted: int | None) -> int:
    """Return the context length, capped where rotary frequencies start to depend on the batch's longest sequence."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        kind = parameters.get("rope_type")
        if kind not in _LENGTH_DEPENDENT_ROPES:
            continue
        longest = min(longest, int(parameters.get("original_max_position_embeddings") or longest))
        if wanted is not None and wanted > longest:
            raise UnsupportedModel(
                f"rope_type {kind!r} of {config.model_type} models is supported up to {longest} tokens, not {wanted}"
            )
    return longest


def _logits_factor(config: Any) -> float:
    """Cohere multiplies its logits by logit_scale, HyperCLOVA X by logits_scaling; Granite divides them by that."""
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    divisor = 1.0 / scaling if config.model_type == "hyperclovax" else scaling
    return float(getattr(config, "logit_scale", None) or 1.0) / divisor
