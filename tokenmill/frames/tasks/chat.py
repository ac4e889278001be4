"""`tokenmill.map`: a message to a model that generates, and the typed answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import AnswerForm, answer_form
from tokenmill.frames.prompts import PromptTemplate, RowText
from tokenmill.frames.tasks.task import ORIGIN, USAGE, FormerAnswer, Task
from tokenmill.frames.tasks.validation import Validate, judging

if TYPE_CHECKING:
    from schemas.requests.parsing import Body

SUFFIXES = ("", "_error", "_finish_reason", *USAGE, "_completion_tokens", *ORIGIN, "_tries")


def chat_task(
    prompt: str, system: str | None, output: Any, sampling: Mapping[str, Any],
    validate: Validate | None = None, max_tries: int | None = None, adapter_column: str | None = None,
    parts: tuple[str, str] = ("prompt", "system"),
) -> Task:  # fmt: skip
    """The task of a prompt. `parts`: the templates' names in messages. Raises `InvalidCall`."""
    from schemas.requests.parsing import CHAT_URL

    form = answer_form(output)
    texts: dict[str, RowText] = {} if system is None else {"system": PromptTemplate(system, parts[1])}
    texts["prompt"] = PromptTemplate(prompt, parts[0])

    def answers(path: Path, body: Body) -> ChatAnswers:
        _check_form(path, body)
        return ChatAnswers(form)

    return Task(
        CHAT_URL, texts, messages_of, {**form.body, **sampling}, SUFFIXES, ("text", "finish_reason"), answers,
        lambda _: ChatAnswers(form), ordered="prompt", judging=judging(form, validate, max_tries),
        adapter_column=adapter_column, bound=form.bound,
    )  # fmt: skip


def messages_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """The messages of a chat; every text but the system message is the user's."""
    roles = {"system": "system"}
    return {"messages": [{"role": roles.get(name, "user"), "content": text} for name, text in texts.items()]}


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """Answers of a form; see `Answers`."""

    form: AnswerForm
    former: tuple[str, ...] = ("", "_finish_reason")

    def columns(self, results: pa.Table, errors: list[str | None]) -> dict[str, pa.Array]:
        """The typed answers; one that doesn't fit is null, with its error."""
        values: list[Any] = []
        texts, reasons = results["text"].to_pylist(), results["finish_reason"].to_pylist()
        for row, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            value = None
            if errors[row] is None and text is None:
                errors[row] = "invalid_answer: it has no text"
            if errors[row] is None and reason == "length" and not self.form.is_text:
                errors[row] = (
                    "incomplete_answer: it was cut off; give another max_tokens, or a form that bounds its texts "
                    "(maxLength, pydantic's Field(max_length=...))"
                )
            if errors[row] is None:
                try:
                    value = self.form.parse(text)
                except ValueError as wrong:
                    errors[row] = f"invalid_answer: {wrong}"
                except Exception as wrong:  # noqa: BLE001 - a mistake in a model's validator is the row's error
                    errors[row] = f"invalid_answer: its check failed with {type(wrong).__name__}: {wrong}"
            values.append(value)
        return {"": self.form.column(values), "_finish_reason": pa.array(reasons, pa.string())}

    def former_answer(self, cells: Mapping[str, Any]) -> FormerAnswer | None:
        """The text is made from the typed answer, in JSON's notation. An answer whose column doesn't hold all of it
        (parts of a schema that became JSON text) has none."""
        text, reason = self._text(cells[""]), cells["_finish_reason"]
        if text is None:
            return None
        if not isinstance(reason, str | None):
            raise InvalidCall("a finish reason must be a text or null; give the column as the call returned it")
        message = {"role": "assistant", "content": text}
        response = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
        return FormerAnswer(response, text, reason)

    def _text(self, value: Any) -> str | None:
        """A text with this value; None: there is none."""
        form = self.form
        try:
            is_text = isinstance(value, str) and (form.is_text or form.categories)
            text = value if is_text else orjson.dumps(value).decode()
            return text if form.parse(text) == value else None
        except Exception:  # noqa: BLE001 - what validators of a model raise; the row is computed again
            return None


def _check_form(path: Path, body: Body) -> None:
    """Compile the answer's grammar with the model's tokens: else every row would fail."""
    from schemas.requests.errors import RowError
    from schemas.requests.parsing import ChatBody
    from workers.structured.constraints import form_of
    from workers.structured.grammar import Grammars
    from workers.text.tokenizer import Tokenizer

    assert isinstance(body, ChatBody)
    if body.response_format is None and body.structured_outputs is None:
        return
    tokenizer = Tokenizer.load(path)
    try:
        form = form_of(body, tokenizer)
        if form is not None:
            Grammars(tokenizer, tokenizer.size, ()).compile(form)
    except RowError as error:
        raise InvalidCall(f"output schema: {error.message}") from error
