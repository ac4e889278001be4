"""Prepares requests of the lane for the engine. They are checked and refused exactly as rows of a job are.

An attempt that follows another one resumes after the tokens that the caller has. If log-probabilities are requested, it
computes those tokens again, because their log-probabilities are not stored; likewise where the engine can't resume the
request. The tokens are the same, and are not emitted a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from engine.request import FinishReason, PartialChoice, Request, as_token_ids
from engine.step_engine import StepEngine
from schemas.jobs.job import JobSettings, Tier
from schemas.requests.dialects.registry import DIALECTS
from schemas.requests.limits import Limits
from schemas.requests.parsing import BODIES, CHAT_URL, GenerationBody, PooledBody, parse_body, unsupported_url
from schemas.requests.sampling_defaults import answer_limit
from schemas.workers.lane import LaneRequest
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import NO_POLICIES, JudgedText, Policies, PolicyGuard
from workers.rows import PreparedRow, RowName
from workers.shards.resume import resume_from
from workers.translation.policy_texts import texts_of_prompt
from workers.translation.pooled import PooledReader
from workers.translation.prompts import encode
from workers.translation.requests import PRIORITIES, JobRules, RowHints, StopWatchers, Translator

PREFIX: Final = "/lane/"
"""Prefix of the engine's request ids of the lane. No job's id begins with a slash."""


@dataclass(frozen=True, slots=True)
class LaneRules:
    """Defaults and limits of the lane's requests.

    Attributes:
        default_max_tokens: of a request without max_tokens (or the remaining context, if that is less).
        caps: the largest max_tokens of each tier.
        request_timeout_seconds: seconds that a request may take in the engine; None: until its deadline.
        policies: check prompts and answers.
    """

    default_max_tokens: int = JobSettings().default_max_tokens
    caps: Mapping[Tier, int] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    request_timeout_seconds: float | None = None
    policies: Policies = NO_POLICIES


class LaneReader:
    """Prepares requests for one model."""

    def __init__(self, model: LoadedModel, rules: LaneRules | None = None) -> None:
        self._model = model
        self._rules = rules or LaneRules()

    @property
    def limits(self) -> Limits:
        """The limits of a request's body."""
        return self._rules.limits

    def prepare(self, request: LaneRequest) -> PreparedRow:
        """Prepare the request as a row. Raises `RowError`, and `PromptRouted` if another model is to answer."""
        if request.url not in BODIES or request.url in DIALECTS:  # the sender translates a dialect
            raise unsupported_url(request.url)
        body = parse_body(request.url, request.body, self._rules.limits)
        names = (RowName(0, request.id),)
        about = JudgedText(request.id, request.tenant, body.model, request.url)
        guard = self._rules.policies.guard(about, self._model.answers_to)
        translator = Translator(
            self._model.tokenizer, self._model.limits, self._job_rules(request), self._model.grammars
        )
        hints = RowHints(_row_number(request.sampled_as or request.id))
        adapter = self._model.adapter_names.get(request.model)
        if not isinstance(body, GenerationBody):
            pooled = self._pooled(request, body, translator, hints, guard)
            return PreparedRow(names, body, replace(pooled, adapter=adapter), guard)
        inputs = translator.prompts_of(body)
        if guard is not None:
            for text in inputs:
                guard.check_prompt(texts_of_prompt(body, text, self._model.tokenizer))
        (prompts,) = encode(self._model.tokenizer, [inputs], chat=request.url == CHAT_URL)
        engine_request = translator.request(engine_request_id(request), body, prompts, hints)
        # More requests may share this prompt's prefix.
        engine_request = replace(engine_request, readers_known=False, adapter=adapter)
        resumed = _resume(self._model.engine, engine_request, request.tokens)
        return PreparedRow(names, body, resumed, guard, given_tokens=sum(map(len, prompts)))

    def _pooled(
        self, request: LaneRequest, body: PooledBody, translator: Translator, hints: RowHints, guard: PolicyGuard | None
    ) -> Request:
        reader = PooledReader(self._model.tokenizer, self._model.limits, self._job_rules(request), translator)
        inputs = reader.inputs_of(body)
        if guard is not None:
            guard.check_prompt(reader.texts_of(body, inputs))
        (encoded,) = reader.encode([(body, inputs)])
        return reader.request(engine_request_id(request), body, encoded, hints)

    def deadline(self, request: LaneRequest, now: datetime) -> float | None:
        """Seconds from now after which the engine times the request out; None: never."""
        until_deadline = None if request.deadline is None else (request.deadline - now).total_seconds()
        limits = [limit for limit in (until_deadline, self._rules.request_timeout_seconds) if limit is not None]
        return min(limits, default=None)

    def _job_rules(self, request: LaneRequest) -> JobRules:
        rules = self._rules
        return JobRules(
            default_max_tokens=answer_limit(self._model.sampling_defaults, rules.default_max_tokens),
            max_output_tokens=rules.caps.get(request.tier, JobSettings().max_output_tokens),
            max_prompt_tokens=rules.limits.max_prompt_tokens,
            max_prompt_logprobs=rules.limits.max_prompt_logprobs,
            max_embedding_tokens=rules.limits.max_embedding_tokens,
            priority=PRIORITIES[request.tier],
            salt=request.tenant.encode(),
        )


def engine_request_id(request: LaneRequest) -> str:
    """The engine's request id of this attempt."""
    return f"{PREFIX}{request.id}/{request.attempt}"


def _row_number(request_id: str) -> int:
    """Stands for a row's number in a job, which keys sampling without a seed. It is the same in each attempt."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "big")


def _resume(engine: StepEngine, request: Request, tokens: Sequence[Sequence[int]]) -> Request:
    """The request, resumed after these tokens of each choice."""
    if request.params.logprobs is not None or not any(tokens):
        return request
    partial = [_partial(request, choice, ids) for choice, ids in enumerate(tokens[: request.num_choices]) if ids]
    return resume_from(engine, request, tuple(partial))


def _partial(request: Request, choice: int, ids: Sequence[int]) -> PartialChoice:
    """The tokens of a choice. A stop string that had ended it is found again here; an end token is sampled again."""
    reason = None
    watchers = request.member_of(choice).watcher
    if isinstance(watchers, StopWatchers):
        watcher = watchers(choice % request.params.n)
        for token_id in ids:
            watcher.push(token_id)
        if watcher.text is not None:
            reason = FinishReason.STOP
    return PartialChoice(choice, as_token_ids(ids), finish_reason=reason)
