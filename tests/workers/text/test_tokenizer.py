"""The tokenizer: templates, special tokens, and what happens when a model lacks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatMessage
from workers.errors import TokenizerError
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer


def message(role: str, content: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def test_a_conversation_is_rendered_by_the_template(byte_level: Tokenizer) -> None:
    # Given a developer's message, which the template doesn't know, and content in parts
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = byte_level.render_chat([message("developer", "Be brief."), message("user", parts)])
    # Then the developer speaks as the system, and the parts are one text
    assert text == "<s><turn>system\nBe brief.<end>\n<turn>user\na\nb<end>\n<turn>assistant\n"


def test_a_template_with_a_developer_role_gets_developer_messages(kit: Any) -> None:
    template = "{% for m in messages %}{% if m['role'] == 'developer' %}D:{% endif %}{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(kit.byte_level_tokenizer(template))
    assert tokenizer.render_chat([message("developer", "x")]) == "D:x"


def test_a_conversation_that_the_template_refuses_fails_its_row(byte_level: Tokenizer) -> None:
    with pytest.raises(RowError, match="tool messages are not supported") as caught:
        byte_level.render_chat([message("tool", "42")])
    assert caught.value.code is RowErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "template", ["{{ messages[7]['content'] }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% if %}"]
)
def test_a_broken_template_fails_rows_not_the_worker(kit: Any, template: str) -> None:
    tokenizer = Tokenizer(kit.byte_level_tokenizer(template))
    with pytest.raises(RowError, match="chat template") as caught:
        tokenizer.render_chat([message("user", "x")])
    assert caught.value.code is RowErrorCode.INVALID_REQUEST


def test_a_template_can_not_reach_out_of_its_sandbox(kit: Any) -> None:
    tokenizer = Tokenizer(kit.byte_level_tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(RowError, match="chat template"):
        tokenizer.render_chat([message("user", "x")])


def test_a_base_model_has_no_chat(kit: Any) -> None:
    tokenizer = Tokenizer(kit.byte_level_tokenizer(template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RowError, match="/v1/completions or give --chat-template"):
        tokenizer.render_chat([message("user", "x")])
    # and a template given by hand is used
    given = Tokenizer(kit.byte_level_tokenizer(template=None), chat=ChatOptions("[{{ messages[0]['content'] }}]"))
    assert given.render_chat([message("user", "x")]) == "[x]"


def test_bos_comes_once(kit: Any) -> None:
    # Given a tokenizer that adds BOS, and a template that writes it
    tokenizer = Tokenizer(kit.byte_level_tokenizer(add_bos=True))
    rendered = tokenizer.render_chat([message("user", "x")])
    (chat,) = tokenizer.encode_batch([rendered], add_special_tokens=False)
    (text,) = tokenizer.encode_batch(["x"], add_special_tokens=True)
    assert chat.tolist().count(1) == 1
    assert chat[0] == 1
    assert text.tolist()[0] == 1
    assert len(text) == 2


def test_special_tokens_are_single_ids_and_leave_the_text(byte_level: Tokenizer) -> None:
    (ids,) = byte_level.encode_batch(["<turn>user\nHi<end>"], add_special_tokens=False)
    assert ids[0] == 3
    assert ids[-1] == 2
    assert byte_level.decode(ids) == "user\nHi"


@pytest.mark.parametrize("text", ["Hello, world", "  two blanks", "naïve 日本語 🎉", "a .\n\n b 's n't", "tab\tend "])
def test_text_survives(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_an_answer_keeps_its_first_blank(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    # Given a prompt and an answer that begins with a blank
    for tokenizer, answer in ((byte_level, " brown fox"), (sentencepiece, "brown fox")):
        prompt, ids = tokenizer.encode_batch(["The quick", answer], add_special_tokens=False)
        # When it is decoded where it stands, then the blank is there (by itself, SentencePiece drops it)
        assert tokenizer.decode_answers([prompt], [ids]) == [" brown fox"]


def test_a_tokenizer_that_can_not_be_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither a model folder nor a GGUF file"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="no tokenizer that can be loaded"):
        Tokenizer.load(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match=r"x\.gguf"):
        Tokenizer.load(tmp_path / "x.gguf")


def test_a_folder_is_loaded_with_its_template(model_folder: Path, kit: Any) -> None:
    tokenizer = Tokenizer.load(model_folder)
    assert tokenizer.has_chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.byte_level
