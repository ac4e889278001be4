"""Counts which quantized weights of a checkpoint stayed quantized, and logs it once, when all are loaded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass

import torch

from engine.logs import get_logger
from engine.quant.weight import QWeight

logger = get_logger(__name__)


@dataclass(slots=True)
class _Count:
    """Weights of one form: how many, and their bytes as they are stored and as they would be dense."""

    weights: int = 0
    stored_bytes: int = 0
    dense_bytes: int = 0

    def add(self, weight: QWeight, dtype: torch.dtype) -> None:
        self.weights += 1
        self.stored_bytes += weight.nbytes
        self.dense_bytes += weight.n * weight.k * dtype.itemsize


class WeightFormatStats:
    """Counts of weights that stayed quantized, and of those dequantized to each dtype."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, _Count] = defaultdict(_Count)
        self._dequantized: defaultdict[tuple[str, torch.dtype], _Count] = defaultdict(_Count)

    def count_quantized(self, weight: QWeight, dtype: torch.dtype) -> None:
        """Count a weight that stays quantized; `dtype`: of the model."""
        self._kept[weight.kind].add(weight, dtype)

    def dequantized(self, weight: QWeight, dtype: torch.dtype) -> None:
        """Count a weight that is dequantized to `dtype`."""
        self._dequantized[weight.kind, dtype].add(weight, dtype)

    def log(self) -> None:
        """Log both, by form; dequantized weights as a warning, because they take more memory than the checkpoint."""
        for form, count in self._kept.items():
            logger.info("weights stay quantized", form=form, **asdict(count))
        for (form, dtype), count in self._dequantized.items():
            name = str(dtype).removeprefix("torch.")
            logger.warning(
                f"no kernel here computes with weights in this form: they were dequantized to {name}",
                form=form,
                **asdict(count),
            )
