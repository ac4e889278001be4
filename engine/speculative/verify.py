"""Verification: accepts the drafts that the model would have sampled, and samples the token behind them.

The rule of Leviathan et al. (2023, section 2.3) accepts a draft x with probability min(1, p(x) / q(x)), and draws from
norm(max(0, p - q)) where it rejects one. It needs p after every sampling parameter, and a coin in addition to the
draw. Here each position is drawn from p once, with the uniforms of its (seed, choice, position), and a draft is
accepted when it equals the draw. For a draft that was fixed before the draw (q is 1 at x) that is the same rule: x is
accepted with probability p(x), and the token drawn otherwise is distributed as p without x, renormalised, which is
norm(max(0, p - q)). But the coin and the draw are one, so the answer is the one that would have been drawn without
drafts, whatever the drafts were, and another worker that computes it again gets it again. (A draft model draws with the
same uniforms, so where its distribution is like the model's, so are its draws: Daliri et al. 2024, drafter-invariant
speculative decoding.)

Rows with penalties, masks, held-back end tokens or log-probabilities are verified position by position: their modifiers
at one position depend on the token before it. The other rows are drawn at all positions at once.
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

NO_DRAFT_ID = -2
"""Padding behind a row's last draft; equals no token id."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Rows that are sampled with drafts (S rows), each in 1 + drafts lines of the step's positions with logits.

    Attributes:
        rows: int32 [S].
        first: int64 [S], token of the step (index into its hidden states) that is the row's first line.
        drafts: int32 [S, max_drafts], the drafts, `NO_DRAFT_ID` behind the last.
        counts: int32 [S], number of drafts.
        at: int32 [S], position of the token that the first line samples.
        num_outputs: int32 [S], tokens generated before it.
    """

    rows: Ints
    first: NDArray[np.int64]
    drafts: Ints
    counts: Ints
    at: Ints
    num_outputs: Ints

    def take(self, part: NDArray[np.intp]) -> Drafted:
        """Return some of the rows."""
        return Drafted(
            self.rows[part], self.first[part], self.drafts[part], self.counts[part], self.at[part],
            self.num_outputs[part],
        )  # fmt: skip

    def lines(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for all lines, row after row, the row's index and the offset in it; int64 [L] each."""
        owner = np.repeat(np.arange(len(self.rows)), self.counts + 1)
        begin = np.cumsum(self.counts + 1) - (self.counts + 1)
        return owner, np.arange(len(owner)) - begin[owner]


@dataclass(slots=True)
class Verified:
    """The results of S rows.

    Attributes:
        token_ids: int32 [S], the token behind the accepted drafts, or `NO_TOKEN`.  failed: bool [S].
        accepted: int32 [S].
        reasons: row -> reason of its failure.
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
    """Verifies drafts against a model's own draws.

    Args:
        logits: hidden states [L, hidden_size] -> float32 [L, vocab].
        greedy: the most probable tokens without writing logits, where the model supports it (`GreedyModel.greedy`).
        max_lines: lines of logits that are held at once (one row's at least).
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: Callable[[Tensor], Tensor],
        greedy: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        max_lines: int = LOGITS_LINES,
    ) -> None:
        self._most_lines = max_lines
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
            self._verify_greedy(hidden, drafted, np.flatnonzero(plain), out)
        for kind, draw in ((~plain & ~special, self._verify_in_parallel), (special, self._verify_sequentially)):
            indices = np.flatnonzero(kind)
            for part in np.split(indices, _cuts(drafted.counts[indices] + 1, self._most_lines)):
                if len(part):
                    draw(hidden, drafted, part, out)
        return out

    def _hidden_of(self, hidden: Tensor, drafted: Drafted) -> Tensor:
        owner, offset = drafted.lines()
        return hidden.index_select(0, torch.from_numpy(drafted.first[owner] + offset).to(hidden.device))

    def _verify_greedy(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        assert self._greedy is not None
        some = drafted.take(part)
        owner, _ = some.lines()
        tokens, alive = self._greedy(self._hidden_of(hidden, some))
        self._settle(some, part, self._sampler.accept(tokens, alive, some.rows[owner]), out)

    def _verify_in_parallel(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        some = drafted.take(part)
        owner, offset = some.lines()
        at, num_outputs = (
            (some.at[owner] + offset).astype(np.int32),
            (some.num_outputs[owner] + offset).astype(np.int32),
        )
        logits = self._logits(self._hidden_of(hidden, some))
        self._settle(some, part, self._sampler.sample(logits, some.rows[owner], at, num_outputs), out)

    def _settle(self, some: Drafted, part: NDArray[np.intp], sampled: SampleOutput, out: Verified) -> None:
        """Compare the samples of all lines with the drafts."""
        owner, offset = some.lines()
        tokens = np.full((len(part), some.drafts.shape[1] + 1), NO_TOKEN, dtype=np.int32)
        tokens[owner, offset] = sampled.token_ids
        accepted = np.cumprod(tokens[:, :-1] == some.drafts, axis=1).sum(axis=1)
        out.accepted[part] = accepted
        out.token_ids[part] = tokens[np.arange(len(part)), accepted]
        out.failed[part] = out.token_ids[part] == NO_TOKEN
        behind = sampled.failed & (offset > accepted[owner])
        out.tainted.update(some.rows[owner[behind]].tolist())
        for row in some.rows[out.failed[part]].tolist():
            out.reasons[row] = sampled.reasons[row]

    def _verify_sequentially(self, hidden: Tensor, drafted: Drafted, part: NDArray[np.intp], out: Verified) -> None:
        some = drafted.take(part)
        owner, offset = some.lines()
        logits = self._logits(self._hidden_of(hidden, some))
        sound = torch.isfinite(block_max(logits).amax(-1)).cpu().numpy()
        first = np.cumsum(some.counts + 1) - (some.counts + 1)
        going = np.arange(len(part))
        for step in range(some.drafts.shape[1] + 1):
            lines = torch.from_numpy(first[going] + step).to(logits.device)
            rows = some.rows[going]
            sampled = self._sampler.sample(
                logits.index_select(0, lines), rows, some.at[going] + step, some.num_outputs[going] + step
            )
            for row, line in sampled.logprobs.items():
                out.logprobs.setdefault(row, []).append(line)
            out.reasons.update(sampled.reasons)
            out.token_ids[part[going]], out.failed[part[going]] = sampled.token_ids, sampled.failed
            out.accepted[part[going]] = step
            if step == some.drafts.shape[1]:
                break
            going = going[sampled.token_ids == some.drafts[going, step]]
            if not len(going):
                break
        behind = ~sound & (offset > out.accepted[part][owner])
        out.tainted.update(some.rows[owner[behind]].tolist())


def _cuts(lines: Ints, max_lines: int) -> list[int]:
    """Return where to split rows with so many lines each, so that no part has more than `max_lines` (or one row)."""
    cuts, held = [], 0
    for i, count in enumerate(lines.tolist()):
        if held and held + count > max_lines:
            cuts.append(i)
            held = 0
        held += count
    return cuts
