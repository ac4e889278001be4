"""An attack: hostile input for a deployment, the answers that it must get, and the comparison of the two."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Form = Literal["cluster", "serve"]
FORMS: Final[tuple[Form, ...]] = ("cluster", "serve")
MESSAGE_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Target:
    """The deployment as an attack reaches it: JSON on the attacker's standard input.

    Attributes:
        host, port: of the gateway.
        keys: API key of each tenant: "good", "bad" (the attacker), "other" and "limited", whose quotas are small.
        root: the folder or s3:// URL that holds all jobs.  s3_endpoint: of the S3 server; None: the root is a folder.
        scratch: a folder for the attack's own files.
        pids: process name -> pid when the attack starts.
        worker_command, variables: how another worker is started; no command where workers are no processes.
        webhook_port: on this machine; the attacker's webhook endpoint names it.
        seed: of what is drawn.  uploaded_files, dropped_files: how many mutated files are sent each way.
    """

    form: Form
    host: str
    port: int
    keys: dict[str, str]
    root: str
    s3_endpoint: str | None
    scratch: str
    pids: dict[str, int]
    worker_command: tuple[str, ...]
    variables: dict[str, str]
    webhook_port: int
    seed: int
    uploaded_files: int
    dropped_files: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one hostile input.

    Attributes:
        kind: "http", "job", "dead_letter", "websocket", "closed", "timeout" or "check".
        status: HTTP status; job status ("rows_failed": completed with failed rows; "open": it goes on);
            WebSocket close code; or the result of a check.
        code, message: of the error.
        count: how many inputs were answered so.
    """

    kind: str
    status: str
    code: str | None = None
    message: str = ""
    count: int = 1

    def __str__(self) -> str:
        shown = f"{self.kind} {self.status}" + (f" {self.code}" if self.code else "")
        return shown if self.count == 1 else f"{shown} ({self.count})"


@dataclass(frozen=True, slots=True)
class Expected:
    """One answer that is right. All but `kind` are regular expressions.

    Attributes:
        status, code: the whole of it.  message: some part, in any case.
        required: at least one answer must match this.
    """

    kind: str
    status: str
    code: str = ".*"
    message: str = ""
    required: bool = False

    def matches(self, answer: Answer) -> bool:
        return (
            answer.kind == self.kind
            and re.fullmatch(self.status, answer.status) is not None
            and re.fullmatch(self.code, answer.code or "") is not None
            and re.search(self.message, answer.message, re.IGNORECASE) is not None
        )

    def __str__(self) -> str:
        shown = f"{self.kind} {self.status}" + ("" if self.code == ".*" else f" {self.code}")
        return f"{shown} /{self.message}/" if self.message else shown


@dataclass(frozen=True, slots=True)
class Attack:
    """An entry of the table.

    Attributes:
        run: sends the input, and returns all answers.
        expected: each answer must match one of these.
        forms: of deployment, to which the attack applies.
        limit_seconds: after which the attack is stopped, and counts as unanswered.
        quick: part of the short run in the tests.
        leaves_jobs: jobs may stay open, damaged, until their objects are removed by hand.
    """

    name: str
    run: Callable[[Target], list[Answer]]
    expected: tuple[Expected, ...]
    forms: tuple[Form, ...] = FORMS
    limit_seconds: float = 120.0
    quick: bool = False
    leaves_jobs: bool = False


def tally(answers: Iterable[Answer]) -> list[Answer]:
    """Answers of the same kind, status and code as one, with their count and the first message."""
    counts: Counter[tuple[str, str, str | None]] = Counter()
    messages: dict[tuple[str, str, str | None], str] = {}
    for answer in answers:
        key = (answer.kind, answer.status, answer.code)
        counts[key] += answer.count
        messages.setdefault(key, answer.message[:MESSAGE_CHARS])
    return [Answer(*key, messages[key], count) for key, count in counts.items()]


def unexpected(expected: Sequence[Expected], answers: Sequence[Answer]) -> str | None:
    """Why the answers are not the expected ones; None: they are."""
    if not answers:
        return "no answer"
    for answer in answers:
        if not any(one.matches(answer) for one in expected):
            return f"{answer}: {answer.message[:MESSAGE_CHARS]}"
    for one in expected:
        if one.required and not any(one.matches(answer) for answer in answers):
            return f"no answer is {one}"
    return None


def as_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [asdict(answer) for answer in answers]
