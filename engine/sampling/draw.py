"""Draws a token by inverse CDF, with sums that are the same in any order of summation.

Each token's probability relative to the most probable one is stored as an integer in units of 2^-40. Integers add
exactly,
so totals, prefix sums and thresholds do not depend on batch size, thread count, block layout or on which path (a short
list of the largest logits, or the whole vocabulary) found them. A token less than 2^-40 times as probable as the
most probable one is never drawn.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

UNITS = 2.0**40
BLOCK = 256
_CPU_CHUNK = 1 << 19  # logits per pass and thread, so that they stay near the core
_DEVICE_CHUNK = 1 << 23
_NARROW_BLOCK = 32


def scale_of_temperature(temperature: float) -> np.float32:
    """Return log2(e) / temperature as float32, clamped so that neither 0 * inf nor inf * 0 can occur."""
    return np.float32(math.log2(math.e) / min(max(temperature, 1e-30), 1e30))


def relative(logits: Tensor, peak: Tensor, scale: Tensor) -> Tensor:
    """Return probabilities relative to the most probable token, float32 [n, m], for peak and scale float32 [n, 1]."""
    # Subtract before scaling: the largest weight is then 1 exactly. exp2 is several times faster than exp.
    return torch.sub(logits, peak).mul_(scale).exp2_()


def units(weights: Tensor) -> Tensor:
    """Relative probabilities as int64 multiples of 2^-40."""
    return (weights * UNITS).to(torch.int64)


def argmax(logits: Tensor, peaks: Tensor) -> Tensor:
    """The lowest index of each line's maximum, int64 [n].

    Args:
        logits: float32 [n, vocab].
        peaks: float32 [n, blocks], from `block_max`.
    """
    vocab = logits.shape[1]
    if vocab <= BLOCK:
        return logits.argmax(-1)
    # The last block may be short; a full window that ends with the vocabulary holds it, and all before it is smaller.
    start = torch.clamp(peaks.argmax(-1) * BLOCK, max=vocab - BLOCK)
    window = logits.gather(1, start[:, None] + torch.arange(BLOCK, device=logits.device))
    return start + window.argmax(-1)


def block_max(logits: Tensor, block: int = BLOCK) -> Tensor:
    """Maximum of each run of `block` logits, float32 [n, ceil(vocab / block)]; NaN where a run holds one."""
    main = logits.shape[1] // block * block
    peaks = _blocks(logits[:, :main], block).amax(-1)
    if main < logits.shape[1]:
        peaks = torch.cat((peaks, logits[:, main:].amax(-1, keepdim=True)), 1)
    return peaks


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each line, and their token ids (int64, ascending); [n, min(count, vocab)] each.

    A token among the `count` largest lies in a block whose maximum is among the `count` largest block maxima, so only
    these blocks are searched. Which of several equal logits are taken at the end of the list is not defined.
    """
    vocab = logits.shape[1]
    main = vocab // _NARROW_BLOCK * _NARROW_BLOCK
    if count * 2 > main // _NARROW_BLOCK:
        ids = _partition(logits, min(count, vocab))
    else:
        best = _partition(_blocks(logits[:, :main], _NARROW_BLOCK).amax(-1), count)
        candidates = (best[:, :, None] * _NARROW_BLOCK + torch.arange(_NARROW_BLOCK, device=logits.device)).flatten(1)
        if main < vocab:
            rest = torch.arange(main, vocab, device=logits.device).expand(len(logits), -1)
            candidates = torch.cat((candidates, rest), 1)
        ids = candidates.gather(1, _partition(logits.gather(1, candidates), count))
    ids = ids.sort(-1).values if ids.device.type != "cpu" else torch.from_numpy(np.sort(ids.numpy(), axis=-1))
    return logits.gather(1, ids), ids


def descending(values: Tensor) -> Tensor:
    """Each line's values in descending order."""
    if values.device.type == "cpu":
        # numpy sorts float32 with SIMD and without indices, over ten times faster than torch on a CPU.
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(-1, descending=True).values


