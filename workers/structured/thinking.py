"""Bounds a thought, and binds the form of an answer behind it, by a grammar.

A thought is any text without the model's markers; after as many tokens as its budget only the marker that ends it is
allowed, so the budget holds wherever masks do: with drafts, after a preemption, and in a resumed answer. A request with
neither a budget nor a form needs no grammar.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import Body, ChatBody
from workers.structured.grammar import OPTIONS, TEXT, GrammarSource, ThoughtLimit, for_slashes, literal
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
    opening, closing = markers.form.opening, markers.form.closing
    is_plain = isinstance(markers.pieces(closing)[0], str)
    # Where markers are plain text, an answer that any text may be must be kept from opening a thought.
    free = f"start: ANY\nANY: {TEXT}{f' & ~{_containing(opening)}' if is_plain else ''}"
    inner = free if form is None else form.text.removeprefix(OPTIONS).rstrip()
    blanks = "" if form is None else "BLANKS? "
    rules = [f"answer: %lark {{\n{inner}\n}}", BLANKS]
    forced = f"{_rule(markers, closing)} {blanks}answer"
    thought = forced
    if budget != 0 and is_plain:
        rules.append(f"thought[lazy]: /(?s:.)*{for_slashes(re.escape(closing))}/")
        thought = f"thought {blanks}answer"
    elif budget != 0:
        rules.append(f"thought{'' if budget is None else f'[max_tokens={budget}]'}: {TEXT}")
        thought = f"thought {forced}"
    starts = {
        True: thought,
        False: "answer",
        None: f"{_rule(markers, opening)} {thought} | {_rule(markers, markers.form.direct)} answer",
    }
    limit = None
    if budget and is_plain and state is not False:
        begun = "" if state is True else opening
        limit = ThoughtLimit(budget, begun.encode(), closing.encode(), _lark(f"start: {forced}", *rules[:2]))
    text = _lark(f"start: {starts[state]}", *rules)
    if form is None:
        return GrammarSource(text, "thinking_token_budget", limit=limit)
    return replace(form, text=text, limit=limit)


def _lark(*rules: str) -> str:
    return OPTIONS + "\n".join(rules) + "\n"


def _containing(text: str) -> str:
    return f"/(?s:.)*{for_slashes(re.escape(text))}(?s:.)*/"


def _rule(markers: ReasoningMarkers, text: str) -> str:
    """The rule of a marker, in which tokens are matched as tokens."""
    pieces = markers.pieces(text)
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else literal(piece) for piece in pieces)
