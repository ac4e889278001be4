"""Log-probabilities of the model's own distribution: of given tokens, and of the most probable ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.draw import DrawWorkspace, largest

_SPARE = 16  # entries beyond k in the first list, so that ties at its end are seen


@dataclass(frozen=True, slots=True)
class RawDistribution:
    """Unmodified logits of some lines, and their normaliser.

    Attributes:
        logits: float32 [n, vocab].  log_partition: float64 [n].
    """

    logits: Tensor
    log_partition: Tensor

    @classmethod
    def of(cls, logits: Tensor, space: DrawWorkspace) -> RawDistribution:
        """Normalise lines [n, vocab], a few at a time; the logits are referenced, not copied."""
        peak = logits.amax(-1, keepdim=True)
        parts = [
            space.log_partition(logits[i : i + space.lines], peak[i : i + space.lines])
            for i in range(0, len(logits), space.lines)
        ]
        return cls(logits, torch.cat(parts) if parts else logits.new_empty(0, dtype=torch.float64))

    def chosen(self, tokens: Tensor) -> NDArray[np.float32]:
        """Log-probability of one token per line (int64 [n]), float32 [n]."""
        values = self.logits.gather(1, tokens[:, None])[:, 0].double() - self.log_partition
        return values.float().cpu().numpy()

    def top(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids int32 and log-probabilities float32 [n, count], descending; the lower id first among equals."""
        values, ids = top_tokens(self.logits, count)
        logprobs = (values.double() - self.log_partition[:, None]).float()
        return ids.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy()


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each line and their int64 ids, [n, count]; the lower id first among equals."""
    vocab = logits.shape[1]
    count = min(count, vocab)
    if count == 0 or len(logits) == 0:
        return logits[:, :count], torch.zeros(len(logits), count, dtype=torch.int64, device=logits.device)
    values, ids = largest(logits, count + _SPARE)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if values.shape[1] < vocab:
        open_tie = values[:, count - 1] == values[:, -1]
        if bool(open_tie.any()):
            values[open_tie], ids[open_tie] = _sorted_top(logits[open_tie], values.shape[1])
    return values[:, :count], ids[:, :count]


def _sorted_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


@torch.inference_mode()
def target_logprobs(logits: Tensor, lines: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Log-probabilities of given tokens, any number of them at a position.

    Args:
        logits: float32 [c, vocab]; not modified.
        lines, tokens: int64 [t], the line and the id of each.

    Returns:
        float32 [t]; NaN where the line has NaN or +inf, or no finite logit.
    """
    space = DrawWorkspace(logits.shape[1], logits.device)
    parts = [RawDistribution.of(logits[i : i + space.lines], space) for i in range(0, len(logits), space.lines)]
    at, ids = torch.from_numpy(lines).to(logits.device), torch.from_numpy(tokens).to(logits.device)
    values = logits[at, ids].double() - torch.cat([part.log_partition for part in parts])[at]
    return values.float().cpu().numpy()


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, targets: NDArray[np.int32], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Log-probabilities of given next tokens. Temporary memory does not grow with c.

    Args:
        logits: float32 [c, vocab]; not modified.
        targets: int32 [c], the token that follows each position.
        k: number of most probable tokens to return as well (0: none).

    Returns:
        float32 [c] of the targets, then ids int32 [c, k] and log-probabilities float32 [c, k], descending. A line with
        NaN or +inf, or without any finite logit, gives NaN.
    """
    c, vocab = logits.shape
    k = min(k, vocab)
    space = DrawWorkspace(vocab, logits.device)
    chosen = np.empty(c, dtype=np.float32)
    ids = np.empty((c, k), dtype=np.int32)
    top = np.empty((c, k), dtype=np.float32)
    target = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    for i in range(0, c, space.lines):
        part = slice(i, i + space.lines)
        raw = RawDistribution.of(logits[part], space)
        chosen[part] = raw.chosen(target[part])
        ids[part], top[part] = raw.top(k)
    return chosen, ids, top
