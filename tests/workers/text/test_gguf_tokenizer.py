"""Tokenizers inside GGUF files, written here with the format's own library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from workers.text.tokenizer import Tokenizer

CONTROL, NORMAL = 3, 1


def write(path: Path, hf: Any, *, model: str, pre: str, add_bos: bool, template: str | None = None) -> Path:
    """A GGUF file with the vocabulary and merges of `hf`, and no weights."""
    state = json.loads(hf.backend_tokenizer.to_str())
    added = {token["content"] for token in state["added_tokens"]}
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([CONTROL if token in added else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def digits(kit: Any) -> Any:
    """A tokenizer in which a blank and a digit can be one token, and two blanks too."""
    return kit.byte_level_tokenizer(corpus=["x  5 7  8  9 5  5 7 7  "] * 9)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return [tokenizer.id_to_token(token_id) for token_id in ids.tolist()]


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["x", "ĠĠ", "5"]), ("gpt-2", ["x", "Ġ", "Ġ5"])])
def test_text_is_split_as_the_files_merges_were_learnt(digits: Any, tmp_path: Path, pre: str, expected: Any) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", digits, model="gpt2", pre=pre, add_bos=False))
    assert tokens_of(tokenizer, "x  5") == expected
    (ids,) = tokenizer.encode_batch(["x  5 <end>7"], add_special_tokens=False)
    assert tokenizer.decode(ids) == "x  5 7"


@pytest.mark.slow
def test_several_threads_may_load_the_first_one(digits: Any, tmp_path: Path) -> None:
    """In a process of its own, where nothing has been imported yet."""
    path = write(tmp_path / "m.gguf", digits, model="gpt2", pre="gpt-2", add_bos=False)
    program = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from workers.text.tokenizer import Tokenizer
sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(4) as threads:
    list(threads.map(Tokenizer.load, [Path({str(path)!r})] * 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_pre_tokenizer_is_logged(digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "m.gguf", digits, model="gpt2", pre="brand-new", add_bos=False)
    Tokenizer.load(path)
    output = capsys.readouterr()
    assert "unknown pre-tokenizer" in output.out + output.err
    assert "brand-new" in output.out + output.err


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_if_the_file_requires_it(kit: Any, tmp_path: Path, add_bos: bool) -> None:
    path = write(
        tmp_path / "m.gguf", kit.byte_level_tokenizer(), model="gpt2", pre="gpt-2", add_bos=add_bos,
        template=kit.TEMPLATE,
    )  # fmt: skip
    tokenizer = Tokenizer.load(path)
    (ids,) = tokenizer.encode_batch(["Hello"], add_special_tokens=True)
    assert ids.tolist().count(1) == int(add_bos)
    # The template writes BOS itself, and the text of a conversation gets no second one
    chat = tokenizer.render_chat([kit.parse(kit.chat("x")).messages[0]])
    (ids,) = tokenizer.encode_batch([chat], add_special_tokens=False)
    assert ids.tolist().count(1) == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids >= {1, 2, 3}) == (1, 2, True)


def test_a_sentencepiece_file(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", kit.sentencepiece_tokenizer(), model="llama", pre="default", add_bos=True)
    tokenizer = Tokenizer.load(path)
    (ids,) = tokenizer.encode_batch(["The quick 日本語"], add_special_tokens=True)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "The quick 日本語"
    assert not tokenizer.byte_level
    assert not tokenizer.has_chat_template
