"""Validation of input lines: a line becomes a request that can be planned, or an error.

Everything is checked that needs no tokenizer; the worker checks the context length. Of several errors of a line, the
first in the order id, shape, url, body, model, cap is reported; a repeated custom_id comes before all of them, because
users find a row by its id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

from pipeline.planner.ports import ModelRouting, SourceBatch, SourceRow
from pipeline.planner.prefix_chain import PrefixChain, prefix_chain, prompt_bytes
from pipeline.planner.rejected_lines import RejectedLine
from pipeline.planner.seen_ids import SeenIds
from pipeline.planner.tokens import PromptTokens, TokenEstimator
from schemas.jobs.job import Job, JobSettings
from schemas.models import ModelPin, merged_hint
from schemas.requests.dialects.registry import translate_error
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import (
    BODIES,
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    RequestLine,
    parse_body,
    parse_line,
)
from schemas.requests.request_key import AnswerContext, request_key, stored_body
from schemas.requests.sampling_defaults import answer_limit, fill_in
from schemas.requests.truncation import limit_prompt_tokens


class ValidRow(NamedTuple):
    """A valid request, with the facts that planning needs.

    Attributes:
        position: in its batch, blank lines not counted.  body: JSON for the worker.
        requested_model: as the request names it; `model` is the pinned one that answers.
        request_key: see `schemas.requests.request_key`.
        shareable: whether an equal request may take this one's answer.
        prompt_tokens: of all prompts, estimated.  expected_tokens: of one choice.  max_tokens: of all choices together.
        certain_tokens: minimum tokens of each choice, for any output of the model.
    """

    position: int
    row: int
    custom_id: str
    url: str
    body: bytes
    model: str
    requested_model: str
    request_key: bytes
    shareable: bool
    choices: int
    prompt_tokens: int
    expected_tokens: int
    max_tokens: int
    certain_tokens: int
    chain: PrefixChain


class _Answer(NamedTuple):
    """The expected answer of a request; fields as in `ValidRow`."""

    shareable: bool
    choices: int
    expected_tokens: int
    max_tokens: int
    certain_tokens: int


class _ReadRow(NamedTuple):
    """A parsed line, before its model is chosen. `position`: in its batch; `prompt`, `ends`: see `prompt_bytes`."""

    position: int
    source: SourceRow
    line: RequestLine
    body: Body
    prompt: bytes
    ends: tuple[int, ...]
    prompt_tokens: PromptTokens


@dataclass(slots=True)
class CheckedBatch:
    """One batch, split into valid and rejected lines; both in input order. `unselected`: number of lines left out."""

    batch: SourceBatch
    valid: list[ValidRow] = field(default_factory=list)
    rejected: list[RejectedLine] = field(default_factory=list)
    unselected: int = 0

    def reject(self, position: int, source: SourceRow, error: RowError) -> None:
        """Add an invalid line; `position`: in the batch."""
        name = self.batch.name
        message = f"{name}: {error.message}" if name else error.message
        located = RowError(error.code, message, param=error.param, line=source.line)
        custom_id, model = _inner(source.value, "custom_id"), _inner(source.value, "body", "model")
        self.rejected.append(RejectedLine(position, source.row, custom_id, model, located))


class Validator:
    """Checks the lines of one job, in order. `seen`: index of the job's custom_ids.

    Args:
        max_model_len: tokens of the model's context, if it is known: requests that can't fit are refused, as by the
            worker.
        routing: chooses the models of requests to virtual ones.
    """

    def __init__(
        self,
        job: Job,
        seen: SeenIds,
        estimator: TokenEstimator,
        *,
        max_model_len: int | None = None,
        routing: ModelRouting | None = None,
    ) -> None:
        self._settings = job.settings
        self._max_model_len = max_model_len
        virtual = [one.name for one in job.settings.virtual_models or ()]
        self._virtual = set(virtual)
        self._routing = routing
        self._adds_logprobs = job.settings.cascade is not None and job.settings.cascade.needs_logprobs
        self._models = job.models
        models = [model.name for model in job.models]
        only = job.settings.model
        self._names = [*models, *virtual] if only is None else list(dict.fromkeys((only, *virtual)))
        self._defaults = {model.name: model.sampling_defaults for model in job.models}
        self._contexts = {model.name: _context(model, job.settings) for model in job.models}
        self._seen = seen
        self._estimator = estimator
        self._selected = None if job.settings.rows is None else job.settings.rows.mask()
        self._keys = {
            (model, url): blake2b(f"{url}\x00{model}".encode(), digest_size=16).digest()
            for model in models
            for url in BODIES
        }

    def check(self, batch: SourceBatch) -> CheckedBatch:
        checked = CheckedBatch(batch)
        repeated = self._repeated(batch)
        read: list[_ReadRow] = []
        for position, source in enumerate(batch.rows):
            if not self._is_selected(source.row):
                checked.unselected += 1
                continue
            try:
                if isinstance(source.value, RowError):
                    raise source.value
                if source.row in repeated:
                    raise repeated[source.row]
                read.append(self._read(position, source))
            except RowError as error:
                checked.reject(position, source, error)
        for row, model in zip(read, self._choose_models(read), strict=True):
            try:
                checked.valid.append(self._request(row, model))
            except RowError as error:
                checked.reject(row.position, row.source, error)
        checked.rejected.sort(key=attrgetter("position"))
        return checked

    def _choose_models(self, rows: list[_ReadRow]) -> list[str]:
        """The model that answers each row: the one that it names, or the choice of a virtual one's rules."""
        chosen = [row.body.model for row in rows]
        for name in self._virtual & set(chosen):
            assert self._routing is not None, "a job with virtual models is planned with their rules"
            at = [index for index, model in enumerate(chosen) if model == name]
            requests = [(rows[index].body, rows[index].prompt_tokens.longest) for index in at]
            for index, model in zip(at, self._routing(name, requests), strict=True):
                chosen[index] = model
        return chosen

    def _is_selected(self, row: int) -> bool:
        """Whether the job answers the row. The custom_ids of rows that it leaves out count as used all the same."""
        return self._selected is None or (row < len(self._selected) and bool(self._selected[row]))

    def remember(self, batch: SourceBatch) -> None:
        """Add the custom_ids of lines that were checked by an earlier planner."""
        named = _named(batch)
        self._seen.add([name for _, name in named], [row.row for row, _ in named])

    def _repeated(self, batch: SourceBatch) -> dict[int, RowError]:
        """The errors of rows whose custom_id an earlier row has."""
        named = _named(batch)
        firsts = self._seen.add([name for _, name in named], [row.row for row, _ in named])
        return {
            row.row: RowError(
                RowErrorCode.DUPLICATE_CUSTOM_ID,
                f"custom_id {name[:80]!r} was used before, {_where(batch, first)}; give each line a name of its own",
                param="custom_id",
            )
            for (row, name), first in zip(named, firsts, strict=True)
            if first is not None
        }

    def _read(self, position: int, source: SourceRow) -> _ReadRow:
        line = parse_line(source.value, self._settings.limits)
        if self._settings.url not in (None, line.url):
            message = f"url is {line.url!r}, but this job's endpoint is {self._settings.url}; submit the line elsewhere"
            raise RowError(RowErrorCode.UNSUPPORTED_URL, message, param="url")
        body = parse_body(line.url, line.body, self._settings.limits)
        if body.model not in self._names:
            known = ", ".join(self._names)
            message = f"model {body.model[:80]!r} is not one of this job's models ({known})"
            message += merged_hint(self._models, body.model) or (
                f"; name one of them, or run with --model {body.model[:80]}=MODEL"
            )
            raise RowError(RowErrorCode.MODEL_NOT_FOUND, message, param="model")
        prompt, ends = prompt_bytes(body)
        prompt_tokens = self._estimator.prompt_tokens(body, len(prompt))
        return _ReadRow(position, source, line, body, prompt, ends, prompt_tokens)

    def _request(self, row: _ReadRow, model: str) -> ValidRow:
        line, prompt_tokens = row.line, row.prompt_tokens
        defaults = self._defaults[model]
        body = fill_in(row.body, defaults)
        if self._adds_logprobs:
            body = _with_logprobs(body)
        try:
            limit = answer_limit(defaults, self._settings.default_max_tokens)
            longest, total = self._cut(body, prompt_tokens.longest, prompt_tokens.total, limit)
            answer = self._answer(body, longest, limit)
        except RowError as error:
            raise translate_error(line.url, error) from None
        key = self._keys[model, line.url]
        return ValidRow(
            position=row.position,
            row=row.source.row,
            custom_id=line.custom_id,
            url=line.url,
            body=stored_body(line.url, body),
            model=model,
            requested_model=body.model,
            request_key=request_key(line.url, body, self._contexts[model]),
            shareable=answer.shareable,
            choices=answer.choices,
            prompt_tokens=total,
            expected_tokens=answer.expected_tokens,
            max_tokens=answer.max_tokens,
            certain_tokens=answer.certain_tokens,
            chain=prefix_chain(row.prompt, row.ends, key, self._settings.plan.min_prefix_bytes),
        )

    def _cut(self, body: Body, longest: int, total: int, default_limit: int) -> tuple[int, int]:
        """The tokens of the longest prompt and of all, of which the worker drops those that don't fit the context, if
        the job wants that and the context is known."""
        context, is_cut = self._max_model_len, self._settings.truncate_prompt is not None
        if not is_cut or context is None or not isinstance(body, GenerationBody):
            return longest, total
        limit = limit_prompt_tokens(body, longest, context, min(default_limit, self._settings.max_output_tokens))
        return limit, min(total, limit * body.num_prompts)

    def _answer(self, body: Body, prompt_tokens: int, default_limit: int) -> _Answer:
        """The expected answer. Vectors and scores are no tokens. `prompt_tokens`: of the longest prompt.
        `default_limit`: maximum tokens of a choice where the body sets none."""
        if not isinstance(body, GenerationBody):
            return _Answer(True, body.num_sequences, 0, 0, 0)
        limit = self._within_context(body, prompt_tokens, self._output_limit(body, default_limit))
        choices = body.n * body.num_prompts
        return _Answer(body.is_deterministic, choices, self._expected(body, limit), limit * choices, _certain(body))

    def _output_limit(self, body: GenerationBody, default_limit: int) -> int:
        """Maximum tokens of a choice; raises `RowError` above the tier's cap."""
        cap = self._settings.max_output_tokens
        limit = body.output_limit
        if limit is None:
            if body.min_tokens > cap:
                message = f"min_tokens is {body.min_tokens}, but this job allows at most {cap} tokens; lower it"
                raise RowError(RowErrorCode.INVALID_REQUEST, message, param="min_tokens")
            return max(min(default_limit, cap), body.min_tokens)
        if limit > cap:
            name = "max_completion_tokens" if "max_completion_tokens" in body.model_fields_set else "max_tokens"
            message = f"{name} is {limit}, but this job allows at most {cap}; lower it"
            raise RowError(RowErrorCode.INVALID_REQUEST, message, param=name)
        return limit

    def _within_context(self, body: GenerationBody, prompt_tokens: int, limit: int) -> int:
        """Tokens that the context leaves for a choice, `limit` at most; raises `RowError` when these are fewer than
        requested. An uncounted prompt counts as a single token, so that no estimate refuses a row."""
        if self._max_model_len is None:
            return limit
        cut = body.truncate_prompt_tokens
        prompt_tokens = prompt_tokens if self._estimator.exact and cut != -1 else 1
        left = self._max_model_len - (prompt_tokens if cut is None or cut < 0 else min(cut, prompt_tokens))
        wanted = 1 if body.output_limit is None else limit
        if wanted > left:
            message = f"the prompt and max_tokens {wanted} do not fit the context of {self._max_model_len} tokens; "
            message += "shorten the prompt or lower max_tokens"
            fields = ("max_tokens", "max_tokens")
            raise RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, message, fields=fields)
        return min(limit, left)

    def _expected(self, body: GenerationBody, limit: int) -> int:
        if body.ignore_eos:
            return limit
        expected = round(limit * self._settings.plan.answer_fraction)
        if (outputs := body.structured_outputs) is not None and outputs.choice:
            expected = min(
                expected, max(map(len, outputs.choice)) + 1
            )  # most tokens have several characters; and an end
        return min(limit, max(body.min_tokens, expected))


