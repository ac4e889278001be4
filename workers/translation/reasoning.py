"""The thought in a chat's answer: split off its text, and counted in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Choice
from workers.rows import PreparedRow
from workers.structured.constraints import shown_tokens
from workers.structured.thinking import prompt_state
from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.reasoning import SplitReasoning, split_reasoning
from workers.text.tokenizer import Tokenizer


def split_texts(row: PreparedRow, texts: Sequence[str], tokenizer: Tokenizer) -> list[SplitReasoning]:
    """The decoded text of each choice, split."""
    if tokenizer.reasoning is None:
        return [SplitReasoning(None, text, []) for text in texts]
    thinks = prompt_state(row.body, row.request.prompt_token_ids, tokenizer)
    return [split_reasoning(tokenizer.reasoning, text, thinks=thinks) for text in texts]


def count_reasoning_tokens(row: PreparedRow, choice: Choice, split: SplitReasoning, tokenizer: Tokenizer) -> int:
    """The tokens that end in a thought. The markers' are not among them."""
    if not split.spans:
        return 0
    shown = shown_tokens(row.body, tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, row.request.prompt_token_ids, shown)
    thoughts = iter(split.spans)
    first, last = next(thoughts)
    count = characters = 0
    for token_id in choice.token_ids.tolist():
        characters += len(detokenizer.push(token_id))
        end = characters + len(detokenizer.pending)
        while last < end:  # tokens and thoughts are in the order of the text, so each is seen once
            thought = next(thoughts, None)
            if thought is None:
                return count
            first, last = thought
        count += first < end
    return count
