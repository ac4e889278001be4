"""Counter-based randomness: the uniform of a draw is a function of (seed, choice, position) and of nothing else.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) enciphers a counter
under a key. Here the key is the seed, the counter is (position, choice, lane, 0), so there is no stream to advance,
save or restore: preemption, other rows of the batch and other workers cannot change a draw.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def fold_seed(seed: int) -> int:
    """Any Python int as 64 bits: two's complement where that is exact, else a hash of all its bytes."""
    if -(1 << 63) <= seed < (1 << 64):
        return seed & 0xFFFFFFFFFFFFFFFF
    data = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def philox4x32(
    counter: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
    key: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Philox4x32-10 of many counters at once.

    Args:
        counter: four uint64 [S], each holding 32 bits.
        key: uint64 [S]; the first key word is its low half.

    Returns:
        uint64 [4, S], each entry holding 32 bits.
    """
    even = np.stack((counter[0], counter[2]))  # the words that are multiplied
    odd = np.stack((counter[1], counter[3]))  # the words that are mixed in
    round_keys = (np.stack((key & _LOW, key >> _WORD)) + _KEY_STEPS) & _LOW
    for round_key in round_keys:
        product = even * _MULTIPLIERS
        # The high half of each product is combined with the other pair's odd word.
        even = (product >> _WORD)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64], lane: int = 0
) -> NDArray[np.float64]:
    """One uniform in [0, 1), with 53 random bits, of each (folded seed, choice, position); float64 [S] from [S]s. Each
    `lane` gives others."""
    zero = np.zeros(len(seeds), dtype=np.uint64)
    words = philox4x32((positions.astype(np.uint64), choices.astype(np.uint64), zero + np.uint64(lane), zero), seeds)
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    scaled: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return scaled
