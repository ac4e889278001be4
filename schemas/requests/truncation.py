"""Prompts of a job that are too long for the model's context: which part is dropped, and how much."""

from __future__ import annotations

from enum import StrEnum

from schemas.requests.bodies import GenerationBody


class TruncatePrompt(StrEnum):
    """The part that a prompt which is too long loses: its beginning, its end, or its last lines."""

    LEFT = "left"
    RIGHT = "right"
    NEWLINE = "newline"


def limit_prompt_tokens(body: GenerationBody, prompt_tokens: int, context: int, default_limit: int) -> int:
    """The tokens to which a job that cuts prompts cuts one of `prompt_tokens`: all of one that fits.

    A prompt fits that leaves room for max_tokens, without it for min_tokens and at least one token. A longer one is cut
    to leave room for max_tokens, without it for `default_limit` or a quarter of the context, if that is less. Where
    that leaves none of the prompt, it isn't cut, and does not fit. A body with `truncate_prompt_tokens` follows that
    alone.

    Args:
        context: the model's longest sequence.
        default_limit: of tokens of an answer without max_tokens.
    """
    limit = body.output_limit
    needed = max(1, body.min_tokens) if limit is None else limit
    if body.truncate_prompt_tokens is not None or prompt_tokens + needed <= context:
        return prompt_tokens
    room = context - (max(needed, min(default_limit, context // 4)) if limit is None else limit)
    return room if room >= 1 else prompt_tokens
