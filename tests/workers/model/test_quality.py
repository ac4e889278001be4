"""The quality loss of quantization, measured on windows of text, token by token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Engine, EngineConfig, as_token_ids
from tests.workers.model.scoring import score
from workers.errors import WorkerError
from workers.model.quality import TokenScores, compare, read_windows, token_scores


class CharacterTokenizer:
    """A tokenizer with one token for each character."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        return [as_token_ids([ord(character) for character in text]) for text in texts]


def test_every_kind_of_line_is_text(tmp_path: Path) -> None:
    lines = [
        {"text": "ab"},
        {"prompt": "cd"},
        {
            "custom_id": "x",
            "body": {"messages": [{"role": "user", "content": "e"}, {"role": "system", "content": "f"}]},
        },
        {"body": {"prompt": "g"}},
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_windows(file, CharacterTokenizer(), 3, 99)  # type: ignore[arg-type]
    assert ["".join(map(chr, window)) for window in found] == ["abc", "de\n", "\nfg"]
    assert len(read_windows(file, CharacterTokenizer(), 3, 2)) == 2  # type: ignore[arg-type]
    plain = tmp_path / "text.txt"
    plain.write_text("hello")
    [window] = read_windows(plain, CharacterTokenizer(), 4, 9)  # type: ignore[arg-type]
    assert "".join(map(chr, window)) == "hell"


def test_each_window_begins_with_the_tokenizers_prefix(tmp_path: Path) -> None:
    class PrefixingTokenizer(CharacterTokenizer):
        """Puts a ^ before each text."""

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            return super().encode_batch(
                [f"^{text}" if add_special_tokens else text for text in texts], add_special_tokens=False
            )

    plain = tmp_path / "text.txt"
    plain.write_text("hello you")
    found = read_windows(plain, PrefixingTokenizer(), 4, 9)  # type: ignore[arg-type]
    assert ["".join(map(chr, window)) for window in found] == ["^hel", "^lo ", "^you"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "ok"}\n{"other": 1}\n', r"a\.jsonl:2 is not a JSON object with text"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1 is not"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1 is not"),
        ("a.jsonl", "", "holds 0 tokens"),
        ("a.txt", "ab", "holds 2 tokens of text; at least 3 are needed"),
        ("a.txt", b"\xff\xfe\x00", "can't be read as text"),
        ("missing.txt", None, "can't be read as text"),
    ],
)
def test_files_without_text_are_refused_in_one_line(name: str, content: Any, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WorkerError, match=said) as caught:
        read_windows(tmp_path / name, CharacterTokenizer(), 3, 9)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_scores_are_those_of_the_model(tiny_model: Any) -> None:
    engine = Engine.load(tiny_model("llama"), EngineConfig(dtype="float32"))
    windows = [as_token_ids(range(3, 20)), as_token_ids(range(50, 67))]
    found = token_scores(engine, windows)
    assert len(found.logprobs) == len(found.greedy) == 32
    whole = score(engine, windows)
    assert math.isclose(float(found.logprobs.sum()), whole[0].logprob + whole[1].logprob, rel_tol=1e-6)
    said = np.concatenate([window[1:] for window in windows])
    assert int((found.greedy == said).sum()) == whole[0].greedy + whole[1].greedy
    same = compare(found, found)
    assert (same.distance, same.same_greedy, same.tokens) == (0.0, 1.0, 32)
    assert same.before == same.after > 1


def test_a_comparison_counts_tokens() -> None:
    before = TokenScores(np.log(np.array([0.5, 0.5, 0.25, 0.25])), np.array([1, 2, 3, 4], dtype=np.int32))
    after = TokenScores(np.log(np.array([0.25, 0.5, 0.5, 0.25])), np.array([1, 2, 3, 5], dtype=np.int32))
    found = compare(before, after)
    assert found.same_greedy == 0.75
    assert math.isclose(found.distance, math.log(2) / 2)
    assert math.isclose(found.before, found.after)
