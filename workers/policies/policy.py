"""Content policies: they judge prompts before a token is computed for them, and answers before their text leaves.

A policy looks at text and says yes or no; who writes one needs nothing of tokenmill but this module. What follows from
a verdict is done here and by those who call: a refused prompt fails its row, a refused answer's text is withheld. What
a policy could not judge, because it raised, is never let through: the row fails, and says so. Logs name the row, the
policy and the rule, and quote no text.

Policies are called by several threads at once.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import structlog

from schemas.requests.errors import RowError, RowErrorCode

_MOST_RULE_CHARS: Final = 100

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """What a policy says of a text. `rule`: what refuses it. It is told and logged, so it must not quote the text."""

    allowed: bool
    rule: str = ""


ALLOWED: Final = PolicyVerdict(True)


class JudgedText(NamedTuple):
    """Whose text it is. `row`: "JOB/ROW", or the id of a request whose caller waits. `url`: OpenAI's endpoint."""

    row: str
    tenant: str
    model: str
    url: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked.

    Attributes:
        texts: the prompt as the model reads it, then the contents, names and calls' arguments of its messages as they
            came. Of a request for embeddings each text.
    """

    about: JudgedText
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: what the model wrote, calls and thoughts included.

    Attributes:
        text: all of it; or, of one that grows, its end.
        start: where in `text` that begins which was not let through yet; nothing that is refused begins before.
        ended: nothing follows.
    """

    about: JudgedText
    text: str
    start: int = 0
    ended: bool = True


class ContentPolicy(Protocol):
    """What judges. Found by its entry point in the group `tokenmill.content_policies`."""

    @property
    def fingerprint(self) -> str:
        """Another one whenever a verdict may be another: answers that are kept are given again under the same only."""
        ...

    @property
    def window(self) -> int | None:
        """Characters at the end of a growing answer that may still become part of what is refused; so many are held
        back. None: only whole answers can be judged, so nothing of one is told before its end. 0: no answer is ever
        refused."""
        ...

    def before(self, prompt: Prompt) -> PolicyVerdict:
        """Of a prompt, before anything is computed for it."""
        ...

    def after(self, answer: Answer) -> PolicyVerdict:
        """Of an answer. While it grows (`ended` false) only what no further text can mend is to be refused; each answer
        comes once more as a whole, with `start` 0."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a worker, in the order in which they are asked. None: nothing is judged, which costs nothing.

    Attributes:
        named: each with the name by which it was chosen.
        fingerprint: of all of them; None: there are none.
    """

    named: tuple[tuple[str, ContentPolicy], ...] = ()
    fingerprint: str | None = field(init=False)

    def __post_init__(self) -> None:
        facts = "\0".join(f"{name}\0{policy.fingerprint}" for name, policy in self.named)
        fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16] if self.named else None
        object.__setattr__(self, "fingerprint", fingerprint)

    def guard(self, about: JudgedText) -> PolicyGuard | None:
        """What judges this row; None: nobody does."""
        return PolicyGuard(self, about) if self.named else None

    @property
    def facts(self) -> dict[str, str]:
        """What a manifest says of them."""
        names = ", ".join(name for name, _ in self.named)
        return {"content_policies": f"{names} ({self.fingerprint})"} if self.named else {}


NO_POLICIES: Final = Policies()


class PolicyGuard:
    """Judges the texts of one row.

    Attributes:
        fingerprint: of the policies.
        window: the largest of those that can judge growing answers; characters.
        holds_all: one of them can't: nothing is told before the end.
    """

    __slots__ = ("_about", "_policies", "fingerprint", "holds_all", "window")

    def __init__(self, policies: Policies, about: JudgedText) -> None:
        self._policies = policies.named
        self._about = about
        self.fingerprint = policies.fingerprint
        windows = [policy.window for _, policy in policies.named]
        self.window = max((window for window in windows if window is not None), default=0)
        self.holds_all = None in windows

    def check_prompt(self, texts: Sequence[str]) -> None:
        """Raises `RowError` when a policy refuses the prompt, or fails."""
        prompt = Prompt(self._about, tuple(texts))
        for name, policy in self._policies:
            verdict = self._ask(name, "prompt", policy.before, prompt)
            if not verdict.allowed:
                by = f"content policy {name!r}" + (f", rule {_rule(verdict)!r}" if verdict.rule else "")
                raise RowError(RowErrorCode.CONTENT_FILTER, f"the prompt is refused by {by}; change the prompt")

    def refuses(self, text: str) -> bool:
        """Whether the whole text of an answer must not be told. Raises `RowError` when a policy fails."""
        answer = Answer(self._about, text)
        return any(not self._ask(name, "answer", policy.after, answer).allowed for name, policy in self._policies)

    def refuses_growing(self, text: str, start: int) -> bool:
        """The same of an answer's end, from which on more follows."""
        answer = Answer(self._about, text, start, ended=False)
        return any(
            not self._ask(name, "answer", policy.after, answer).allowed
            for name, policy in self._policies
            if policy.window
        )

    def _ask(self, name: str, what: str, judge: Callable[[Any], PolicyVerdict], text: Prompt | Answer) -> PolicyVerdict:
        try:
            verdict: object = judge(text)
            if not isinstance(verdict, PolicyVerdict):
                raise TypeError("no Verdict")
        except Exception as error:  # noqa: BLE001 - whatever it raises, the row fails and the worker goes on
            # Neither the error's message nor a traceback: both may quote the text.
            at = traceback.extract_tb(error.__traceback__)[-1]
            kind, where = type(error).__name__, f"{at.filename}:{at.lineno}"
            logger.error("content policy failed", policy=name, row=self._about.row, what=what, error=kind, at=where)
            message = f"content policy {name!r} could not judge the {what} ({kind}), so it is refused; see the log"
            raise RowError(RowErrorCode.ENGINE_ERROR, message) from None
        if not verdict.allowed:
            logger.info("content refused", policy=name, rule=_rule(verdict), row=self._about.row, what=what)
        return verdict


def _rule(verdict: PolicyVerdict) -> str:
    return verdict.rule[:_MOST_RULE_CHARS]


class GrowingAnswer:
    """An answer whose text comes piece by piece: what of it may be told, and whether it is to go on at all.

        |  forgotten  |  context  |  held back: a window  |  comes next
        |------- cleared ---------|
                      |-------------- text ---------------|
                                start

    What is refused within a window is found while all of it is held back: it begins in there, or in what comes next.

    Attributes:
        cleared: characters, from the beginning, that may be told.
        refused: the answer must not go on; nothing more of it may be told.
    """

    __slots__ = ("_guard", "_start", "_text", "cleared", "refused")

    def __init__(self, guard: PolicyGuard) -> None:
        self._guard = guard
        self._text = ""
        self._start = 0
        self.cleared = 0
        self.refused = False

    def push(self, text: str) -> None:
        """More of it. Raises `RowError` when a policy fails."""
        if not text or self.refused:
            return
        window = self._guard.window
        self._text += text
        self.refused = self._guard.refuses_growing(self._text, self._start)
        if self.refused:
            return
        end = max(self._start, len(self._text) - window)
        if not self._guard.holds_all:
            self.cleared += end - self._start
        kept = max(0, end - max(1, window))  # as context: whether a word begins at `start` is seen in front of it
        self._text, self._start = self._text[kept:], end - kept
