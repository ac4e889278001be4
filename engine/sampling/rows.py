"""Row-indexed sampling parameters: one array per parameter, so that a step selects and computes without a loop.

Parameters that only some rows have (bias, end tokens to hold back, masks, penalty slots) are stored separately, and
only these rows are visited for them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.request import Request, SamplingParams, TokenMask
from engine.sampling.draw import scale_of_temperature
from engine.sampling.penalties import PenaltyTable
from engine.sampling.philox import fold_seed
from engine.sampling.token_bans import BadWordPrefixes

MASK_FAILED = "token mask failed"
"""Begins the reason of a row whose mask raised; the exception's class and message follow."""

NO_SLOT = -1
OFF = -1
LARGEST = float(np.finfo(np.float32).max)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check parameters against the vocabulary; for `Engine.add`.

    Raises:
        RequestRefused: a listed token outside the vocabulary, more log-probabilities than it has tokens, or a bias or
            penalty that is NaN or, in float32, infinite (a bias of -inf bans its token).
    """
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("prompt_targets", (token for _, token in params.prompt_targets)),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise RequestRefused(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}")
    if params.bans is not None:
        params.bans.check(vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None and count > vocab_size:
            raise RequestRefused(f"{name} is {count}, but the vocabulary has {vocab_size} tokens")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"logit_bias names token {token}, but the vocabulary ends at {vocab_size - 1}")
        if not bias <= LARGEST:
            raise RequestRefused(f"logit_bias of token {token} is {bias}, but must be a number or -inf")
    for name in ("frequency_penalty", "presence_penalty"):
        if not abs(value := getattr(params, name)) <= LARGEST:
            raise RequestRefused(f"{name} is {value}, but must be finite")


class RowParams:
    """Parameters of each row's present sequence.

    Attributes (R = max_num_seqs rows):
        greedy: bool [R].  scale: float32 [R], log2(e) / temperature.  top_k: int64 [R], 0 is off (also when it spans
            the vocabulary).  top_p: float64 [R].  min_p: float32 [R].
        repetition, frequency, presence: float32 [R].  penalty_slot: int64 [R], or `NO_SLOT`.
        seed: uint64 [R] (folded).  choice: int64 [R].
        min_tokens: int64 [R].  logprobs: int64 [R], `OFF` or k.
        special: bool [R], rows that need more than temperature and filters; the fast paths check only this.
        awaited: bool [R], of them those whose tokens the host needs one by one (`Request.awaited`).
        bias: row -> (token ids int64, values float32).  end_tokens: row -> int64.  masks: row -> its mask.
        allowed: row -> tokens that are allowed at each position, int32 [ceil(vocab / 32)].  bad_words: row -> its bad
            words of several tokens.
        broken: row -> its mask's exception; the row fails when it is sampled next.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.greedy = np.ones(max_num_seqs, dtype=np.bool_)
        self.special = np.zeros(max_num_seqs, dtype=np.bool_)
        self.awaited = np.zeros(max_num_seqs, dtype=np.bool_)
        self.scale = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.penalty_slot = np.full(max_num_seqs, NO_SLOT, dtype=np.int64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.choice = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.logprobs = np.full(max_num_seqs, OFF, dtype=np.int64)
        self.penalties = PenaltyTable()
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.end_tokens: dict[int, NDArray[np.int64]] = {}
        self.masks: dict[int, TokenMask] = {}
        self.allowed: dict[int, NDArray[np.int32]] = {}
        self.bad_words: dict[int, BadWordPrefixes] = {}
        self.broken: dict[int, str] = {}

    def assign(self, row: int, request: Request, choice: int, known: NDArray[np.int32], prompt_len: int) -> None:
        """See `Sampler.assign`."""
        self.release(row)
        params = request.params
        self.greedy[row] = params.greedy
        self.scale[row] = scale_of_temperature(params.temperature)
        self.top_k[row] = params.top_k if params.top_k < self._vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = fold_seed(params.seed)
        self.choice[row] = choice
        self.logprobs[row] = OFF if params.logprobs is None else params.logprobs
        self.min_tokens[row] = params.min_tokens
        self._assign_penalties(row, params, known, prompt_len)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
            self.bias[row] = (ids, np.fromiter(params.logit_bias.values(), dtype=np.float32))
        if params.min_tokens > 0:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
            self.end_tokens[row] = np.array([t for t in sorted(ends) if 0 <= t < self._vocab_size], dtype=np.int64)
        if request.mask is not None:
            self._assign_mask(row, request.mask, choice, known[prompt_len:])
        if (bans := params.bans) is not None:
            if (allowed := bans.static_mask(self._vocab_size)) is not None:
                self.allowed[row] = allowed
            if bans.long_words is not None:
                self.bad_words[row] = BadWordPrefixes(bans.long_words, known[prompt_len:])
        self.special[row] = (
            params.logprobs is not None
            or params.min_tokens > 0
            or bool(params.logit_bias)
            or request.mask is not None
            or row in self.allowed
            or row in self.bad_words
            or self.penalty_slot[row] != NO_SLOT
        )
        self.awaited[row] = request.awaited

    def release(self, row: int) -> None:
        """Release the state of the row's sequence."""
        if self.penalty_slot[row] != NO_SLOT:
            self.penalties.release(int(self.penalty_slot[row]))
            self.penalty_slot[row] = NO_SLOT
        self.bias.pop(row, None)
        self.end_tokens.pop(row, None)
        self.masks.pop(row, None)
        self.allowed.pop(row, None)
        self.bad_words.pop(row, None)
        self.broken.pop(row, None)
        self.special[row] = self.awaited[row] = False
        self.greedy[row] = True

    def record(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Update penalties, bad words and masks with the tokens of these special rows; int32 [n] each."""
        slots = self.penalty_slot[rows]
        penalised = slots != NO_SLOT
        if penalised.any():
            self.penalties.add(slots[penalised], tokens[penalised])
        if self.masks or self.bad_words:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self.bad_words:
                    self.bad_words[row].push(token)
                if row in self.masks:
                    try:
                        self.masks[row].advance(token)
                    except Exception as error:  # noqa: BLE001 - it becomes this row's result
                        self.break_mask(row, error)

    def break_mask(self, row: int, error: Exception) -> None:
        """Fail one row: a mask is one request's own code, so its exception does not affect other rows."""
        self.masks.pop(row, None)
        self.broken[row] = f"{MASK_FAILED}: {type(error).__name__}: {error}"

    def _assign_mask(self, row: int, make: Callable[[int], TokenMask], choice: int, output: NDArray[np.int32]) -> None:
        try:
            mask = make(choice)
            for token in output.tolist():
                mask.advance(token)
        except Exception as error:  # noqa: BLE001 - it becomes this row's result
            self.break_mask(row, error)
        else:
            self.masks[row] = mask

    def _assign_penalties(self, row: int, params: SamplingParams, known: NDArray[np.int32], prompt_len: int) -> None:
        self.repetition[row] = params.repetition_penalty
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            # Only repetition looks at the prompt; without it the list stays as short as the output.
            prompt = known[:prompt_len] if params.repetition_penalty != 1 else known[:0]
            self.penalty_slot[row] = self.penalties.assign(prompt, known[prompt_len:])