def _context(model: ModelPin, settings: JobSettings) -> AnswerContext:
    """What enters the answers of this model."""
    limit = min(answer_limit(model.sampling_defaults, settings.default_max_tokens), settings.max_output_tokens)
    return AnswerContext(model.key, limit, settings.content_policies, settings.seed, settings.truncate_prompt)


def _with_logprobs(body: Body) -> Body:
    """The request, with log-probabilities of the answer's tokens."""
    if isinstance(body, ChatBody):
        return body.model_copy(update={"logprobs": True})
    if isinstance(body, CompletionBody) and body.logprobs is None:
        return body.model_copy(update={"logprobs": 0})
    return body


def _certain(body: GenerationBody) -> int:
    """Minimum tokens of an answer, before which it can't end."""
    if body.output_limit is None or not body.ignore_eos or body.stop or body.stop_token_ids:
        return body.min_tokens
    return body.output_limit


def _named(batch: SourceBatch) -> list[tuple[SourceRow, str]]:
    """The lines with a custom_id, and their custom_ids."""
    return [(row, name) for row in batch.rows if (name := _inner(row.value, "custom_id"))]


def _where(batch: SourceBatch, row: int) -> str:
    """The location of a row for messages: its line when there is one file, in which each row has one line."""
    has_lines = not batch.name and batch.rows[0].line == batch.rows[0].row + 1
    return f"on line {row + 1}" if has_lines else f"in row {row} of the whole input"


def _inner(value: object, *path: str) -> str | None:
    """The string at `path` inside parsed JSON, or None when there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value else None
