"""What changes logits before a token is chosen: masks, held-back end tokens, bias, penalties; in this order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.rows import NO_SLOT, RowParams


def modified_lines(params: RowParams, rows: NDArray[np.int32], num_outputs: NDArray[np.int32]) -> NDArray[np.int64]:
    """Indices into `rows` (int32 [S]) whose logits the chain changes in this step, int64 [m]."""
    changed = (params.penalty_slot[rows] != NO_SLOT) | (params.min_tokens[rows] > num_outputs)
    for lines in (params.bias, params.masks):
        if lines:
            changed |= np.fromiter((row in lines for row in rows.tolist()), dtype=np.bool_, count=len(rows))
    return np.flatnonzero(changed)


def modify(
    params: RowParams,
    logits: Tensor,
    rows: NDArray[np.int32],
    num_outputs: NDArray[np.int32],
    lines: NDArray[np.int64],
) -> None:
    """Apply the chain up to the choice, in place.

    Args:
        logits: float32 [S, vocab].  rows, num_outputs: int32 [S].
        lines: int64 [m], from `modified_lines`.
    """
    _mask(params, logits, rows, lines)
    _hold_back(params, logits, rows, lines[params.min_tokens[rows[lines]] > num_outputs[lines]])
    _bias(params, logits, rows, lines)
    slots = params.penalty_slot[rows[lines]]
    penalised = lines[slots != NO_SLOT]
    if len(penalised):
        row = rows[penalised]
        params.penalties.apply(
            logits,
            penalised,
            params.penalty_slot[row],
            params.repetition[row],
            params.frequency[row],
            params.presence[row],
        )


def _mask(params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64]) -> None:
    if not params.masks:
        return
    for line in lines.tolist():
        masked = params.masks.get(int(rows[line]))
        if masked is not None:
            masked.words.fill(0)
            try:
                masked.mask.fill(masked.words)
            except Exception as error:  # noqa: BLE001 - it becomes this row's result
                params.break_mask(int(rows[line]), error)
                continue
            bits = np.unpackbits(masked.words.view(np.uint8), bitorder="little", count=logits.shape[1])
            banned = torch.from_numpy(bits == 0).to(logits.device)
            logits[line].masked_fill_(banned, float("-inf"))


def _hold_back(params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64]) -> None:
    ends = [params.end_tokens[int(rows[line])] for line in lines]
    if ends:
        line = torch.from_numpy(np.repeat(lines, [len(e) for e in ends])).to(logits.device)
        logits[line, torch.from_numpy(np.concatenate(ends)).to(logits.device)] = float("-inf")


def _bias(params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64]) -> None:
    if not params.bias:
        return
    with_bias = [line for line in lines.tolist() if int(rows[line]) in params.bias]
    if with_bias:
        pairs = [params.bias[int(rows[line])] for line in with_bias]
        line = torch.from_numpy(np.repeat(with_bias, [len(ids) for ids, _ in pairs])).to(logits.device)
        token = torch.from_numpy(np.concatenate([ids for ids, _ in pairs])).to(logits.device)
        logits[line, token] += torch.from_numpy(np.concatenate([values for _, values in pairs])).to(logits.device)
