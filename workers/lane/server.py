"""Serves the lane: computes interactive requests in the running batch, together with the rows of shards.

Threads of the server:

- The taker takes requests from the lane.
- A few preparers prepare them, alternating between tenants (`workers.lane.preparation`).
- The emitter makes events from the engine's tokens and emits them in batches.
- Judges make an answer's last events where a content policy waits for another process.
- The holder renews the holds on the requests of this worker every few seconds. It does nothing else, so that no request
  delays it.

The lane's replies to the last two name the requests that are no longer wanted.

Between them and the engine is the worker's loop, which polls the server between two steps (`SideWork`).

Once two tenants have sent requests, a part of the worker's capacity is reserved: one tenant alone can't fill it, so a
request of another tenant is taken at once.

A request ends with a response, an error, or by being handed back; the lane detects the death of the process. A request
whose step failed is computed once more: another row may have caused the failure, and is isolated by then
(`workers.shards.isolation`). An unexpected exception ends its own request with an error, and no other.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import structlog

from engine.errors import ContextLengthExceeded, RequestRefused
from engine.request import Completion, FinishReason, PartialChoice
from pipeline.lane.ports import LaneWorker, TenantShares
from pipeline.lane.queue_order import STEAL_AFTER_SECONDS, QueueOrder
from pipeline.ports import Clock
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.tracing import NO_TRACES, Traces
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.tokenizing import TOKENIZER_URLS
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import LaneEvent, LaneRequest, addressed_to, closes_attempt, is_addressed
from workers.lane.handover import NO_HANDOVER, Blocks, LaneHandover, PrefillHandover
from workers.lane.preparation import PreparationQueue
from workers.lane.requests import PREFIX, LaneReader, LaneRules
from workers.lane.responses import LaneAnswer, hand_back_events, refusal_events, response_events
from workers.lane.routes import FindModel, no_models, route_of
from workers.lane.tokenizing import tokenizer_response
from workers.model.loaded_model import LoadedModel
from workers.observability.metrics import EndedRequests, SideWorkMetrics
from workers.observability.tracing import LaneSpans
from workers.policies.policy import PromptRouted
from workers.rows import Envelope, PreparedRow
from workers.shards.resume import resume_failed
from workers.structured.grammar import too_complex
from workers.translation.responses import ResponseBuilder
from workers.translation.unexpected import unforeseen

_TAKE_SECONDS: Final = 1.0
_MAX_TAKEN: Final = 128
"""Limit of the requests that are taken in one call, so that workers with large batches share a burst."""
_RETRY_SECONDS: Final = 1.0
_LAST_EMIT_SECONDS: Final = 5.0
_MAX_BATCH_EVENTS: Final = 256

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaneServing:
    """Settings of a worker that serves the lane; times are seconds.

    Attributes:
        most: requests that the worker holds at once; None: a few more than its batch has rows, so that no row of the
            batch stays empty until the next request arrives.
        emit_interval_seconds, emit_interval_seconds_each: interval between two events of a request: a fixed part, and
            a part for each request in the engine, because emitting takes time from computing. The first token is
            emitted at once.
        log_interval_seconds: interval of the log record with the latency objectives.
        grace_seconds: how long requests may take to end after the worker's stop; the others are handed back.
        max_tries: tries in the engine of a request whose step fails.
        steal_after_seconds: how long a request that is addressed to another worker must have waited before this one
            takes it.
        num_preparers: threads that prepare requests. One tenant, and large requests, use all but one of them at most.
    """

    most: int | None = None
    emit_interval_seconds: float = 0.02
    emit_interval_seconds_each: float = 0.0005
    log_interval_seconds: float = 60.0
    grace_seconds: float = 20.0
    max_tries: int = 2
    steal_after_seconds: float = STEAL_AFTER_SECONDS
    num_preparers: int = 2


@dataclass(slots=True)
class _OpenRequest:
    """A prepared request.

    Attributes:
        passed_on: choice -> tokens that were passed on to the emitter.
        has_tokens: whether any were.
        is_failed: an error was emitted; later outcomes of the engine are ignored.
        blocks: of its prompt, which were fetched from another worker.
        stays: it is not handed over any more.
    """

    answer: LaneAnswer
    row: PreparedRow
    passed_on: dict[int, int] = field(default_factory=dict)
    has_tokens: bool = False
    is_failed: bool = False
    tries: int = 1
    blocks: Blocks = ()
    stays: bool = False

    @property
    def request(self) -> LaneRequest:
        return self.answer.request


_EventMaker = Callable[[], Sequence[LaneEvent]]
"""Makes events on the emitter's thread."""


