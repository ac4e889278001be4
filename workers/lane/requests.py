"""From a request on the lane to one that the engine can compute: checked and refused exactly as a row of a job is.

An attempt that follows another goes on behind the tokens that the caller has. Where log-probabilities are asked for it
computes those tokens again, since nobody has kept theirs; the same ones come out, and are not told a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from engine.request import FinishReason, PartialChoice, Request, as_token_ids
from schemas.jobs.job import JobSettings, Tier
from schemas.requests.limits import Limits
from schemas.requests.requests import BODIES, CHAT_URL, EmbeddingBody, parse_body, unsupported_url
from schemas.workers.lane import LaneRequest
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import NO_POLICIES, JudgedText, Policies, PolicyGuard
from workers.rows import PreparedRow, RowName
from workers.shards.resume import go_on
from workers.text.tokenizer import TokenIds
from workers.translation.embeddings import EmbeddingReader
from workers.translation.policy_texts import texts_of_prompt, texts_to_embed
from workers.translation.requests import PRIORITIES, JobRules, RowHints, StopWatchers, Translator

PREFIX: Final = "/lane/"
"""Of the engine's names for the lane's requests. No job's id begins with a slash."""


@dataclass(frozen=True, slots=True)
class LaneRules:
    """What stands in where a request says nothing, and what it may ask for.

    Attributes:
        default_max_tokens: tokens of a request that names no number (or what is left of the context, if that is less).
        caps: the largest max_tokens of each tier.
        request_timeout: seconds that a request may take in the engine; None: until its deadline.
        policies: judge prompts and answers.
    """

    default_max_tokens: int = JobSettings().default_max_tokens
    caps: Mapping[Tier, int] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    request_timeout: float | None = None
    policies: Policies = NO_POLICIES


class LaneReader:
    """Prepares requests for one model."""

    def __init__(self, model: LoadedModel, rules: LaneRules | None = None) -> None:
        self._model = model
        self._rules = rules or LaneRules()

    def prepare(self, request: LaneRequest) -> PreparedRow:
        """The request as a row; raises `RowError`."""
        if request.url not in BODIES:
            raise unsupported_url(request.url)
        body = parse_body(request.url, request.body, self._rules.limits)
        names = (RowName(0, request.id),)
        guard = self._rules.policies.guard(JudgedText(request.id, request.tenant, body.model, request.url))
        if isinstance(body, EmbeddingBody):
            return PreparedRow(names, body, self._embedding(request, body, guard), guard)
        translator = Translator(
            self._model.tokenizer, self._model.limits, self._job_rules(request), self._model.grammars
        )
        text = translator.prompt_of(body)
        if guard is not None:
            guard.check_prompt(texts_of_prompt(body, text, self._model.tokenizer))
        prompt = self._encode(text, chat=request.url == CHAT_URL)
        made = translator.request(engine_name(request), body, prompt, RowHints(_number(request.id)))
        made = replace(made, readers_known=False)  # who else may come with this prompt nobody knows
        return PreparedRow(names, body, _resumed(made, request.tokens), guard)

    def _embedding(self, request: LaneRequest, body: EmbeddingBody, guard: PolicyGuard | None) -> Request:
        reader = EmbeddingReader(self._model.tokenizer, self._model.limits, self._job_rules(request))
        inputs = reader.inputs_of(body)
        if guard is not None:
            guard.check_prompt(texts_to_embed(inputs, self._model.tokenizer))
        (prompts,) = reader.encode([inputs])
        return reader.request(engine_name(request), body, prompts)

    def deadline(self, request: LaneRequest, now: datetime) -> float | None:
        """Seconds from now after which the engine is to give the request up."""
        left = None if request.deadline is None else (request.deadline - now).total_seconds()
        limits = [limit for limit in (left, self._rules.request_timeout) if limit is not None]
        return min(limits, default=None)

    def _job_rules(self, request: LaneRequest) -> JobRules:
        rules = self._rules
        return JobRules(
            default_max_tokens=rules.default_max_tokens,
            max_output_tokens=rules.caps.get(request.tier, JobSettings().max_output_tokens),
            max_embedding_tokens=rules.limits.max_embedding_tokens,
            priority=PRIORITIES[request.tier],
            salt=request.tenant.encode(),
        )

    def _encode(self, prompt: str | TokenIds, *, chat: bool) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._model.tokenizer
        return (
            tokenizer.encode_chats([prompt]) if chat else tokenizer.encode_batch([prompt], add_special_tokens=True)
        )[0]


def engine_name(request: LaneRequest) -> str:
    """The engine's name for this attempt."""
    return f"{PREFIX}{request.id}/{request.attempt}"


def _number(request_id: str) -> int:
    """What a row's number is to a job: sampling without a seed is keyed by it, the same in each attempt."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "big")


def _resumed(made: Request, tokens: Sequence[Sequence[int]]) -> Request:
    """Going on behind these tokens of each choice."""
    if made.params.logprobs is not None or not any(tokens):
        return made
    partial = [_partial(made, choice, ids) for choice, ids in enumerate(tokens) if ids]
    return go_on(made, tuple(partial))


def _partial(made: Request, choice: int, ids: Sequence[int]) -> PartialChoice:
    """What a choice has. Whether a stop string had ended it is seen; an end token comes again by itself."""
    reason = None
    if isinstance(made.watcher, StopWatchers):
        watcher = made.watcher(choice)
        for token_id in ids:
            watcher.push(token_id)
        if watcher.text is not None:
            reason = FinishReason.STOP
    return PartialChoice(choice, as_token_ids(ids), finish_reason=reason)
