"""Prepares shards for the engine: reads bodies, renders chat templates, checks policies, tokenizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
from pydantic import ValidationError

from pipeline.worker_client.ports import ShardWork
from schemas.jobs.checkpoints import FormerTry
from schemas.requests.dialects.registry import DIALECTS, translate_error
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import BODIES, CHAT_URL, Body, ChatBody, GenerationBody, load_body
from schemas.requests.policy_report import NO_REPORT
from schemas.requests.sampling_defaults import answer_limit
from workers.errors import ModelMismatchError
from workers.model.loaded_model import LoadedModel
from workers.policies.concurrency import for_each_row
from workers.policies.policy import NO_POLICIES, JudgedText, Policies, PolicyGuard
from workers.policies.retry import JudgingInterrupted, PolicyRetry
from workers.rows import PreparedRow, RejectedRow, RowName
from workers.shards.isolation import condemn
from workers.shards.open_shard import PreparedShard
from workers.shards.resume import resume
from workers.structured.form_check import is_judged
from workers.translation.policy_texts import texts_of_prompt
from workers.translation.pooled import Inputs, PooledReader
from workers.translation.prompts import Prompt, encode
from workers.translation.requests import PRIORITIES, JobRules, RowHints, Translator
from workers.translation.tries import body_of_retry
from workers.translation.unexpected import unforeseen

HINTS = ("prefix_group", "prefix_readers", "expected_tokens")
COLUMNS = ("row", "compute_row", "custom_id", "url", "body", "model", *HINTS)

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Line:
    """A row of the table that is being prepared."""

    names: tuple[RowName, ...]
    url: str
    body: str
    model: str
    hints: RowHints
    parsed: Body | None = None
    prompts: Sequence[Prompt] = ()
    inputs: Inputs = ()  # of a request that is answered with numbers
    guard: PolicyGuard | None = None
    error: RowError | None = None
    tries: tuple[FormerTry, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardReader:
    """Prepares shards for one model: reads bodies, renders templates, checks prompts against the policies, and
    tokenizes a whole shard in two calls."""

    model: LoadedModel
    policies: Policies = NO_POLICIES
    retry: PolicyRetry | None = None

    def prepare(self, work: ShardWork) -> PreparedShard:
        """Prepare or refuse each row of the shard. Raises `ModelMismatchError` and `JudgingInterrupted` (see there)."""
        lines = self._lines(work)
        judges = work.job.settings.max_tries is not None
        for line in lines:
            line.error = condemn(work.history.blamed.get(line.names[0].row, 0))
        model, rules = self.model, self._rules(work)
        translator = Translator(model.tokenizer, model.limits, rules, model.grammars)
        pooled = PooledReader(model.tokenizer, model.limits, rules, translator)
        for line in lines:
            if line.error is None:
                self._read(line, work, translator, pooled)
        judged = [line for line in lines if line.error is None and line.guard is not None]
        for_each_row(partial(self._judge, work, pooled), judged, self.policies.concurrency)
        self._encode(lines, work, pooled)
        waiting: list[PreparedRow] = []
        rejected: list[RejectedRow] = []
        now = self.model.engine.clock()
        for line in lines:
            row = self._prepared(line, work, translator, pooled)
            if row is not None:
                waiting.append(replace(row, is_judged=judges and is_judged(line.url, row.body)))
            else:
                assert line.error is not None
                report = NO_REPORT if line.guard is None else line.guard.report
                requested = line.model if line.parsed is None else line.parsed.model
                rejected.append(RejectedRow(line.names, requested, line.error, now, now, report))
        return PreparedShard(work, tuple(waiting), tuple(rejected))

    def ask_again(self, work: ShardWork, row: PreparedRow, former: FormerTry) -> PreparedRow:
        """The row whose answer was not accepted, behind its messages, that answer and the reason. Raises `RowError`
        where the longer prompt can't be answered."""
        assert isinstance(row.body, ChatBody), "only chats are judged"
        tries = (*row.tries, former)
        body = body_of_retry(row.body, tries)
        translator = Translator(self.model.tokenizer, self.model.limits, self._rules(work), self.model.grammars)
        (prompts,) = encode(self.model.tokenizer, [translator.prompts_of(body)], chat=True)
        hints = RowHints(row.names[0].row, expected_tokens=row.request.expected_tokens)
        request = translator.request(row.request.request_id, body, prompts, hints)
        request = replace(request, continues=True, adapter=row.request.adapter)
        return replace(row, request=request, tries=tries, given_tokens=sum(map(len, prompts)))

    def _rules(self, work: ShardWork) -> JobRules:
        settings = work.job.settings
        names = work.table.column("model")  # the same in all rows of a shard
        pin = work.job.model_named(names[0].as_py()) if len(names) else None
        defaults = None if pin is None else pin.sampling_defaults
        return JobRules(
            seed=settings.seed,
            default_max_tokens=answer_limit(defaults, settings.default_max_tokens),
            max_output_tokens=settings.max_output_tokens,
            truncate_prompt=settings.truncate_prompt,
            max_prompt_tokens=settings.limits.max_prompt_tokens,
            max_prompt_logprobs=settings.limits.max_prompt_logprobs,
            max_embedding_tokens=settings.limits.max_embedding_tokens,
            priority=PRIORITIES[work.tier],
            salt=work.job.tenant.encode(),
        )

    def _lines(self, work: ShardWork) -> list[_Line]:
        """The rows to compute, in the table's order, each with the names of its copies."""
        columns: dict[str, list[Any]] = {name: work.table.column(name).to_pylist() for name in COLUMNS}
        names = [RowName(*pair) for pair in zip(columns["row"], columns["custom_id"], strict=True)]
        copies: defaultdict[int, list[RowName]] = defaultdict(list)
        for name, compute_row in zip(names, columns["compute_row"], strict=True):
            if name.row != compute_row:
                copies[compute_row].append(name)
        lines = []
        finished = work.history.finished_rows
        for index, name in enumerate(names):
            if name.row == columns["compute_row"][index]:
                hints = RowHints(name.row, **{hint: columns[hint][index] for hint in HINTS})
                row_names = (name, *copies.pop(name.row, ()))
                if name.row in finished:
                    continue
                tries = next((choice.tries for choice in work.history.running.get(name.row, ()) if choice.tries), ())
                line = _Line(row_names, columns["url"][index], columns["body"][index], columns["model"][index], hints)
                line.tries = tries
                lines.append(line)
        assert not copies, f"shard {work.shard}: rows {sorted(copies)[:5]} have copies, but are not in the shard"
        return lines

    def _read(self, line: _Line, work: ShardWork, translator: Translator, pooled: PooledReader) -> None:
        try:
            self._check_model(line.model, work)
            if line.url not in BODIES:
                raise RowError(RowErrorCode.UNSUPPORTED_URL, f"url {line.url} is not served by this worker")
            line.parsed = _parse(line.url, line.body)
            url = CHAT_URL if line.url in DIALECTS else line.url  # policies judge what the model gets
            about = JudgedText(f"{work.job.id}/{line.names[0].row}", work.job.tenant, line.model, url)
            line.guard = self.policies.guard(about, self.model.answers_to)
            tried = _body_of_try(line.parsed, line.tries)
            if isinstance(tried, GenerationBody):
                line.prompts = translator.prompts_of(tried)
            else:
                line.inputs = pooled.inputs_of(tried)
        except RowError as error:
            line.error = translate_error(line.url, error)
        except (ModelMismatchError, MemoryError):  # it concerns the run, not the row
            raise
        except Exception as error:  # noqa: BLE001 - it concerns one row
            line.error = _unforeseen(error, "a row could not be read", line, work)

    def _judge(self, work: ShardWork, pooled: PooledReader, line: _Line) -> None:
        """Check the prompts of a row against the policies. Threads may judge different rows."""
        assert line.parsed is not None
        assert line.guard is not None
        try:
            if not isinstance(line.parsed, GenerationBody):
                line.guard.check_prompt(pooled.texts_of(line.parsed, line.inputs), self.retry)
                return
            for prompt in line.prompts:
                line.guard.check_prompt(texts_of_prompt(line.parsed, prompt, self.model.tokenizer), self.retry)
        except RowError as error:
            line.error = translate_error(line.url, error)
        except (JudgingInterrupted, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - it concerns one row
            line.error = _unforeseen(error, "a row could not be judged", line, work)

    def _check_model(self, name: str, work: ShardWork) -> None:
        pin = work.job.model_named(name)
        if pin is not None:
            reason = self.model.mismatch(pin)
            if reason is not None:
                raise ModelMismatchError(
                    f"job {work.job.id} was begun with {reason}; give the same model and options, or start afresh"
                )
        elif not self.model.answers_to(name):
            loaded = ", ".join(sorted({self.model.name, *self.model.aliases}))
            raise RowError(
                RowErrorCode.MODEL_NOT_FOUND,
                f"model {name!r} is not loaded; this run serves {loaded}",
                param="model",
            )

    def _encode(self, lines: list[_Line], work: ShardWork, pooled: PooledReader) -> None:
        """Encode all prompts; if that fails, encode each by itself, to find the row that causes it."""
        try:
            self._encode_batch(lines, pooled)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by the row that causes it
            logger.warning("prompts can't be encoded in one batch", rows=len(lines), error=type(error).__name__)
            for line in lines:
                self._encode_alone(line, work, pooled)

    def _encode_alone(self, line: _Line, work: ShardWork, pooled: PooledReader) -> None:
        try:
            self._encode_batch([line], pooled)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - it concerns one row
            line.error = _unforeseen(error, "a row could not be encoded", line, work)

    def _encode_batch(self, lines: list[_Line], pooled: PooledReader) -> None:
        """Encode all prompts that are text. Chat templates contain their special tokens; completions get BOS."""
        read = [
            (line, line.parsed)
            for line in lines
            if line.inputs and line.parsed is not None and not isinstance(line.parsed, GenerationBody)
        ]
        encoded_inputs = pooled.encode([(body, line.inputs) for line, body in read])
        for (line, _), inputs in zip(read, encoded_inputs, strict=True):
            line.inputs = inputs
        for chat in (True, False):
            chosen = [line for line in lines if line.prompts and isinstance(line.parsed, ChatBody) is chat]
            encoded = encode(self.model.tokenizer, [line.prompts for line in chosen], chat=chat)
            for line, prompts in zip(chosen, encoded, strict=True):
                line.prompts = prompts

    def _prepared(
        self, line: _Line, work: ShardWork, translator: Translator, pooled: PooledReader
    ) -> PreparedRow | None:
        if line.error is not None or line.parsed is None:
            return None
        tried = _body_of_try(line.parsed, line.tries)
        request_id = f"{work.job.id}/{work.shard}/{line.names[0].row}"
        pin = work.job.model_named(line.model)
        logged = work.history.running.get(line.names[0].row)
        given_tokens = None
        try:
            if not isinstance(tried, GenerationBody):
                request = pooled.request(request_id, tried, line.inputs, line.hints)
            else:
                prompts = [prompt for prompt in line.prompts if not isinstance(prompt, str)]
                assert len(prompts) == len(line.prompts), "prompts are encoded before"
                request = translator.request(request_id, tried, prompts, line.hints)
                given_tokens = sum(map(len, prompts))
            if pin is not None and pin.adapter is not None:  # a merged one is not named
                request = replace(request, adapter=self.model.adapter_names.get(pin.key))
            request = request if logged is None else resume(self.model.engine, request, logged)
        except RowError as error:
            line.error = translate_error(line.url, error)
            return None
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - it concerns one row
            line.error = _unforeseen(error, "a row could not be prepared", line, work)
            return None
        return PreparedRow(
            line.names,
            line.parsed,
            request,
            line.guard,
            DIALECTS.get(line.url),
            given_tokens=given_tokens,
            tries=line.tries,
        )


def _body_of_try(body: Body, tries: Sequence[FormerTry]) -> Body:
    """The request as the model is asked: after former tries a longer conversation."""
    return body_of_retry(body, tries) if tries and isinstance(body, ChatBody) else body


def _unforeseen(error: Exception, what: str, line: _Line, work: ShardWork) -> RowError:
    return unforeseen(error, what, f"{work.job.id}/{line.names[0].row}")


def _parse(url: str, data: str) -> Body:
    try:
        return load_body(url, data)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in detail["loc"])
        raise RowError(RowErrorCode.INVALID_REQUEST, f"{where} {detail['msg']}", param=where) from error