def _partition(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values of each line, in any order."""
    if values.device.type == "cpu":
        first = values.shape[1] - count  # argpartition is several times faster than torch's topk
        return torch.from_numpy(np.argpartition(values.numpy(), min(first, values.shape[1] - 1), axis=-1)[:, first:])
    return values.topk(count, -1, sorted=False).indices


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF along each line: the first index whose running sum exceeds u * total.

    Args:
        weights: int64 [n, m].  u: float64 [n] in [0, 1).

    Returns:
        int64 [n].
    """
    sums = weights.cumsum(-1)
    index = torch.searchsorted(sums, _target(sums[:, -1:], u), right=True)[:, 0]
    return torch.clamp(index, max=weights.shape[1] - 1)


def _blocks(lines: Tensor, block: int) -> Tensor:
    """A view of [n, m] as [n, m / block, block]."""
    return lines.view(lines.shape[0], lines.shape[1] // block, block)


def _target(total: Tensor, u: Tensor) -> Tensor:
    # float64 may round u * total up to the total itself, which no running sum exceeds.
    return torch.minimum((total.double() * u[:, None]).to(torch.int64), total - 1)


class DrawWorkspace:
    """Buffers for passes over the whole vocabulary, a few lines at a time, and the passes."""

    __slots__ = ("_fixed", "_float", "_mask", "_vocab", "lines")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        padded = -(-vocab_size // BLOCK) * BLOCK
        chunk = _CPU_CHUNK * min(torch.get_num_threads(), 8) if device.type == "cpu" else _DEVICE_CHUNK
        self.lines = max(1, chunk // padded)
        self._vocab = vocab_size
        self._float = torch.empty(self.lines, vocab_size, dtype=torch.float32, device=device)
        self._mask = torch.empty_like(self._float)
        # The columns behind the vocabulary stay zero, so that blocks are whole.
        self._fixed = torch.zeros(self.lines, padded, dtype=torch.int64, device=device)

    def weigh(
        self,
        logits: Tensor,
        peak: Tensor,
        scale: Tensor,
        min_weight: Tensor | None = None,
        min_logit: Tensor | None = None,
    ) -> Tensor:
        """Weights of whole lines in units, int64 [n, padded vocab], valid until the next call; n is at most `lines`.

        Args:
            logits: float32 [n, vocab].  peak, scale: float32 [n, 1].
            min_weight: float32 [n, 1], tokens of smaller relative probability weigh nothing (min_p).
            min_logit: float32 [n, 1], tokens of smaller logit weigh nothing.
        """
        n = len(logits)
        weights = torch.sub(logits, peak, out=self._float[:n]).mul_(scale).exp2_()
        # Multiplying by a comparison kept as float32 is vectorised; a boolean mask is not, and takes ten times longer.
        if min_weight is not None:
            weights.mul_(torch.ge(weights, min_weight, out=self._mask[:n]))
        if min_logit is not None:
            weights.mul_(torch.ge(logits, min_logit, out=self._mask[:n]))
        fixed = self._fixed[:n]
        fixed[:, : self._vocab] = weights.mul_(UNITS)
        return fixed

    def pick(self, weights: Tensor, u: Tensor) -> Tensor:
        """As the function `pick`, for lines from `weigh`: first the block, then the token inside it."""
        blocks = _blocks(weights, BLOCK)
        sums = blocks.sum(-1)
        running = sums.cumsum(-1)
        target = _target(running[:, -1:], u)
        block = torch.clamp(torch.searchsorted(running, target, right=True), max=sums.shape[1] - 1)
        inside = target - (running - sums).gather(1, block)
        line = torch.arange(len(weights), device=weights.device)
        token = torch.searchsorted(blocks[line, block[:, 0]].cumsum(-1), inside, right=True)
        return (block * BLOCK + torch.clamp(token, max=BLOCK - 1))[:, 0]

    def pick_apart(self, weights: Tensor, u: Tensor, inner: Tensor) -> Tensor:
        """Draw a token of each line from `weigh`: the block by `u`, then the token inside it by a separate uniform.

        Logits that are computed again in another batch differ in their last digits. One running sum over the whole
        vocabulary would propagate that error to every token behind it, and most tokens' intervals are narrower than it.
        Inside a block only the block's own error counts, relative to the block.

        Args:
            weights: int64 [n, padded vocab].  u, inner: float64 [n] in [0, 1).
        """
        blocks = _blocks(weights, BLOCK)
        block = pick(blocks.sum(-1), u)
        line = torch.arange(len(weights), device=weights.device)
        return block * BLOCK + pick(blocks[line, block], inner)

    def log_partition(self, logits: Tensor, peak: Tensor) -> Tensor:
        """log(sum(exp(logits))) of each line, float64 [n]; n is at most `lines`.

        Args:
            logits: float32 [n, vocab].  peak: float32 [n, 1], each line's maximum.
        """
        weights = torch.sub(logits, peak, out=self._float[: len(logits)]).mul_(math.log2(math.e)).exp2_()
        main = self._vocab // BLOCK * BLOCK
        total = weights[:, main:].sum(-1, dtype=torch.float64)
        total += _blocks(weights[:, :main], BLOCK).sum(-1).sum(-1, dtype=torch.float64)
        return total.log_() + peak[:, 0].double()
