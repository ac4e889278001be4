"""An encoder: all positions of a text at once, through transformers' own modelling code.

Every model that AutoModel supports without remote code works; texts of a batch are padded on the right. A check at load
verifies with the actual weights that padding does not change results.
"""

from __future__ import annotations

import inspect
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
from engine.models.encoders.settings import is_classifier
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
        num_token_types: see `PoolingModel`.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        pad_token_id: int,
        device: torch.device = _CPU,
        *,
        classifies: bool = False,
        num_token_types: int = 0,
    ) -> None:
        """`classifies`: the model gives logits of labels instead of hidden states."""
        self._model = model
        self._device = device
        self._pad = pad_token_id
        self._classifies = classifies
        self.spec = spec
        self.num_token_types = num_token_types

    def compute(self, prompts: Sequence[NDArray[np.int32]], types: Sequence[NDArray[np.int32] | None] = ()) -> Tensor:
        """Compute the last hidden states [prompts, longest, hidden] in the model's dtype, whose positions behind a
        prompt's end are undefined; or a classifier's logits [prompts, labels].

        Args:
            types: token types of each prompt; None or absent: 0.
        """
        lengths = [len(prompt) for prompt in prompts]
        ids = np.full((len(prompts), max(lengths)), self._pad, dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        mask = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask).long()}
        if self.num_token_types and any(each is not None for each in types):
            padded = np.zeros_like(ids)
            for row, each in zip(padded, types, strict=True):
                if each is not None:
                    row[: len(each)] = each
            inputs["token_type_ids"] = torch.from_numpy(padded)
        with torch.inference_mode():
            output = self._model(**{name: each.to(self._device) for name, each in inputs.items()})
            computed: Tensor = output.logits if self._classifies else output.last_hidden_state
            return computed

    def pool(
        self,
        prompts: Sequence[NDArray[np.int32]],
        mode: Pooling,
        skips: Sequence[int],
        types: Sequence[NDArray[np.int32] | None] = (),
    ) -> NDArray[np.float32]:
        """Pooled hidden states, float32 [prompts, hidden], or a classifier's logits, [prompts, labels]; `skips`: see
        `pool_padded`."""
        with torch.inference_mode():
            computed = self.compute(prompts, types)
            if not self._classifies:
                computed = pool_padded(computed, [len(prompt) for prompt in prompts], mode, skips)
            vectors: NDArray[np.float32] = computed.float().cpu().numpy()
            return vectors

    def check(self) -> None:
        """Check that a text gives the same result with a longer one as alone.

        Raises:
            UnsupportedModel: it doesn't.
        """
        ids = [1 + np.arange(length, dtype=np.int32) % max(1, self.spec.vocab_size - 1) for length in _LENGTHS]
        batched = self.compute(ids).float()
        smallest = 1.0 if self._classifies else 1e-6  # a single number of a label may be near 0
        for row, prompt in zip(batched, ids, strict=True):
            alone = self.compute([prompt])[0].float()
            difference = (row[: len(alone)] - alone).abs().max() / alone.abs().max().clamp(min=smallest)
            if not difference <= _DIFFERENCE[self.spec.dtype]:  # NaN too
                what = "logits" if self._classifies else "hidden states"
                raise UnsupportedModel(
                    f"{self.spec.architecture} can't be run in batches: padding changes {what} by "
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
    """Load an encoder into transformers' code; a classifier with its head.

    Raises:
        UnsupportedModel, ModelNotFound: as `describe_encoder`; or AutoModel doesn't know it, or it can't be batched.
        CorruptWeights: tensors are missing, unexpected or of another shape.  OutOfMemory: it does not fit the device.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    spec = describe_encoder(folder, config, dtype)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{folder}: quantized encoders are not supported; take the model as it was before")
    classifies = is_classifier(folder)
    auto = AutoModelForSequenceClassification if classifies else AutoModel
    try:
        known = auto._model_mapping[type(config)]
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
    _check_report(folder, model, report, classifies=classifies)
    if classifies and hasattr(model, "score"):
        # transformers takes the last position that is not the padding's id, which may stand in a text
        raise UnsupportedModel(f"{spec.architecture} is not supported: its head reads the last position of a text")
    try:
        model.eval().to(device)
        types = int(getattr(config, "type_vocab_size", 0)) if _takes_types(model) else 0
        encoder = Encoder(
            model, _with_positions(spec, model), _pad_token(config), device, classifies=classifies,
            num_token_types=types,
        )  # fmt: skip
        encoder.check()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the weights of {folder} do not fit the memory of {device}: {error}") from error
    return encoder


def _takes_types(model: Any) -> bool:
    return "token_type_ids" in inspect.signature(model.forward).parameters


def _check_report(folder: Path, model: Any, report: Any, *, classifies: bool) -> None:
    """Check that all tensors exist. Tensors of a training task's head are ignored, unless it is the classifier's."""
    parts = {name for module in (model, model.base_model) for name, _ in module.named_children()}

    def counts(kind: str, key: str) -> bool:
        name = key.removeprefix(f"{model.base_model_prefix}.")
        part = name.partition(".")[0]
        if classifies and kind != "unexpected":
            return True
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
