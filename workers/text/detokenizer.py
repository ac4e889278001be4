"""Incremental detokenization of growing answers that are streamed, judged by policies or watched for stop strings.

All other answers are decoded in bulk at their end. Both ways give the same characters: the joined pieces of an answer
are always a prefix of its final text.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from workers.text.reasoning import without_marks
from workers.text.token_bytes import without_blanks
from workers.text.tokenizer import CONTEXT_TOKENS, NOTHING_SHOWN, TokenIds, Tokenizer


class _Decoding(Protocol):
    """Decoding state of one answer."""

    @property
    def pending(self) -> str: ...

    def push(self, token_ids: Sequence[int]) -> str: ...


class IncrementalDetokenizer:
    """Decodes a growing answer into pieces that never end within a character. The cost of a token doesn't depend on the
    answer's length."""

    __slots__ = ("_decoding",)

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds, shown: Mapping[int, str] = NOTHING_SHOWN) -> None:
        """`prompt` int32 [prompt_tokens] precedes the answer; `shown`: special tokens that are spelt out."""
        kind = _ByteDecoding if tokenizer.joins_bytes else _NeighbourDecoding
        self._decoding: _Decoding = kind(tokenizer, prompt, shown)

    @property
    def pending(self) -> str:
        """The text that would follow the last piece if the answer ended here: U+FFFD for an incomplete character (two
        for the beginning of a surrogate, which is invalid), else nothing."""
        return self._decoding.pending

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that becomes certain with them."""
        return self._decoding.push(token_ids)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that becomes certain with it."""
        return self._decoding.push((token_id,))


class _ByteDecoding:
    """Decoding for a tokenizer that joins bytes: a UTF-8 decoder that buffers the bytes of an incomplete character."""

    __slots__ = ("_blanks", "_shown", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds, shown: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._blanks = tokenizer.blanks_to_drop(prompt)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._shown:
            return self._decode(token_ids)
        text, start = "", 0
        for at, token_id in enumerate(token_ids):
            if token_id in self._shown:
                text += without_marks(self._decode(token_ids[start:at])) + self._decode((token_id,))
                start = at + 1
        return text + without_marks(self._decode(token_ids[start:]))

    def _decode(self, token_ids: Sequence[int]) -> str:
        raw = self._tokenizer.join_bytes(token_ids, self._shown)
        if self._blanks and raw:
            rest = without_blanks(raw, self._blanks)
            self._blanks = 0 if rest else self._blanks - len(raw)
            raw = rest
        return self._utf8.decode(raw)


class _NeighbourDecoding:
    """Decoding for a tokenizer whose decoder depends on a token's neighbours (WordPiece): the last tokens are decoded
    once more with each token."""

    __slots__ = ("_context", "_shown", "_tokenizer")

    pending = ""

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds, shown: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._context: list[int] = prompt[-CONTEXT_TOKENS:].tolist()

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id in self._shown:
                text += self._shown[token_id]
            elif token_id not in self._tokenizer.special_ids:
                ids = [*self._context, token_id]
                before = self._tokenizer.decode(self._context)
                if piece := self._tokenizer.decode(ids)[len(before) :]:  # an id without text is not context
                    text += without_marks(piece)
                    self._context = ids[-CONTEXT_TOKENS:]
        return text
