"""Pools the hidden states that vLLM returns, as `engine.request.Pooling` defines the modes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.request import Pooling


def pool(states: NDArray[np.float32], mode: Pooling, skip: int = 0) -> NDArray[np.float32]:
    """One vector float32 [hidden] of the states float32 [tokens, hidden] of a text; means leave out the first `skip`
    positions."""
    if mode in ("cls", "last"):
        vector = states[0 if mode == "cls" else -1]
    elif mode == "max":
        vector = states.max(axis=0)
    else:
        weights = np.arange(1, len(states) + 1) if mode == "weightedmean" else np.ones(len(states))
        weights[:skip] = 0
        vector = weights @ states.astype(np.float64) / weights.sum()
        if mode == "mean_sqrt_len":
            vector = vector * np.sqrt(weights.sum())
    return np.asarray(vector, dtype=np.float32)
