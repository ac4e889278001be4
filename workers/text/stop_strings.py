"""Stop strings: they end an answer by its text. End tokens and stop tokens end it by a token id, in the engine
(`engine.scheduler.stop_tokens`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.tokenizer import NOTHING_SHOWN, TokenIds, Tokenizer


class StopStringWatcher:
    """Ends a choice at its first stop string, also across token borders (a `TokenWatcher`). An incomplete character at
    the end is not text yet, so no stop string can match it.

    As with OpenAI, the text ends before the stop string, or behind it where `includes_stop`. A stop string counts if it
    ends in a token after the first `min_tokens`. Pushing the same tokens into a new watcher gives the same state.

    Attributes:
        text: the final text once a stop string was found, else None.  stop: that string.
    """

    __slots__ = (
        "_detokenizer",
        "_exempt_characters",
        "_ids",
        "_includes_stop",
        "_max_tail",
        "_min_tokens",
        "_prompt",
        "_shown",
        "_stops",
        "_tail",
        "_tokenizer",
        "stop",
        "text",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: TokenIds,
        stops: Sequence[str],
        min_tokens: int = 0,
        shown: Mapping[int, str] = NOTHING_SHOWN,
        *,
        includes_stop: bool = False,
    ) -> None:
        """`prompt` int32 [prompt_tokens]; `stops`: at least one string, none empty; `shown`: special tokens that are
        spelt out."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._shown = shown
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, shown)
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._max_tail = max(map(len, stops)) - 1
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._tail = ""  # the last emitted characters, where a stop string may have begun
        self._exempt_characters = 0  # characters of the first `min_tokens` tokens, where no stop string may end
        self.text: str | None = None
        self.stop: str | None = None

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
        """The whole answer's text before its first stop string (or up to that one's end), or None if it contains
        none."""
        text = self._tokenizer.decode_showing(self._prompt, self._ids, self._shown)
        text = text.removesuffix(self._detokenizer.pending)
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, self._exempt_characters - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop)))
        if not found:
            return None
        start, end = min(found)
        self.stop = text[start:end]
        return text[: end if self._includes_stop else start]
