"""Loads a model from a path, or describes it without its weights.

A model is a Hugging Face folder (config.json and safetensors) or a GGUF file. The fused decoder computes the families
that it supports, transformers' own code with this engine's attention the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from engine.checkpoints.checkpoint import SafetensorsCheckpoint, WeightSource, folder_weights
from engine.checkpoints.config import (
    check_sizes,
    end_tokens,
    folder_config,
    folder_end_tokens,
    has_head,
    is_out_of_memory,
    quantization_settings,
    usable,
)
from engine.checkpoints.stacked import UnstackedWeights
from engine.checkpoints.stacked_experts import StackedExperts
from engine.errors import ModelNotFound, OutOfMemory, UnsupportedModel
from engine.models.base import CausalModel, ModelSpec
from engine.models.decoder import DecoderSpec
from engine.models.decoder_builder import DecoderBuilder, TorchBuilder, build_decoder
from engine.models.encoders.encoder import describe_encoder
from engine.models.encoders.settings import SCORE, embedding_settings, is_classifier, required_settings
from engine.models.families.registry import fused_family
from engine.models.hf import check_supported, describe_transformers_model, load_transformers_model


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model's description without its weights.

    Attributes:
        spec: its shape, with the requested dtype.
        fused: whether the fused decoder computes it; otherwise transformers' code does, slower.
    """

    spec: ModelSpec
    fused: bool


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    builder: DecoderBuilder | None = None,
    own_models: bool = True,
    change: Callable[[WeightSource, DecoderSpec], WeightSource] | None = None,
) -> CausalModel:
    """Load a model, ready to compute.

    Args:
        path: a Hugging Face folder or a .gguf file.
        dtype: float32, bfloat16 or float16, of weights and activations.
        max_positions: maximum length of a sequence. Rotary tables are sized for it; models whose rotary
            frequencies can't follow each sequence's length are accepted only below their original context.
        builder: of a fused decoder's parts, or of the quantized layers of another model; None: torch's operators.
        own_models: see `EngineConfig`.
        change: returns the weights to load in the place of the checkpoint's.

    Raises:
        ModelNotFound: there is no model.  UnsupportedModel: it is not supported; names the reason.
        CorruptWeights: its files are incomplete or contradict its config.  OutOfMemory: it does not fit.
    """
    path = _existing(path)
    try:
        config, decoder, source = _open(path, own_models=own_models)
        if decoder is None:
            if change is not None:
                raise UnsupportedModel(f"the weights of {path} can't be changed: transformers' code computes it")
            return load_transformers_model(
                path, config, dtype, device, folder_end_tokens(path, config), max_positions, builder or TorchBuilder()
            )
        weights = source or _folder_weights(path, decoder)
        return build_decoder(
            decoder,
            weights if change is None else change(weights, decoder),
            dtype=dtype,
            device=device,
            positions=max_positions,
            builder=builder,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"the weights of {path} do not fit the memory of {device}: {error}") from error


def describe_model(
    path: str | Path, *, dtype: torch.dtype = torch.bfloat16, own_models: bool = True
) -> ModelDescription:
    """Read a model's config and tensor names only. `own_models`: see `EngineConfig`.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: as `load_model`, as far as headers show it.
    """
    path = _existing(path)
    if is_encoder(path):
        if not is_classifier(path):
            required_settings(path)
        spec = describe_encoder(path, folder_config(path), dtype)
        return ModelDescription(spec, fused=False)
    config, decoder, _ = _open(path, own_models=own_models)
    if decoder is None:
        spec = describe_transformers_model(path, config, dtype, folder_end_tokens(path, config), folder_weights(path))
    else:
        spec = decoder.model_spec(dtype)
        if path.is_dir() and quantization_settings(path) is not None:
            _folder_weights(path, decoder)  # refuses what can't be read
    return ModelDescription(spec, decoder is not None)


def stored_bytes(path: str | Path) -> int:
    """Bytes of the files that hold a model's weights, quantized or not.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: there are none that can be read.
    """
    path = _existing(path)
    return path.stat().st_size if path.is_file() else SafetensorsCheckpoint(path).num_bytes


