"""Estimates of prompts' tokens, without tokenizing every prompt: bytes times a ratio measured on a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.planner.ports import TokenCounter
from pipeline.planner.prefix_chain import message_text, tools_text
from schemas.requests.bodies import Prompt
from schemas.requests.parsing import Body, ChatBody, ClassifyBody, CompletionBody

DEFAULT_TOKENS_PER_BYTE = 0.25  # English text, common vocabularies
SAMPLED_PROMPTS = 64
SAMPLED_CHARS = 8192
MESSAGE_TOKENS = 4  # that a chat template adds to a message
TEXT_TOKENS = 2  # that an encoder's tokenizer adds to a text


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """The tokens that a chat template adds to messages.

    Attributes:
        alone: to a single user message: many templates add a system message of their own.
        with_system: to a user message and a system message.
        message: to each further message.
    """

    alone: int = 2 * MESSAGE_TOKENS
    with_system: int = 3 * MESSAGE_TOKENS
    message: int = MESSAGE_TOKENS

    def of(self, roles: Sequence[str]) -> int:
        """The tokens added to messages of these roles."""
        if {"system", "developer"} & set(roles):
            return max(0, self.with_system + (len(roles) - 2) * self.message)
        return self.alone + (len(roles) - 1) * self.message


class PromptTokens(NamedTuple):
    """Tokens of a request's prompts: of all of them, and of the longest one."""

    total: int
    longest: int


class TokenEstimator:
    """Token counts of prompts: exact for token ids, else estimated, or counted one by one when `exact`.

    Without a counter a token is four bytes. With one, the ratio is measured on the first prompts, so the same input
    gives the same estimates; the measured ratio can be stored, and given to the next planner.
    """

    def __init__(
        self,
        counter: TokenCounter | None = None,
        *,
        exact: bool = False,
        template: TemplateTokens = TemplateTokens(),
    ) -> None:
        self._counter = counter
        self._exact = exact and counter is not None
        self._template = template
        self._sampled = 0
        self._tokens = 0
        self._bytes = 0
        self._settled: float | None = None

    @property
    def exact(self) -> bool:
        """Whether every prompt is counted."""
        return self._exact

    @property
    def tokens_per_byte(self) -> float | None:
        """The ratio that was measured or given; None: the rule of thumb applies."""
        return self._tokens / self._bytes if self._settled is None and self._bytes else self._settled

    def settle(self, tokens_per_byte: float | None) -> None:
        """Fix the ratio, and stop sampling."""
        self._settled = tokens_per_byte
        if not self._exact:
            self._counter = None

    def prompt_tokens(self, body: Body, size: int) -> PromptTokens:
        """Tokens of the body's prompt, or of all its prompts or sequences. `size`: bytes of a conversation's text."""
        if isinstance(body, ClassifyBody) and body.choices:  # they are computed behind one prompt
            prompts = self.prompt_tokens(body.prompt_body, size)
            added = sum(self._of_prompt(choice) for choice in body.choices)
            return PromptTokens(prompts.total + added * max(1, len(body.input)), prompts.longest + added)
        if not isinstance(body, ChatBody | CompletionBody):
            known: dict[str, int] = {}  # a query stands in a pair with each document
            for text in (given for sequence in body.sequences for given in sequence if isinstance(given, str)):
                if text not in known:
                    known[text] = self._of_prompt(text, TEXT_TOKENS)
            counts = [
                sum(known[given] if isinstance(given, str) else len(given) for given in sequence)
                for sequence in body.sequences
            ]
            return PromptTokens(sum(counts), max(counts))
        if isinstance(body, CompletionBody):
            counts = [self._of_prompt(prompt) for prompt in body.prompts]
            return PromptTokens(sum(counts), max(counts))
        counted = None
        if self._counting:
            counted = self._counted("\n".join([tools_text(body), *map(message_text, body.messages)]).lstrip("\n"))
        template = self._template.of([message.role for message in body.messages])
        tokens = template + (self.bytes_to_tokens(size) if counted is None else counted)
        return PromptTokens(tokens, tokens)

    def _of_prompt(self, prompt: Prompt, added: int = 0) -> int:
        """Tokens of one prompt, at least 1; `added`: special tokens that a text gets."""
        if isinstance(prompt, tuple):
            return len(prompt)
        return added + max(1, self._counted(prompt) or self.bytes_to_tokens(len(prompt.encode())))

    def bytes_to_tokens(self, size: int) -> int:
        """An estimate for `size` bytes of text, in tokens."""
        return round(size * (self.tokens_per_byte or DEFAULT_TOKENS_PER_BYTE))

    @property
    def _counting(self) -> bool:
        return self._counter is not None and (self._exact or self._sampled < SAMPLED_PROMPTS)

    def _counted(self, text: str) -> int | None:
        """The text's tokens if all of it was counted; a sample also improves the ratio."""
        if self._counter is None or not self._counting:
            return None
        sample = text if self._exact else text[:SAMPLED_CHARS]
        tokens = self._counter(sample)
        self._sampled += 1
        self._tokens += tokens
        self._bytes += len(sample.encode())
        return tokens if len(sample) == len(text) else None
