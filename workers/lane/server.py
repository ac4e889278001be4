"""A worker on the lane: requests whose callers wait, in the running batch beside the rows of shards.

Threads of its own: one takes requests, a few prepare them, tenants in turn (`workers.lane.preparation`). Another tells:
it makes events of what the engine gave, hands them over in batches, and says every few seconds which requests are held
here; from the answers it learns which of them nobody wants any more. In between, on the thread that steps the engine,
the loop asks once a turn (`SideWork`).

Once two tenants have sent requests, one tenant alone holds no more than all but a reserve of what is held here, so that
a request of another one is taken at once.

A request ends with a response, an error, or by being handed back; if the process dies, the lane notices. One whose step
failed is computed once more: another row may have been to blame, and is found by then (`workers.shards.isolation`).
What nobody foresaw about a request is that request's error.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import structlog

from engine.errors import ContextLengthExceeded, RequestRefused
from engine.request import Completion, FinishReason, PartialChoice
from pipeline.lane.protocol import LaneSettings, LaneWorker, TenantShares
from pipeline.ports import Clock
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.tracing import NO_TRACES, Traces
from schemas.requests.errors import RowError, RowErrorCode
from schemas.workers.lane import LaneEvent, LaneRequest, closes_attempt
from workers.lane.preparation import PreparationQueue
from workers.lane.requests import PREFIX, LaneReader, LaneRules
from workers.lane.responses import LaneAnswer, handed_back, refusal
from workers.model.loaded_model import LoadedModel
from workers.observability.metrics import EndedRequests, SideWorkMetrics
from workers.observability.tracing import LaneSpans
from workers.rows import Envelope, PreparedRow
from workers.shards.resume import resume_failed
from workers.structured.grammar import too_complex
from workers.translation.responses import ResponseBuilder
from workers.translation.unexpected import unforeseen

_TAKE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0
_MOST_AT_ONCE: Final = 256

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaneServing:
    """How a worker serves the lane; seconds.

    Attributes:
        most: requests that it has at once; None: a few more than its batch has rows, so that no row stands empty until
            the next has come.
        tell_seconds, tell_each_seconds: between two events of a request, and as much more for each request that is
            here: telling takes time from computing. A first token is told at once.
        report_seconds: between two notes in the log on how they fare.
        grace: that requests have to come to their end when the worker is told to stop; the others are handed back.
        tries: in the engine, for a request whose step fails.
        preparing_threads: that prepare requests; one tenant, and large requests, use all but one of them at most.
    """

    most: int | None = None
    tell_seconds: float = 0.02
    tell_each_seconds: float = 0.0005
    report_seconds: float = 60.0
    grace: float = 20.0
    tries: int = 2
    preparing_threads: int = 2


@dataclass(slots=True)
class _Open:
    """A request here. `given`: choice -> tokens that were passed on; `begun`: whether there were any; `failed`: its end
    is told, whatever the engine still says of it."""

    answer: LaneAnswer
    row: PreparedRow
    given: dict[int, int] = field(default_factory=dict)
    begun: bool = False
    failed: bool = False
    tries: int = 1

    @property
    def request(self) -> LaneRequest:
        return self.answer.request


_Telling = Callable[[], Sequence[LaneEvent]]
"""Makes events on the teller's thread."""


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
    ) -> None:
        """`lane_settings`: the lane's own."""
        self._model = model
        self._engine = model.engine
        self._lane = lane
        self._clock = clock
        self._reader = LaneReader(model, rules)
        self._builder = ResponseBuilder(model.tokenizer)
        self._spans = LaneSpans(model.name, traces)
        self._serving = serving or LaneServing()
        self._most = self._serving.most or model.max_num_seqs + max(2, model.max_num_seqs // 8)
        self._key = model.pin().key
        self._hold_every = (lane_settings or LaneSettings()).lifetime / 3
        self._zero = clock.now() - timedelta(seconds=self._engine.clock())
        # Between the threads.
        self._changed = threading.Condition()
        self._held: dict[str, LaneRequest] = {}  # by id, from being taken until its end is told
        self._first_tenant: str | None = None
        self._has_several_tenants = False
        self._unwanted: set[tuple[str, int]] = set()
        self._arrived: deque[_Open] = deque()
        self._refused: deque[tuple[str, int]] = deque()  # engine's name and choice, to be ended
        self._taking = False
        self._admitting = True
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._news: queue.SimpleQueue[_Telling | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._taker: threading.Thread | None = None
        self._preparation = PreparationQueue(self._prepare, self._serving.preparing_threads)
        self._preparers: list[threading.Thread] = []
        # The loop's own.
        self._open: dict[str, _Open] = {}  # by the engine's name
        self._next_tell = 0.0
        self._next_report = 0.0
        self._reported = 0
        self._ended_here = EndedRequests()

    @contextmanager
    def running(self, stop: threading.Event) -> Iterator[LaneServer]:
        """Serve until the block ends; when `stop` is set nothing new is taken."""
        self._taker = taker = threading.Thread(target=self._guarded, args=(self._take_all, stop), name="lane-taker")
        teller = threading.Thread(target=self._guarded, args=(self._tell_all,), name="lane-teller")
        self._preparers = [
            threading.Thread(target=self._guarded, args=(self._preparation.work,), name=f"lane-preparer-{number}")
            for number in range(self._serving.preparing_threads)
        ]
        for thread in (teller, taker, *self._preparers):
            thread.start()
        try:
            yield self
        finally:
            self._end_taking()
            for left in [*self._open.values(), *self._arrived]:  # the loop ended with an error
                self._news.put(left.answer.handed_back)
            self._news.put(None)
            teller.join()

    # -- on the loop's thread

    @property
    def busy(self) -> bool:
        """Whether something of it is in the engine, or about to enter."""
        return bool(self._open or self._arrived or self._taking or self._preparation.busy)

    @property
    def grace(self) -> float:
        """Seconds that requests have to come to their end when the worker is told to stop."""
        return self._serving.grace

    def turn(self, *, admit: bool) -> None:
        """See `SideWork.turn`. Raises what ended one of the threads."""
        if self._failure is not None:
            raise self._failure
        self._admitting = admit
        if self._unwanted:
            self._drop_unwanted()
        while self._refused:
            name, choice = self._refused.popleft()
            if name in self._open:  # its completion comes like that of any other
                self._engine.cancel(name, choice)
        if self._open:
            self._pass_on()
        while admit and self._arrived:
            self._add(self._arrived.popleft())
        self._report()

    def take(self, completion: Completion) -> bool:
        """Whether it is one of the lane's requests that has ended."""
        if not completion.request_id.startswith(PREFIX):
            return False
        opened = self._open.pop(completion.request_id, None)
        if opened is None:  # nobody wanted it any more
            return True
        failed = any(choice.finish_reason is FinishReason.ERROR for choice in completion.choices)
        failed = failed and too_complex(completion.error or "") is None  # its grammar would fail again
        if failed and opened.tries < self._serving.tries:
            opened.tries += 1
            opened.row = resume_failed(opened.row, completion)
            self._arrived.append(opened)
        else:
            self._ended_here.note(opened.request.tier, completion)
            self._news.put(partial(self._ended, opened, completion))
        return True

    def figures(self) -> SideWorkMetrics:
        """See `SideWork.figures`."""
        with self._changed:
            waiting = Counter(opened.request.tier for opened in self._arrived)
        return SideWorkMetrics(len(self._open), waiting, self._ended_here)

    def rest(self, seconds: float) -> None:
        """Wait until something comes, or so long."""
        self._wake.wait(seconds)
        self._wake.clear()

    def close(self) -> None:
        """Nothing new is taken from now on."""
        self._closed.set()

    def hand_back(self) -> None:
        """See `SideWork.hand_back`. Waits for a look at the lane that is under way, or it might take them again."""
        self._end_taking()
        self._pass_on(everything=True)
        for name, opened in self._open.items():
            self._engine.cancel(name)
            self._news.put(opened.answer.handed_back)
        self._open.clear()
        while self._arrived:
            self._news.put(self._arrived.popleft().answer.handed_back)

    def _end_taking(self) -> None:
        """Take nothing more, and hand back what waits to be prepared; what is being prepared arrives before this
        returns."""
        self._closed.set()
        if self._taker is not None:
            self._taker.join()
        for request in self._preparation.close():
            self._news.put(partial(handed_back, request))
        for thread in self._preparers:
            thread.join()

    def _add(self, opened: _Open) -> None:
        """Into the engine, unless nobody wants it; an earlier attempt at the same request leaves it."""
        request, row = opened.request, opened.row
        for name in [name for name, other in self._open.items() if other.request.id == request.id]:
            self._forget(name)
        if (request.id, request.attempt) in self._unwanted or not self._holds(request.id, request.attempt):
            self._release(request)
            return
        left = self._reader.deadline(request, self._clock.now())
        try:
            self._engine.add(
                row.request if left is None else replace(row.request, deadline=self._engine.clock() + left)
            )
        except RequestRefused as error:
            too_long = isinstance(error, ContextLengthExceeded)
            code = RowErrorCode.CONTEXT_LENGTH_EXCEEDED if too_long else RowErrorCode.INVALID_REQUEST
            self._news.put(partial(opened.answer.failed, RowError(code, str(error))))
        else:
            self._open[row.request.request_id] = opened

    def _pass_on(self, everything: bool = False) -> None:
        """New tokens of the requests in the engine, when it is time. What ends is told at its end."""
        now = self._clock.monotonic()
        due = everything or now >= self._next_tell
        if due:
            self._next_tell = now + self._serving.tell_seconds + len(self._open) * self._serving.tell_each_seconds
        for opened in self._open.values():
            if opened.begun and not due:
                continue
            found = self._engine.partial(opened.row.request, opened.given)
            new = [choice for choice in found if choice.finish_reason is None]
            for choice in new:
                opened.given[choice.index] = opened.given.get(choice.index, 0) + len(choice.token_ids)
            if new:
                if not opened.begun:
                    self._spans.first_token(opened.request)
                opened.begun = True
                self._news.put(partial(self._grown, opened, new))

    def _report(self) -> None:
        """Say in the log how they fare, now and then, where something is promised and somebody was served."""
        now = self._clock.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + self._serving.report_seconds
        pace = self._engine.stats().pace
        if pace is not None and pace.first_tokens > self._reported:
            self._reported = pace.first_tokens
            said = {name: _rounded(value) for name, value in asdict(pace).items()}
            logger.info("requests whose callers wait", objective=_rounded(pace.objective), **said)

    def _drop_unwanted(self) -> None:
        with self._changed:
            unwanted = set(self._unwanted)
        for name in [n for n, o in self._open.items() if (o.request.id, o.request.attempt) in unwanted]:
            logger.info("request dropped: nobody wants it any more", request=self._open[name].request.id)
            self._forget(name)
        for request in self._preparation.discard(unwanted):
            logger.info("request dropped before it was prepared: nobody wants it any more", request=request.id)
            self._release(request)
        with self._changed:  # those that are being prepared stay on the list
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
                taken = self._lane.take([self._key], room, _TAKE_SECONDS, shares)
            except ServiceUnavailable as error:
                logger.warning("no requests can be taken", reason=str(error))
                self._closed.wait(_PAUSE_SECONDS)
                continue
            self._taking = bool(taken)
            self._hold_taken(taken)
            for request in taken:
                self._spans.taken(request)
                self._preparation.put(request)
            self._taking = False

    def _hold_taken(self, taken: Sequence[LaneRequest]) -> None:
        """Note what was taken. An earlier attempt that still waits to be prepared is not wanted any more."""
        with self._changed:
            earlier = [(request.id, self._held[request.id].attempt) for request in taken if request.id in self._held]
            self._held.update((request.id, request) for request in taken)
            for request in taken:
                self._first_tenant = request.tenant if self._first_tenant is None else self._first_tenant
                self._has_several_tenants |= request.tenant != self._first_tenant
        for request in self._preparation.discard(earlier):
            self._release(request)

    def _room(self) -> tuple[int, TenantShares]:
        """How many requests may be taken, beside which others; waits a while for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._admitting and len(self._held) < self._most, _TAKE_SECONDS)
            room = self._most - len(self._held)
            if not self._admitting:
                room = 0
            held = Counter(request.tenant for request in self._held.values())
            reserve = max(1, self._most // 8) if self._has_several_tenants and self._most > 1 else 0
            return room, TenantShares(held, self._most - reserve)

    def _prepare(self, request: LaneRequest) -> None:
        try:
            row = self._reader.prepare(request)
            answer = LaneAnswer(request, row, self._model.tokenizer)
        except RowError as error:
            self._news.put(partial(refusal, request, error))
            return
        except Exception as error:  # noqa: BLE001 - its own, and nobody else's
            failure = unforeseen(error, "a request could not be prepared", request.id)
            self._news.put(partial(refusal, request, failure))
            return
        given = {choice.index: len(choice.token_ids) for choice in row.request.partial}
        with self._changed:
            self._arrived.append(_Open(answer, row, given))
        self._wake.set()

    # -- on the teller's thread

    def _tell_all(self) -> None:
        events: deque[LaneEvent] = deque()
        ending, next_hold, give_up = False, 0.0, float("inf")
        while not (ending and not events) and self._clock.monotonic() < give_up:
            news, ended = self._gather(wait=not events)
            if ended and not ending:
                ending, give_up = True, self._clock.monotonic() + _END_SECONDS
            for tell in news:
                events += tell()
            try:
                while events:
                    batch = [events[at] for at in range(min(len(events), _MOST_AT_ONCE))]
                    self._emit(batch)
                    for _ in batch:
                        events.popleft()
                if self._clock.monotonic() >= next_hold:
                    next_hold = self._clock.monotonic() + self._hold_every
                    self._hold()
            except ServiceUnavailable as error:
                logger.warning("the lane can't be told", events=len(events), reason=str(error))
                self._clock.sleep(_PAUSE_SECONDS)

    def _gather(self, *, wait: bool) -> tuple[list[_Telling], bool]:
        """What there is to tell, and whether that is all there will ever be; waits for the first, not for ever."""
        news: list[_Telling] = []
        try:
            while True:
                one = self._news.get(wait and not news, self._hold_every / 2)
                if one is None:
                    return news, True
                news.append(one)
        except queue.Empty:
            return news, False

    def _grown(self, opened: _Open, new: Sequence[PartialChoice]) -> Sequence[LaneEvent]:
        """Tell of new tokens. A choice that a policy refuses is not to be computed any further, nor is a request whose
        tokens can't be told."""
        if opened.failed:
            return ()
        try:
            events = opened.answer.grown(new)
        except Exception as error:  # noqa: BLE001 - its own, and nobody else's
            opened.failed = True
            self._unwant(opened.request.id, opened.request.attempt)
            return opened.answer.failed(unforeseen(error, "tokens could not be told", opened.request.id))
        for choice in (choice.index for choice in new if opened.answer.refuses(choice.index)):
            self._refused.append((opened.row.request.request_id, choice))
        return events

    def _ended(self, opened: _Open, completion: Completion) -> Sequence[LaneEvent]:
        request = opened.request
        if opened.failed:
            return ()
        envelope = Envelope(f"{PREFIX}{request.id}", self._clock.now(), request.attempt, self._wall)
        try:
            return opened.answer.ended(opened.row, completion, self._builder, envelope)
        except Exception as error:  # noqa: BLE001 - its own, and nobody else's
            return opened.answer.failed(unforeseen(error, "a response could not be made", request.id))

    def _wall(self, seconds: float) -> datetime:
        """UTC of a time on the engine's clock."""
        return self._zero + timedelta(seconds=seconds)

    def _emit(self, events: Sequence[LaneEvent]) -> None:
        unwanted = self._lane.emit(events)
        for event in events:
            if closes_attempt(event):
                self._spans.told(event)
                self._release_pair(event.request, event.attempt)
            elif event.request in unwanted:
                self._unwant(event.request, event.attempt)

    def _hold(self) -> None:
        with self._changed:
            held = {request_id: request.attempt for request_id, request in self._held.items()}
        if held:
            for request_id in self._lane.hold(list(held)):
                self._unwant(request_id, held[request_id])

    def _unwant(self, request_id: str, attempt: int) -> None:
        """Nobody wants it from this worker any more: have the loop take it out of the engine."""
        with self._changed:
            if self._holds(request_id, attempt):
                self._unwanted.add((request_id, attempt))
        self._wake.set()

    # -- on any

    def _holds(self, request_id: str, attempt: int) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.attempt == attempt

    def _release(self, request: LaneRequest) -> None:
        self._release_pair(request.id, request.attempt)

    def _release_pair(self, request_id: str, attempt: int) -> None:
        """The request is no longer here: there is room for another."""
        self._spans.dropped(request_id, attempt)  # unless its end was told
        with self._changed:
            if self._holds(request_id, attempt):
                del self._held[request_id]
                self._changed.notify_all()

    def _guarded(self, work: Callable[..., None], *arguments: threading.Event) -> None:
        """A thread whose failure is the loop's."""
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again by `turn`
            self._failure = error
            self._wake.set()


def _rounded(value: float | dict[str, float]) -> float | dict[str, float]:
    if isinstance(value, dict):
        return {name: round(number, 4) for name, number in value.items()}
    return value if isinstance(value, int) else round(value, 4)
