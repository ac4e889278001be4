"""How a tokenizer's template puts special tokens around a text and between the texts of a pair.

It is read off one example, so that a text that stands in thousands of pairs is encoded once, and cut as an array: the
Rust tokenizer keeps all that it cuts off, and combines it with what it cuts off the other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from workers.errors import TokenizerError


class FramePart(NamedTuple):
    """A text, or the special tokens before, between or behind texts.

    Attributes:
        text: the text's number; None: `ids` int32 [tokens] stand here.
        type_id: of its tokens.
    """

    text: int | None
    ids: NDArray[np.int32]
    type_id: int


def pair_frame(backend: tokenizers.Tokenizer, texts: int) -> tuple[FramePart, ...]:
    """The parts of an encoded text (`texts` 1) or pair (2), in order. Raises `TokenizerError` for a template that holds
    a text twice, or in another order."""
    given = [_example(backend) for _ in range(texts)]
    found = backend.post_process(given[0], given[1] if texts > 1 else None)
    parts: list[FramePart] = []
    at = number = 0
    while at < len(found.ids):
        text = None if found.special_tokens_mask[at] else number
        length = 1
        if text is not None:
            length = len(given[number].ids) if number < texts else 0
            if not length or found.ids[at : at + length] != given[number].ids:
                raise TokenizerError("the tokenizer's template for texts repeats or reorders them")
            number += 1
        ids = np.asarray(found.ids[at : at + length], dtype=np.int32)
        parts.append(FramePart(text, ids, found.type_ids[at]))
        at += length
    return tuple(parts)


def cut_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """The tokens that are left of a text or of each text of a pair, `room` together: the longer text is cut first."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    short, _ = sorted(lengths)
    short = min(short, room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]


def _example(backend: tokenizers.Tokenizer) -> tokenizers.Encoding:
    """A text of one token or more."""
    texts = chain("a1 ", backend.get_vocab())
    encoded = (backend.encode(text, add_special_tokens=False) for text in texts)
    found = next((encoding for encoding in encoded if len(encoding.ids)), None)
    if found is None:
        raise TokenizerError("the tokenizer encodes no text")
    return found
