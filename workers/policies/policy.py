"""Content policies check prompts before any token is computed for them, and answers before their text leaves.

A policy lets a text pass, flags it, refuses it, or sends a prompt to another model; an author of a policy needs only
this module of tokenmill. The worker applies the verdict: a refused prompt fails its row, and a refused answer's text is
withheld. A text that a policy could not judge, because the policy raised, never passes: its row fails with an error
that states this. Log records name the row, the policy and the rule, and quote no text.

Several threads call a policy at the same time.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, get_args

import structlog

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.policy_report import ContentVerdict, JudgedSide, PolicyAction, PolicyReport
from workers.policies.counts import PolicyCounts
from workers.policies.retry import JudgingInterrupted, PolicyRetry

_MAX_RULE_CHARS: Final = 100
_MAX_MODEL_CHARS: Final = 1_000

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """A policy's verdict on a text.

    Attributes:
        action: what happens to the text: it is refused; or passes and is `flag`ged in the result; or the request of
            this prompt is sent to `model` (`route`; an answer is refused instead). None: it passes.
        rule: the rule that decided. It is logged and appears in results and errors, so it must not quote the text.
        model: the name of the model of a `route`.
        prompt_tokens, completion_tokens: of a model that judged the text.
        failed: the policy could not judge the text, and is configured to decide this nevertheless.
    """

    action: PolicyAction | None = None
    rule: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: bool = False


ALLOWED: Final = PolicyVerdict()
SEVERITY: Final = {"refuse": 3, "route": 2, "flag": 1, None: 0}
"""Of several verdicts on a text the one with the largest number counts."""


class PromptRouted(RowError):
    """Raised when a policy sends the request of a prompt to another model. Where a request can't be sent on it is the
    row's error.

    Attributes:
        policy, model: the policy's name, and the model's.
        report: all verdicts on the prompt.
    """

    def __init__(self, policy: str, verdict: PolicyVerdict, report: PolicyReport) -> None:
        by = _named(policy, verdict)
        super().__init__(
            RowErrorCode.CONTENT_FILTER,
            f"{by} routes the prompt to model {verdict.model!r}, and rows of a job stay with their model; "
            "send the row again with that model",
        )
        self.policy = policy
        self.model = verdict.model
        self.report = report


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
    """A policy. It is found by its entry point in the group `tokenmill.content_policies`.

    A policy that waits for another process has an attribute `concurrency`: how many texts it judges at a time. If it
    raises `workers.policies.retry.PolicyUnavailable`, rows of jobs wait for up to its attribute `retry_seconds` until
    its method `is_available()`, which several threads call, returns true.
    """

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
        chosen: the policies as the settings have them, to load them in another process.
        fingerprint: that of all policies; None: there are none.
        counts: of their verdicts; None: there are no policies.
    """

    named: tuple[tuple[str, ContentPolicy], ...] = ()
    chosen: tuple[str, ...] = ()
    fingerprint: str | None = field(init=False)
    counts: PolicyCounts | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        facts = "\0".join(f"{name}\0{policy.fingerprint}" for name, policy in self.named)
        fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16] if self.named else None
        object.__setattr__(self, "fingerprint", fingerprint)
        object.__setattr__(self, "counts", PolicyCounts() if self.named else None)

    def guard(self, about: JudgedText, serves: Callable[[str], bool] | None = None) -> PolicyGuard | None:
        """The guard of a row; None: there are no policies. `serves`: whether a name is that of the row's model."""
        return PolicyGuard(self, about, serves) if self.named else None

    @property
    def concurrency(self) -> int:
        """How many texts the policies judge at a time, more than 1 where one of them waits for another process."""
        return max((getattr(policy, "concurrency", 1) for _, policy in self.named), default=1)

    @property
    def facts(self) -> dict[str, str]:
        """The policies as a manifest records them."""
        names = ", ".join(name for name, _ in self.named)
        return {"content_policies": f"{names} ({self.fingerprint})"} if self.named else {}


NO_POLICIES: Final = Policies()


