"""Conversion of the options of `run` and `estimate` to the types of the packages below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenmill.errors import InputUnusable, ModelError, UserError
from tokenmill.models import sources
from tokenmill.output import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.planner.tokens import TemplateTokens
    from schemas.jobs.inputs import InputRef
    from schemas.jobs.job import JobSettings
    from schemas.models import EngineName
    from schemas.settings.settings import Settings
    from workers.policies.policy import Policies
    from workers.text.chat_options import ChatOptions


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model on this machine, and its name in requests.

    Attributes:
        digest: required digest of weights and chat template; None: any.
        engine: that computes it; None: one of this project's.
    """

    name: str
    source: sources.ModelSource
    digest: str | None = None
    engine: EngineName | None = None


def choose_model(given: str, cache: Path) -> ChosenModel:
    """Resolve `MODEL` or `NAME=MODEL`, and pull it if needed. Raises `ModelError`."""
    name, source = split_name(given)
    return ChosenModel(name, sources.pull(source, cache, say))


def split_name(given: str) -> tuple[str, str]:
    """NAME and MODEL of `NAME=MODEL`; `MODEL` alone is its own name. Raises `ModelError` where one is empty."""
    name, separator, source = given.partition("=")
    if not separator or Path(given).exists():
        name = source = given
    if not name or not source:
        raise ModelError(f"--model {given}: give MODEL, or NAME=MODEL where requests use another name for it")
    return name, source


def only_model(given: Sequence[str]) -> str:
    """The model of a command that takes one. Raises `typer.BadParameter` for more."""
    if len(given) > 1:
        raise typer.BadParameter(f"takes one model, not {len(given)}; give it once", param_hint="--model")
    return given[0]


def choose_models(given: Sequence[str], cache: Path) -> tuple[ChosenModel, ...]:
    """Each `MODEL` or `NAME=MODEL`, under a name of its own. Raises `typer.BadParameter` for a name that is given
    twice, and `ModelError`."""
    names = [split_name(one)[0] for one in given]
    if len(set(names)) != len(names):
        twice = max(names, key=names.count)
        raise typer.BadParameter(
            f"two models are named {twice!r}; name each with NAME=MODEL, as the requests do", param_hint="--model"
        )
    return tuple(choose_model(one, cache) for one in given)


def read_input(given: str, out: Path | None = None) -> InputRef:
    """Pin the input's files for a job in `out`. Raises `InputUnusable` or the pipeline's own errors."""
    from tokenmill.config.inputs import pin

    if not given:
        raise InputUnusable("INPUT is empty; name a file, a folder, or s3://BUCKET/KEY")
    return pin(given, None if out is None else known_input(out))


def known_input(out: Path) -> InputRef | None:
    """The input of the job in `out`, if it is planned completely; else the input is read and hashed again anyway."""
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.ledger.ledger import JobLedger

    if not out.is_dir():
        return None
    ledger = JobLedger(FolderStore(out, read_only=True))
    job = ledger.find_job()
    return job.input if job is not None and ledger.planned_parts() is not None else None


def job_settings(
    settings: Settings,
    *,
    tier: str = "standard",
    seed: int = 0,
    on_invalid: str = "row",
    limit: int | None = None,
    max_output_tokens: int | None = None,
    truncate_prompt: str | None = None,
    max_tries: int | None = None,
) -> JobSettings:
    """The settings that change a job's answers or its plan. Raises `UserError`."""
    from schemas.jobs.job import JobSettings, OnInvalid, Tier
    from schemas.requests.truncation import TruncatePrompt

    cap = settings.max_output_tokens.of(Tier(tier))
    if max_output_tokens is not None:
        check_cap(max_output_tokens, cap, tier)
    return JobSettings(
        seed=seed,
        on_invalid=OnInvalid(on_invalid),
        limit=limit,
        default_max_tokens=min(settings.default_max_tokens, max_output_tokens or cap),
        max_output_tokens=max_output_tokens or cap,
        truncate_prompt=None if truncate_prompt is None else TruncatePrompt(truncate_prompt),
        max_tries=max_tries,
        limits=settings.limits,
        plan=settings.plan,
    )


def check_cap(max_output_tokens: int, cap: int, tier: str) -> None:
    """Check --max-output-tokens against the tier's cap. Raises `UserError`."""
    if max_output_tokens > cap:
        raise UserError(
            f"--max-output-tokens {max_output_tokens} is above the tier's cap of {cap}; "
            f"lower it, or raise TOKENMILL_MAX_OUTPUT_TOKENS__{tier.upper()}"
        )


def content_policies(given: Sequence[str] | None, settings: Settings) -> Policies:
    """Load the policies of a command's options, else those of the settings. Raises what loading them raises."""
    from workers.policies.loader import load_policies

    return load_policies(given or settings.content_policies)


def chat_options(
    template: Path | None, parser: str | None, thinking_token_budget: int | None, score_tokens: str | None
) -> ChatOptions:
    """Read the options of conversations. Raises `UserError`."""
    from workers.text.chat_options import ChatOptions, read_template
    from workers.text.reasoning import FORMATS, NO_PARSER

    if parser is not None and parser not in FORMATS and parser != NO_PARSER:
        known = ", ".join(FORMATS)
        raise UserError(f"--reasoning-parser {parser}: is not known; use one of {known}, or {NO_PARSER}")
    try:
        text = None if template is None else read_template(template)
    except ValueError as error:
        raise UserError(f"--chat-template {template}: {error}") from error
    no, _, yes = (score_tokens or "").partition(",")
    if score_tokens is not None and (not no or not yes or "," in yes):
        raise UserError(f"--score-tokens {score_tokens}: must be two tokens with a comma between them, such as no,yes")
    return ChatOptions(text, parser, thinking_token_budget, None if score_tokens is None else (no, yes))


def template_tokens(path: Path) -> TemplateTokens:
    """The tokens that the model's chat template adds; an estimate where it has none or refuses the sample messages."""
    from pipeline.planner.tokens import TemplateTokens
    from schemas.requests.errors import RowError
    from schemas.requests.parsing import ChatMessage
    from workers.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    if not tokenizer.has_chat_template:
        return TemplateTokens()

    def around(*roles: str) -> int:
        messages = [ChatMessage.model_validate({"role": role, "content": "word"}) for role in roles]
        text = tokenizer.render_chat(messages)
        plain = len(tokenizer.encode_batch(["word"], add_special_tokens=False)[0])
        return max(0, len(tokenizer.encode_chats([text])[0]) - len(roles) * plain)

    try:
        alone, several = around("user"), around("user", "assistant", "user")
    except RowError:
        return TemplateTokens()
    message = (several - alone) // 2
    try:
        return TemplateTokens(alone, around("system", "user"), message)
    except RowError:  # it accepts no system message
        return TemplateTokens(alone, alone + message, message)


def token_counter(path: Path, chat: ChatOptions | None = None) -> Callable[[str], int]:
    """A function that counts a text's tokens with the model's tokenizer, for the planner's estimates."""
    from workers.text.chat_options import OWN_CHAT
    from workers.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path, chat or OWN_CHAT)

    def count(text: str) -> int:
        return len(tokenizer.encode_batch([text], add_special_tokens=False)[0])

    return count
