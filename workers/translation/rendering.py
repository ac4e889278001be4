"""A chat as the text of its prompt."""

from __future__ import annotations

from schemas.requests.bodies import ChatBody
from schemas.requests.errors import RowError, RowErrorCode
from workers.structured.constraints import tool_format
from workers.text.tokenizer import Tokenizer
from workers.translation.template_variables import template_variables


def rendered_chat(body: ChatBody, tokenizer: Tokenizer) -> str:
    """The prompt of a chat as text, for `Tokenizer.encode_chats`. Raises `RowError` when the chat template refuses the
    messages or the tools."""
    if body.offered_tools:
        tool_format(tokenizer)
    rendered = tokenizer.render_chat(
        body.messages,
        body.offered_tools,
        template_variables(body, tokenizer),
        begins_answer=body.add_generation_prompt is not False,
        continues=body.continue_final_message,
    )
    return encodable(rendered, "messages")


def encodable(text: str, name: str) -> str:
    """Return the text of the field `name`. Raises `RowError` when it can't be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        message = f"{name} holds half a surrogate pair at character {at}, which is no text; remove it"
        raise RowError(RowErrorCode.INVALID_REQUEST, message, param=name) from error
    return text
