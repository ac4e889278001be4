"""What the families whose layers have states read alike from their configs."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel

_MAX_SIZE = 1 << 16
_KERNEL_SIZES = range(2, 257)


def layers_with_states(config: Any, kind: str) -> tuple[bool, ...]:
    """Return per layer whether it is of this kind of `layer_types`, which has a state; not all of them are."""
    layers = tuple(each == kind for each in config.layer_types)
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"layer_types describes {len(layers)} layers, but num_hidden_layers is {config.num_hidden_layers}"
        )
    if "full_attention" not in config.layer_types:
        raise UnsupportedModel("layer_types has no layer of full_attention, but one at least must attend")
    return layers


def state_sizes(config: Any, *names: str) -> list[int]:
    """The values of these keys."""
    for name in names:
        if not 1 <= (size := getattr(config, name)) <= _MAX_SIZE:
            raise UnsupportedModel(f"{name} is {size}, but must be from 1 to {_MAX_SIZE}")
    return [getattr(config, name) for name in names]


def kernel_size(config: Any, name: str) -> int:
    """Tokens that a convolution sees."""
    size: int = getattr(config, name)
    if size not in _KERNEL_SIZES:
        raise UnsupportedModel(f"{name} is {size}, but must be from {_KERNEL_SIZES[0]} to {_KERNEL_SIZES[-1]}")
    return size
