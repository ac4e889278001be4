"""Token ids to text while an answer grows: for rows with stop strings only.

Rows without stop strings never come here; their text is decoded in bulk at the end. A row with stop strings is
decoded incrementally, but only to notice a stop: what the user gets is cut from the text of the whole answer, so both
ways give the same characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from workers.tokenizer import CONTEXT_TOKENS, TokenIds, Tokenizer

REPLACEMENT: Final = "\ufffd"
MAX_PENDING: Final = 8
"""Tokens that may wait for the rest of a character. UTF-8 needs four; beyond, the bytes are broken for good."""


NOTHING_SHOWN: Final[Mapping[int, str]] = MappingProxyType({})


class IncrementalDetokenizer:
    """The text of a growing answer, in pieces that never end in half a character.

    Two offsets into the tokens do it (as in Hugging Face's text-generation-inference): tokens before `_read` have been
    given out, and decoding starts at `_prefix`, a few tokens earlier, so that the decoder sees what stands before. The
    cost of a token doesn't depend on the length of the answer.

    Attributes:
        pending: text behind the last piece that may still change; a U+FFFD at its end is the start of a character.
    """

    __slots__ = ("_ids", "_read", "_shown", "_tokenizer", "pending")

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds, shown: Mapping[int, str] = NOTHING_SHOWN) -> None:
        """`prompt` int32 [prompt_tokens] is what the answer follows; `shown`: special tokens that are spelt out."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._ids: list[int] = prompt[-CONTEXT_TOKENS:].tolist()
        self._read = len(self._ids)
        self.pending = ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that became certain with them: what `push` would give one by one, for
        two decodings instead of two for each."""
        special = self._tokenizer.special_ids
        if len(token_ids) > 1 and not any(one in special or one in self._shown for one in token_ids):
            ids = [*self._ids, *token_ids]
            piece = self._piece(ids)
            if piece and not piece.endswith(REPLACEMENT):
                self.pending, self._ids = "", ids[self._read :]
                self._read = len(self._ids)
                return piece
        return "".join(map(self.push, token_ids))

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that became certain with it."""
        if token_id in self._shown:
            piece, self.pending = self.pending + self._shown[token_id], ""
            self._read = len(self._ids)
            return piece
        if token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        piece = self._piece(self._ids)
        unfinished = not piece or piece.endswith(REPLACEMENT)
        if unfinished and len(self._ids) - self._read < MAX_PENDING:
            self.pending = piece
            return ""
        self.pending = ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return piece

    def _piece(self, ids: list[int]) -> str:
        """The text behind what was given out."""
        before = self._tokenizer.decode(ids[: self._read])
        return self._tokenizer.decode(ids)[len(before) :]


class StopStringWatcher:
    """Ends a choice at its first stop string, wherever that lies across token borders (a `TokenWatcher`).

    Like OpenAI's, the text ends before the stop string. A stop string counts if it ends in a token behind the first
    `min_tokens`. Pushing the same tokens into a new watcher brings it to the same state.

    Attributes:
        text: the final text once a stop string was found, else None.
    """

    __slots__ = (
        "_detokenizer",
        "_free",
        "_ids",
        "_keep",
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
        self._keep = max(map(len, stops)) - 1
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._tail = ""  # the last characters given out: a stop string may have begun there
        self._free = 0  # characters of the first `min_tokens` tokens, where no stop string may end
        self.text: str | None = None

    def push(self, token_id: int) -> bool:
        """Take the next sampled token; True once a stop string is complete."""
        self._ids.append(token_id)
        piece = self._detokenizer.push(token_id)
        pending = self._detokenizer.pending
        if len(self._ids) <= self._min_tokens:
            self._free += len(piece) + (len(pending.rstrip(REPLACEMENT)) if len(self._ids) == self._min_tokens else 0)
        else:
            window = self._tail + piece + pending
            if any(stop in window for stop in self._stops):
                self.text = self._cut()
        self._tail = (self._tail + piece)[-self._keep :] if self._keep else ""
        return self.text is not None

    def _cut(self) -> str | None:
        """The text of the whole answer up to the stop string, or None if it is not in there."""
        text = self._tokenizer.decode_showing(self._prompt, self._ids, self._shown)
        starts = [text.find(stop, max(0, self._free - len(stop) + 1)) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        return text[: min(found)] if found else None
