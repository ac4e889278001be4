"""The families of models that the fused decoder computes."""
