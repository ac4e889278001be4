"""The way in: a path becomes a model, or a description of one without its weights.

A model is a Hugging Face folder (config.json and safetensors) or a GGUF file. Families that the fused decoder knows
are computed by it, others by transformers' own code with our attention.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.errors import ModelNotFound, OutOfMemory, UnsupportedModel
from engine.models.base import CausalModel, ModelSpec
from engine.models.checkpoint import SafetensorsCheckpoint, WeightSource
from engine.models.decoder import DecoderSpec
from engine.models.families import end_tokens, fused_family
from engine.models.gguf import GGUFCheckpoint
from engine.models.hf import describe_transformers_model, load_transformers_model
from engine.models.loader import build_decoder


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What can be said of a model before its weights are read.

    Attributes:
        spec: its shape, with the dtype asked for.
        parameter_bytes: of all weights in that dtype.
        fused: whether the fused decoder computes it; otherwise transformers' code does, slower.
    """

    spec: ModelSpec
    parameter_bytes: int
    fused: bool


def load_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
) -> CausalModel:
    """Load a model, ready to compute.

    Args:
        path: a Hugging Face folder or a .gguf file.
        dtype: float32, bfloat16 or float16, of weights and activations.
        max_positions: tokens that no sequence will exceed. Rotary tables are sized for it; models whose rotary
            frequencies can't follow each sequence's length are accepted only below their original context.

    Raises:
        ModelNotFound: no model is there.  UnsupportedModel: it can't be computed here; says why.
        CorruptWeights: its files are incomplete or contradict its config.  OutOfMemory: it does not fit.
    """
    path = _existing(path)
    try:
        config, decoder, source = _open(path)
        if decoder is None:
            return load_transformers_model(path, config, dtype, device, _folder_end_tokens(path, config), max_positions)
        return build_decoder(
            decoder, source or SafetensorsCheckpoint(path), dtype=dtype, device=device, positions=max_positions
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(f"the weights of {path} do not fit the memory of {device}: {error}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"the weights of {path} do not fit the memory of {device}: {error}") from error


def describe_model(path: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> ModelDescription:
    """Read a model's config and tensor names only.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: as `load_model`, as far as headers tell.
    """
    path = _existing(path)
    config, decoder, _ = _open(path)
    if decoder is not None:
        spec = decoder.model_spec(dtype)
    else:
        spec = describe_transformers_model(path, config, dtype, _folder_end_tokens(path, config))
    return ModelDescription(spec, spec.num_parameters * dtype.itemsize, decoder is not None)


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"no model at {path}: give a Hugging Face folder or a .gguf file")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json: give a Hugging Face folder or a .gguf file")
    elif path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is no model folder and no .gguf file")
    return path


def _open(path: Path) -> tuple[Any, DecoderSpec | None, WeightSource | None]:
    """The config, the fused decoder's spec (None: transformers' code), and a GGUF file's weights."""
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return checkpoint.config, checkpoint.decoder_spec(), checkpoint
    config = _config(path)
    family = fused_family(config)
    if family is None:
        return config, None, None
    return config, replace(family(config), eos_token_ids=_folder_end_tokens(path, config)), None


def _config(folder: Path) -> Any:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModel(f"{folder / 'config.json'} can't be used: {reason}") from error
    if quantization := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"{folder} is quantized ({method}); give the unquantized weights or a GGUF file")
    architectures = config.architectures or []
    if architectures and not any(
        a.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for a in architectures
    ):
        raise UnsupportedModel(f"{architectures[0]} is not a causal language model")
    return config


def _folder_end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json together, sorted."""
    ids = set(end_tokens(getattr(config.get_text_config(), "eos_token_id", None)))
    generation = folder / "generation_config.json"
    if generation.is_file():
        try:
            ids |= set(end_tokens(json.loads(generation.read_bytes()).get("eos_token_id")))
        except (ValueError, AttributeError, TypeError) as error:
            raise UnsupportedModel(f"{generation} can't be read: {error}") from error
    return tuple(sorted(ids))
