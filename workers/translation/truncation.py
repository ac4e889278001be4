"""Cuts a prompt that is too long, as the job wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, CompletionBody
from schemas.requests.truncation import TruncatePrompt
from workers.text.tokenizer import TokenIds, Tokenizer

_NOTHING_LEFT: Final = {
    TruncatePrompt.RIGHT: "nothing of its last user message fits; shorten the other messages",
    TruncatePrompt.NEWLINE: "no whole line fits; shorten it, or set truncate_prompt to right",
}


class PromptCutter:
    """Cuts the prompts of one job.

    - left: the beginning of the prompt's tokens is dropped, of a chat the beginning of the rendered template, as
      `truncate_prompt_tokens` does.
    - right: the end of a completion's tokens is dropped; of a chat the end of the last user message's text, so that
      whatever the template puts behind it stays.
    - newline: as right, and further to the last newline, which stays. Of token ids, the last token that has one.
    """

    def __init__(self, tokenizer: Tokenizer, side: TruncatePrompt, render: Callable[[ChatBody], str]) -> None:
        """`render`: makes a chat's prompt as text for `Tokenizer.encode_chats`."""
        self._tokenizer = tokenizer
        self._side = side
        self._render = render

    def cut(self, body: ChatBody | CompletionBody, at: int, prompt: TokenIds, most: int) -> TokenIds:
        """At most `most` tokens of a longer prompt, the body's number `at`. Raises `RowError` when nothing is left."""
        if self._side is TruncatePrompt.LEFT:
            return prompt[len(prompt) - most :]
        if isinstance(body, ChatBody):
            kept = self._cut_chat(body, prompt, most)
        elif self._side is TruncatePrompt.RIGHT:
            return prompt[:most]
        elif isinstance(given := body.prompts[at], str):
            kept = self._cut_text(given, self._encode, prompt, most, chat=False)
        else:
            kept = self._whole_lines(prompt[:most])
        if kept is None:
            name = "prompt" if body.num_prompts == 1 else f"prompt[{at}]"
            message = f"{name} of {len(prompt)} tokens is to be cut to {most}, but {_NOTHING_LEFT[self._side]}"
            raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=None if name == "prompt" else name)
        return kept

    def _cut_chat(self, body: ChatBody, prompt: TokenIds, most: int) -> TokenIds | None:
        messages = body.messages
        last = max((at for at, message in enumerate(messages) if message.role == "user"), default=None)
        if last is None:
            return None

        def render(text: str) -> TokenIds:
            shorter = messages[last].model_copy(update={"content": text})
            cut = body.model_copy(update={"messages": (*messages[:last], shorter, *messages[last + 1 :])})
            return self._tokenizer.encode_chats([self._render(cut)])[0]

        return self._cut_text(messages[last].text, render, prompt, most, chat=True)

    def _cut_text(
        self, text: str, prompt_of: Callable[[str], TokenIds], prompt: TokenIds, most: int, *, chat: bool
    ) -> TokenIds | None:
        whole_lines = self._side is TruncatePrompt.NEWLINE
        return cut_text(self._tokenizer, text, prompt_of, prompt, most, chat=chat, whole_lines=whole_lines)

    def _encode(self, text: str) -> TokenIds:
        return self._tokenizer.encode_batch([text], add_special_tokens=True)[0]

    def _whole_lines(self, prompt: TokenIds) -> TokenIds | None:
        for length in range(len(prompt), 0, -1):
            if b"\n" in self._tokenizer.token_bytes[int(prompt[length - 1])]:
                return prompt[:length]
        return None


def cut_text(
    tokenizer: Tokenizer,
    text: str,
    prompt_of: Callable[[str], TokenIds],
    prompt: TokenIds,
    most: int,
    *,
    chat: bool,
    whole_lines: bool = False,
) -> TokenIds | None:
    """The prompt of as much of the text's beginning as `most` tokens hold; None: no text is left. Tokens are dropped by
    the excess; another template or tokenizer than expected takes more tries, each of which drops twice as much.

    Args:
        prompt_of: the prompt of a text.  prompt: that of the whole text, with more than `most` tokens.
        chat: see `Tokenizer.without_last_tokens`.
        whole_lines: drop what follows the last newline as well.
    """
    excess, factor = len(prompt) - most, 1
    while True:
        text = tokenizer.without_last_tokens(text, excess * factor, chat=chat)
        if whole_lines:
            text = text[: text.rfind("\n") + 1]
        if not text:
            return None
        prompt = prompt_of(text)
        if len(prompt) <= most:
            return prompt
        excess, factor = len(prompt) - most, 2 * factor
