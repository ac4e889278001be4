"""Writes a quantized checkpoint of a model: one tensor at a time, so that memory holds one and a file's worth."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoints.checkpoint import DERIVED, WeightSource
from engine.checkpoints.config import usable
from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.registry import fused_family
from engine.models.load import OpenedModel, load_model, open_model
from engine.quant.gptq_rounding import PRODUCTS, CalibratingBuilder, by_module
from engine.quant.rtn import round_to_nearest
from engine.quant.smoothing import NotingBuilder, factors, run_in_one_step, run_over, smoothed
from engine.quant.weight import QWeight
from engine.quant.writing import FILE_BYTES, CheckpointWriter, Scheme, module_tensors

_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
_SENSITIVE = re.compile(
    r"\.(?:(?:mlp|feed_forward|block_sparse_moe|mixer)\.(?:gate(?:\.wg)?|router(?:\.layer|\.gate)?|shared_expert_gate)"
    r"|layers\.\d+\.router\.proj|linear_attn\.in_proj_(?:ba|b|a))\.weight$"
)
"""Products that route, and those that make a gated delta net's rates and decays: small, but their errors are not."""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The result of quantizing a model.

    Attributes:
        modules: quantized linear layers.  kept: linear layers that stay dense, without the head.
        num_bytes: of all tensors.  dense_bytes: of the same model, not quantized.
        error: of the quantized weights, relative to them: sqrt(sum of squares over sum of squares).
    """

    modules: int
    kept: tuple[str, ...]
    num_bytes: int
    dense_bytes: int
    error: float


def smoothing_factors(path: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """SmoothQuant's factors from a run over calibration sequences (token ids), with the whole model in memory.

    Raises:
        UnsupportedModel: the fused decoder does not compute this family.  What `load_model` raises.
    """
    spec, prefix = _fused(path, "smoothed")
    if spec.norms[0] is None and spec.norms[2] is None:
        raise UnsupportedModel(f"{path} can't be smoothed: no norms feed its products; leave smoothing out")
    builder = NotingBuilder()
    longest = max(map(len, sequences))
    model = load_model(path, dtype=dtype, device=torch.device("cpu"), max_positions=longest, builder=builder)
    run_over(model, sequences)
    return factors(spec, builder.noted, prefix)


def gptq_weights(
    path: Path,
    sequences: Sequence[Sequence[int]],
    scheme: Scheme,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, QWeight]:
    """Each module's weight by GPTQ, from one run over calibration sequences (token ids) with the whole model, and what
    one product sees, in memory in float32. Modules whose columns the groups don't divide are missing.

    Args:
        progress: is called with products done, and how many there are.

    Raises:
        UnsupportedModel: the fused decoder does not compute this family.  What `load_model` raises.
    """
    spec, prefix = _fused(path, "calibrated product by product")
    builder = CalibratingBuilder(
        rounding=scheme.rounding, progress=lambda done: progress(done, PRODUCTS * spec.num_layers)
    )
    longest = max(map(len, sequences))
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"), max_positions=longest, builder=builder)
    run_in_one_step(model, sequences)
    return by_module(builder.done, spec, prefix)


def _fused(path: Path, what: str) -> tuple[DecoderSpec, str]:
    """The model as the fused decoder computes it, and the prefix of its layers' names."""
    opened = open_model(path)
    if opened.decoder is None:
        raise UnsupportedModel(
            f"{opened.config.model_type} models can't be {what}: the fused decoder has no such family"
        )
    if opened.decoder.experts is not None:  # an expert may see none of the calibration's tokens
        raise UnsupportedModel(f"{opened.config.model_type} models can't be {what}: they are mixtures of experts")
    if opened.decoder.latent is not None:
        raise UnsupportedModel(f"{opened.config.model_type} models can't be {what}: their attention is latent")
    if opened.decoder.state_layers is not None:
        raise UnsupportedModel(f"{opened.config.model_type} models can't be {what}: some of their layers have states")
    if not opened.decoder.is_plain:
        raise UnsupportedModel(f"{opened.config.model_type} models can't be {what}: their layers differ")
    prefixes, names = opened.decoder.weight_prefixes, opened.weights.names
    return opened.decoder, next((p for p in prefixes if f"{p}embed_tokens.weight" in names), prefixes[0])


