"""Splits the text of an answer into the model's reasoning (its thought) and the answer proper, incrementally for a
stream or at once.

Each family of models marks its thought in its own way, which its chat template shows (`FORMATS`). Depending on the
tokenizer, a marker is one token, several, or plain text. A marker that is a token is recognized by the token: ordinary
tokens that spell it are text. White space beside a marker belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from workers.text.markers import cut_at, overlap

TOKEN_MARK: Final = "\ufdd1"
"""Follows the spelling of a marker's token in decoded text. Unicode reserves this character for internal use; where
ordinary tokens write it, decoding replaces it (`without_marks`)."""

REPLACEMENT: Final = "\ufffd"

TAIL_TOKENS: Final = 24
"""Last tokens of a prompt among which the template may have begun or ended a thought."""

MIN_TOKEN_CHARS: Final = 3
"""Of a marker's token; some vocabularies have a new line as such a token."""

NO_PARSER: Final = "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its thought.

    Attributes:
        opening: begins a thought.  closing: ends it; the answer follows.
        direct: begins an answer without a thought.
        answers, others: markers that begin another part of the answer, or none.
    """

    opening: str
    closing: str
    direct: str = ""
    answers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


_FINAL: Final = "<|channel|>final<|message|>"

FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    # Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, SmolLM 3, Phi-4-reasoning, Nemotron, OLMo 3, MiniMax M2 and others
    "think": ReasoningFormat("<think>", "</think>"),
    # gpt-oss: harmony's channels. The comments to the user between calls are a part of the answer.
    "gpt_oss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        f"<|end|><|start|>assistant{_FINAL}",
        direct=_FINAL,
        answers=(_FINAL, "<|channel|>commentary<|message|>", "<|end|>"),
        others=("<|start|>assistant",),
    ),
    # Magistral
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", others=("<|channel>",)),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    # Granite 3.2 and 3.3, in plain text
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
"""The known formats by the names of `--reasoning-parser`. A model has the first one that its chat template shows."""

_SHOWN_BY: Final[Mapping[str, str]] = {
    "gpt_oss": "<|channel|>analysis",
    "gemma4": "<|channel>thought",
    "granite": "my thought process",
}
"""What a template writes that has the format; otherwise its closing marker."""


def format_of(template: str | None, parser: str | None) -> ReasoningFormat | None:
    """The format of a model with this chat template; None: it marks no thought. `parser`: a name in `FORMATS` that
    replaces the detection, or `NO_PARSER`."""
    if parser is not None:
        return FORMATS.get(parser)
    if template is None:
        return None
    return next((form for name, form in FORMATS.items() if _SHOWN_BY.get(name, form.closing) in template), None)


def without_marks(text: str) -> str:
    """The text of ordinary tokens, in which no token of a marker stands."""
    return text.replace(TOKEN_MARK, REPLACEMENT)


class ReasoningMarkers:
    """The markers of a format in the vocabulary of one model.

    Attributes:
        shown: tokens of the markers; decoded text has to spell them (`TOKEN_MARK`) to be split.
        is_plain: no marker has a token. An answer may mention such a marker, so no thought begins within its text.
        opening, closing: as decoded.  max_length: of a marker, in characters.
    """

    def __init__(self, form: ReasoningFormat, added_tokens: Mapping[int, str]) -> None:
        """`added_tokens`: ids and texts of the tokens that are matched whole."""
        self.form = form
        texts = {form.opening: True, form.closing: False, form.direct: False}
        texts |= dict.fromkeys(form.answers, False)
        given = [*texts, *form.others]
        self.shown = {
            token_id: text + TOKEN_MARK
            for token_id, text in added_tokens.items()
            if len(text) >= MIN_TOKEN_CHARS and any(text in marker for marker in given)
        }
        self.is_plain = not self.shown
        self._spellings = {text.removesuffix(TOKEN_MARK): token_id for token_id, text in self.shown.items()}
        self.opening, self.closing = self._decoded(form.opening), self._decoded(form.closing)
        # What the model does behind each marker: it thinks (True), answers (False), or goes on as before (None).
        self.thinks_behind: dict[str, bool | None] = dict.fromkeys(self.shown.values())
        self.thinks_behind |= {self._decoded(text): None for text in form.others}
        self.thinks_behind |= {self._decoded(text): thinks for text, thinks in texts.items() if text}
        by_length = sorted(self.thinks_behind, key=len, reverse=True)
        self.max_length = len(by_length[0])
        self.pattern = re.compile("|".join(map(re.escape, by_length)))

    def pieces(self, text: str) -> list[str | int]:
        """A marker as its tokens, and the text that is not one token."""
        return [self._spellings.get(piece, piece) for piece in cut_at(text, self._spellings)]

    def _decoded(self, text: str) -> str:
        return "".join(piece if isinstance(piece, str) else self.shown[piece] for piece in self.pieces(text))

    def state_behind(self, text: str) -> bool | None:
        """Whether a text ends within a thought (True), behind one (False), or has no marker (None)."""
        state = None
        for found in self.pattern.finditer(text):
            behind = self.thinks_behind[found[0]]
            state = state if behind is None else behind
        return state

    def prompt_state(self, text: str) -> bool | None:
        """Whether a prompt with this end has begun a thought (True), ended one (False) or left it to the model
        (None)."""
        text = text.rstrip()
        if text.endswith(self.opening.rstrip()):
            return True
        return False if text.endswith(self.closing.rstrip()) else None


class AnswerPart(NamedTuple):
    """A certain piece of an answer. One of the two is empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningReader:
    """Incrementally splits the decoded text of one answer.

    Args:
        thinks: the prompt has begun a thought.

    Attributes:
        spans: where thoughts are in the pushed text: characters from the end of a marker to the start of the next one;
            complete after `close`.
    """

    def __init__(self, markers: ReasoningMarkers, thinks: bool) -> None:
        self._markers = markers
        self._thinks = thinks
        self._text = ""  # received last, and shorter than a marker: one may begin with it
        self._blanks: list[str] = []  # before it: they belong to a marker if one follows
        self._follows_marker = False  # white space belongs to the marker before it
        self._begun = {True: False, False: False}  # whether thoughts (True) and the text have any characters
        self._resumes = False  # a part of another kind stood before this one: a line ends between them
        self._at = 0  # characters before `_text`
        self._thought_from = 0
        self.spans: list[tuple[int, int]] = []

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; returns the pieces that are certain now."""
        return list(self._read(text, is_end=False))

    def close(self) -> list[AnswerPart]:
        """The text that was held back in case a marker followed."""
        parts = list(self._read("", is_end=True))
        if self._thinks:
            self.spans.append((self._thought_from, self._at))
        return parts

    def _read(self, new: str, *, is_end: bool) -> Iterable[AnswerPart]:
        """Each character is searched a bounded number of times, however an answer is cut into pieces and whatever is
        in it: the pattern goes on behind the last marker, and blanks that are held back are not in `text`."""
        text, at = self._text + new, 0
        while True:
            found = self._markers.pattern.search(text, at)
            begun = len(text) if is_end else self._maybe_begun(text, at)
            if found is None or found.start() >= begun:
                # A longer marker may begin where a shorter one was found, too.
                yield from self._take(text[at:begun])
                if is_end:
                    yield from self._take_blanks()
                self._text, self._at = text[begun:], self._at + begun
                return
            start, end = found.span()
            is_answer = not self._thinks and (self._begun[False] or bool(text[at:start].strip()))
            yield from self._take(text[at:start])
            if is_answer and self._markers.is_plain:  # which mentions the marker
                yield from self._take_blanks()
            else:
                self._blanks.clear()
                self._follow(self._markers.thinks_behind[found[0]], self._at + start, self._at + end)
            at = end

    def _maybe_begun(self, text: str, at: int) -> int:
        """Where behind `at` a marker that isn't complete may begin."""
        end = text[max(at, len(text) - self._markers.max_length) :]
        return len(text) - max(overlap(end, marker) for marker in self._markers.thinks_behind)

    def _take(self, text: str) -> Iterable[AnswerPart]:
        """Emit text without the blanks at its end, which are held back, and without those that belong to a marker."""
        if self._follows_marker:
            text = text.lstrip()
            self._follows_marker = not text
        taken = text.rstrip()
        if taken:
            yield from self._take_blanks()
            yield self._part(taken)
        if len(taken) < len(text):
            self._blanks.append(text[len(taken) :])

    def _take_blanks(self) -> Iterable[AnswerPart]:
        """Emit the blanks that were held back."""
        if self._blanks:
            yield self._part("".join(self._blanks))
            self._blanks.clear()

    def _part(self, text: str) -> AnswerPart:
        if self._resumes and self._begun[self._thinks]:
            text = "\n" + text
        self._resumes, self._begun[self._thinks] = False, True
        return AnswerPart(text, "") if self._thinks else AnswerPart("", text)

    def _follow(self, thinks: bool | None, start: int, end: int) -> None:
        """Skip a marker behind which the model thinks, or does not, or goes on as before (None). `start`, `end`: its
        characters in the pushed text."""
        if self._thinks and thinks is not True:
            self.spans.append((self._thought_from, start))
            self._thought_from = end
        if thinks is True and not self._thinks:
            self._thought_from = end
        self._resumes = True
        self._thinks = self._thinks if thinks is None else thinks
        self._follows_marker = True


class SplitReasoning(NamedTuple):
    """A finished answer: its thought (None: it has none), its text, and where thoughts are in the decoded text."""

    reasoning: str | None
    content: str
    spans: list[tuple[int, int]]


def split_reasoning(markers: ReasoningMarkers, text: str, *, thinks: bool | None) -> SplitReasoning:
    """Split a finished answer's decoded text.

    `thinks`: whether the prompt has begun the thought, or ended it (False), or left it to the model (None). A model to
    which it is left may forget the marker that begins a thought: where the first one in the answer ends a thought, all
    before it is the thought, as with vLLM's parsers. Where markers are plain text it isn't, since an answer may mention
    one; nor in a stream (`ReasoningReader`), which has given it out as the answer before the marker came.
    """
    if thinks is None and not markers.is_plain:
        first = markers.pattern.search(text)
        thinks = first is not None and first[0] == markers.closing
    reader = ReasoningReader(markers, bool(thinks))
    parts = [*reader.push(text), *reader.close()]
    reasoning = "".join(part.reasoning for part in parts)
    return SplitReasoning(reasoning or None, "".join(part.content for part in parts), reader.spans)
