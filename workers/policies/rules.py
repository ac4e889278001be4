"""The built-in content policy `rules`: keywords and regular expressions from a TOML file.

RE2 matches them in time linear in the text, whatever the pattern is, so no prompt can stall a match. It releases the
interpreter lock meanwhile. It has neither look-around nor back-references.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import re2
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from schemas.requests.policy_report import PolicyAction
from workers.errors import WorkerError
from workers.policies.policy import ALLOWED, SEVERITY, Answer, PolicyVerdict, Prompt

DEFAULT_WINDOW: Final = 200
"""Default of a rule's `window`: the characters that a regex may match in a stream before any of them is emitted."""

MAX_STEPS: Final = 10_000
"""Limit of a compiled regex's size in RE2's steps. In the worst case a character costs some ten nanoseconds a step."""

_MAX_MEMORY_BYTES: Final = 64 << 20
"""RE2's memory of one compiled pattern. With less, ten thousand keywords are matched a hundred times slower."""

Side = Literal["prompt", "answer", "both"]


class RulesError(WorkerError):
    """Raised when a file of rules can't be used; the message names the file, the rule, the entry and the fix."""


class _Rule(BaseModel):
    """One `[[rule]]`.

    Attributes:
        apply: to prompts, answers, or both, which is the default; a `route` applies to prompts.
        action: what a match does.
        model: to which a `route` sends the request.
        ignore_case, whole_words: apply to keywords.
        window: maximum length of a match of `regexes`, in characters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    apply: Side = "both"
    action: PolicyAction = "refuse"
    model: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    keywords: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    regexes: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    ignore_case: bool = True
    whole_words: bool = False
    window: Annotated[int, Field(ge=1, le=100_000)] = DEFAULT_WINDOW

    @model_validator(mode="after")
    def _check(self) -> _Rule:
        if bool(self.keywords) == bool(self.regexes):
            raise _wrong("must have either keywords or regexes; give one of them, and the other in a rule of its own")
        if (self.action == "route") != (self.model is not None):
            raise _wrong("must have action = 'route' together with model, the name to send the request to")
        if self.action == "route" and self.sides != "prompt":
            raise _wrong("has action = 'route', which is for prompts; set apply = 'prompt'")
        if self.regexes and self.model_fields_set & {"ignore_case", "whole_words"}:
            raise _wrong(r"has ignore_case or whole_words, which are for keywords; write (?i) or \b in the regexes")
        if "window" in self.model_fields_set and (self.keywords or self.sides == "prompt" or self.action == "flag"):
            raise _wrong("has a window, which is for regexes that refuse answers; remove it")
        for at, keyword in enumerate(self.keywords):
            if self.whole_words and not re.fullmatch(r"(?a:\w(.*\w)?)", keyword, re.DOTALL):
                why = "whole_words needs keywords that begin and end with an ASCII letter, a digit or _"
                raise _wrong(f"keywords[{at}]: {why}; put this one into a rule without it")
        return self

    @property
    def sides(self) -> Side:
        """The texts that it applies to."""
        return "prompt" if self.action == "route" and "apply" not in self.model_fields_set else self.apply


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rule: Annotated[list[_Rule], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A rule, ready to match. `window`: characters at the end of a growing answer that it may still refuse."""

    verdict: PolicyVerdict
    patterns: tuple[Any, ...]
    window: int


class Rules:
    """The policy of a file of rules (a `ContentPolicy`). A rule applies to a text that matches anywhere. Of several
    the severest action counts, and among equal ones the first rule.

    Attributes:
        fingerprint: that of the file.
        window: length of the longest possible match of a rule that refuses answers.
    """

    def __init__(self, path: Path) -> None:
        """Raises `RulesError`."""
        rules, self.fingerprint = _read(path)
        rules.sort(key=lambda rule: -SEVERITY[rule.action])  # so that the first match counts
        compiled = [(rule.sides, _compile(f"{path}: rule {rule.name!r}", rule)) for rule in rules]
        self._of_prompts = tuple(rule for side, rule in compiled if side != "answer")
        self._of_answers = tuple(rule for side, rule in compiled if side != "prompt")
        self.window = max((rule.window for rule in self._of_answers), default=0)

    def before(self, prompt: Prompt) -> PolicyVerdict:
        """See `ContentPolicy`."""
        # A message may hold half a surrogate pair where no template reads it.
        texts = [text.encode(errors="replace") for text in prompt.texts]
        for rule in self._of_prompts:
            if any(pattern.search(data) for data in texts for pattern in rule.patterns):
                return rule.verdict
        return ALLOWED

    def after(self, answer: Answer) -> PolicyVerdict:
        """See `ContentPolicy`. A match at the end of a growing text may disappear with the next letter (`\\b`, `$`), so
        the last letter is excluded until another one follows."""
        if not (self._of_answers and answer.text):
            return ALLOWED
        data = answer.text.encode()
        start = len(answer.text[: answer.start].encode())
        end = len(data) if answer.ended else len(data) - len(answer.text[-1].encode())
        for rule in self._of_answers:
            if any(pattern.search(data, start, end) for pattern in rule.patterns):
                return rule.verdict
        return ALLOWED