class PolicyGuard:
    """Checks the texts of one row against all policies, and collects their verdicts. One thread at a time calls it.

    Attributes:
        fingerprint: that of the policies.
        window: the largest window of the policies that can judge growing answers; characters.
        holds_all: a policy can't judge growing answers, so no text is emitted before the end.
        concurrency: see `Policies.concurrency`.
    """

    __slots__ = (
        "_about", "_counts", "_policies", "_serves", "_tokens", "_verdicts", "concurrency", "fingerprint", "holds_all",
        "window",
    )  # fmt: skip

    def __init__(self, policies: Policies, about: JudgedText, serves: Callable[[str], bool] | None = None) -> None:
        self._policies = policies.named
        self._counts = policies.counts
        self._about = about
        self._serves = serves
        self._verdicts: dict[ContentVerdict, None] = {}
        self._tokens = (0, 0)
        self.fingerprint = policies.fingerprint
        self.concurrency = policies.concurrency
        windows = [policy.window for _, policy in policies.named]
        self.window = max((window for window in windows if window is not None), default=0)
        self.holds_all = None in windows

    @property
    def report(self) -> PolicyReport:
        """The verdicts so far on texts that don't simply pass, and the tokens that judging took."""
        return PolicyReport(tuple(self._verdicts), *self._tokens)

    def check_prompt(self, texts: Sequence[str], retry: PolicyRetry | None = None) -> None:
        """Raise `RowError` when a policy refuses the prompt, or fails, and `PromptRouted` when one sends it to another
        model and none refuses it. `retry`: of a row of a job; raises `JudgingInterrupted`."""
        prompt = Prompt(self._about, tuple(texts))
        routed: tuple[str, PolicyVerdict] | None = None
        for name, policy in self._policies:
            verdict = self._judge(name, policy, "prompt", prompt, retry)
            if verdict.action == "refuse":
                by = _named(name, verdict)
                raise RowError(RowErrorCode.CONTENT_FILTER, f"the prompt is refused by {by}; change the prompt")
            if verdict.action == "route" and routed is None and not self._is_served(verdict.model):
                routed = name, verdict
        if routed is not None:
            raise PromptRouted(*routed, self.report)

    def refuses(self, text: str, retry: PolicyRetry | None = None) -> bool:
        """Whether a policy refuses the whole text of an answer. Raises `RowError` when a policy fails. `retry`: as in
        `check_prompt`."""
        answer = Answer(self._about, text)
        verdicts = [self._judge(name, policy, "answer", answer, retry) for name, policy in self._policies]
        return any(verdict.action in _REFUSING for verdict in verdicts)

    def refuses_growing(self, text: str, start: int) -> bool:
        """Whether a policy refuses the end of a growing answer. Raises `RowError` when a policy fails."""
        answer = Answer(self._about, text, start, ended=False)
        return any(
            self._judge(name, policy, "answer", answer).action in _REFUSING
            for name, policy in self._policies
            if policy.window
        )

    def _is_served(self, model: str) -> bool:
        """Whether the row's model is this one, so that a prompt which is sent to it passes."""
        return model == self._about.model or (self._serves is not None and self._serves(model))

    def _judge(
        self,
        name: str,
        policy: ContentPolicy,
        side: JudgedSide,
        text: Prompt | Answer,
        retry: PolicyRetry | None = None,
    ) -> PolicyVerdict:
        def judge() -> PolicyVerdict:
            return policy.before(text) if isinstance(text, Prompt) else policy.after(text)

        try:
            verdict: object = judge() if retry is None else retry.judge(name, policy, judge)
            if not isinstance(verdict, PolicyVerdict) or not _is_valid(verdict):
                raise TypeError("the verdict is no PolicyVerdict")
        except JudgingInterrupted:
            raise
        except Exception as error:  # noqa: BLE001 - the row fails and the worker continues
            # Neither the error's message nor a traceback is logged: both may quote the text.
            at = traceback.extract_tb(error.__traceback__)[-1]
            kind, where = type(error).__name__, f"{at.filename}:{at.lineno}"
            logger.error("content policy failed", policy=name, row=self._about.row, what=side, error=kind, at=where)
            self._count(name, PolicyVerdict(failed=True))
            message = f"content policy {name!r} could not judge the {side} ({kind}), so it is refused; see the log"
            raise RowError(RowErrorCode.ENGINE_ERROR, message) from None
        is_growing = isinstance(text, Answer) and not text.ended
        if not is_growing or verdict.action in _REFUSING:  # what only flags a growing answer flags the whole one
            self._record(name, side, verdict)
        return verdict

    def _record(self, name: str, side: JudgedSide, verdict: PolicyVerdict) -> None:
        """Log, count and collect a verdict."""
        self._tokens = (self._tokens[0] + verdict.prompt_tokens, self._tokens[1] + verdict.completion_tokens)
        action = "refuse" if verdict.action == "route" and side == "answer" else verdict.action
        model = verdict.model if action == "route" else None
        found = None if action is None else ContentVerdict(name, _rule(verdict), action, side, model, verdict.failed)
        if found is not None and found not in self._verdicts:
            self._verdicts[found] = None
            logger.info(_EVENTS[found.action], policy=name, rule=found.rule, row=self._about.row, what=side)
        self._count(name, verdict)

    def _count(self, name: str, verdict: PolicyVerdict) -> None:
        if self._counts is not None:
            self._counts.add(name, verdict.action, verdict.prompt_tokens, verdict.completion_tokens, verdict.failed)


_REFUSING: Final = ("refuse", "route")
"""The actions that refuse an answer: it can't be sent to another model."""

_EVENTS: Final = {"refuse": "content refused", "route": "content routed", "flag": "content flagged"}


def _is_valid(verdict: PolicyVerdict) -> bool:
    """Whether a policy's verdict has the fields that its action needs."""
    has_model = bool(verdict.model) and len(verdict.model) <= _MAX_MODEL_CHARS
    return verdict.action is None or (
        verdict.action in get_args(PolicyAction) and has_model >= (verdict.action == "route")
    )


def _rule(verdict: PolicyVerdict) -> str:
    return verdict.rule[:_MAX_RULE_CHARS]


def _named(policy: str, verdict: PolicyVerdict) -> str:
    return f"content policy {policy!r}" + (f", rule {_rule(verdict)!r}" if verdict.rule else "")
