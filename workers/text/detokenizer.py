"""Incremental detokenization of growing answers that are streamed, judged by policies or watched for stop strings.

All other answers are decoded in bulk at their end. Both ways give the same characters: the joined pieces of an answer
are always a prefix of its final text.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

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
                    text += piece
                    self._context = ids[-CONTEXT_TOKENS:]
        return text


class StopStringWatcher:
    """Ends a choice at its first stop string, also across token borders (a `TokenWatcher`). An incomplete character at
    the end is not text yet, so no stop string can match it.

    As with OpenAI, the text ends before the stop string. A stop string counts if it ends in a token after the first
    `min_tokens`. Pushing the same tokens into a new watcher gives the same state.

    Attributes:
        text: the final text once a stop string was found, else None.
    """

    __slots__ = (
        "_detokenizer",
        "_exempt_characters",
        "_ids",
        "_max_tail",
        "_min_tokens",
        "_prompt",
        "_shown",
        "_stops",
        "_tail",
        "_tokenizer",
        "text",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: TokenIds,
        stops: Sequence[str],
        min_tokens: int = 0,
        shown: Mapping[int, str] = NOTHING_SHOWN,
    ) -> None:
        """`prompt` int32 [prompt_tokens]; `stops`: at least one string, none empty; `shown`: special tokens that are
        spelt out."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._shown = shown
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, shown)
        self._stops = tuple(stops)
        self._max_tail = max(map(len, stops)) - 1
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._tail = ""  # the last emitted characters, where a stop string may have begun
        self._exempt_characters = 0  # characters of the first `min_tokens` tokens, where no stop string may end
        self.text: str | None = None

    def push(self, token_id: int) -> bool:
        """Add the next sampled token; returns True once a stop string is complete."""
        self._ids.append(token_id)
        piece = self._detokenizer.push(token_id)
        if len(self._ids) <= self._min_tokens:
            self._exempt_characters += len(piece)
        else:
            window = self._tail + piece
            if any(stop in window for stop in self._stops):
                self.text = self._cut()
        self._tail = (self._tail + piece)[-self._max_tail :] if self._max_tail else ""
        return self.text is not None

    def _cut(self) -> str | None:
        """The whole answer's text before the stop string, or None if it contains none."""
        text = self._tokenizer.decode_showing(self._prompt, self._ids, self._shown)
        text = text.removesuffix(self._detokenizer.pending)
        starts = [text.find(stop, max(0, self._exempt_characters - len(stop) + 1)) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        return text[: min(found)] if found else None
