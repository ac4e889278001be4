"""`tokenmill.generate`, without Celery: one request whose caller waits, over the lane to a worker's running batch.

A task that waits for its answer holds neither a thread nor a broker message: it is handed over, and one thread serves
all waiting tasks. Nothing is stored. The request's id is derived from tenant, task and content, so a task that is
delivered twice, here or at another intake, waits for the same answer, or finds it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol

import orjson
import structlog

from pipeline.ingest.celery.tasks import TryLater
from pipeline.lane.client import CallSettings, LaneCalls
from pipeline.lane.dialects import lane_url, rewrite_response, translate_event
from pipeline.lane.ports import Lane, LaneFull
from pipeline.models.virtual_models import ModelResolver
from pipeline.ports import Clock, PipelineError
from pipeline.routing.requests import RoutedRequest, estimate_prompt_tokens
from pipeline.tracing import NO_TRACES, Traces, current_traceparent
from schemas.jobs.job import Tier
from schemas.models import ModelPin
from schemas.requests.errors import STATUS_CODES, RowError, RowErrorCode, error_body
from schemas.requests.limits import Limits
from schemas.requests.parsing import (
    BODIES,
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    SCORE_URL,
    Body,
    dump_body,
    parse_body,
    unsupported_url,
)
from schemas.requests.sampling_defaults import fill_in
from schemas.requests.scoring import PAIR_NAMES
from schemas.virtual_models import VirtualModel
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest

GENERATE: Final = "tokenmill.generate"
EXTENSION: Final = "tokenmill"
"""The field of a response that names the model which answered, if the request names another."""

URLS: Final = {
    "choices": CLASSIFY_URL,
    "messages": CHAT_URL,
    "prompt": COMPLETIONS_URL,
    "input": EMBEDDINGS_URL,
    "query": RERANK_URL,
    **{names[0]: SCORE_URL for names in PAIR_NAMES},
}
"""Field of the body -> the url of a task that names none; the first match counts."""

_ARGUMENTS: Final = ("body", "tier", "timeout", "url")
_READ_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 0.5
_RESULT_RETRY_SECONDS: Final = 300.0
"""For how long storing a result is retried."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Limits of requests; times in seconds.

    Attributes:
        max_timeout_seconds: a request times out after this long, or earlier by its own timeout.
        max_waiting: maximum number of waiting requests in this process; a further task is retried later.
        default_model: model of bodies that name none.
        call: settings of each call over the lane.
    """

    max_timeout_seconds: float = 600.0
    max_waiting: int = 1_000
    default_model: str | None = None
    limits: Limits = field(default_factory=Limits)
    call: CallSettings = field(default_factory=lambda: CallSettings(poll_interval_seconds=_READ_SECONDS))


class WaitingTask(Protocol):
    """A task that waits for its result."""

    def revoked(self) -> bool:
        """Whether its caller has revoked it."""
        ...

    def done(self, body: Mapping[str, Any]) -> None:
        """Store the result for the caller. May raise, and is then called again."""
        ...

    def cancelled(self) -> None:
        """Mark the task as revoked."""
        ...

    def send_again(self) -> None:
        """Put the task back on its queue: another process continues it."""
        ...


@dataclass(frozen=True, slots=True)
class _WaitingCall:
    """A lane request with its task. `url`, `body`: of the task's request, which may be in a dialect. `served_by`: the
    name of the model that answers; None: it is the requested one."""

    request: LaneRequest
    url: str
    body: Body
    waiter: WaitingTask
    served_by: str | None = None


@dataclass(frozen=True, slots=True)
class _UnsavedResult:
    waiter: WaitingTask
    body: Mapping[str, Any]
    until: float


class GenerateCalls:
    """All waiting requests of this process. Any thread may start one; one thread executes `run`."""

    def __init__(
        self,
        lane: Lane,
        models: ModelResolver,
        clock: Clock,
        settings: GenerateSettings | None = None,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._settings = settings or GenerateSettings()
        self._calls = LaneCalls(lane, clock, self._settings.call, traces)
        self._models = models
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _WaitingCall] = {}
        self._unsaved: list[_UnsavedResult] = []

    def start(
        self, tenant: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], waiter: WaitingTask
    ) -> dict[str, Any] | None:
        """Send the task's request; `waiter` receives its result later. Returns the result if it is known at once.

        Args:
            args, kwargs: `(body, tier="standard", timeout=None, url=None)`, as received.

        Raises:
            TryLater: not now.
        """
        try:
            call = self._call(tenant, task_id, args, kwargs, waiter)
        except RowError as error:
            return error_body(error.code.value, error.message, STATUS_CODES[error.code], error.param)
        name = call.request.id
        with self._lock:
            if name in self._waiting:  # the same task, delivered twice
                return None
            if len(self._waiting) >= self._settings.max_waiting:
                raise TryLater(f"no_room: {self._settings.max_waiting} requests wait already; ask again later")
            self._waiting[name] = call
        try:
            self._calls.start(call.request)
        except BaseException as error:
            self._take(name)
            if isinstance(error, LaneFull):
                raise TryLater(f"no_room: {error}") from error
            if isinstance(error, PipelineError):
                return error_body(RowErrorCode.INVALID_REQUEST.value, str(error), 400)
            raise
        return None

    def run(self, stop: threading.Event) -> None:
        """Serve waiting requests until `stop` is set; tasks that still wait then are sent again."""
        while not stop.is_set():
            self._calls.wait(_IDLE_SECONDS)
            for event in self._calls.poll():
                if isinstance(event, EndEvent | ErrorEvent) and (call := self._take(event.request)) is not None:
                    self._end(call, event)
            self._cancel_revoked()
            self._save()
        self._calls.leave()
        for request_id in list(self._waiting):
            call = self._take(request_id)
            if call is None:
                continue
            try:
                call.waiter.send_again()
            except Exception as error:  # noqa: BLE001 - any error of the broker
                logger.warning("a waiting task can't be sent again", request=request_id, reason=str(error))
        self._save()

    # -- requests

    def _call(
        self, tenant: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], waiter: WaitingTask
    ) -> _WaitingCall:
        """The task's request; raises `RowError`."""
        given = _arguments(args, kwargs)
        body, tier, timeout = given.get("body"), given.get("tier"), given.get("timeout")
        if not isinstance(body, dict):
            raise _refuse("body", "must be an object, as OpenAI's API takes it")
        if "model" not in body and self._settings.default_model is not None:
            body = {**body, "model": self._settings.default_model}
        url = _url(given.get("url"), body)
        checked = parse_body(url, body, self._settings.limits)
        try:
            as_sent = dump_body(checked)
        except ValueError:
            raise _refuse("body", "holds half a character (a lone surrogate); send text") from None
        longest = self._settings.max_timeout_seconds
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= longest
        ):
            raise _refuse("timeout", f"must be above 0 and at most {longest:g} seconds")
        chosen = _tier(tier)
        seconds = longest if timeout is None else float(timeout)
        # Without the model: a task that is delivered again is the same one, if the rules now choose another, too.
        sent = (part.encode(errors="surrogatepass") for part in (tenant, task_id, chosen, url))
        identity = b"\0".join([*sent, as_sent])
        pin = self._pin(checked, tenant, chosen)
        checked = fill_in(checked, pin.sampling_defaults)
        plain = dump_body(checked)
        request = LaneRequest(
            id=f"task-{hashlib.sha256(identity).hexdigest()[:48]}",
            model=pin.key,
            body=orjson.loads(plain) | {"model": pin.name},  # which workers and content policies know
            url=lane_url(url),
            tier=chosen,
            tenant=tenant,
            deadline=self._clock.now() + timedelta(seconds=seconds),
            traceparent=current_traceparent(),
        )
        return _WaitingCall(request, url, checked, waiter, None if pin.name == checked.model else pin.name)

    def _pin(self, body: Body, tenant: str, tier: Tier) -> ModelPin:
        """The pin of the model that answers; raises `RowError` for one that no worker serves."""
        try:
            found = self._models.find(body.model)
            if isinstance(found, VirtualModel):
                tokens, now = estimate_prompt_tokens(body), self._clock.now()
                return self._models.choose(found, RoutedRequest(body, tokens, tenant, tier, now)).pin
            missing = None if found is not None else self._models.why_missing(body.model)
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; ask again later") from error
        if found is None:
            if missing is None:
                raise TryLater("no_model: no model is served here yet; ask again when a worker is up")
            raise RowError(RowErrorCode.MODEL_NOT_FOUND, missing, param="model")
        return found.pin

    # -- results

    def _take(self, request_id: str) -> _WaitingCall | None:
        with self._lock:
            return self._waiting.pop(request_id, None)

    def _end(self, call: _WaitingCall, event: EndEvent | ErrorEvent) -> None:
        if isinstance(event, EndEvent):
            body: Mapping[str, Any] = self._result(call, event.response)
        else:
            event = translate_event(call.url, event)
            body = error_body(event.code, event.message, event.status, event.param)
        self._unsaved.append(_UnsavedResult(call.waiter, body, self._clock.monotonic() + _RESULT_RETRY_SECONDS))

    def _result(self, call: _WaitingCall, response: dict[str, Any]) -> dict[str, Any]:
        """The response in the format of the task's url. For a virtual model it has the name that the task used, and
        the one of the model that answered."""
        if call.served_by is None:
            return rewrite_response(call.url, call.body, response)
        served_by = response.get("model", call.served_by)
        body = rewrite_response(call.url, call.body, response | {"model": call.body.model})
        return body | {EXTENSION: {**response.get(EXTENSION, {}), "model": served_by}}

    def _save(self) -> None:
        """Store results for their callers; one that can't be stored now is retried for a while."""
        left = []
        for one in self._unsaved:
            try:
                if one.waiter.revoked():
                    one.waiter.cancelled()
                else:
                    one.waiter.done(one.body)
            except Exception as error:  # noqa: BLE001 - any error of a result backend
                is_retried = self._clock.monotonic() < one.until
                logger.warning("a result can't be stored", is_retried=is_retried, reason=str(error))
                left += [one] if is_retried else []
        self._unsaved = left

    def _cancel_revoked(self) -> None:
        for request_id, call in list(self._waiting.items()):
            if call.waiter.revoked() and self._take(request_id) is not None:
                self._calls.cancel(request_id)
                try:
                    call.waiter.cancelled()
                except Exception as error:  # noqa: BLE001 - its sender revoked it, and needs no result
                    logger.warning("a revoked task can't be marked", reason=str(error))


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) > len(_ARGUMENTS):
        raise _refuse("arguments", f"are {len(args)}, but {GENERATE} takes {', '.join(_ARGUMENTS)}")
    given = dict(zip(_ARGUMENTS, args, strict=False))
    for name in kwargs:
        if name in given or name not in _ARGUMENTS:
            raise _refuse(
                str(name)[:80], f"is no argument, or is given twice; {GENERATE} takes {', '.join(_ARGUMENTS)}"
            )
    return given | dict(kwargs)


def _url(given: Any, body: Mapping[str, Any]) -> str:
    """The url of the request; raises `RowError`."""
    if given is None:
        found = next((url for field, url in URLS.items() if field in body), None)
        if found is None:
            raise _refuse("body", f"has none of {', '.join(URLS)}; give one of them, or name the url")
        return found
    if not isinstance(given, str):
        raise _refuse("url", f"must be a string such as {CHAT_URL!r}")
    if given not in BODIES:
        raise unsupported_url(given)
    return given


def _tier(value: Any) -> Tier:
    try:
        return Tier.STANDARD if value is None else Tier(value)
    except ValueError:
        raise _refuse("tier", f"must be one of {', '.join(Tier)}") from None


def _refuse(name: str, text: str) -> RowError:
    return RowError(RowErrorCode.INVALID_REQUEST, f"{name} {text}", param=name)
