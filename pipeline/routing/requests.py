"""A request as the rules of a virtual model see it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pipeline.planner.prefix_chain import prompt_bytes
from pipeline.planner.tokens import TokenEstimator
from schemas.jobs.job import Tier
from schemas.requests.parsing import Body, ChatBody, CompletionBody, GenerationBody


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request, or the row of a job.

    Attributes:
        prompt_tokens: estimated, of the longest prompt.
        at: now (aware, UTC).
    """

    body: Body
    prompt_tokens: int
    tenant: str
    tier: Tier
    at: datetime

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools."""
        return isinstance(self.body, ChatBody) and bool(self.body.offered_tools)

    @property
    def has_schema(self) -> bool:
        """Whether the answer must have a given form."""
        body = self.body
        return isinstance(body, GenerationBody) and (
            body.response_format is not None or body.structured_outputs is not None
        )

    @property
    def user_turns(self) -> int:
        """The number of user messages; 1 of other bodies."""
        body = self.body
        return sum(one.role == "user" for one in body.messages) if isinstance(body, ChatBody) else 1

    @property
    def user_text(self) -> str:
        """The texts of the user's messages, or of all prompts and inputs; token ids have none."""
        return "\n".join(self._texts())

    @property
    def last_text(self) -> str:
        """The last user message, or the last prompt or input."""
        texts = self._texts()
        return texts[-1] if texts else ""

    def _texts(self) -> list[str]:
        body = self.body
        if isinstance(body, ChatBody):
            return [one.text for one in body.messages if one.role == "user"]
        if isinstance(body, CompletionBody):
            return [one for one in body.prompts if isinstance(one, str)]
        return [text for sequence in body.sequences for text in sequence if isinstance(text, str)]


def estimate_prompt_tokens(body: Body) -> int:
    """Estimated tokens of the body's longest prompt: exact for token ids, else four bytes a token."""
    return TokenEstimator().prompt_tokens(body, len(prompt_bytes(body)[0])).longest
