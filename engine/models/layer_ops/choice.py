"""Selects a decoder's `LayerOps`, once, by its device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine.logs import get_logger
from engine.models.layer_ops.base import LayerOps
from engine.models.layer_ops.torch_ops import TorchLayerOps

logger = get_logger(__name__)

MAX_HIDDEN_SIZE = 32_768
"""A program of the fused kernels holds a row of hidden states in registers."""


def make_layer_ops(hidden_size: int, epsilon: float, device: torch.device, *, layer_norm: bool) -> LayerOps:
    """The fused kernels on a CUDA device, else torch's operators, and that is logged.

    Args:
        epsilon, layer_norm: of the decoder's norms, see `DecoderSpec`.
    """
    reference = TorchLayerOps(epsilon, layer_norm=layer_norm)
    if device.type != "cuda":
        return reference
    reason = None
    if find_spec("triton") is None:
        reason = "triton is not installed"
    elif hidden_size > MAX_HIDDEN_SIZE:
        reason = f"hidden states have {hidden_size} elements, more than {MAX_HIDDEN_SIZE}"
    if reason is not None:
        logger.warning("norms, rotations and activations are not fused, which is slower", reason=reason)
        return reference
    from engine.models.layer_ops.triton_ops import TritonLayerOps  # noqa: PLC0415 - comes with CUDA's torch

    return TritonLayerOps(reference)
