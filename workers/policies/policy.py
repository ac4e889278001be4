"""Content policies check prompts before any token is computed for them, and answers before their text leaves.

A policy allows or refuses a text; an author of a policy needs only this module of tokenmill. The worker applies the
verdict: a refused prompt fails its row, and a refused answer's text is withheld. A text that a policy could not judge,
because the policy raised, never passes: its row fails with an error that states this. Log records name the row, the
policy and the rule, and quote no text.

Several threads call a policy at the same time.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import structlog

from schemas.requests.errors import RowError, RowErrorCode

_MAX_RULE_CHARS: Final = 100

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """A policy's verdict on a text. `rule`: the rule that refuses it. It is logged and appears in the error, so it must
    not quote the text."""

    allowed: bool
    rule: str = ""


ALLOWED: Final = PolicyVerdict(True)


class JudgedText(NamedTuple):
    """The request of a text. `row`: "JOB/ROW", or the id of an interactive request. `url`: OpenAI's endpoint."""

    row: str
    tenant: str
    model: str
    url: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        texts: the prompt as the model reads it, then the contents, names and calls' arguments of its messages as
            received. For an embeddings request: its inputs.
    """

    about: JudgedText
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model, including its tool calls and thoughts.

    Attributes:
        text: the whole answer; of a growing one, its end.
        start: index in `text` of the first character that has not passed yet. No refused text begins before it.
        ended: the answer is complete.
    """

    about: JudgedText
    text: str
    start: int = 0
    ended: bool = True


class ContentPolicy(Protocol):
    """A policy. It is found by its entry point in the group `tokenmill.content_policies`."""

    @property
    def fingerprint(self) -> str:
        """Identifies the policy's verdicts; it must change when a verdict may change. Stored answers are reused only
        under the same fingerprint."""
        ...

    @property
    def window(self) -> int | None:
        """Characters at the end of a growing answer that may still become part of a refused text; they are held back.
        None: only whole answers can be judged, so no text is emitted before the end. 0: no answer is ever refused."""
        ...

    def before(self, prompt: Prompt) -> PolicyVerdict:
        """Judge a prompt, before any token is computed for it."""
        ...

    def after(self, answer: Answer) -> PolicyVerdict:
        """Judge an answer. While it grows (`ended` false), refuse only text that no further text can make acceptable.
        Each answer is judged once more as a whole, with `start` 0."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a worker, in the order of their calls. Without policies, no text is judged, at no cost.

    Attributes:
        named: pairs of a policy's name in the settings and the policy.
        fingerprint: that of all policies; None: there are none.
    """

    named: tuple[tuple[str, ContentPolicy], ...] = ()
    fingerprint: str | None = field(init=False)

    def __post_init__(self) -> None:
        facts = "\0".join(f"{name}\0{policy.fingerprint}" for name, policy in self.named)
        fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16] if self.named else None
        object.__setattr__(self, "fingerprint", fingerprint)

    def guard(self, about: JudgedText) -> PolicyGuard | None:
        """The guard of a row; None: there are no policies."""
        return PolicyGuard(self, about) if self.named else None

    @property
    def facts(self) -> dict[str, str]:
        """The policies as a manifest records them."""
        names = ", ".join(name for name, _ in self.named)
        return {"content_policies": f"{names} ({self.fingerprint})"} if self.named else {}


NO_POLICIES: Final = Policies()


class PolicyGuard:
    """Checks the texts of one row against all policies.

    Attributes:
        fingerprint: that of the policies.
        window: the largest window of the policies that can judge growing answers; characters.
        holds_all: a policy can't judge growing answers, so no text is emitted before the end.
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
        """Raise `RowError` when a policy refuses the prompt, or fails."""
        prompt = Prompt(self._about, tuple(texts))
        for name, policy in self._policies:
            verdict = self._judge(name, "prompt", policy.before, prompt)
            if not verdict.allowed:
                by = f"content policy {name!r}" + (f", rule {_rule(verdict)!r}" if verdict.rule else "")
                raise RowError(RowErrorCode.CONTENT_FILTER, f"the prompt is refused by {by}; change the prompt")

    def refuses(self, text: str) -> bool:
        """Whether a policy refuses the whole text of an answer. Raises `RowError` when a policy fails."""
        answer = Answer(self._about, text)
        return any(not self._judge(name, "answer", policy.after, answer).allowed for name, policy in self._policies)

    def refuses_growing(self, text: str, start: int) -> bool:
        """Whether a policy refuses the end of a growing answer. Raises `RowError` when a policy fails."""
        answer = Answer(self._about, text, start, ended=False)
        return any(
            not self._judge(name, "answer", policy.after, answer).allowed
            for name, policy in self._policies
            if policy.window
        )

    def _judge(
        self, name: str, what: str, judge: Callable[[Any], PolicyVerdict], text: Prompt | Answer
    ) -> PolicyVerdict:
        try:
            verdict: object = judge(text)
            if not isinstance(verdict, PolicyVerdict):
                raise TypeError("the verdict is no PolicyVerdict")
        except Exception as error:  # noqa: BLE001 - the row fails and the worker continues
            # Neither the error's message nor a traceback is logged: both may quote the text.
            at = traceback.extract_tb(error.__traceback__)[-1]
            kind, where = type(error).__name__, f"{at.filename}:{at.lineno}"
            logger.error("content policy failed", policy=name, row=self._about.row, what=what, error=kind, at=where)
            message = f"content policy {name!r} could not judge the {what} ({kind}), so it is refused; see the log"
            raise RowError(RowErrorCode.ENGINE_ERROR, message) from None
        if not verdict.allowed:
            logger.info("content refused", policy=name, rule=_rule(verdict), row=self._about.row, what=what)
        return verdict


def _rule(verdict: PolicyVerdict) -> str:
    return verdict.rule[:_MAX_RULE_CHARS]


class GrowingAnswer:
    """Judges an answer whose text grows: which characters may be emitted, and whether it may continue.

        | discarded   |  context  |  held back: a window  |  future text
        |------- cleared ---------|
                      |-------------- text ---------------|
                                start

    A refused text is at most a window long, so it is found while all of it is held back.

    Attributes:
        cleared: characters from the answer's beginning that may be emitted.
        refused: the answer must not continue, and no more of it may be emitted.
    """

    __slots__ = ("_guard", "_start", "_text", "cleared", "refused")

    def __init__(self, guard: PolicyGuard) -> None:
        self._guard = guard
        self._text = ""
        self._start = 0
        self.cleared = 0
        self.refused = False

    def push(self, text: str) -> None:
        """Add text. Raises `RowError` when a policy fails."""
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
        context = max(0, end - max(1, window))  # shows a pattern whether a word begins at `start`
        self._text, self._start = self._text[context:], end - context