def describe_shape(path: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> tuple[ModelSpec, bool]:
    """A model's shape, and whether it is an encoder; of a model that this engine can't compute, what its config.json
    says.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: the files don't say it.
    """
    path = _existing(path)
    try:
        return describe_model(path, dtype=dtype).spec, is_encoder(path)
    except UnsupportedModel:
        if path.is_file():
            raise
        return _shape_in_config(path, dtype), False


def _shape_in_config(folder: Path, dtype: torch.dtype) -> ModelSpec:
    file = folder / "config.json"
    with usable(file):
        raw = json.loads(file.read_bytes())
        config = raw | (raw.get("text_config") or {})
        check_sizes(file, config)
        layers, heads, hidden = (
            int(config[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        weights = SafetensorsCheckpoint(folder)
        return ModelSpec(
            architecture=architecture_of(folder) or "unknown",
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            hidden_size=hidden,
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            windows=(None,) * layers,
            eos_token_ids=tuple(sorted(end_tokens(config.get("eos_token_id")))),
            num_parameters=sum(math.prod(weights.shape(name)) for name in weights.names),
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A model whose weights can be read one by one.

    Attributes:
        path: of its folder or file.  config: transformers' config.
        decoder: of a family that the fused decoder computes, else None.
    """

    path: Path
    config: Any
    decoder: DecoderSpec | None
    weights: WeightSource


def open_model(path: str | Path) -> OpenedModel:
    """Open a model to read its weights.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: as `load_model`, as far as headers show it.
    """
    path = _existing(path)
    config, decoder, source = _open(path)
    return OpenedModel(path, config, decoder, source or _folder_weights(path, decoder))


def is_encoder(path: str | Path) -> bool:
    """Whether the model is one for `EncoderEngine`: it has no language-model head, and sees whole texts at once or is
    of no family that the fused decoder computes.

    Raises:
        ModelNotFound: there is no model.  UnsupportedModel: its config can't be read.
    """
    path = _existing(path)
    if not path.is_dir():
        return False
    config = folder_config(path)
    with usable(path / "config.json"):
        return _encodes(config)


def _encodes(config: Any) -> bool:
    if has_head(config):
        return False
    both_ways = getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False
    return bool(both_ways) or fused_family(config) is None


def is_native(path: str | Path) -> bool:
    """Whether this engine computes the model with code of its own, and not with transformers'.

    Raises:
        ModelNotFound: there is no model.  UnsupportedModel: its config can't be read.
    """
    path = _existing(path)
    if path.is_file() or is_encoder(path):
        return True
    config = folder_config(path)
    with usable(path / "config.json"):
        return fused_family(config) is not None


def architecture_of(path: str | Path) -> str | None:
    """The first architecture that a folder's config.json names; None: it names none. Also of models that transformers
    doesn't know. Raises `UnsupportedModel` when it can't be read."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_bytes())
        return str(config["architectures"][0])
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} can't be read: {error}") from error
    except (KeyError, IndexError, TypeError):
        return None


def config_kv_dtype(path: str | Path) -> Literal["int8", "fp8"] | None:
    """Return the KV cache dtype of a model's config; None: not specified.

    Raises:
        ModelNotFound, UnsupportedModel: as `load_model`.
    """
    path = _existing(path)
    if path.is_file():
        return None
    settings = quantization_settings(path)
    if settings is None:
        return None
    from engine.quant.formats.registry import cache_form  # noqa: PLC0415 - needs pydantic, for nothing else

    try:
        return cache_form(settings)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path / 'config.json'}: {error}") from error


def _existing(path: str | Path) -> Path:
    """Return the folder or file of the model; a folder with one GGUF file and no config means that file."""
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"no model at {path}: give a Hugging Face folder or a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        files = list(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelNotFound(f"{path} has no config.json and {len(files)} GGUF files: name the model's file")
        return files[0]
    if path.is_file() and path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is no model folder and no .gguf file")
    return path


def _folder_weights(path: Path, decoder: DecoderSpec | None) -> WeightSource:
    weights = _with_single_experts(path, decoder)
    return weights if decoder is None or not decoder.stored_as else UnstackedWeights(weights, decoder.stored_as)


def _with_single_experts(path: Path, decoder: DecoderSpec | None) -> WeightSource:
    if decoder is None or (experts := decoder.experts) is None:
        return folder_weights(path)
    settings = quantization_settings(path) if experts.stack_layout == "interleaved" else None
    mxfp4 = settings is not None and settings.get("quant_method") == "mxfp4"
    weights = SafetensorsCheckpoint(path) if mxfp4 else folder_weights(path)
    if not isinstance(weights, SafetensorsCheckpoint):
        return weights
    columns = decoder.hidden_size, experts.intermediate_size
    return StackedExperts(weights, experts.num_experts, experts.stack_layout, columns)


def _open(path: Path, *, own_models: bool = True) -> tuple[Any, DecoderSpec | None, WeightSource | None]:
    """Return the config, the fused decoder's spec (None: transformers' code), and a GGUF file's weights."""
    if path.is_file():
        if not own_models:
            raise UnsupportedModel(f"{path} is a GGUF file, which transformers' code does not compute here")
        from engine.models.gguf import GGUFCheckpoint  # noqa: PLC0415 - needs the package gguf, for nothing else

        with usable(path):
            checkpoint = GGUFCheckpoint(path)
            return checkpoint.config, checkpoint.decoder_spec(), checkpoint
    config = folder_config(path)
    with usable(path / "config.json"):
        headless = not has_head(config)
        pools = is_classifier(path) or embedding_settings(path) is not None
        if _encodes(config) or (headless and not pools):
            raise UnsupportedModel(f"{config.architectures[0]} is not a causal language model")
        family = fused_family(config) if own_models else None
        if family is None:
            check_supported(config)  # before anything is said of its weights
            return config, None, None
        spec = family(config)
    if headless:  # nothing asks for logits, and the embedding is there anyway
        spec = replace(spec, headless=True, tied=True, weight_prefixes=("", *spec.weight_prefixes))
    if is_classifier(path):  # a `ScoreHead` reads it
        spec = replace(spec, ignored_weights=(*spec.ignored_weights, SCORE))
    return config, replace(spec, eos_token_ids=folder_end_tokens(path, config)), None
