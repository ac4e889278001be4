"""Verification: which drafts are what the model would have sampled, and what comes behind them.

The rule of Leviathan et al. (2023, section 2.3) accepts a draft x with probability min(1, p(x) / q(x)), and draws from
norm(max(0, p - q)) where it rejects one. It needs p after every sampling parameter, and a coin beside the draw. Here
each position is drawn from p once, with the uniforms of its (seed, choice, position), and a draft stays when it is
what was drawn. For a draft that was fixed before the draw (q is 1 at x) that is the same rule: x stays with probability
p(x), and what is drawn instead of it is distributed as p without x, renormalised, which is norm(max(0, p - q)). But the
coin and the draw are one, so the answer is the one that would have been drawn without drafts, whatever was guessed,
and whoever computes it again elsewhere gets it again. (A draft model draws its guesses with the same uniforms, so where
its distribution is like the model's, so are its draws: Daliri et al. 2024, drafter-invariant speculative decoding.)

Rows with penalties, masks, held-back end tokens or log-probabilities go from place to place: what they forbid or count
at one place depends on what was taken before it. The others are drawn at all places at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NO_TOKEN
from engine.sampling.draw import block_max
from engine.sampling.sampler import SampleOutput, Sampler

Ints = NDArray[np.int32]
Line = tuple[float, NDArray[np.int32], NDArray[np.float32]]

LOGITS_LINES = 128
"""Lines of logits that are held at once: at a vocabulary of 262,144 they are 134 MB."""

NO_DRAFTED = -2
"""Stands behind a row's last draft: no token is like it."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Rows that are sampled with drafts (S rows), each in 1 + drafts lines of the step's wanted positions.

    Attributes:
        rows: int32 [S].
        first: int64 [S], token of the step (index into its hidden states) that is the row's first line.
        drafts: int32 [S, most], the guesses, `NO_DRAFTED` behind the last.
        counts: int32 [S], guesses.
        at: int32 [S], position of the token that the first line gives.
        num_outputs: int32 [S], tokens generated before it.
    """

    rows: Ints
    first: NDArray[np.int64]
    drafts: Ints
    counts: Ints
    at: Ints
    num_outputs: Ints

    def take(self, part: NDArray[np.intp]) -> Drafted:
        """Some of the rows."""
        return Drafted(
            self.rows[part], self.first[part], self.drafts[part], self.counts[part], self.at[part],
            self.num_outputs[part],
        )  # fmt: skip

    def lines(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of all lines, row after row: which row (index) and which place in it; int64 [L] each."""
        owner = np.repeat(np.arange(len(self.rows)), self.counts + 1)
        begin = np.cumsum(self.counts + 1) - (self.counts + 1)
        return owner, np.arange(len(owner)) - begin[owner]


@dataclass(slots=True)
class Verified:
    """What came of S rows.

    Attributes:
        token_ids: int32 [S], the token behind the accepted drafts, or `NO_TOKEN`.  failed: bool [S].
        accepted: int32 [S].
        reasons: row -> why it failed.
        logprobs: row -> one line for each accepted draft and one for the token.
        tainted: rows with non-finite logits behind their first rejected draft.
    """

    token_ids: Ints
    failed: NDArray[np.bool_]
    accepted: Ints
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Line]] = field(default_factory=dict)
    tainted: set[int] = field(default_factory=set)


