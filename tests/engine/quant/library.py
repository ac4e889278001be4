"""Makes tiny checkpoints with compressed-tensors itself, and says what they stand for by its own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytest.importorskip("compressed_tensors", reason="NOT TESTED HERE: the library of the format is not installed")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams

INT8_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP8_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: Any = ("Linear",)) -> dict[str, Any]:
    """A config group."""
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


def packed(bits: int, size: int | None, symmetric: bool = True) -> dict[str, Any]:
    """Arguments of weights of 4 or 8 bits with a scale for `size` columns (None: for a row)."""
    strategy = "channel" if size is None else "group"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


def fp8(strategy: str, block: tuple[int, int] | None = None) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy,
        "block_structure": None if block is None else list(block),
    }  # fmt: skip


def compress(
    folder: Path,
    out: Path,
    groups: dict[str, Any],
    form: str,
    ignore: Any = ("lm_head",),
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Quantize the model of `folder` to nearest with the library and save it in `out` as a checkpoint of that format.

    Returns transformers' model of what was saved: its weights as the library dequantizes them, and its inputs
    quantized by the library where the groups say so.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore), format=form)
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            _calibrate(module, scheme)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tied = model.config.tie_word_embeddings
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if not (tied and name.startswith("lm_h"))}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(out))
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (said["format"], said["quant_method"]) == (form, "compressed-tensors")
    compressor.decompress_model(model)
    return model


def _calibrate(module: Any, scheme: Any) -> None:
    """Scales from the least and largest values, as the library computes them; inputs up to 4."""
    weight, arguments = module.weight.data, scheme.weights
    if arguments.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif arguments.strategy == "group":
        parts = weight.reshape(len(weight), -1, arguments.group_size)
    elif arguments.strategy == "block":
        rows, columns = arguments.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        parts = padded.reshape(len(padded) // rows, rows, -1, columns).transpose(1, 2).flatten(2)
    else:
        parts = weight[:, None]
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data.fill_(4 / (448 if scheme.input_activations.type == "float" else 127))