def load(argument: str | None) -> Rules:
    """Load the policy from the file `argument`. Raises `RulesError`."""
    if argument is None:
        raise RulesError("content policy rules needs a file; name it, as in rules:policy.toml")
    return Rules(Path(argument).expanduser())


def _read(path: Path) -> tuple[list[_Rule], str]:
    """Read the file's rules and fingerprint."""
    try:
        data = path.read_bytes()
        rules = _File.model_validate(tomllib.loads(data.decode())).rule
    except OSError as error:
        raise RulesError(f"{path}: can't be read: {error.strerror or error}; name a file of rules") from error
    except ValidationError as error:
        raise RulesError(f"{path}: {_explain(error)}") from error
    except ValueError as error:  # tomllib's, and bytes that are not UTF-8
        raise RulesError(f"{path}: is no TOML: {error}; correct it") from error
    names = [rule.name for rule in rules]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise RulesError(f"{path}: two rules are called {duplicate!r}; give each a name of its own")
    return rules, hashlib.sha256(data).hexdigest()


def _explain(error: ValidationError) -> str:
    """The first mistake: its location, what is wrong, and the fix."""
    detail = error.errors(include_url=False)[0]
    match list(detail["loc"]):
        case ["rule", int(number), *path]:
            where = f"rule {number + 1}"
        case path:
            where = "the file"
    entry = "".join(f"[{step}]" if isinstance(step, int) else f" {step}" for step in path)
    what = {
        "missing": "is missing; add it" if path[-1:] != ["rule"] else "is missing; write at least one [[rule]]",
        "extra_forbidden": f"is not known; a rule has {', '.join(_Rule.model_fields)}",
        "too_short": "is empty; write at least one [[rule]]",
    }.get(detail["type"], detail["msg"])
    return f"{where}{entry}: {what}"


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{text}", {"text": message})


def _compile(where: str, rule: _Rule) -> _Compiled:
    verdict = PolicyVerdict(rule.action, rule.name, rule.model or "")
    holds_back = rule.action != "flag"
    if rule.keywords:
        words = "|".join(re2.escape(keyword) for keyword in rule.keywords)
        pattern = rf"\b(?:{words})\b" if rule.whole_words else words
        try:
            compiled = _pattern(pattern, ignore_case=rule.ignore_case)
        except ValueError as error:
            raise RulesError(f"{where}: keywords: {error}; make several rules of it") from error
        return _Compiled(verdict, (compiled,), holds_back * max(map(len, rule.keywords)))
    patterns = tuple(_regex(where, at, regex) for at, regex in enumerate(rule.regexes))
    return _Compiled(verdict, patterns, holds_back * rule.window)


def _regex(where: str, at: int, regex: str) -> Any:
    where = f"{where}: regexes[{at}]"
    try:
        pattern = _pattern(regex)
    except ValueError as error:
        fix = "correct it (RE2's syntax: neither look-around nor back-references)"
        raise RulesError(f"{where}: {error}; {fix}") from error
    if pattern.programsize > MAX_STEPS:
        size = f"has {pattern.programsize} steps, but at most {MAX_STEPS} are allowed"
        raise RulesError(f"{where}: {size}; use smaller repetitions, or fewer classes such as \\p{{L}} in them")
    if pattern.search(b""):
        raise RulesError(f"{where}: matches where there is no text, so it refuses everything; correct it")
    return pattern


def _pattern(pattern: str, *, ignore_case: bool = False) -> Any:
    """Compile a pattern. Raises `ValueError` with RE2's reason."""
    options = re2.Options()
    options.log_errors = False  # to stderr
    options.never_capture = True
    options.max_mem = _MAX_MEMORY_BYTES
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from error
