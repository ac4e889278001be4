"""What a decoder layer computes between its products: by torch's operators, or on a GPU by fused Triton kernels."""

from engine.models.layer_ops.base import Activation, HeadLayout, LayerOps, QkNorm, Residual, Update
from engine.models.layer_ops.choice import make_layer_ops

__all__ = ["Activation", "HeadLayout", "LayerOps", "QkNorm", "Residual", "Update", "make_layer_ops"]
