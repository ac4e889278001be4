"""The draws of one step, grouped by the cheapest method.

- No filter but min_p: one pass over the line, no order needed.
- top_k: only a list of the largest logits is searched.
- top_p: one pass for the total, then a list; where the list is too short or ends in a tie, the line is sorted.

The parameters alone decide the method; all methods give the same token for the same parameters. The host reads a list's
outcome, for which it would wait on a GPU: there `engine.triton_kernels.draws` draws, with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import Transfer
from engine.sampling.draw import DrawWorkspace, argmax, block_max
from engine.sampling.filters import Filters, draw_from_largest, draw_from_sorted

NUCLEUS_WIDTHS = (64, 1024)  # logits listed for top_p, one list after the other, before the line is sorted
MAX_LIST = 512  # a larger top_k is faster sorted
_SPARE = 16  # entries listed beyond top_k, so that ties at its end are seen


class Columns(NamedTuple):
    """Parameters of a step's lines, [S] each.

    Attributes:
        scale: float32, log2(e) / temperature; 0: the line is greedy.
        top_k: int64, 0 is off.  top_p: float64, 1 is off.  min_p: float32, 0 is off.
        u, inner: float64 in [0, 1); `inner` is for lines without top_k and top_p.
    """

    scale: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    u: NDArray[np.float64]
    inner: NDArray[np.float64]

    def take(self, lines: NDArray[np.int64]) -> Columns:
        """The parameters of some of the lines."""
        return Columns(
            self.scale[lines], self.top_k[lines], self.top_p[lines], self.min_p[lines], self.u[lines], self.inner[lines]
        )


def choose(
    logits: Tensor, peaks: Tensor | None, columns: Columns, space: Callable[[], DrawWorkspace], transfer: Transfer
) -> tuple[Tensor, Tensor]:
    """Return a token of each line, int64 [S], and bool [S], lines with a token to choose.

    Args:
        logits: float32 [S, vocab].  peaks: float32 [S, blocks] from `block_max`, if known already.
        space: makes the buffers, where a line draws.
    """
    peaks = block_max(logits) if peaks is None else peaks
    peak = peaks.amax(-1)
    # amax propagates NaN and +inf, and is -inf only where no logit is finite, so it is the only check needed.
    alive = torch.isfinite(peak)
    greedy = columns.scale == 0
    if greedy.all():
        return argmax(logits, peaks), alive
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if greedy.any():
        (index,) = transfer.up(np.flatnonzero(greedy))
        tokens[index] = argmax(logits[index], peaks[index])
    lines = np.flatnonzero(~greedy)
    drawing = columns.take(lines)
    *parameters, u, inner = transfer.up(*drawing)
    filters = Filters(*(parameter[:, None] for parameter in parameters))
    draws = DrawBatch(logits, peak[:, None], alive, tokens, lines, filters, u, inner, space(), transfer)
    draws.run(drawing.top_k, drawing.top_p, drawing.min_p)
    return tokens, alive


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The lines of a step that draw (n of its S lines), and the output for their tokens.

    Attributes:
        logits: float32 [S, vocab].  peak: float32 [S, 1], each line's maximum.
        alive: bool [S], lines whose maximum is finite; the draws of the others are ignored.
        tokens: int64 [S], the output.
        lines: int64 [n], the drawing lines.  filters, u, inner: of these, [n, 1] each and float64 [n].
        transfer: to the logits' device.
    """

    logits: Tensor
    peak: Tensor
    alive: Tensor
    tokens: Tensor
    lines: NDArray[np.int64]
    filters: Filters
    u: Tensor
    inner: Tensor
    space: DrawWorkspace
    transfer: Transfer

    def run(self, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float32]) -> None:
        """Draw for all lines; the host's copies of the filters (each [n]) select the method of each one."""
        listed = (top_k > 0) & (top_k <= MAX_LIST)
        nucleus = (top_k == 0) & (top_p < 1)
        ranked = top_k > MAX_LIST
        self._from_whole_line(np.flatnonzero(~(listed | nucleus | ranked)), bool(min_p.any()))
        width = -(-(int(top_k[listed].max(initial=0)) + _SPARE) // 64) * 64
        self._from_list(np.flatnonzero(listed), (width,), with_total=False)
        self._from_list(np.flatnonzero(nucleus), NUCLEUS_WIDTHS, with_total=True)
        self._from_sorted(np.flatnonzero(ranked))

    def _index(self, lines: NDArray[np.int64]) -> Tensor | slice:
        """Return an index for ascending lines; a slice, which copies nothing, where they are consecutive."""
        first, last = int(lines[0]), int(lines[-1])
        if last - first + 1 == len(lines):
            return slice(first, last + 1)
        return self.transfer.up(lines)[0]

    def _take(self, part: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor | slice]:
        """Return logits and peaks of some of the drawing lines, and their index into the step's lines."""
        index = self._index(self.lines[part])
        return self.logits[index], self.peak[index], index

    def _from_whole_line(self, part: NDArray[np.int64], any_min_p: bool) -> None:
        for i in range(0, len(part), self.space.lines):
            chunk = part[i : i + self.space.lines]
            logits, peak, index = self._take(chunk)
            filters, u = self._settings(chunk)
            weights = self.space.weigh(logits, peak, filters.scale, min_weight=filters.min_p if any_min_p else None)
            self.tokens[index] = self.space.pick_apart(weights, u, self.inner[self._index(chunk)])

    def _from_list(self, part: NDArray[np.int64], widths: tuple[int, ...], with_total: bool) -> None:
        total = self._total(part) if with_total and len(part) else None
        for width in widths:
            if not len(part):
                return
            logits, peak, index = self._take(part)
            filters, u = self._settings(part)
            self.tokens[index], settled = draw_from_largest(logits, peak, filters, total, u, width)
            # The only synchronisation of a list: the host reads which lines are not settled.
            open_ = (~settled & self.alive[index]).nonzero()[:, 0]
            total = None if total is None else total[open_]
            part = part[open_.cpu().numpy()]
        self._from_sorted(part)

    def _total(self, part: NDArray[np.int64]) -> Tensor:
        """Return the weight of whole lines, int64 [len(part), 1]."""
        totals = []
        for i in range(0, len(part), self.space.lines):
            logits, peak, _ = self._take(part[i : i + self.space.lines])
            filters, _ = self._settings(part[i : i + self.space.lines])
            totals.append(self.space.weigh(logits, peak, filters.scale).sum(-1, keepdim=True))
        return torch.cat(totals)

    def _from_sorted(self, part: NDArray[np.int64]) -> None:
        for i in range(0, len(part), self.space.lines):
            chunk = part[i : i + self.space.lines]
            logits, peak, index = self._take(chunk)
            filters, u = self._settings(chunk)
            self.tokens[index] = draw_from_sorted(logits, peak, filters, u, self.space)

    def _settings(self, part: NDArray[np.int64]) -> tuple[Filters, Tensor]:
        index = self._index(part)
        return self.filters.take(index), self.u[index]
