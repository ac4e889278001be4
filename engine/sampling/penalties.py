"""Repetition, frequency and presence penalties over the tokens a sequence has seen.

A sequence sees a few hundred or thousand distinct tokens of a vocabulary of tens of thousands, so each slot lists
only those, with their counts; applying the penalties touches these logits and no others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import Transfer


class PenaltyTable:
    """Token counts of the sequences that use a penalty, in slots that are handed out, reused and grown on demand.

    Slot s lists `size[s]` distinct tokens: `ids[s, j]` with `counts[s, j]` occurrences in the output (0: prompt only).
    """

    __slots__ = ("_counts", "_free", "_ids", "_size")

    def __init__(self) -> None:
        self._ids = np.zeros((0, 64), dtype=np.int32)
        self._counts = np.zeros((0, 64), dtype=np.int32)
        self._size = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []

    def assign(self, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> int:
        """Take a slot and count these tokens (int32 [tokens]); returns the slot."""
        if not self._free:
            self._grow(slots=max(4, 2 * len(self._size)), width=self._ids.shape[1])
        slot = self._free.pop()
        ids, inverse = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        counts = np.bincount(inverse[len(prompt) :], minlength=len(ids))
        if len(ids) > self._ids.shape[1]:
            self._grow(slots=len(self._size), width=max(len(ids), 2 * self._ids.shape[1]))
        self._ids[slot, : len(ids)] = ids
        self._counts[slot, : len(ids)] = counts
        self._size[slot] = len(ids)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        # Column 0 stands in for the padding of short rows, so an empty slot must show a token that was never counted.
        self._ids[slot, 0] = 0
        self._counts[slot, 0] = 0
        self._size[slot] = 0
        self._free.append(slot)

    def add(self, slots: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Count one more output token in each of these distinct slots; int [n] each."""
        size = self._size[slots]
        width = int(size.max(initial=0))
        if width + 1 > self._ids.shape[1]:
            self._grow(slots=len(self._size), width=2 * self._ids.shape[1])
        listed = self._ids[slots, :width] == tokens[:, None]
        listed &= np.arange(width) < size[:, None]
        old = listed.any(axis=1)
        column = np.where(old, listed.argmax(axis=1) if width else 0, size)
        self._ids[slots, column] = tokens
        self._counts[slots, column] = np.where(old, self._counts[slots, column], 0) + 1
        self._size[slots] = size + ~old

    def apply(
        self,
        logits: Tensor,
        lines: NDArray[np.int64],
        slots: NDArray[np.int64],
        repetition: NDArray[np.float32],
        frequency: NDArray[np.float32],
        presence: NDArray[np.float32],
        transfer: Transfer,
    ) -> None:
        """Penalise in place.

        Repetition divides positive and multiplies negative logits of every listed token (Keskar et al. 2019, CTRL,
        section 4.1); then frequency * count and presence are subtracted for tokens of the output.

        Args:
            logits: float32 [S, vocab].
            lines, slots: int64 [n], distinct lines of `logits` and the slots of their sequences.
            repetition, frequency, presence: float32 [n].
            transfer: to where the logits are.
        """
        size = self._size[slots][:, None]
        width = int(size.max(initial=0))
        if width == 0:
            return
        # Short rows are padded with copies of their first entry: it is written more than once, with the same value.
        column = np.arange(width)
        column = np.where(column < size, column, 0)
        counts = self._counts[slots[:, None], column]
        offset = counts * frequency[:, None] + (counts > 0) * presence[:, None]
        ids, line, factor, less = transfer.up(
            self._ids[slots[:, None], column],
            lines[:, None],
            np.where(size > 0, repetition[:, None], np.float32(1)),
            offset.astype(np.float32),
        )
        index = ids.to(torch.int64)
        value = logits[line, index]
        value = torch.where(value > 0, value / factor, value * factor)
        logits[line, index] = value - less

    def _grow(self, slots: int, width: int) -> None:
        old_slots, old_width = self._ids.shape
        for name in ("_ids", "_counts"):
            grown = np.zeros((slots, width), dtype=np.int32)
            grown[:old_slots, :old_width] = getattr(self, name)
            setattr(self, name, grown)
        self._size = np.concatenate((self._size, np.zeros(slots - old_slots, dtype=np.int64)))
        self._free.extend(reversed(range(old_slots, slots)))