class Verifier:
    """Checks drafts against a model's own choices.

    Args:
        logits: hidden states [L, hidden_size] -> float32 [L, vocab].
        greedy: the likeliest tokens without writing logits, where the model can (`GreedyModel.greedy`).
        most_lines: lines of logits that are held at once (one row's at least).
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: Callable[[Tensor], Tensor],
        greedy: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        most_lines: int = LOGITS_LINES,
    ) -> None:
        self._most_lines = most_lines
        self._sampler = sampler
        self._logits = logits
        self._greedy = greedy

    def verify(self, hidden: Tensor, drafted: Drafted) -> Verified:
        """Sample all rows; hidden: [T, hidden_size] of the step's tokens."""
        size = len(drafted.rows)
        out = Verified(
            np.full(size, NO_TOKEN, dtype=np.int32), np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.int32)
        )
        plain = np.zeros(size, dtype=np.bool_) if self._greedy is None else self._sampler.plain(drafted.rows)
        special = self._sampler.special(drafted.rows)
        if plain.any():
            self._take_likeliest(hidden, drafted, np.flatnonzero(plain), out)
        for kind, draw in ((~plain & ~special, self._draw_at_once), (special, self._draw_in_turn)):
            places = np.flatnonzero(kind)
            for part in np.split(places, _cuts(drafted.counts[places] + 1, self._most_lines)):
                if len(part):
                    draw(hidden, drafted, part, out)
        return out

    def _hidden_of(self, hidden: Tensor, drafted: Drafted) -> Tensor:
        owner, place = drafted.lines()
        return hidden.index_select(0, torch.from_numpy(drafted.first[owner] + place).to(hidden.device))

    def _take_likeliest(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        assert self._greedy is not None
        some = drafted.take(part)
        owner, _ = some.lines()
        tokens, alive = self._greedy(self._hidden_of(hidden, some))
        self._settle(some, part, self._sampler.accept(tokens, alive, some.rows[owner]), out)

    def _draw_at_once(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        some = drafted.take(part)
        owner, place = some.lines()
        at, num_outputs = (some.at[owner] + place).astype(np.int32), (some.num_outputs[owner] + place).astype(np.int32)
        logits = self._logits(self._hidden_of(hidden, some))
        self._settle(some, part, self._sampler.sample(logits, some.rows[owner], at, num_outputs), out)

    def _settle(self, some: Drafted, part: NDArray[np.intp], sampled: SampleOutput, out: Verified) -> None:
        """Compare what every line gave with the drafts."""
        owner, place = some.lines()
        tokens = np.full((len(part), some.drafts.shape[1] + 1), NO_TOKEN, dtype=np.int32)
        tokens[owner, place] = sampled.token_ids
        accepted = np.cumprod(tokens[:, :-1] == some.drafts, axis=1).sum(axis=1)
        out.accepted[part] = accepted
        out.token_ids[part] = tokens[np.arange(len(part)), accepted]
        out.failed[part] = out.token_ids[part] == NO_TOKEN
        behind = sampled.failed & (place > accepted[owner])
        out.tainted.update(some.rows[owner[behind]].tolist())
        for row in some.rows[out.failed[part]].tolist():
            out.reasons[row] = sampled.reasons[row]

    def _draw_in_turn(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        some = drafted.take(part)
        owner, place = some.lines()
        logits = self._logits(self._hidden_of(hidden, some))
        sound = torch.isfinite(block_max(logits).amax(-1)).cpu().numpy()
        first = np.cumsum(some.counts + 1) - (some.counts + 1)
        going = np.arange(len(part))
        for turn in range(some.drafts.shape[1] + 1):
            lines = torch.from_numpy(first[going] + turn).to(logits.device)
            rows = some.rows[going]
            sampled = self._sampler.sample(
                logits.index_select(0, lines), rows, some.at[going] + turn, some.num_outputs[going] + turn
            )
            for row, line in sampled.logprobs.items():
                out.logprobs.setdefault(row, []).append(line)
            out.reasons.update(sampled.reasons)
            out.token_ids[part[going]], out.failed[part[going]] = sampled.token_ids, sampled.failed
            out.accepted[part[going]] = turn
            if turn == some.drafts.shape[1]:
                break
            going = going[sampled.token_ids == some.drafts[going, turn]]
            if not len(going):
                break
        behind = ~sound & (place > out.accepted[part][owner])
        out.tainted.update(some.rows[owner[behind]].tolist())


def _cuts(lines: Ints, most: int) -> list[int]:
    """Where to cut rows with so many lines each, so that no part has more than `most` (or one row)."""
    cuts, held = [], 0
    for i, count in enumerate(lines.tolist()):
        if held and held + count > most:
            cuts.append(i)
            held = 0
        held += count
    return cuts
