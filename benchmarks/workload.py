"""Workload files (OpenAI batch lines) as token-id prompts with lengths: the same for every engine measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


class ChatTemplate(Protocol):
    """From messages to the token ids of a prompt."""

    def __call__(self, messages: list[dict[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload: prompt token ids and how many tokens to generate."""

    custom_id: str
    token_ids: list[int]
    max_tokens: int


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Keep tokenized prompts, so that another engine is given the very same ids."""
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts]), encoding="utf-8")


def read_prompts(path: Path) -> list[Prompt]:
    """What `write_prompts` kept."""
    return [Prompt(**line) for line in json.loads(path.read_text(encoding="utf-8"))]


def read_workload(path: Path, template: ChatTemplate, limit: int | None = None) -> list[Prompt]:
    """Read the chat requests of a workload file, in order."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        request = json.loads(line)
        body = request["body"]
        prompts.append(Prompt(request["custom_id"], template(body["messages"]), int(body["max_tokens"])))
    return prompts


def load_prompts(path: Path, model: Path, limit: int | None = None) -> list[Prompt]:
    """Read a workload file with the chat template and the tokenizer of `model` (a folder or a GGUF file).

    A `.json` file is what `write_prompts` kept: token ids, taken as they are.
    """
    if path.suffix == ".json":
        return read_prompts(path)[:limit]
    from schemas.requests.parsing import ChatMessage
    from workers.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)

    def template(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer.render_chat([ChatMessage.model_validate(message) for message in messages])
        ids: list[int] = tokenizer.encode_chats([text])[0].tolist()
        return ids

    return read_workload(path, template, limit)
