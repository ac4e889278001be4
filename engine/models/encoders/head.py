"""The head behind the pooling: dense layers and scaling to length 1, in float32, one text at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.encoders.settings import DenseSettings, EmbeddingSettings

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.GELU, nn.Identity, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh)
}
_SMALLEST_LENGTH = 1e-12  # as torch.nn.functional.normalize has it


class EmbeddingHead:
    """Converts pooled hidden states to vectors.

    Raises:
        UnsupportedModel: an activation is not known.  CorruptWeights: a layer's weights are missing or misshapen.
    """

    def __init__(self, settings: EmbeddingSettings) -> None:
        self._layers = [_Dense(dense) for dense in settings.dense]
        self._normalize = settings.normalize

    @torch.inference_mode()
    def apply(self, pooled: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
        """Vectors float32 [texts, size] of pooled states float32 [texts, hidden]; each is computed separately, so that
        it does not depend on others. With `dimensions` they are truncated before they are scaled (Kusupati et al. 2022,
        Matryoshka Representation Learning)."""
        rows = []
        for row in torch.from_numpy(np.ascontiguousarray(pooled)):
            for layer in self._layers:
                row = layer(row)
            rows.append(row)
        vectors: NDArray[np.float32] = torch.stack(rows).numpy()[:, :dimensions]
        return unit_length(vectors) if self._normalize else vectors


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors float32 [texts, size], each scaled to length 1; a zero vector is unchanged."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(_SMALLEST_LENGTH))
    return scaled


class _Dense:
    """activation(W x + b) of one vector."""

    def __init__(self, settings: DenseSettings) -> None:
        if settings.activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise UnsupportedModel(f"{settings.weights.parent}: activation {settings.activation} is none of {known}")
        self._activation = _ACTIVATIONS[settings.activation]()
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (settings.out_features, settings.in_features)}
        if settings.bias:
            shapes["linear.bias"] = (settings.out_features,)
        tensors = _tensors(settings, shapes)
        self._weight, self._bias = tensors["linear.weight"], tensors.get("linear.bias")

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._activation(nn.functional.linear(x, self._weight, self._bias))
        return out


def _tensors(settings: DenseSettings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The layer's tensors in float32; they are exactly those of `shapes`."""
    path = settings.weights
    try:
        with safe_open(path, framework="pt") as file:
            if (found := {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}) != shapes:  # noqa: SIM118
                raise CorruptWeights(f"{path} holds {found}, but its config.json means {dict(shapes)}")
            return {name: file.get_tensor(name).float() for name in shapes}
    except (SafetensorError, OSError) as error:
        raise CorruptWeights(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
