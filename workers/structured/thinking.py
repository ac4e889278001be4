"""Bounds a thought, and binds the form of an answer behind it, by a grammar.

A thought is any text without the model's markers; after as many tokens as its budget the grammar allows only the marker
that ends it, so the budget holds wherever masks do: with drafts, after a preemption, and in a resumed answer. A request
with neither a budget nor a form needs no grammar.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import Body, ChatBody
from workers.structured.grammar import OPTIONS, TEXT, GrammarSource, literal
from workers.text.reasoning import TAIL_TOKENS, ReasoningMarkers
from workers.text.tokenizer import TokenIds, Tokenizer

BLANKS: Final = r"BLANKS: /\n{1,2}/"
"""What models write between the marker and the answer."""


def prompt_state(body: Body, prompt: TokenIds, tokenizer: Tokenizer) -> bool | None:
    """Whether the prompt has begun a thought (True), ended one (False), or leaves it to the model (None)."""
    markers = tokenizer.reasoning
    if markers is None or not isinstance(body, ChatBody):
        return None
    if body.continue_final_message:
        return markers.state_behind(_with_marks(markers, body.messages[-1].text))
    tail = prompt[-TAIL_TOKENS:]
    return markers.prompt_state(tokenizer.decode_showing(tail[:0], tail, markers.shown))


def _with_marks(markers: ReasoningMarkers, text: str) -> str:
    """A text of the caller's as decoding would show it."""
    return "".join(markers.shown.get(piece, "") if isinstance(piece, int) else piece for piece in markers.pieces(text))


def thinking_budget(body: ChatBody, tokenizer: Tokenizer) -> int | None:
    """The tokens that the thought may have; None: any number. Raises `RowError` when the model marks no thought."""
    wanted = body.thinking_token_budget
    if wanted is not None and tokenizer.reasoning is None:
        message = (
            "thinking_token_budget is not supported: the model's chat template shows no thought; remove it, or name "
            "the form with --reasoning-parser"
        )
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param="thinking_token_budget")
    budget = tokenizer.thinking_token_budget if wanted is None else wanted
    return None if budget == -1 else budget


def grammar_behind_thought(
    form: GrammarSource | None, body: ChatBody, prompt: TokenIds, tokenizer: Tokenizer
) -> GrammarSource | None:
    """The grammar of an answer whose thought keeps its budget, and which has this form behind it; None: any text may be
    the answer. Raises `RowError`."""
    budget = thinking_budget(body, tokenizer)
    markers = tokenizer.reasoning
    if markers is None or (form is None and budget is None):
        return form
    state = prompt_state(body, prompt, tokenizer)
    if form is not None and state is False:
        return form
    inner = "start: ANY\nANY: " + TEXT if form is None else form.text.removeprefix(OPTIONS).rstrip()
    blanks = "" if form is None else " BLANKS?"
    opening, direct = (_rule(markers, text) for text in (markers.form.opening, markers.form.direct))
    thought = f"{'' if budget == 0 else 'thought '}{_rule(markers, markers.form.closing)}{blanks} answer"
    starts = {True: thought, False: "answer", None: f"{opening} {thought} | {direct} answer"}
    lines = [f"start: {starts[state]}", f"answer: %lark {{\n{inner}\n}}", BLANKS]
    if budget != 0:
        first = markers.pieces(markers.form.closing)[0]
        bounds = [] if budget is None else [f"max_tokens={budget}"]
        bounds += [f"stop={literal(first)}"] if isinstance(first, str) else []
        lines.append(f"thought{'[' + ', '.join(bounds) + ']' if bounds else ''}: {TEXT}")
    text = OPTIONS + "\n".join(lines) + "\n"
    return GrammarSource(text, "thinking_token_budget") if form is None else replace(form, text=text)


def _rule(markers: ReasoningMarkers, text: str) -> str:
    """The rule of a marker, in which tokens are matched as tokens."""
    pieces = markers.pieces(text)
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else literal(piece) for piece in pieces)
