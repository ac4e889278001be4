"""Splits the text of an answer into content and tool calls, incrementally for a stream or at once.

The same reader serves both, so the pieces of a stream add up to the finished answer. A call's arguments are the model's
own text, unchanged. A model may write any text (a grammar lets ordinary tokens spell a special marker), so no text is
an error: text that begins as a call and has no name is content.
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
from workers.text.markers import overlap

_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)

MAX_HEAD_CHARS: Final = 4_096
"""Characters from a call's brace to that of its arguments. A name has 64 at most; text with more is no call."""


class AnswerDelta(NamedTuple):
    """A certain piece of an answer: text of the content or of call `call`, whose name comes before its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class _State(Enum):
    CONTENT = "content"
    TEXT = "text"  # content in which no call can begin
    BETWEEN = "between"  # before a call's first brace, or after its last one
    HEAD = "head"  # after a call's brace, before its arguments
    ARGUMENTS = "arguments"


class ToolCallReader:
    """Incrementally splits the text of one answer. Text that is held back is not read again with each piece."""

    def __init__(self, form: ToolFormat) -> None:
        self._opening = form.opening.strip()
        self._state = _State.CONTENT
        self._text = ""  # received, but not processed yet
        self._before: list[str] = []  # the text before it since the last call: content, unless a call follows
        self._calls = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and none of them is incomplete."""
        return self._calls > 0 and self._state is _State.BETWEEN

    def push(self, text: str) -> list[AnswerDelta]:
        """Add text; returns the pieces that are certain now."""
        self._text += text
        found: list[AnswerDelta] = []
        while self._text and self._step(found):
            pass
        return found

    def close(self) -> list[AnswerDelta]:
        """The text that was held back in case a call followed."""
        rest, self._text = "".join([*self._before, self._text]), ""
        return [AnswerDelta(content=rest)] if self._state is _State.CONTENT and rest else []

    def _step(self, found: list[AnswerDelta]) -> bool:
        """Make one state transition. False: more text is needed."""
        match self._state:
            case _State.CONTENT:
                return self._read_content(found)
            case _State.TEXT:
                found.append(AnswerDelta(content=self._text))
                self._text = ""
                return False
            case _State.BETWEEN:
                start = self._text.find("{")
                end = start if start >= 0 else len(self._text)
                self._before.append(self._text[:end])
                self._text = self._text[end:]
                if start < 0:
                    return False
                self._state = _State.HEAD
                return True
            case _State.HEAD:
                return self._read_head(found)
            case _State.ARGUMENTS:
                return self._read_arguments(found)

    def _read_content(self, found: list[AnswerDelta]) -> bool:
        """Read up to the opening. Blanks before it are not content; text that may begin it is held back."""
        text = self._text
        if not self._opening:
            stripped = text.lstrip()
            if not stripped:
                self._before.append(text)
                self._text = ""
            elif stripped.startswith("{"):
                self._before, self._text, self._state = [], stripped, _State.BETWEEN
            else:
                self._text, self._state = "".join([*self._before, text]), _State.TEXT
            return bool(stripped)
        start = text.find(self._opening)
        end = start if start >= 0 else len(text) - overlap(text, self._opening)
        if content := text[:end].rstrip():
            found.append(AnswerDelta(content="".join([*self._before, content])))
            self._before = []
        self._before.append(text[len(content) : end])
        self._text = text[end:]
        if start < 0:
            return False
        self._before.append(self._opening)
        self._text, self._state = text[start + len(self._opening) :], _State.BETWEEN
        return True

    def _read_head(self, found: list[AnswerDelta]) -> bool:
        """Read up to the arguments. If the name is invalid, or they don't come soon, all following text is content."""
        head = _HEAD.match(self._text, 0, MAX_HEAD_CHARS)
        if head is None and len(self._text) < MAX_HEAD_CHARS:
            return False
        name = None if head is None else _name(head[1])
        if head is None or name is None:
            before = "".join(self._before)
            start = before.find(self._opening) if self._calls else 0
            found.append(AnswerDelta(content=before[start:] if start >= 0 else ""))
            self._before, self._state = [], _State.TEXT
            return True
        self._text = self._text[head.end() :]
        found.append(AnswerDelta(call=self._calls, name=name))
        self._calls += 1
        self._before, self._state, self._depth = [], _State.ARGUMENTS, 0
        return True

    def _read_arguments(self, found: list[AnswerDelta]) -> bool:
        """Read up to the brace that closes the arguments."""
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
                    end, self._state = at + 1, _State.BETWEEN
                    break
        piece, self._text = self._text[:end], self._text[end:]
        if piece:
            found.append(AnswerDelta(call=self._calls - 1, arguments=piece))
        return self._state is _State.BETWEEN


def _name(text: str) -> str | None:
    """A call's name, decoded from JSON; None: it is invalid, or has half a surrogate pair, which UTF-8 can't encode."""
    try:
        name: str = json.loads(text)
        name.encode()
    except ValueError:
        return None
    return name


@dataclass(frozen=True, slots=True)
class CallIds:
    """The ids of an answer's calls, which are the same each time it is computed."""

    answer: str
    choice: int
    short: bool

    def of(self, call: int) -> str:
        digest = hashlib.blake2b(f"{self.answer}/{self.choice}/{call}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.short else f"call_{digest}"


class SplitAnswer(NamedTuple):
    """An answer's content and calls, as in OpenAI's API; `whole`: there are calls, and none is incomplete."""

    content: str
    calls: list[dict[str, Any]]
    whole: bool


def split_answer(form: ToolFormat, text: str, ids: CallIds) -> SplitAnswer:
    """Split a finished answer into content and calls."""
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
    return SplitAnswer(content, calls, reader.is_whole)


def stream_deltas(deltas: Iterable[AnswerDelta], ids: CallIds) -> tuple[str, list[dict[str, Any]]]:
    """The content, and `delta.tool_calls` as in OpenAI's streams."""
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
