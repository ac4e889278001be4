"""From the text of an answer to the calls in it, piece by piece as it grows or all at once.

The same reader serves a finished answer and a stream: what is told of an answer in pieces is what its end says. A
call's arguments are the model's own text, not a copy of it. A model may write anything (a grammar lets ordinary tokens
spell a marker that is a special one), so no text is an error: what begins as a call and has no name is content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from workers.structured.tool_formats import ToolFormat

_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


class AnswerDelta(NamedTuple):
    """Something that became certain: text of the content, or of call `call`: its name first, then its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class _At(Enum):
    CONTENT = "content"
    TEXT = "text"  # content in which no call can begin any more
    BETWEEN = "between"  # in front of a call's brace, or behind its last one
    HEAD = "head"  # behind a call's brace, in front of its arguments
    ARGUMENTS = "arguments"


class ToolCallReader:
    """Splits the text of one answer."""

    def __init__(self, form: ToolFormat) -> None:
        self._opening = form.opening.strip()
        self._at = _At.CONTENT
        self._text = ""  # read, but not yet understood
        self._before = ""  # what stood before it since the last call: content, unless one follows
        self._calls = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def whole(self) -> bool:
        """Whether there are calls, and none of them is cut off."""
        return self._calls > 0 and self._at is _At.BETWEEN

    def push(self, text: str) -> list[AnswerDelta]:
        """What the next piece of text makes certain."""
        self._text += text
        found: list[AnswerDelta] = []
        while self._text and self._step(found):
            pass
        return found

    def close(self) -> list[AnswerDelta]:
        """What was held back in case that a call followed."""
        kept, self._text = self._text, ""
        return [AnswerDelta(content=kept)] if self._at is _At.CONTENT and kept else []

    def _step(self, found: list[AnswerDelta]) -> bool:
        """One move; False: more text is needed."""
        match self._at:
            case _At.CONTENT:
                return self._read_content(found)
            case _At.TEXT:
                found.append(AnswerDelta(content=self._text))
                self._text = ""
                return False
            case _At.BETWEEN:
                start = self._text.find("{")
                end = start if start >= 0 else len(self._text)
                self._before, self._text = self._before + self._text[:end], self._text[end:]
                if start < 0:
                    return False
                self._at = _At.HEAD
                return True
            case _At.HEAD:
                return self._read_head(found)
            case _At.ARGUMENTS:
                return self._read_arguments(found)

    def _read_content(self, found: list[AnswerDelta]) -> bool:
        """Up to the opening. Blanks before it are no content; text that may be its beginning is held back."""
        text = self._text
        if not self._opening:
            stripped = text.lstrip()
            if stripped.startswith("{"):
                self._text, self._at = stripped, _At.BETWEEN
                return True
            if not stripped:
                return False
            self._at = _At.TEXT
            return True
        start = text.find(self._opening)
        end = start if start >= 0 else len(text) - _overlap(text, self._opening)
        end = len(text[:end].rstrip())
        if end:
            found.append(AnswerDelta(content=text[:end]))
        if start < 0:
            self._text = text[end:]
            return False
        behind = start + len(self._opening)
        self._before, self._text, self._at = text[end:behind], text[behind:], _At.BETWEEN
        return True

    def _read_head(self, found: list[AnswerDelta]) -> bool:
        """Up to the arguments. Where the name is none, nothing from here on is a call."""
        head = _HEAD.match(self._text)
        if head is None:
            return False
        name = _name(head[1])
        if name is None:
            start = self._before.find(self._opening) if self._calls else 0
            found.append(AnswerDelta(content=self._before[start:] if start >= 0 else ""))
            self._before, self._at = "", _At.TEXT
            return True
        self._text = self._text[head.end() :]
        found.append(AnswerDelta(call=self._calls, name=name))
        self._calls += 1
        self._before, self._at, self._depth = "", _At.ARGUMENTS, 0
        return True

    def _read_arguments(self, found: list[AnswerDelta]) -> bool:
        """Up to the brace that closes the arguments."""
        end = len(self._text)
        for at, char in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    end, self._at = at + 1, _At.BETWEEN
                    break
        piece, self._text = self._text[:end], self._text[end:]
        if piece:
            found.append(AnswerDelta(call=self._calls - 1, arguments=piece))
        return self._at is _At.BETWEEN


def _name(text: str) -> str | None:
    """A call's name, from JSON; None: it is none, or holds half a surrogate pair, which no answer could say."""
    try:
        name: str = json.loads(text)
        name.encode()
    except ValueError:
        return None
    return name


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


@dataclass(frozen=True, slots=True)
class CallIds:
    """Ids of an answer's calls: the same each time it is computed."""

    answer: str
    choice: int
    short: bool

    def of(self, call: int) -> str:
        digest = hashlib.blake2b(f"{self.answer}/{self.choice}/{call}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.short else f"call_{digest}"


class SplitAnswer(NamedTuple):
    """An answer's content and calls, in OpenAI's shape; `whole`: there are calls, and the last one is not cut off."""

    content: str
    calls: list[dict[str, Any]]
    whole: bool


def split_answer(form: ToolFormat, text: str, ids: CallIds) -> SplitAnswer:
    """The content and the calls of a finished answer."""
    reader = ToolCallReader(form)
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in [*reader.push(text), *reader.close()]:
        content += delta.content
        if delta.name is not None:
            assert delta.call is not None
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": ids.of(delta.call), "type": "function", "function": function})
        if delta.arguments:
            calls[-1]["function"]["arguments"] += delta.arguments
    return SplitAnswer(content, calls, reader.whole)


def told(deltas: Iterable[AnswerDelta], ids: CallIds) -> tuple[str, list[dict[str, Any]]]:
    """Content, and `delta.tool_calls` as OpenAI's streams have them."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.content
        if delta.call is None:
            continue
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"index": delta.call, "id": ids.of(delta.call), "type": "function", "function": function})
        elif calls and calls[-1]["index"] == delta.call:
            calls[-1]["function"]["arguments"] += delta.arguments
        else:
            calls.append({"index": delta.call, "function": {"arguments": delta.arguments}})
    return content, calls
