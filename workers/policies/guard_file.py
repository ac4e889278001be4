"""The file of a guard model: a TOML file that names the model, how it is asked, and what its labels mean."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from schemas.requests.policy_report import PolicyAction
from workers.errors import WorkerError

_MAX_FILE_BYTES: Final = 1 << 20
PROBE: Final = "a text that only stands in for one"
"""The template must show it, so the guard can be asked about it."""

Side = Literal["prompt", "answer", "both"]
Label = Annotated[str, Field(min_length=1, max_length=100)]


class GuardFileError(WorkerError):
    """Raised when the file of a guard model can't be used; the message names the file, the entry and the fix."""


class GuardLabel(BaseModel):
    """One `[[label]]`.

    Attributes:
        name: the label as the model gives it.
        action: what happens to a text with this label.
        model: to which a `route` sends the request.
        threshold: least probability of the label for its action; below it the text passes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Label
    action: PolicyAction | Literal["pass"] = "pass"
    model: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> GuardLabel:
        if (self.action == "route") != (self.model is not None):
            raise wrong("must have action = 'route' together with model, the name to send the request to")
        if self.threshold and self.action == "pass":
            raise wrong("has a threshold, which is for labels with an action; remove it")
        return self


class GuardFile(BaseModel):
    """The file.

    Attributes:
        url: of an OpenAI-compatible server, with or without /v1.
        model: the guard's name there; NAME@sha256:DIGEST names one version of it.
        kind: `chat` is asked with a chat, `classifier` over /v1/classify.
        prompt: a Jinja template of the question; its variable is `text`.
        apply: the texts that are judged.
        constrain: let the server allow no other answers than the labels (`structured_outputs.choice`).
        max_tokens: of an answer.
        timeout_seconds: after that a text counts as not judged.
        concurrency: texts that one process asks about at a time.
        on_failure: what happens to a text that could not be judged: `open` lets it pass, flagged; `closed` fails it.
        retry_seconds: how long rows of jobs wait for a guard that answers nothing, before they fail; 0: not at all.
            Where `on_failure` is `closed`.
        api_key_env: the environment variable with the server's key.
        cached_texts: how many of the last texts' verdicts are remembered.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: str
    model: Annotated[str, Field(min_length=1, max_length=1_000)]
    kind: Literal["chat", "classifier"] = "chat"
    prompt: Annotated[str, Field(min_length=1)] = "{{ text }}"
    apply: Side = "prompt"
    constrain: bool = True
    max_tokens: Annotated[int, Field(ge=1, le=1_024)] = 16
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    on_failure: Literal["open", "closed"]
    retry_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    api_key_env: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cached_texts: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    label: Annotated[list[GuardLabel], Field(min_length=1, max_length=64)]

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise wrong(f"is no URL: {error}; give http(s)://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise wrong("must be http(s)://HOST:PORT, perhaps with a path")
        if "@" in parts.netloc:
            raise wrong("carries credentials; name the key's environment variable with api_key_env")
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        try:
            shown = template_of(prompt).render(text=PROBE)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise wrong(f"is no template: {type(error).__name__}: {error}; correct it") from None
        if PROBE not in shown:
            raise wrong("doesn't show the text; write {{ text }} where it belongs")
        return prompt

    @model_validator(mode="after")
    def _check(self) -> GuardFile:
        names = [label.name for label in self.label]
        if len(set(names)) != len(names):
            raise wrong(f"two labels are called {max(names, key=names.count)!r}; remove one")
        if all(label.action == "pass" for label in self.label):
            raise wrong("no label has an action; give one of them action = 'refuse', 'route' or 'flag'")
        if self.apply != "prompt" and any(label.action == "route" for label in self.label):
            raise wrong("a label has action = 'route', which is for prompts; set apply = 'prompt'")
        given = self.model_fields_set & {"constrain", "max_tokens"}
        if self.on_failure == "open" and "retry_seconds" in self.model_fields_set:
            raise wrong("retry_seconds is for on_failure = 'closed': with 'open' no row waits; remove it")
        if self.kind == "classifier" and given:
            raise wrong(f"{min(given)} is for chats; remove it")
        return self

    @property
    def needs_probabilities(self) -> bool:
        """Whether a label has a threshold."""
        return any(label.threshold for label in self.label)


def template_of(prompt: str) -> jinja2.Template:
    """The template, in the sandbox that transformers has for chat templates. Raises `jinja2.TemplateError`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.from_string(prompt)


def read_guard_file(path: Path) -> tuple[GuardFile, bytes]:
    """The file, and its bytes. Raises `GuardFileError`."""
    try:
        data = path.read_bytes()
        if len(data) > _MAX_FILE_BYTES:
            raise GuardFileError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes; name a guard model's file")
        return GuardFile.model_validate(tomllib.loads(data.decode())), data
    except OSError as error:
        raise GuardFileError(f"{path}: can't be read: {error.strerror or error}; name a guard model's file") from error
    except ValidationError as error:
        raise GuardFileError(f"{path}: {_explain(error)}") from error
    except ValueError as error:  # tomllib's, and bytes that are not UTF-8
        raise GuardFileError(f"{path}: is no TOML: {error}; correct it") from error


def key_of(file: GuardFile, path: Path) -> str | None:
    """The server's key; None: it needs none. Raises `GuardFileError`."""
    if file.api_key_env is None:
        return None
    key = os.environ.get(file.api_key_env, "").strip()
    if not key or not (key.isascii() and key.isprintable() and " " not in key):
        raise GuardFileError(f"{path}: api_key_env: {file.api_key_env} holds no key; set it in the environment")
    return key


def _explain(error: ValidationError) -> str:
    """The first mistake: its location, what is wrong, and the fix."""
    detail = error.errors(include_url=False)[0]
    match list(detail["loc"]):
        case ["label", int(number), *rest]:
            where, fields = f"label {number + 1}", GuardLabel.model_fields
        case rest:
            where, fields = "the file", GuardFile.model_fields
    entry = "".join(f" {step}" for step in rest)
    what = {
        "missing": "is missing; add it",
        "extra_forbidden": f"is not known; there are {', '.join(fields)}",
        "too_short": "is empty; write at least one [[label]]",
    }.get(detail["type"], detail["msg"])
    return f"{where}{entry}: {what}"


def wrong(message: str) -> PydanticCustomError:
    """The error of a value that pydantic's types allow."""
    return PydanticCustomError("guard", "{text}", {"text": message})
