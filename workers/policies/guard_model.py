"""The built-in content policy `guard`: a served model labels the texts.

The guard is asked over HTTP, so one instance of it serves all workers, and `tokenmill run` as well. A chat model is
held to the labels by structured output where the server supports it; a classifier gives its most probable label. A
text that could not be judged in time passes with a flag or fails, as the file says. Where it fails, rows of jobs are
judged again later (`workers.policies.retry`).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from pipeline.models.catalog import BY_DIGEST
from schemas.requests.parsing import CHAT_URL, CLASSIFY_URL, COMPLETIONS_URL
from workers.policies.guard_file import PROBE, GuardFileError, key_of, read_guard_file, template_of
from workers.policies.guard_http import GuardAnswerInvalid, GuardFailed, GuardServer
from workers.policies.policy import ALLOWED, SEVERITY, Answer, PolicyVerdict, Prompt
from workers.policies.retry import PolicyUnavailable

_MODELS_PATH: Final = "/v1/models"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The guard's answer. `probability`: of the label; None: it wasn't asked for."""

    label: str
    probability: float | None
    prompt_tokens: int
    completion_tokens: int


class GuardModel:
    """The policy of a guard model's file (a `ContentPolicy`).

    Attributes:
        fingerprint: of the file and of the model's weights.
        window: None where it may refuse answers: it judges whole ones.
        concurrency: texts that it judges at a time.
        retry_seconds: how long rows of jobs wait for it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `GuardFileError`, also where the server doesn't serve the model."""
        self._file, data = read_guard_file(path)
        self._template = template_of(self._file.prompt)
        self._labels = {label.name: label for label in self._file.label}
        self._server = GuardServer(self._file.url, self._file.concurrency, key_of(self._file, path))
        self._model, facts = self._find_model(path)
        self._own_names = {self._file.model, self._model, self._file.model.partition(BY_DIGEST)[0]}
        self._cache: OrderedDict[bytes, PolicyVerdict] = OrderedDict()
        self._lock = threading.Lock()
        self.fingerprint = hashlib.sha256(b"\0".join((data, facts))).hexdigest()
        refuses = any(label.action == "refuse" for label in self._file.label) or self._file.on_failure == "closed"
        self.window = None if self._file.apply != "prompt" and refuses else 0
        self.concurrency = self._file.concurrency
        self.retry_seconds = self._file.retry_seconds if self._file.on_failure == "closed" else 0.0
        self._was_available = True

    def before(self, prompt: Prompt) -> PolicyVerdict:
        """See `ContentPolicy`. A conversation is judged as the model reads it, texts to embed or score one by one."""
        if self._file.apply == "answer" or prompt.about.model in self._own_names:
            return ALLOWED
        is_generating = prompt.about.url in (CHAT_URL, COMPLETIONS_URL)
        texts = prompt.texts[:1] if is_generating else dict.fromkeys(prompt.texts)
        found = ALLOWED
        for text in texts:
            verdict = self._judge(text, prompt.about.tenant)
            chosen = max(found, verdict, key=lambda one: SEVERITY[one.action])
            found = replace(
                chosen,
                prompt_tokens=found.prompt_tokens + verdict.prompt_tokens,
                completion_tokens=found.completion_tokens + verdict.completion_tokens,
            )
            if found.action == "refuse":
                break
        return found

    def after(self, answer: Answer) -> PolicyVerdict:
        """See `ContentPolicy`."""
        if self._file.apply == "prompt" or not answer.text or answer.about.model in self._own_names:
            return ALLOWED
        return self._judge(answer.text, answer.about.tenant)

    def is_available(self) -> bool:
        """See `ContentPolicy`. Asks the guard about a short text."""
        try:
            self._ask(PROBE, None)
        except PolicyUnavailable:
            with self._lock:
                self._was_available = False
            return False
        except GuardFailed:  # it answered
            pass
        with self._lock:
            was_available, self._was_available = self._was_available, True
        if not was_available:  # the tenants' texts failed because of the outage
            self._server.forget_failures()
        return True

    def _find_model(self, path: Path) -> tuple[str, bytes]:
        """The name under which the guard is asked, which is that of its version where the server has versions, and what
        identifies its weights. Raises `GuardFileError`."""
        name = self._file.model
        if BY_DIGEST in name:
            return name, name.encode()
        fix = f"start it, or name one version with model = '{name}@sha256:…'"
        try:
            found = self._server.call("GET", _MODELS_PATH, None, self._file.timeout_seconds)
            models = {str(model["id"]): model for model in found["data"]}
        except (GuardFailed, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, GuardFailed) else "the answer lists no models"
            raise GuardFileError(f"{path}: {self._file.url} can't be asked for its models: {reason}; {fix}") from error
        if name not in models:
            known = ", ".join(sorted(models))[:500] or "none"
            raise GuardFileError(f"{path}: model {name!r} is not served at {self._file.url} ({known}); {fix}")
        extension = models[name].get("tokenmill")
        digest = extension.get("digest") if isinstance(extension, dict) else None
        if isinstance(digest, str):
            return f"{name}@{digest}", digest.encode()
        model = {field: value for field, value in models[name].items() if field != "created"}
        return name, orjson.dumps(model, option=orjson.OPT_SORT_KEYS)

    def _judge(self, text: str, tenant: str) -> PolicyVerdict:
        text = text.encode(errors="replace").decode()  # a message may hold half a surrogate pair
        # By tenant, or the time and the tokens of a verdict would tell one what texts another has sent.
        owner = tenant.encode(errors="replace")
        key = hashlib.blake2b(
            text.encode(), digest_size=32, salt=hashlib.blake2b(owner, digest_size=16).digest()
        ).digest()
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known
        try:
            labelled = self._ask(text, tenant)
        except GuardFailed as error:
            if self._file.on_failure == "closed":
                raise
            logger.warning("guard failed, and the text passes", model=self._model, error=type(error).__name__)
            return PolicyVerdict("flag", f"not judged ({type(error).__name__})", failed=True)
        verdict = self._verdict(labelled)
        with self._lock:
            self._cache[key] = verdict
            while len(self._cache) > self._file.cached_texts:
                self._cache.popitem(last=False)
        return replace(verdict, prompt_tokens=labelled.prompt_tokens, completion_tokens=labelled.completion_tokens)

    def _verdict(self, labelled: _Labelled) -> PolicyVerdict:
        label = self._labels[labelled.label]
        if label.action == "pass" or (label.threshold and (labelled.probability or 0.0) < label.threshold):
            return ALLOWED
        return PolicyVerdict(label.action, label.name, label.model or "")

    def _ask(self, text: str, tenant: str | None) -> _Labelled:
        """The guard's label for a text; `tenant` None: of a probe. Raises `GuardFailed`."""
        file, question = self._file, self._template.render(text=text)
        body: dict[str, Any] = {"model": self._model}
        if file.kind == "classifier":
            body |= {"input": question}
            return self._read(_classified, self._server.call("POST", CLASSIFY_URL, body, file.timeout_seconds, tenant))
        body |= {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": file.max_tokens}
        if file.constrain:
            body |= {"structured_outputs": {"choice": list(self._labels)}}
        if file.needs_probabilities:
            body |= {"logprobs": True}
        return self._read(_chatted, self._server.call("POST", CHAT_URL, body, file.timeout_seconds, tenant))

    def _read(self, read: Callable[[Mapping[str, Any]], _Labelled], answer: Mapping[str, Any]) -> _Labelled:
        """The answer's label, as the file spells it. Raises `GuardAnswerInvalid`."""
        try:
            found = read(answer)
            if self._file.needs_probabilities and found.probability is None:
                raise ValueError("the answer has no log-probabilities")
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise GuardAnswerInvalid("the guard's answer has another form") from error
        label = _label_of(found.label, self._labels)
        if label is None:
            raise GuardAnswerInvalid("the guard's answer is none of its labels")
        return replace(found, label=label)


def load(argument: str | None) -> GuardModel:
    """Load the policy from the file `argument`. Raises `GuardFileError`."""
    if argument is None:
        raise GuardFileError("content policy guard needs a file; name it, as in guard:guard.toml")
    return GuardModel(Path(argument).expanduser())


def _label_of(answer: str, labels: Collection[str]) -> str | None:
    """The label that the answer is, or else the longest one that it begins with as a word: a guard may add its
    reasons."""
    text = answer.strip()
    found = (label for label in labels if text.startswith(label) and not _continues_word(text, len(label)))
    return max(found, key=len, default=None)


def _continues_word(text: str, at: int) -> bool:
    """Whether the word before this index goes on there: "Nothing" doesn't begin with the label "No"."""
    return text[at : at + 1].isalnum() and text[at - 1 : at].isalnum()


def _classified(answer: Mapping[str, Any]) -> _Labelled:
    """The label of a response of /v1/classify."""
    (found,) = answer["data"]
    usage = answer.get("usage") or {}
    return _Labelled(_text(found["label"]), max(map(float, found["probs"])), _count(usage, "prompt_tokens"), 0)


def _chatted(answer: Mapping[str, Any]) -> _Labelled:
    """The label of a chat completion. Its probability is that of the whole answer's tokens."""
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    logprobs = choice.get("logprobs")
    probability = None
    if logprobs is not None:
        probability = math.exp(min(0.0, sum(float(token["logprob"]) for token in logprobs["content"])))
    used = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    return _Labelled(_text(choice["message"]["content"]), probability, *used)


def _text(value: Any) -> str:
    """A string of the answer. Raises TypeError for null, which a server may send for an answer that it withholds."""
    if not isinstance(value, str):
        raise TypeError("the answer holds no text")
    return value


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
