"""Options of a model that decide how its conversations are written and read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TEMPLATES: Final = Path(__file__).parent / "templates"
"""Chat templates that are a part of this package, for models that come without: NAME.jinja."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What replaces or completes the model's own chat template.

    Attributes:
        template: jinja; None: the model's own.
        reasoning_parser: how the model marks its thought, a name in `FORMATS`, or "none"; None: as the template shows.
        thinking_token_budget: tokens of a thought, for requests without a budget; None: no bound.
        score_tokens: the tokens that mean no and yes to a reranker that generates; None: as its files say, if they do.
    """

    template: str | None = None
    reasoning_parser: str | None = None
    thinking_token_budget: int | None = None
    score_tokens: tuple[str, str] | None = None

    def fingerprint(self) -> bytes:
        """A string that differs if answers do; empty for the model's own."""
        parts = (
            (b"chat template", self.template),
            (b"reasoning parser", self.reasoning_parser),
            (b"thinking token budget", self.thinking_token_budget),
            (b"score tokens", self.score_tokens),
        )
        return b"".join(name + b"\0" + str(value).encode() for name, value in parts if value is not None)


OWN_CHAT: Final = ChatOptions()


def read_template(given: Path) -> str:
    """The chat template in a file, or of `TEMPLATES` if there is no such file and the name is one of these.

    Raises:
        ValueError: it can't be read; the message has the names of `TEMPLATES`.
    """
    shipped = {path.stem: path for path in TEMPLATES.glob("*.jinja")}
    path = given.expanduser()
    if not path.exists():
        path = shipped.get(str(given), path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"can't be read: {reason}; give a file, or one of {', '.join(sorted(shipped))}") from error