def write_quantized(
    path: Path,
    out: Path,
    scheme: Scheme,
    by: Mapping[str, Tensor] | None = None,
    ready: Mapping[str, QWeight] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    file_bytes: int = FILE_BYTES,
) -> QuantizationReport:
    """Write the model at `path`, quantized, into the folder `out`, which exists: config.json and weights.

    Args:
        by: SmoothQuant's factors.  ready: weights of modules that are quantized already.
        progress: is called with tensors written, and how many there are.

    Raises:
        UnsupportedModel: linear layers are not stored as such.  What reading the model raises.
    """
    opened = open_model(path)
    _refuse_factors(opened)
    source = opened.weights
    linears, head = _linears(opened, source)
    offset = opened.decoder is not None and opened.decoder.norm_offset
    writer = CheckpointWriter(out, file_bytes)
    kept, wrong, whole, dense_bytes, modules = [], 0.0, 0.0, 0, 0
    names = sorted((name for name in source.names if not name.endswith(DERIVED)), key=_natural)
    for done, name in enumerate(names, 1):
        tensor = torch.empty(source.shape(name))
        source.read(name, tensor)
        tensor = smoothed(name, tensor, by or {}, offset)
        dense_bytes += tensor.numel() * scheme.dtype.itemsize
        module = name.removesuffix(".weight")
        if module in linears and scheme.fits(tensor.shape[1]):
            weight = (ready or {}).get(module) or round_to_nearest(tensor, scheme.rounding)
            wrong += float((weight.dequantize() - tensor).square().sum(dtype=torch.float64))
            whole += float(tensor.square().sum(dtype=torch.float64))
            modules += 1
            for end, stored in module_tensors(weight, scheme).items():
                writer.add(f"{module}.{end}", stored)
        else:
            kept += [module] if module in linears else []
            writer.add(name, tensor.to(scheme.dtype))
        progress(done, len(names))
    writer.close()
    _write_config(opened, out, scheme, [*kept, *head])
    return QuantizationReport(
        modules, tuple(kept), writer.num_bytes, dense_bytes, (wrong / whole) ** 0.5 if whole else 0.0
    )


def _linears(opened: OpenedModel, source: WeightSource) -> tuple[frozenset[str], list[str]]:
    """Names of the linear layers between embedding and head, and of those that are not quantized (the head, sensitive
    ones), from a model without weights."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    with usable(opened.path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(opened.config)
    head = model.get_output_embeddings()
    prefixes = () if opened.decoder is None else opened.decoder.weight_prefixes

    def stored(name: str) -> str:
        """The module's name in the checkpoint."""
        names = (name, *(f"{prefix}{name.removeprefix('model.')}" for prefix in prefixes))
        return next((found for found in names if f"{found}.weight" in source.names), name)

    found = {stored(name): module for name, module in model.named_modules() if type(module) is nn.Linear}
    heads = [name for name, module in found.items() if module is head]
    linears = frozenset(found) - frozenset(heads)
    if opened.decoder is not None:
        # Of transformers' modules one holds all experts, and the gate of a shared one is a layer.
        sensitive = [name.removesuffix(".weight") for name in source.names if _SENSITIVE.search(name)]
        experts = (name.removesuffix(".weight") for name in source.names if _EXPERT.search(name))
        linears, heads = linears.union(experts).difference(sensitive), [*heads, *sensitive]
    if missing := sorted(name for name in linears if f"{name}.weight" not in source.names):
        raise UnsupportedModel(f"{opened.path} can't be quantized: it does not store {missing[0]}.weight by this name")
    if not linears:
        raise UnsupportedModel(f"{opened.path} can't be quantized: its weights are not in linear layers")
    return linears, heads


def _refuse_factors(opened: OpenedModel) -> None:
    """Refuse rotary frequencies that only a GGUF file can store: they would be lost."""
    family = fused_family(opened.config)
    if opened.decoder is None or family is None:
        return
    for ours, expected in zip(opened.decoder.ropes, family(opened.config).ropes, strict=True):
        if not torch.equal(ours.inverse_frequencies, expected.inverse_frequencies):
            raise UnsupportedModel(f"{opened.path} has rotary frequencies that no config.json can hold")


def _write_config(opened: OpenedModel, out: Path, scheme: Scheme, ignored: list[str]) -> None:
    """The model's own config.json, or of a GGUF file what transformers would write, with how it is quantized."""
    file = out / "config.json"
    if opened.path.is_dir():
        values = json.loads((opened.path / "config.json").read_bytes())
    else:
        opened.config.save_pretrained(out)
        values = json.loads(file.read_bytes())
        if opened.decoder is not None:
            values["eos_token_id"] = list(opened.decoder.eos_token_ids)
    for key in ("torch_dtype", "quantization_config", "compression_config"):
        values.pop(key, None)
    dtype = str(scheme.dtype).removeprefix("torch.")
    values |= {"dtype": dtype, "quantization_config": scheme.settings(sorted(set(ignored), key=_natural))}
    file.write_text(json.dumps(values, indent=2) + "\n")


def _natural(name: str) -> list[Any]:
    """For names in the order of their numbers: layer 9 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
