"""A thought is split off its answer, and its tokens are counted at a cost that grows with the answer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.requests.parsing import parse_body
from tests.counting import count_lines
from workers.text.reasoning import SplitReasoning
from workers.text.tokenizer import Tokenizer
from workers.translation.reasoning import count_reasoning_tokens, split_texts

PROMPT = np.array([1], dtype=np.int32)


def make_row() -> Any:
    """A chat's row whose prompt leaves the thought to the model."""
    body = parse_body("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    return SimpleNamespace(body=body, request=SimpleNamespace(prompt_token_ids=PROMPT))


def split(tokenizer: Tokenizer, ids: list[int]) -> SplitReasoning:
    """An answer of these tokens."""
    assert tokenizer.reasoning is not None
    (found,) = split_texts(make_row(), [tokenizer.decode_showing(PROMPT, ids, tokenizer.reasoning.shown)], tokenizer)
    return found


def count(tokenizer: Tokenizer, ids: list[int]) -> int:
    """The tokens of thoughts among these of an answer."""
    choice: Any = SimpleNamespace(token_ids=np.array(ids, dtype=np.int32))
    return count_reasoning_tokens(make_row(), choice, split(tokenizer, ids), tokenizer)


@pytest.fixture
def tokenizer(kit: Any) -> Tokenizer:
    hf = kit.byte_level_tokenizer("{{ '</think>' }}")
    hf.add_tokens(["<think>", "</think>"])
    return Tokenizer(hf)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Its tokens, with those of the markers in it."""
    found: list[int] = tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
    return found


def test_a_thought_without_its_beginning_is_one(tokenizer: Tokenizer) -> None:
    secret = ids_of(tokenizer, "secret")
    ids = [*secret, *ids_of(tokenizer, "</think>yes")]
    assert split(tokenizer, ids)[:2] == ("secret", "yes")
    assert count(tokenizer, ids) == len(secret)


def test_an_answer_of_many_thoughts_is_counted_in_one_pass(tokenizer: Tokenizer) -> None:
    """Given answers of n and 4 n thoughts, when their tokens are counted, then that takes four times the work."""
    (opening,), (closing,) = ids_of(tokenizer, "<think>"), ids_of(tokenizer, "</think>")
    (word,), part = ids_of(tokenizer, "a"), ids_of(tokenizer, "\u00e9")[0]
    one = [opening, word, word, closing, word, closing, opening, part, closing]
    work, counts = [], []
    for times in (100, 400):
        lines, counted = count_lines(lambda times=times: count(tokenizer, one * times))
        work.append(lines)
        counts.append(counted)
    assert counts[1] == 4 * counts[0] == 400 * count(tokenizer, one) > 0
    assert work[1] < 5 * work[0]
