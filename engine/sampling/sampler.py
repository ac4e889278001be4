"""The batched sampler: logits in, one token per row out.

A step's rows are grouped by their parameters, so a greedy row costs one pass over its logits and no row pays for other
rows' parameters. Every operation works on a row alone and every sum that decides a draw is exact (see
sampling/draw.py), so the same logits, parameters, choice and position give the same token in any batch, bit for bit.

A row fails when the model's logits hold NaN or +inf, or nothing finite (single tokens at -inf are a model's right),
when the chain excludes all tokens, and when its mask raises; the other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import make_transfer
from engine.plan import NO_TOKEN
from engine.request import Request
from engine.sampling import logits_processors
from engine.sampling.batch import Columns, choose
from engine.sampling.draw import DrawWorkspace, block_max
from engine.sampling.logprobs import RawDistribution, prompt_logprobs, target_logprobs
from engine.sampling.philox import uniforms
from engine.sampling.rows import OFF, RowParams, check_params

__all__ = ["SampleOutput", "Sampler", "check_params", "prompt_logprobs", "target_logprobs"]

NON_FINITE = "the model's logits are not finite"
NOTHING_LEFT = "mask, allowed_token_ids, bad_words, logit_bias, penalties and min_tokens together leave no token"


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One step's tokens (S lines, in the order they were given).

    Attributes:
        token_ids: int32 [S], or `NO_TOKEN`.
        failed: bool [S].
        reasons: row -> reason of its failure.
        logprobs: row -> (chosen token's log-probability, top ids int32 [k], their log-probabilities float32 [k]),
            for rows that request them and did not fail.
    """

    token_ids: NDArray[np.int32]
    failed: NDArray[np.bool_]
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, tuple[float, NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SampleRequest:
    """Lines (int64 [n]) with log-probabilities, and the distribution before the chain modified it."""

    lines: NDArray[np.int64]
    raw: RawDistribution


class Sampler:
    """Samples tokens for the rows of the running batch.

    Args:
        max_num_seqs: rows.  vocab_size: tokens in a line of logits.
        eos_token_ids: the model's end tokens, held back by min_tokens.
        device: of the logits.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._params = RowParams(max_num_seqs, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._device = device
        self._transfer = make_transfer(device)
        self._draw_rows = _fused_draw(device)
        self._buffers: DrawWorkspace | None = None

    def assign(self, row: int, request: Request, choice: int, known: NDArray[np.int32], prompt_len: int) -> None:
        """Assign a row to a sequence.

        Args:
            choice: index of the request's choice.
            known: int32 [tokens], all its tokens so far; after a preemption they include output, which penalties
                count again and a new mask is advanced by.
            prompt_len: number of prompt tokens among them.
        """
        self._params.assign(row, request, choice, known, prompt_len)

    def release(self, row: int) -> None:
        """Release the state of the row's sequence; `assign` does it too."""
        self._params.release(row)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        num_outputs: NDArray[np.int32],
    ) -> SampleOutput:
        """Sample the next token of each row, and update penalties and masks.

        Args:
            logits: float32 [S, vocab]; may be modified.
            rows: int32 [S]; the `special` ones among them distinct.
            positions: int32 [S], index of the drawn token in its sequence.
            num_outputs: int32 [S], tokens generated before it (min_tokens).
        """
        if not len(rows):
            return SampleOutput(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_))
        special = self._params.special[rows]
        sampled = self._sample_request(logits, rows) if special.any() else None
        tokens, alive, sound = self._take(logits, rows, positions, num_outputs)
        output = self._fetch(tokens, alive, sound, rows)
        if not special.any():
            return output
        taken = special & ~output.failed
        self._params.record(rows[taken], output.token_ids[taken])
        self._fail_broken(output, rows)
        if sampled is not None:
            self._add_logprobs(output, sampled, tokens, rows)
        return output

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        num_outputs: NDArray[np.int32],
    ) -> Tensor:
        """Sample rows whose results the host does not need at once (not `awaited`): int64 [3, S] on the device, for
        `unpack`. With the kernel of `_fused_draw` it never blocks on the device."""
        assert not self.awaited(rows).any(), "what the host must see is sampled by `sample`"
        return self.pack(*self._take(logits, rows, positions, num_outputs))

    def _take(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        num_outputs: NDArray[np.int32],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens int64 [S]; bool [S], lines with a token to choose; bool [S], lines with finite logits."""
        if not self._params.special[rows].any():
            tokens, alive = self._choose(logits, None, rows, positions)
            return tokens, alive, alive
        peaks = block_max(logits)
        sound = torch.isfinite(peaks.amax(-1))
        lines = logits_processors.modified_lines(self._params, rows, num_outputs)
        if len(lines):
            logits_processors.modify(self._params, logits, rows, num_outputs, lines, self._transfer)
            (index,) = self._transfer.up(lines)
            peaks[index] = block_max(logits if len(lines) == len(rows) else logits[index])
        tokens, alive = self._choose(logits, peaks, rows, positions)
        return tokens, alive & sound, sound

    def plain(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [S]: greedy rows that need nothing else of their logits."""
        return np.asarray(self._params.greedy[rows] & ~self._params.special[rows])

    def special(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [S]: rows whose next token depends on more than logits, temperature and filters. They are sampled
        one position after the other."""
        return np.asarray(self._params.special[rows])

    def awaited(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [S]: rows whose next token needs the last one on the host first, or of which the host needs more
        than the token (penalties, masks, log-probabilities)."""
        return np.asarray(self._params.awaited[rows])

    def accept(self, tokens: Tensor, alive: Tensor, rows: NDArray[np.int32]) -> SampleOutput:
        """Return the output of `plain` rows whose most probable tokens (int64 [S]) are known already; alive: bool
        [S]."""
        return self._fetch(tokens, alive, alive, rows)

    def _fetch(self, tokens: Tensor, alive: Tensor, sound: Tensor, rows: NDArray[np.int32]) -> SampleOutput:
        """Wait for the results of these rows; see `pack`."""
        if self._device.type == "cpu":
            return self.unpack((tokens.numpy(), alive.numpy(), sound.numpy()), rows)
        return self.unpack(self.pack(tokens, alive, sound).cpu().numpy(), rows)

    def _choose(
        self, logits: Tensor, peaks: Tensor | None, rows: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [S], and bool [S], lines with a token to choose; peaks: float32 [S, blocks] from
        `block_max`, if known already."""
        columns = self._columns(rows, positions)
        if self._draw_rows is not None:
            return self._draw_rows(logits, *self._transfer.up(*columns))
        return choose(logits, peaks, columns, self._space, self._transfer)

    def _columns(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> Columns:
        params, greedy = self._params, self._params.greedy[rows]
        seed, choice, at = params.seed[rows], params.choice[rows], positions.astype(np.int64)
        unused = np.zeros(len(rows))
        u, inner = (unused if greedy.all() else uniforms(seed, choice, at, lane) for lane in (0, 1))
        scale = np.where(greedy, np.float32(0), params.scale[rows])
        return Columns(scale, params.top_k[rows], params.top_p[rows], params.min_p[rows], u, inner)

    @staticmethod
    def pack(tokens: Tensor, alive: Tensor, sound: Tensor) -> Tensor:
        """Pack int64 [3, S], one small tensor to copy to the host: tokens int64 [S]; alive bool [S], lines with a
        token; sound bool [S], with finite logits."""
        return torch.stack((tokens, alive.long(), sound.long()))

    @staticmethod
    def unpack(packed: Iterable[NDArray[Any]], rows: NDArray[np.int32]) -> SampleOutput:
        """Return the results of these rows from the lines of `pack` on the host, or from what it is given."""
        tokens, alive, sound = packed
        token_ids, failed = tokens.astype(np.int32), alive == 0
        if not failed.any():
            return SampleOutput(token_ids, failed)
        token_ids[failed] = NO_TOKEN
        reasons = {int(rows[i]): NOTHING_LEFT if sound[i] else NON_FINITE for i in np.flatnonzero(failed)}
        return SampleOutput(token_ids, failed, reasons)

    def _fail_broken(self, output: SampleOutput, rows: NDArray[np.int32]) -> None:
        """Fail the rows whose mask has raised, now or when the row was assigned."""
        if not self._params.broken:
            return
        for line, row in enumerate(rows.tolist()):
            reason = self._params.broken.get(row)
            if reason is not None and output.reasons.get(row) != NON_FINITE:
                output.token_ids[line], output.failed[line] = NO_TOKEN, True
                output.reasons[row] = reason

    def _sample_request(self, logits: Tensor, rows: NDArray[np.int32]) -> _SampleRequest | None:
        lines = np.flatnonzero(self._params.logprobs[rows] != OFF)
        if not len(lines):
            return None
        return _SampleRequest(lines, RawDistribution.of(logits[self._transfer.up(lines)[0]], self._space()))

    def _add_logprobs(
        self, output: SampleOutput, sampled: _SampleRequest, tokens: Tensor, rows: NDArray[np.int32]
    ) -> None:
        chosen = sampled.raw.chosen(tokens[self._transfer.up(sampled.lines)[0]].clamp(0, self._vocab_size - 1))
        counts = self._params.logprobs[rows[sampled.lines]]
        ids, top = sampled.raw.top(int(counts.max()))
        for i, line in enumerate(sampled.lines.tolist()):
            if not output.failed[line]:
                output.logprobs[int(rows[line])] = (float(chosen[i]), ids[i, : counts[i]], top[i, : counts[i]])

    def _space(self) -> DrawWorkspace:
        if self._buffers is None:
            self._buffers = DrawWorkspace(self._vocab_size, self._device)
        return self._buffers


def _fused_draw(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the kernel that chooses all tokens in one launch (`engine.triton_kernels.draws`), on a GPU with Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from engine.triton_kernels.draws import draw_rows  # noqa: PLC0415 - comes with CUDA's torch

    return draw_rows
