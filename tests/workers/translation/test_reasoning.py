"""The tokens of a thought are counted at a cost that grows with the answer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from schemas.requests.parsing import parse_body
from tests.counting import count_lines
from workers.text.reasoning import split_reasoning
from workers.text.tokenizer import Tokenizer
from workers.translation.reasoning import count_reasoning_tokens

PROMPT = np.array([1], dtype=np.int32)


def count(tokenizer: Tokenizer, ids: list[int]) -> int:
    """The tokens of thoughts among these of an answer."""
    assert tokenizer.reasoning is not None
    text = tokenizer.decode_showing(PROMPT, ids, tokenizer.reasoning.shown)
    split = split_reasoning(tokenizer.reasoning, text, thinks=False)
    body = parse_body("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    row: Any = SimpleNamespace(body=body, request=SimpleNamespace(prompt_token_ids=PROMPT))
    choice: Any = SimpleNamespace(token_ids=np.array(ids, dtype=np.int32))
    return count_reasoning_tokens(row, choice, split, tokenizer)


def test_an_answer_of_many_thoughts_is_counted_in_one_pass(kit: Any) -> None:
    """Given answers of n and 4 n thoughts, when their tokens are counted, then that takes four times the work."""
    hf = kit.byte_level_tokenizer("{{ '</think>' }}")
    hf.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(hf)
    opening, closing, word, part = *hf.convert_tokens_to_ids(["<think>", "</think>", "a"]), hf.encode("\u00e9")[0]
    one = [opening, word, word, closing, word, closing, opening, part, closing]
    work, counts = [], []
    for times in (100, 400):
        lines, counted = count_lines(lambda times=times: count(tokenizer, one * times))
        work.append(lines)
        counts.append(counted)
    assert counts[1] == 4 * counts[0] == 400 * count(tokenizer, one) > 0
    assert work[1] < 5 * work[0]
