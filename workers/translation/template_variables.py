"""The variables of the model's chat template that a request sets: those in `chat_template_kwargs`, and whether and how
much the model thinks, under the names that its template has for that.

What the template does not read is refused by name: it would be ignored. But a model that does not think takes that it
shall not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, PairBody
from workers.text.tokenizer import Tokenizer

THINKING: Final = ("enable_thinking", "thinking")
"""Names of the switch: of Qwen 3, GLM, SmolLM 3 and others; of DeepSeek V3.1 and Granite."""

EFFORT: Final = "reasoning_effort"

INSTRUCTION: Final = "instruction"


def template_variables(body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """The template's variables for this request. Raises `RowError`."""
    known = tokenizer.template_variables
    variables = _read(body.chat_template_kwargs, known)
    switch = next((name for name in THINKING if name in known), None)
    effort = body.reasoning_effort
    never_thinks = not (switch or EFFORT in known or tokenizer.shows_thought)  # there is nothing to switch off
    if body.enable_thinking is not None:
        if switch is not None:
            _set(variables, switch, body.enable_thinking, "enable_thinking")
        elif body.enable_thinking or not never_thinks:
            raise _unread("enable_thinking", known)
    if effort is not None:
        if EFFORT in known:
            _set(variables, EFFORT, effort, EFFORT)
        if switch is not None and effort == "none":
            _set(variables, switch, False, EFFORT)
        elif EFFORT not in known and not (never_thinks and effort == "none"):
            raise _unread(EFFORT, known)
    return variables


def pair_variables(body: PairBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """The template's variables for pairs; an instruction that it reads as a message is not among them. Raises
    `RowError`."""
    if not tokenizer.renders_pairs:
        for name in (INSTRUCTION, "chat_template_kwargs"):
            if getattr(body, name):
                message = f"{name} is not supported: the model has no chat template with the roles query and document"
                raise RowError(
                    RowErrorCode.UNSUPPORTED_PARAMETER, f"{message}; remove it, or give --chat-template", param=name
                )
        return {}
    known = tokenizer.template_variables
    variables = _read(body.chat_template_kwargs, known)
    if body.instruction is None:
        return variables
    if not tokenizer.takes_instruction:
        raise _unread(INSTRUCTION, known)
    if INSTRUCTION in known:
        _set(variables, INSTRUCTION, body.instruction, INSTRUCTION)
    return variables


def _read(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The given variables. Raises `RowError` for one that the template does not read."""
    for name in given:
        if name not in known:
            raise _unread(f"chat_template_kwargs.{name}", known)
    return dict(given)


def _set(variables: dict[str, Any], name: str, value: Any, param: str) -> None:
    if variables.setdefault(name, value) != value:
        message = f"{param} sets the template's {name} to {value}, but it is set to {variables[name]}; remove one"
        raise RowError(RowErrorCode.INVALID_REQUEST, message, param=param)


def _unread(param: str, known: frozenset[str]) -> RowError:
    reads = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
    message = f"{param} is not supported: the model's chat template does not read it ({reads}); remove it"
    return RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