class LaneServer:
    """`workers.side_work.SideWork` for the requests of one lane and one loaded model."""

    def __init__(
        self,
        model: LoadedModel,
        lane: LaneWorker,
        clock: Clock,
        rules: LaneRules | None = None,
        serving: LaneServing | None = None,
        lane_settings: LaneSettings | None = None,
        traces: Traces = NO_TRACES,
        handover: LaneHandover = NO_HANDOVER,
        find_model: FindModel = no_models,
    ) -> None:
        """`lane_settings`: those of the lane. `handover`: of requests to other workers, or from them. `find_model`:
        finds the models to which content policies send requests."""
        self._model = model
        self._engine = model.engine
        self._lane = lane
        self._clock = clock
        self._find_model = find_model
        # Policies that wait for another process judge on more threads, so that requests don't wait for each other.
        self._num_judges = 1 if rules is None else rules.policies.concurrency
        self._reader = LaneReader(model, rules)
        self._builder = ResponseBuilder(model.tokenizer, model.limits.classifier)
        self._spans = LaneSpans(model.name, traces)
        self._prefill, self._decode = handover.prefill, handover.decode
        self._serving = serving or LaneServing()
        self._max_requests = self._serving.most or model.max_num_seqs + max(2, model.max_num_seqs // 8)
        self._own_queue = addressed_to(lane.name)
        keys = list(dict.fromkeys(pin.key for pin in model.pins))
        self._queues = QueueOrder(
            keys, lane.name, self._serving.steal_after_seconds, handover.role, handover.help_after_seconds
        )
        self._hold_interval_seconds = (lane_settings or LaneSettings()).worker_timeout_seconds / 3
        self._engine_epoch = clock.now() - timedelta(seconds=self._engine.clock())
        # Shared by the threads.
        self._changed = threading.Condition()
        self._held: dict[str, LaneRequest] = {}  # by id, from being taken until its last event is emitted
        self._first_tenant: str | None = None
        self._has_several_tenants = False
        self._stolen = 0
        self._unwanted: set[tuple[str, int]] = set()
        self._arrived: deque[_OpenRequest] = deque()
        self._refused: deque[tuple[str, int]] = deque()  # engine's request id and choice, to cancel
        self._num_fetching = 0
        self._is_taking = False
        self._is_admitting = True
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._all_emitted = threading.Event()
        self._pending_events: queue.SimpleQueue[_EventMaker | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._taker: threading.Thread | None = None
        self._num_preparers = self._serving.num_preparers + self._num_judges - 1
        self._preparation = PreparationQueue(self._prepare, self._num_preparers)
        self._preparers: list[threading.Thread] = []
        self._num_judging = 0
        self._judges: Executor | None = None  # judge answers; None: the emitter does
        # Used by the loop only.
        self._open: dict[str, _OpenRequest] = {}  # by the engine's request id
        self._next_emit = 0.0
        self._next_log = 0.0
        self._logged_first_tokens = 0
        self._ended_requests = EndedRequests()

    @contextmanager
    def running(self, stop: threading.Event) -> Iterator[LaneServer]:
        """Serve until the block ends. Once `stop` is set no more requests are taken."""
        self._taker = taker = threading.Thread(target=self._guarded, args=(self._take_all, stop), name="lane-taker")
        emitter = threading.Thread(target=self._guarded, args=(self._emit_all,), name="lane-emitter")
        holder = threading.Thread(target=self._guarded, args=(self._hold_all,), name="lane-holder")
        self._preparers = [
            threading.Thread(target=self._guarded, args=(self._preparation.work,), name=f"lane-preparer-{number}")
            for number in range(self._num_preparers)
        ]
        for thread in (emitter, holder, taker, *self._preparers):
            thread.start()
        judges = ThreadPoolExecutor(self._num_judges, "lane-judge") if self._num_judges > 1 else None
        self._judges = judges
        try:
            yield self
        finally:
            self._end_taking()
            for left in [*self._open.values(), *self._arrived]:  # the loop ended with an error
                self._pending_events.put(left.answer.hand_back)
            self._pending_events.put(None)
            emitter.join()
            if judges is not None:
                judges.shutdown(wait=True, cancel_futures=True)
            self._all_emitted.set()
            holder.join()

    # -- on the loop's thread

    @property
    def busy(self) -> bool:
        """Whether a request is in the engine, or about to enter it."""
        is_preparing = self._is_taking or self._preparation.busy or self._num_fetching
        return bool(self._open or self._arrived or is_preparing or self._num_judging)

    @property
    def grace_seconds(self) -> float:
        """How long requests may take to end after the worker's stop."""
        return self._serving.grace_seconds

    def poll(self, *, admit: bool) -> None:
        """See `SideWork.poll`. Raises what ended one of the threads."""
        if self._failure is not None:
            raise self._failure
        self._is_admitting = admit
        if self._unwanted:
            self._cancel_unwanted()
        while self._refused:
            name, choice = self._refused.popleft()
            if name in self._open:  # its completion follows like that of any other
                self._engine.cancel(name, choice)
        if self._open:
            self._pass_on_tokens()
        while admit and self._arrived:
            self._add(self._arrived.popleft())
        self._log_objectives()

    def take(self, completion: Completion) -> bool:
        """Process the completion of one of the lane's requests. False: it is not one of them."""
        if not completion.request_id.startswith(PREFIX):
            return False
        opened = self._open.pop(completion.request_id, None)
        if opened is None:  # it was cancelled as unwanted
            return True
        if (source := opened.request.kv_source) is not None:
            completion = replace(completion, cached_tokens=source.cached_tokens)
        is_failed = any(choice.finish_reason is FinishReason.ERROR for choice in completion.choices)
        is_failed = is_failed and too_complex(completion.error or "") is None  # its grammar would fail again
        if is_failed and opened.tries < self._serving.max_tries:
            opened.tries += 1
            opened.row = resume_failed(self._engine, opened.row, completion)
            self._arrived.append(opened)
        else:
            self._ended_requests.record(opened.request.tier, completion, opened.row.request.adapter)
            with self._changed:
                self._num_judging += self._judges is not None
            self._pending_events.put(partial(self._end, opened, completion))
        return True

    def metrics(self) -> SideWorkMetrics:
        """See `SideWork.metrics`."""
        with self._changed:
            waiting = Counter(opened.request.tier for opened in self._arrived)
            stolen = self._stolen
        handover = self._prefill or self._decode
        return SideWorkMetrics(
            len(self._open), waiting, self._ended_requests, None if handover is None else handover.metrics(), stolen
        )

    def wait(self, seconds: float) -> None:
        """See `SideWork.wait`."""
        self._wake.wait(seconds)
        self._wake.clear()

    def close(self) -> None:
        """Take no more requests."""
        self._closed.set()

    def hand_back(self) -> None:
        """See `SideWork.hand_back`. Waits for the taker's current call, which might take these requests again."""
        self._end_taking()
        self._pass_on_tokens(everything=True)
        for name, opened in self._open.items():
            self._engine.cancel(name)
            self._pending_events.put(opened.answer.hand_back)
        self._open.clear()
        while self._arrived:
            self._pending_events.put(self._arrived.popleft().answer.hand_back)

    def _end_taking(self) -> None:
        """Stop the taker and the preparers. Requests that wait to be prepared are handed back; those in preparation
        have arrived when this returns."""
        self._closed.set()
        if self._taker is not None:
            self._taker.join()
        for request in self._preparation.close():
            self._pending_events.put(partial(hand_back_events, request))
        for thread in self._preparers:
            thread.join()
        if self._decode is not None:
            self._decode.close()

    def _add(self, opened: _OpenRequest) -> None:
        """Add the request to the engine unless it is unwanted; an earlier attempt at it is cancelled."""
        request, row = opened.request, opened.row
        if (request.id, request.attempt) in self._unwanted or not self._holds(request.id, request.attempt):
            self._release(request)
            return
        earlier = [
            name
            for name, other in self._open.items()
            if other.request.id == request.id and other.request.attempt < request.attempt
        ]
        for name in earlier:
            self._forget(name)
        if self._decode is not None and opened.blocks:
            self._decode.import_blocks(opened.blocks)
            opened.blocks = ()
        left = self._reader.deadline(request, self._clock.now())
        try:
            self._engine.add(
                row.request if left is None else replace(row.request, deadline=self._engine.clock() + left)
            )
        except RequestRefused as error:
            too_long = isinstance(error, ContextLengthExceeded)
            code = RowErrorCode.CONTEXT_LENGTH_EXCEEDED if too_long else RowErrorCode.INVALID_REQUEST
            self._pending_events.put(partial(opened.answer.fail, RowError(code, str(error))))
        else:
            self._open[row.request.request_id] = opened

    def _pass_on_tokens(self, everything: bool = False) -> None:
        """Pass on the engine's new tokens to the emitter when the interval has passed. The end of a choice is
        not passed on; it follows with the completion. Only choices that may have new tokens are asked for them: a
        request may have thousands that wait."""
        now = self._clock.monotonic()
        due = everything or now >= self._next_emit
        if due:
            self._next_emit = (
                now + self._serving.emit_interval_seconds + len(self._open) * self._serving.emit_interval_seconds_each
            )
        elif all(opened.has_tokens for opened in self._open.values()):
            return
        growing = dict.fromkeys(self._open) if everything else self._engine.growing()
        for name, choices in growing.items():
            opened = self._open.get(name)
            if opened is None or (opened.has_tokens and not due):
                continue
            found = self._engine.partial(opened.row.request, opened.passed_on, choices)
            new = [choice for choice in found if choice.finish_reason is None]
            for choice in new:
                opened.passed_on[choice.index] = opened.passed_on.get(choice.index, 0) + len(choice.token_ids)
            if new:
                if not opened.has_tokens:
                    self._spans.first_token(opened.request)
                opened.has_tokens = True
                self._pending_events.put(partial(self._make_token_events, opened, new))
            # With `everything` this worker ends, and couldn't serve the blocks for long.
            if self._prefill is not None and opened.has_tokens and not opened.stays and not everything:
                self._hand_over(self._prefill, name, opened)

    def _hand_over(self, prefill: PrefillHandover, name: str, opened: _OpenRequest) -> None:
        """Hand a request over to another worker, once all choices have tokens, if that pays and there is memory for the
        blocks of its prompt. Else it stays."""
        if len(opened.passed_on) < opened.row.request.num_choices:
            return
        opened.stays = True
        if (
            prefill.should_hand_over(opened.request, opened.row)
            and (source := prefill.offer(opened.row.request)) is not None
        ):
            self._engine.cancel(name)
            del self._open[name]
            self._pending_events.put(partial(opened.answer.hand_back, source))

    def _log_objectives(self) -> None:
        """Log the latency objectives every `log_interval_seconds`, if there are any and requests were served since."""
        now = self._clock.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + self._serving.log_interval_seconds
        slo = self._engine.stats().slo
        if slo is not None and slo.first_tokens > self._logged_first_tokens:
            self._logged_first_tokens = slo.first_tokens
            fields = {name: _rounded(value) for name, value in asdict(slo).items()}
            logger.info("requests whose callers wait", objective=_rounded(slo.objective), **fields)

    def _cancel_unwanted(self) -> None:
        with self._changed:
            unwanted = set(self._unwanted)
        for name in [n for n, o in self._open.items() if (o.request.id, o.request.attempt) in unwanted]:
            logger.info("request cancelled: it is no longer wanted", request=self._open[name].request.id)
            self._forget(name)
        for request in self._preparation.discard(unwanted):
            logger.info("request discarded before its preparation: it is no longer wanted", request=request.id)
            self._release(request)
        with self._changed:  # those in preparation stay in the set
            self._unwanted = {pair for pair in self._unwanted if self._holds(*pair)}

    def _forget(self, name: str) -> None:
        self._engine.cancel(name)
        self._release(self._open.pop(name).request)

    # -- on the taker's thread

    def _take_all(self, stop: threading.Event) -> None:
        while not (stop.is_set() or self._closed.is_set()):
            room, shares = self._room()
            if room <= 0:
                continue
            try:
                taken = self._lane.take(self._queues.next(), min(room, _MAX_TAKEN), _TAKE_SECONDS, shares)
            except ServiceUnavailable as error:
                logger.warning("requests can't be taken from the lane", reason=str(error))
                self._closed.wait(_RETRY_SECONDS)
                continue
            self._is_taking = bool(taken)
            self._hold_taken(taken)
            for request in taken:
                self._spans.taken(request)
                self._preparation.put(request)
            self._is_taking = False

    def _hold_taken(self, taken: Sequence[LaneRequest]) -> None:
        """Record the requests as held. An earlier attempt that still waits to be prepared is discarded."""
        with self._changed:
            earlier = [(request.id, self._held[request.id].attempt) for request in taken if request.id in self._held]
            self._held.update((request.id, request) for request in taken)
            self._stolen += sum(is_addressed(one.queue) and one.queue != self._own_queue for one in taken)
            for request in taken:
                self._first_tenant = request.tenant if self._first_tenant is None else self._first_tenant
                self._has_several_tenants |= request.tenant != self._first_tenant
        for request in self._preparation.discard(earlier):
            self._release(request)

    def _room(self) -> tuple[int, TenantShares]:
        """How many requests may be taken, and each tenant's share of the held ones; waits a while for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_admitting and len(self._held) < self._max_requests, _TAKE_SECONDS)
            room = self._max_requests - len(self._held)
            if not self._is_admitting:
                room = 0
            held = Counter(request.tenant for request in self._held.values())
            reserve = max(1, self._max_requests // 8) if self._has_several_tenants and self._max_requests > 1 else 0
            return room, TenantShares(held, self._max_requests - reserve)

    def _prepare(self, request: LaneRequest) -> None:
        try:
            if request.url in TOKENIZER_URLS:
                response = tokenizer_response(request, self._model, self._reader.limits)
                self._pending_events.put(partial(response_events, request, response))
                return
            row = self._reader.prepare(request)
            answer = LaneAnswer(request, row, self._model.tokenizer)
        except PromptRouted as routed:
            self._pending_events.put(self._route(request, routed))
            return
        except RowError as error:
            self._pending_events.put(partial(refusal_events, request, error))
            return
        except Exception as error:  # noqa: BLE001 - it concerns one request
            failure = unforeseen(error, "a request could not be prepared", request.id)
            self._pending_events.put(partial(refusal_events, request, failure))
            return
        passed_on = {choice.index: len(choice.token_ids) for choice in row.request.partial}
        opened = _OpenRequest(answer, row, passed_on)
        if self._decode is None or request.kv_source is None:
            self._arrive(opened)
            return
        with self._changed:
            self._num_fetching += 1
        self._decode.fetch(request.kv_source, row.request, partial(self._arrive_with, opened))

    def _route(self, request: LaneRequest, routed: PromptRouted) -> _EventMaker:
        """Hand a request back for the model that a content policy chose."""
        try:
            if any(request.tokens):
                message = f"content policy {routed.policy!r} routes a prompt whose answer has begun; send it again"
                raise RowError(RowErrorCode.ENGINE_ERROR, message)
            route = route_of(routed, self._find_model)
        except RowError as error:
            return partial(refusal_events, request, error)
        return partial(hand_back_events, request, route=route)

    def _arrive_with(self, opened: _OpenRequest, blocks: Blocks) -> None:
        opened.blocks = blocks
        self._arrive(opened)
        with self._changed:
            self._num_fetching -= 1

    def _arrive(self, opened: _OpenRequest) -> None:
        """Let the loop add a prepared request to the engine."""
        with self._changed:
            self._arrived.append(opened)
        self._wake.set()

    # -- on the emitter's thread

    def _emit_all(self) -> None:
        events: deque[LaneEvent] = deque()
        is_ending, deadline = False, float("inf")
        while not (is_ending and not events and not self._num_judging) and self._clock.monotonic() < deadline:
            makers, has_ended = self._gather(wait=not events)
            if has_ended and not is_ending:
                is_ending, deadline = True, self._clock.monotonic() + _LAST_EMIT_SECONDS
            for make_events in makers:
                events += make_events()
            try:
                while events:
                    batch = [events[index] for index in range(min(len(events), _MAX_BATCH_EVENTS))]
                    self._emit(batch)
                    for _ in batch:
                        events.popleft()
            except ServiceUnavailable as error:
                logger.warning("events can't be emitted to the lane", events=len(events), reason=str(error))
                self._clock.sleep(_RETRY_SECONDS)

    def _gather(self, *, wait: bool) -> tuple[list[_EventMaker], bool]:
        """The pending events, and whether no more will follow; waits a bounded time for the first."""
        makers: list[_EventMaker] = []
        try:
            while True:
                one = self._pending_events.get(wait and not makers, _TAKE_SECONDS)
                if one is None:
                    return makers, True
                makers.append(one)
        except queue.Empty:
            return makers, False

    def _make_token_events(self, opened: _OpenRequest, new: Sequence[PartialChoice]) -> Sequence[LaneEvent]:
        """The events of new tokens. A choice that a policy refuses is cancelled, and so is a request whose events can't
        be made."""
        if opened.is_failed:
            return ()
        try:
            events = opened.answer.grow(new)
        except Exception as error:  # noqa: BLE001 - it concerns one request
            opened.is_failed = True
            self._mark_unwanted(opened.request.id, opened.request.attempt)
            return opened.answer.fail(unforeseen(error, "tokens could not be emitted", opened.request.id))
        for choice in (choice.index for choice in new if opened.answer.refuses(choice.index)):
            self._refused.append((opened.row.request.request_id, choice))
        return events

    def _end(self, opened: _OpenRequest, completion: Completion) -> Sequence[LaneEvent]:
        """The events of an answer's end; none now if the content policies take their time to judge it."""
        if self._judges is None:
            return self._make_end_events(opened, completion)
        self._judges.submit(self._end_later, opened, completion)
        return ()

    def _end_later(self, opened: _OpenRequest, completion: Completion) -> None:
        """Runs on a judge's thread. All tokens of the answer were emitted, so no other thread uses it any more."""
        events = self._make_end_events(opened, completion)
        self._pending_events.put(lambda: events)
        with self._changed:
            self._num_judging -= 1

    def _make_end_events(self, opened: _OpenRequest, completion: Completion) -> Sequence[LaneEvent]:
        request = opened.request
        if opened.is_failed:
            return ()
        envelope = Envelope(f"{PREFIX}{request.id}", self._clock.now(), request.attempt, self._wall)
        try:
            return opened.answer.end(opened.row, completion, self._builder, envelope)
        except Exception as error:  # noqa: BLE001 - it concerns one request
            return opened.answer.fail(unforeseen(error, "a response could not be made", request.id))

    def _wall(self, seconds: float) -> datetime:
        """UTC of a time on the engine's clock."""
        return self._engine_epoch + timedelta(seconds=seconds)

    def _emit(self, events: Sequence[LaneEvent]) -> None:
        unwanted = self._lane.emit(events)
        for event in events:
            if closes_attempt(event):
                self._spans.ended(event)
                self._release_attempt(event.request, event.attempt)
            elif event.request in unwanted:
                self._mark_unwanted(event.request, event.attempt)

    # -- on the holder's thread

    def _hold_all(self) -> None:
        seconds = 0.0
        while not self._all_emitted.wait(seconds):
            seconds = self._hold_interval_seconds
            try:
                self._hold()
            except ServiceUnavailable as error:
                logger.warning("holds on requests can't be renewed", reason=str(error))
                seconds = min(seconds, _RETRY_SECONDS)

    def _hold(self) -> None:
        with self._changed:
            held = {request_id: request.attempt for request_id, request in self._held.items()}
        if held:
            for request_id in self._lane.hold(list(held)):
                self._mark_unwanted(request_id, held[request_id])

    # -- on any thread

    def _mark_unwanted(self, request_id: str, attempt: int) -> None:
        """Mark the attempt as unwanted from this worker; the loop then cancels it in the engine."""
        with self._changed:
            if self._holds(request_id, attempt):
                self._unwanted.add((request_id, attempt))
        self._wake.set()

    def _holds(self, request_id: str, attempt: int) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.attempt == attempt

    def _release(self, request: LaneRequest) -> None:
        self._release_attempt(request.id, request.attempt)

    def _release_attempt(self, request_id: str, attempt: int) -> None:
        """The attempt is no longer held, and another request may be taken."""
        self._spans.discarded(request_id, attempt)  # does nothing if the span has ended
        with self._changed:
            if self._holds(request_id, attempt):
                del self._held[request_id]
                self._changed.notify_all()

    def _guarded(self, work: Callable[..., None], *arguments: threading.Event) -> None:
        """Run a thread's work; its failure is raised in the loop."""
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            self._failure = error
            self._wake.set()


def _rounded(value: float | dict[str, float]) -> float | dict[str, float]:
    if isinstance(value, dict):
        return {name: round(number, 4) for name, number in value.items()}
    return value if isinstance(value, int) else round(value, 4)
