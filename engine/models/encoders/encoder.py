"""An encoder: all positions of a text at once, through transformers' own modelling code.

Every model that AutoModel supports without remote code works; texts of a batch are padded on the right. A check at load
verifies with the actual weights that padding does not change results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.checkpoints.config import usable
from engine.errors import CorruptWeights, OutOfMemory, UnsupportedModel
from engine.models.base import ModelSpec
from engine.models.encoders.pooling import pool_padded
from engine.request import Pooling

_BUFFERS: Final = ("position_ids", "token_type_ids")
_UNUSED: Final = ("pooler",)
"""Parts that some checkpoints omit, because the last hidden states don't depend on them."""

_CPU: Final = torch.device("cpu")
_LENGTHS: Final = (7, 3)
_DIFFERENCE: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Tolerance of hidden states with and without padding, relative to the largest: only rounding may differ."""


class Encoder:
    """A loaded encoder.

    Attributes:
        spec: its shape; `max_position` is the size of its position table.
    """

    def __init__(self, model: Any, spec: ModelSpec, pad_token_id: int, device: torch.device = _CPU) -> None:
        self._model = model
        self._device = device
        self._pad = pad_token_id
        self.spec = spec

    def hidden(self, prompts: Sequence[NDArray[np.int32]]) -> Tensor:
        """Compute the last hidden states [prompts, longest, hidden] in the model's dtype; positions behind a prompt's
        end are undefined."""
        lengths = [len(prompt) for prompt in prompts]
        ids = np.full((len(prompts), max(lengths)), self._pad, dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        mask = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        with torch.inference_mode():
            inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask).long()}
            inputs = {name: each.to(self._device) for name, each in inputs.items()}
            output: Tensor = self._model(**inputs).last_hidden_state
            return output

    def pool(self, prompts: Sequence[NDArray[np.int32]], mode: Pooling, skips: Sequence[int]) -> NDArray[np.float32]:
        """Pooled hidden states, float32 [prompts, hidden]; `skips`: see `pool_padded`."""
        with torch.inference_mode():
            pooled = pool_padded(self.hidden(prompts), [len(prompt) for prompt in prompts], mode, skips)
            vectors: NDArray[np.float32] = pooled.cpu().numpy()
            return vectors

    def check(self) -> None:
        """Check that a text gives the same result with a longer one as alone.

        Raises:
            UnsupportedModel: it doesn't.
        """
        ids = [1 + np.arange(length, dtype=np.int32) % max(1, self.spec.vocab_size - 1) for length in _LENGTHS]
        batched = self.hidden(ids).float()
        for row, prompt in zip(batched, ids, strict=True):
            alone = self.hidden([prompt])[0].float()
            difference = (row[: len(prompt)] - alone).abs().max() / alone.abs().max().clamp(min=1e-6)
            if not difference <= _DIFFERENCE[self.spec.dtype]:  # NaN too
                raise UnsupportedModel(
                    f"{self.spec.architecture} can't be run in batches: padding changes hidden states by "
                    f"{float(difference):.2g} of the largest"
                )


def describe_encoder(folder: Path, config: Any, dtype: torch.dtype) -> ModelSpec:
    """The spec of an encoder, from its config and the headers of its weights.

    Raises:
        UnsupportedModel: it is not supported.
        ModelNotFound, CorruptWeights: there are no weights, or incomplete ones.
    """
    name = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is not supported: it is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{name} is not supported: it takes more than text")
    weights = SafetensorsCheckpoint(folder)
    with usable(folder / "config.json"):
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return ModelSpec(
            architecture=name,
            num_layers=int(config.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            hidden_size=hidden,
            vocab_size=int(config.vocab_size),
            max_position=int(config.max_position_embeddings),
            windows=(None,) * int(config.num_hidden_layers),
            eos_token_ids=(),
            num_parameters=sum(math.prod(weights.shape(name)) for name in weights.names),
            dtype=dtype,
            generates=False,
        )


def load_encoder(folder: Path, config: Any, dtype: torch.dtype, device: torch.device = _CPU) -> Encoder:
    """Load an encoder into transformers' code.

    Raises:
        UnsupportedModel, ModelNotFound: as `describe_encoder`; or AutoModel doesn't know it, or it can't be batched.
        CorruptWeights: tensors are missing, unexpected or of another shape.  OutOfMemory: it does not fit the device.
    """
    from transformers import AutoModel  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    spec = describe_encoder(folder, config, dtype)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{folder}: quantized encoders are not supported; take the model as it was before")
    try:
        known = AutoModel._model_mapping[type(config)]
    except KeyError as error:
        raise UnsupportedModel(f"{spec.architecture} is not supported: transformers has no model for it") from error
    with usable(folder):
        model, report = (known[0] if isinstance(known, tuple) else known).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused by name
            output_loading_info=True,
        )
    _check_report(folder, model, report)
    try:
        model.eval().to(device)
        encoder = Encoder(model, _with_positions(spec, model), _pad_token(config), device)
        encoder.check()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the weights of {folder} do not fit the memory of {device}: {error}") from error
    return encoder


def _check_report(folder: Path, model: Any, report: Any) -> None:
    """Check that all tensors exist. Tensors of a training task's head are ignored."""
    parts = {name for name, _ in model.named_children()}

    def counts(kind: str, key: str) -> bool:
        name = key.removeprefix(f"{model.base_model_prefix}.")
        part = name.partition(".")[0]
        if kind == "unexpected":
            return part in parts and part not in _UNUSED and not name.endswith(_BUFFERS)
        return part not in _UNUSED

    for kind in ("missing", "mismatched", "unexpected"):
        keys = (key[0] if isinstance(key, tuple) else str(key) for key in report[f"{kind}_keys"])
        if found := sorted(key for key in keys if counts(kind, key)):
            raise CorruptWeights(f"{folder}: tensor {found[0]} is among the {kind} ones")


def _with_positions(spec: ModelSpec, model: Any) -> ModelSpec:
    """Return the spec with the usable positions of the model's table: some tables begin behind the padding's id."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return replace(spec, max_position=min(spec.max_position, module.num_embeddings - first))
    return spec


def _pad_token(config: Any) -> int:
    """Return the padding token id."""
    given = getattr(config, "pad_token_id", None)
    return given if isinstance(given, int) and 0 <= given < config.vocab_size else 0
