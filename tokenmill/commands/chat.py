"""`tokenmill chat`: a chat with a model over HTTP, of one message or several."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug
from tokenmill.errors import EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from tokenmill.jobs.http_client import GatewayClient


DIM, NORMAL = "\033[2m", "\033[0m"
"""A thought is dim in a terminal; elsewhere only the answer is written."""


def chat(
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="What to say; '-' reads it from stdin. Default: a talk.")
    ] = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The gateway.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Needed where several are served.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer. Default: the installation's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: always the likeliest token.")] = None,
    _debug: Debug = False,
) -> None:
    """Talk to a model that an installation serves; its answers come on stdout, token by token.

    With MESSAGE there is one answer. Without, each line is a message, and what was said before goes along; Ctrl-C
    cancels the answer that is under way, and Ctrl-D ends. The API key, if one is needed, is read from
    TOKENMILL_API_KEY, else OPENAI_API_KEY.
    """
    from tokenmill.jobs.http_client import open_gateway

    text = sys.stdin.read().strip() if message == "-" else message
    if text is not None and not text.strip():
        raise UserError("the message is empty; say something")
    with open_gateway(url) as gateway:
        settings: dict[str, Any] = {"model": model or _only_model(gateway), "max_tokens": max_tokens}
        if temperature is not None:
            settings["temperature"] = temperature
        body = {name: value for name, value in settings.items() if value is not None}
        messages = [] if system is None else [{"role": "system", "content": system}]
        if text is None:
            _talk(gateway, body, messages)
            return
        messages.append({"role": "user", "content": text})
        if not _answer(gateway, body, messages):
            raise typer.Exit(EXIT_INTERRUPTED)


def _talk(gateway: GatewayClient, body: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Run the conversation until the end of stdin. In a terminal, errors are printed and it goes on."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        output.say(f"{body['model']} at {gateway.url}; Ctrl-C cancels an answer, Ctrl-D ends")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            if not _answer(gateway, body, messages):
                messages.pop()
        except UserError as error:
            messages.pop()
            if not prompt:
                raise
            output.say(f"error: {error}")


def _answer(gateway: GatewayClient, body: dict[str, Any], messages: list[dict[str, str]]) -> bool:
    """Stream an answer to stdout and append it to the messages; False: the user cancelled it."""
    parts: list[str] = []
    try:
        for thought, part in _parts(gateway, body | {"messages": messages, "stream": True}):
            if not thought:
                parts.append(part)
            if not thought or sys.stdout.isatty():
                sys.stdout.write(f"{DIM}{_shown(part)}{NORMAL}" if thought else _shown(part))
                sys.stdout.flush()
    except KeyboardInterrupt:
        print()
        output.say("cancelled")
        return False
    except UserError:
        if parts:
            print()
        raise
    print()
    messages.append({"role": "assistant", "content": "".join(parts)})
    return True


def _parts(gateway: GatewayClient, body: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """The streamed text of an answer, and whether it is the model's thought. Raises `UserError`, also for an incomplete
    stream."""
    thinks = False
    from tokenmill.jobs.http_client import error_of

    with gateway.stream("POST", "/v1/chat/completions", body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError:
                raise UserError(f"{gateway.url}: an event can't be read; is a tokenmill gateway there?") from None
            if "error" in chunk:
                raise UserError(f"{gateway.url}: {error_of(chunk) or 'the answer failed'}")
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta", {})
                if thought := delta.get("reasoning_content"):
                    thinks = True
                    yield True, thought
                if content := delta.get("content"):
                    if thinks:
                        yield True, "\n\n"
                    thinks = False
                    yield False, content
    raise UserError(f"{gateway.url}: the answer broke off; ask again")


def _only_model(gateway: GatewayClient) -> str:
    names = [str(model["id"]) for model in gateway.get("/v1/models")["data"]]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(f"{gateway.url}: no model has been served yet; start a worker")
    raise UserError(f"{gateway.url}: several models are served; give --model: {', '.join(names)[:500]}")


def _shown(text: str) -> str:
    """Remove control characters in a terminal, so that an answer can't move the cursor or change the screen."""
    if not sys.stdout.isatty():
        return text
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())
