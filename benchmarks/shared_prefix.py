"""How many prompt tokens need no computing at best, whatever the order: from a trie of the prompts' token blocks.

A block's keys can be shared when two prompts are equal from their start to the block's end. Of all that share it one
must compute it. The last token of a prompt is always computed, because its hidden state gives the first answer token;
so a block that ends with a prompt is never taken from the cache by that prompt, only given to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np


def best_hits(prompts: Iterable[Sequence[int]], block_size: int) -> int:
    """Most prompt tokens that all prompts together can take from a cache that forgets nothing.

    Args:
        prompts: token ids of each request's prompt, as the engine is given them.
        block_size: tokens a block holds; 1: what could be shared if blocks had no borders.
    """
    holders: Counter[bytes] = Counter()  # a node of the trie is named by the digest of all tokens up to its end
    takers: Counter[bytes] = Counter()
    for prompt in prompts:
        ids = np.ascontiguousarray(prompt, dtype=np.int32)
        state = blake2b(digest_size=16)
        for block in range(len(ids) // block_size):
            state.update(ids[block * block_size : (block + 1) * block_size].tobytes())
            node = state.digest()
            holders[node] += 1
            takers[node] += (block + 1) * block_size < len(ids)
    return block_size * sum(min(takers[node], count - 1) for node, count in holders.items())
