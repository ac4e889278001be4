"""The logits processors, in this order: masks, allowed tokens, bad words, held-back end tokens, bias, penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import Transfer
from engine.request import MaskFiller, TokenMask
from engine.sampling.rows import NO_SLOT, RowParams

LINES_AT_ONCE = 16
"""Masked lines that are written in one operation, so that they stay in a core's cache."""

_BIAS_OF_BYTE = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(0), np.float32("-inf"))
"""float32 [256, 8]: bias of eight tokens, by their byte of a mask."""


def modified_lines(params: RowParams, rows: NDArray[np.int32], num_outputs: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return indices into `rows` (int32 [S]) whose logits the chain changes in this step, int64 [m]."""
    changed = (params.penalty_slot[rows] != NO_SLOT) | (params.min_tokens[rows] > num_outputs)
    for lines in (params.bias, params.masks, params.allowed, params.bad_words):
        if lines:
            changed |= np.fromiter((row in lines for row in rows.tolist()), dtype=np.bool_, count=len(rows))
    return np.flatnonzero(changed)


def modify(
    params: RowParams,
    logits: Tensor,
    rows: NDArray[np.int32],
    num_outputs: NDArray[np.int32],
    lines: NDArray[np.int64],
    transfer: Transfer,
) -> None:
    """Apply the chain before sampling, in place.

    Args:
        logits: float32 [S, vocab].  rows, num_outputs: int32 [S].
        lines: int64 [m], from `modified_lines`.
        transfer: to the logits' device.
    """
    _mask(params, logits, rows, lines, transfer)
    _ban_bad_words(params, logits, rows, lines, transfer)
    _ban_end_tokens(params, logits, rows, lines[params.min_tokens[rows[lines]] > num_outputs[lines]], transfer)
    _bias(params, logits, rows, lines, transfer)
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
            transfer,
        )


def _mask(
    params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64], transfer: Transfer
) -> None:
    if not (params.masks or params.allowed):
        return
    masked = [line for line in lines.tolist() if int(rows[line]) in params.masks or int(rows[line]) in params.allowed]
    of_rows = [int(rows[line]) for line in masked]
    words = np.zeros((len(masked), -(-logits.shape[1] // 32)), dtype=np.int32)
    with_mask = [at for at, row in enumerate(of_rows) if row in params.masks]
    filled = words if len(with_mask) == len(masked) else np.zeros((len(with_mask), words.shape[1]), dtype=np.int32)
    failed = fill_masks([params.masks[of_rows[at]] for at in with_mask], filled)
    if filled is not words:
        words[:] = -1
        words[with_mask] = filled
    for at, row in enumerate(of_rows):
        if (allowed := params.allowed.get(row)) is not None:
            words[at] &= allowed
    for at, error in failed.items():
        params.break_mask(of_rows[with_mask[at]], error)
    for begin in range(0, len(masked), LINES_AT_ONCE):
        part = slice(begin, begin + LINES_AT_ONCE)
        _ban(logits, np.array(masked[part]), words[part], transfer)


def _ban(logits: Tensor, lines: NDArray[np.int64], words: NDArray[np.int32], transfer: Transfer) -> None:
    """Add -inf to the tokens that the words (int32 [n, ceil(vocab / 32)]) exclude, in these lines; 0 to the rest.

    Bytes are looked up, eight tokens each: unlike a fill under a condition that takes the same time for any mask.
    """
    bias = np.take(_BIAS_OF_BYTE, words.view(np.uint8), axis=0).reshape(len(lines), -1)[:, : logits.shape[1]]
    added, index = transfer.up(bias, lines)
    if lines[-1] - lines[0] + 1 == len(lines):
        logits[int(lines[0]) : int(lines[-1]) + 1].add_(added)
    else:
        logits.index_add_(0, index, added)


def fill_masks(masks: Sequence[TokenMask], words: NDArray[np.int32]) -> dict[int, Exception]:
    """Fill a line of `words` (int32 [masks, ceil(vocab / 32)], zeros) for each mask, in one call for those with the
    same filler. Returns their exceptions by index: a mask is one request's own code, and fails that request alone."""
    failed: dict[int, Exception] = {}
    by_filler: dict[int, tuple[MaskFiller, list[int]]] = {}
    for at, mask in enumerate(masks):
        filler: MaskFiller | None = getattr(mask, "filler", None)
        if filler is not None:
            by_filler.setdefault(id(filler), (filler, []))[1].append(at)
            continue
        try:
            mask.fill(words[at])
        except Exception as error:  # noqa: BLE001 - it becomes this row's result
            failed[at] = error
    for filler, indices in by_filler.values():
        part = words if len(indices) == len(words) else np.zeros((len(indices), words.shape[1]), dtype=np.int32)
        try:
            found = filler.fill([masks[at] for at in indices], part)
        except Exception as error:  # noqa: BLE001 - it becomes these rows' result
            failed.update(dict.fromkeys(indices, error))
            continue
        words[indices] = part
        failed.update({indices[i]: error for i, error in found.items()})
    return failed


def _ban_bad_words(
    params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64], transfer: Transfer
) -> None:
    if not params.bad_words:
        return
    with_words = [line for line in lines.tolist() if int(rows[line]) in params.bad_words]
    banned = [params.bad_words[int(rows[line])].banned() for line in with_words]
    _ban_tokens(logits, with_words, banned, transfer)


def _ban_tokens(
    logits: Tensor, lines: Sequence[int], tokens: Sequence[Sequence[int] | NDArray[np.int64]], transfer: Transfer
) -> None:
    """Write -inf for the tokens of each line."""
    if any(map(len, tokens)):
        ids = np.concatenate([np.asarray(of_line, dtype=np.int64) for of_line in tokens])
        line, token = transfer.up(np.repeat(lines, [len(of_line) for of_line in tokens]), ids)
        logits.index_put_((line, token), logits.new_full((), float("-inf")))


def _ban_end_tokens(
    params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64], transfer: Transfer
) -> None:
    _ban_tokens(logits, lines.tolist(), [params.end_tokens[int(rows[line])] for line in lines], transfer)


def _bias(
    params: RowParams, logits: Tensor, rows: NDArray[np.int32], lines: NDArray[np.int64], transfer: Transfer
) -> None:
    if not params.bias:
        return
    with_bias = [line for line in lines.tolist() if int(rows[line]) in params.bias]
    if with_bias:
        pairs = [params.bias[int(rows[line])] for line in with_bias]
        line, token, value = transfer.up(
            np.repeat(with_bias, [len(ids) for ids, _ in pairs]),
            np.concatenate([ids for ids, _ in pairs]),
            np.concatenate([values for _, values in pairs]),
        )
        logits[line, token] += value
