"""Refuses operations that would make the host wait for a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCHRONIZING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}


class ForbidHostSync(TorchDispatchMode):
    """Refuses operations whose result, or its shape, depends on values that the host would have to see."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _SYNCHRONIZING, f"the host waits for {name}"
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        for index in indices:
            masks = isinstance(index, Tensor) and index.dtype == torch.bool
            assert not masks, f"{name} by a mask: the host must wait for their number"
        return func(*args, **(kwargs or {}))
