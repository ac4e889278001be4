"""The simulation of interactive requests: a heap of events on a virtual clock, steps of workers and transfers between
them.

Workers of one pool take prompts from one queue in the order of arrival, as from the lane, when their step has room for
more. In a disaggregated installation `pipeline.lane.placement.place` decides for each arriving request, by the load of
that moment. A split request's keys and values stay at the prefill worker until a decode worker has room, which then
fetches them (DistServe, Zhong et al. 2024, section 4.3, so bursts wait in the prefill workers' memory); its second
token comes with the decode worker's next step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from pipeline.lane.placement import (
    DecodeLoad,
    LatencyTargets,
    Placement,
    PrefillLoad,
    RequestSize,
    TransferCost,
    place,
)
from pipeline.ports import PipelineError
from pipeline.simulator.serving.link import LinkSettings, SharedLinks
from pipeline.simulator.serving.replica import ReplicaSettings, SimulatedReplica
from pipeline.simulator.serving.requests import SimulatedRequest


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Equal workers."""

    count: int
    settings: ReplicaSettings


@dataclass(frozen=True, slots=True)
class Deployment:
    """The workers of an installation.

    Attributes:
        decode: workers that compute whole requests, and the answers of split ones.
        prefill: workers that compute prompts; None: there are none, and every request is whole.
        split_all: split every request whose answer has a second token, whatever `place` would decide.
    """

    decode: WorkerPool
    prefill: WorkerPool | None = None
    split_all: bool = False


@dataclass(slots=True)
class ServingOutcome:
    """What became of the requests.

    Attributes:
        requests: in order of arrival.
        step_itls: (seconds, rows) of steps: so many tokens came so long after the one before.
        single_itls: seconds of those that came after another time, above all first tokens on a decode worker.
        seconds: until the last request ended.
        computed_tokens, busy_seconds, steps: of all workers.
        moved_bytes: of all transfers.
    """

    requests: list[SimulatedRequest]
    step_itls: list[tuple[float, int]] = field(default_factory=list)
    single_itls: list[float] = field(default_factory=list)
    seconds: float = 0.0
    computed_tokens: int = 0
    busy_seconds: float = 0.0
    steps: int = 0
    moved_bytes: float = 0.0


def simulate_requests(
    requests: list[SimulatedRequest], deployment: Deployment, link: LinkSettings, targets: LatencyTargets
) -> ServingOutcome:
    """Simulate until all requests have ended. Raises `RequestTooLong`, and `DoesNotFit` for a model that is too large
    for its workers."""
    return _ServingSimulation(requests, deployment, link, targets).run()


class RequestTooLong(PipelineError):
    """Raised when a request doesn't fit the KV cache of an empty worker."""


@dataclass(slots=True)
class _Pool:
    """Workers and their queue. `prompt_rate`: prompt tokens a second of one worker, measured over all requests."""

    replicas: list[SimulatedReplica]
    prompt_rate: float
    queue: deque[SimulatedRequest] = field(default_factory=deque)

    @property
    def settings(self) -> ReplicaSettings:
        return self.replicas[0].settings

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are queued or admitted, and not computed."""
        queued = sum(request.waiting_tokens for request in self.queue)
        return queued + sum(replica.prompt_tokens_left for replica in self.replicas)


class _ServingSimulation:
    def __init__(
        self, requests: list[SimulatedRequest], deployment: Deployment, link: LinkSettings, targets: LatencyTargets
    ) -> None:
        self._targets = targets
        self._link = link
        self._split_all = deployment.split_all
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        numbers = count()
        self._decode = _pool(deployment.decode, requests, numbers)
        self._prefill = None if deployment.prefill is None else _pool(deployment.prefill, requests, numbers)
        self._handovers: deque[tuple[SimulatedRequest, SimulatedReplica]] = deque()
        self._links: SharedLinks[tuple[SimulatedRequest, SimulatedReplica, SimulatedReplica]] = SharedLinks(link)
        self._link_serial = 0
        self._answer_tokens = sum(request.answer_tokens for request in requests) / max(1, len(requests))
        self._outcome = ServingOutcome(requests)

    def run(self) -> ServingOutcome:
        for request in self._outcome.requests:
            self._at(request.arrived_at, partial(self._arrive, request))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        outcome = self._outcome
        outcome.seconds = max((request.ended_at or inf for request in outcome.requests), default=0.0)
        for replica in self._replicas():
            outcome.computed_tokens += replica.computed_tokens
            outcome.busy_seconds += replica.busy_seconds
            outcome.steps += replica.steps
        outcome.moved_bytes = self._links.moved_bytes
        return outcome

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), act))

    def _replicas(self) -> list[SimulatedReplica]:
        return self._decode.replicas + ([] if self._prefill is None else self._prefill.replicas)

    # -- requests

    def _arrive(self, request: SimulatedRequest) -> None:
        request.placement = self._placement(request)
        pool = self._decode
        if self._prefill is not None and request.placement is not Placement.WHOLE_ON_DECODE:
            pool = self._prefill
        pool.queue.append(request)
        self._wake(pool)

    def _placement(self, request: SimulatedRequest) -> Placement:
        if self._prefill is None:
            return Placement.WHOLE_ON_DECODE
        if self._split_all:
            return Placement.SPLIT if request.answer_tokens > 1 else Placement.WHOLE_ON_PREFILL
        size = RequestSize(request.prompt_tokens, request.cached_tokens, request.answer_tokens)
        transfer = TransferCost(
            self._kv_bytes_per_token, self._link.bytes_per_second_of_one, self._link.latency_seconds,
            self._waiting_bytes() / len(self._prefill.replicas),
        )  # fmt: skip
        return place(
            size, self._prefill_load(self._prefill), self._decode_load(self._prefill), transfer, self._targets
        ).placement

    def _waiting_bytes(self) -> float:
        """Bytes of keys and values that are on their way, or wait to be fetched."""
        tokens = sum(request.prompt_tokens for request, _ in self._handovers)
        return self._links.waiting_bytes() + tokens * self._kv_bytes_per_token

    @property
    def _kv_bytes_per_token(self) -> float:
        return self._decode.settings.roofline.model.kv_bytes_per_token

    def _prefill_load(self, pool: _Pool) -> PrefillLoad:
        # The SLO control fills steps with prompts up to the target.
        row_step = min(self._targets.itl_seconds, pool.settings.step_tokens / pool.prompt_rate)
        step = pool.settings.roofline.step_seconds(1, 0)
        return PrefillLoad(len(pool.replicas), pool.waiting_tokens, pool.prompt_rate, step, row_step)

    def _decode_load(self, prefill: _Pool) -> DecodeLoad:
        pool, number = self._decode, len(self._decode.replicas)
        roofline = pool.settings.roofline
        rows = sum(replica.rows for replica in pool.replicas)
        context = sum(replica.context_tokens for replica in pool.replicas)
        coming = sum(
            request.placement is Placement.SPLIT
            for requests in (prefill.queue, *(replica.prompts for replica in prefill.replicas))
            for request in requests
        )
        return DecodeLoad(
            workers=number,
            running_rows=rows + sum(replica.fetches for replica in pool.replicas),
            waiting_rows=len(self._handovers) + coming,
            waiting_tokens=pool.waiting_tokens,
            kv_tokens=sum(replica.kv_tokens for replica in pool.replicas),
            kv_tokens_used=sum(replica.kv_tokens_used for replica in pool.replicas),
            answer_tokens=self._answer_tokens,
            step_seconds=roofline.step_seconds(max(1, round(rows / number)), round(context / number)),
            tokens_per_second=pool.prompt_rate,
            step_tokens=pool.settings.step_tokens,
            free_step_tokens=roofline.ridge_tokens,
        )

    # -- workers

    def _wake(self, pool: _Pool) -> None:
        """Let idle workers take from their queue, the emptiest first."""
        for replica in sorted(pool.replicas, key=lambda one: (one.kv_tokens_used, one.number)):
            if not pool.queue:
                return
            if not replica.is_stepping:
                self._begin_step(pool, replica)

    def _begin_step(self, pool: _Pool, replica: SimulatedReplica) -> None:
        self._admit(pool, replica)
        seconds = replica.begin_step()
        if seconds is not None:
            self._at(self._now + seconds, partial(self._end_step, pool, replica))

    def _admit(self, pool: _Pool, replica: SimulatedReplica) -> None:
        """Take prompts while the step has tokens left for them, and room is left for the next split request."""
        kept = self._handovers[0][0].total_tokens if pool is self._decode and self._handovers else 0
        left = pool.settings.step_tokens - replica.rows - replica.prompt_tokens_left
        while pool.queue and left > 0:
            request = pool.queue[0]
            tokens = _reserved_tokens(request)
            if not replica.has_room(tokens + kept):
                return
            pool.queue.popleft()
            replica.reserve(tokens)
            replica.prompts.append(request)
            left -= request.waiting_tokens

    def _end_step(self, pool: _Pool, replica: SimulatedReplica) -> None:
        result = replica.end_step()
        if result.rows:
            self._outcome.step_itls.append((result.seconds, result.rows))
        self._outcome.single_itls += [self._now - (request.first_token_at or 0.0) for request in result.joined]
        for request in result.prompts:
            request.first_token_at = self._now
            if request.answer_tokens == 1:
                result.ended.append(request)
            elif request.placement is Placement.SPLIT:
                self._handovers.append((request, replica))
            else:
                replica.decode(request)
        for request in result.ended:
            request.ended_at = self._now
            replica.release(request.total_tokens)
        self._fetch()
        self._begin_step(pool, replica)

    # -- transfers

    def _fetch(self) -> None:
        """Let decode workers with room fetch keys and values, each the one with the most room."""
        while self._handovers:
            request, source = self._handovers[0]
            free = [one for one in self._decode.replicas if one.fetches < self._link.max_fetches]
            target = min(free, key=lambda one: (one.kv_tokens_used, one.number), default=None)
            if target is None or not target.has_room(request.total_tokens):
                return
            self._handovers.popleft()
            target.reserve(request.total_tokens)
            target.fetches += 1
            self._at(self._now + self._link.latency_seconds, partial(self._start_transfer, request, source, target))

    def _start_transfer(self, request: SimulatedRequest, source: SimulatedReplica, target: SimulatedReplica) -> None:
        num_bytes = request.prompt_tokens * self._kv_bytes_per_token
        self._links.start(self._now, (request, source, target), source.number, target.number, num_bytes)
        self._expect_transfer()

    def _expect_transfer(self) -> None:
        """Schedule the end of the next transfer. Earlier expectations are void: rates have changed since."""
        self._link_serial += 1
        end = self._links.next_end()
        if end < inf:
            self._at(end, partial(self._end_transfers, self._link_serial))

    def _end_transfers(self, serial: int) -> None:
        if serial != self._link_serial or self._prefill is None:
            return
        for request, source, target in self._links.ended(self._now):
            target.fetches -= 1
            source.release(request.prompt_tokens)
            target.join(request)
            if not target.is_stepping:
                self._begin_step(self._decode, target)
        self._fetch()
        self._expect_transfer()
        self._wake(self._prefill)


def _pool(pool: WorkerPool, requests: Sequence[SimulatedRequest], numbers: Iterator[int]) -> _Pool:
    replicas = [SimulatedReplica(next(numbers), pool.settings) for _ in range(pool.count)]
    longest = max((request.total_tokens for request in requests), default=0)
    if longest > replicas[0].kv_tokens:
        raise RequestTooLong(
            f"a request has {longest} tokens, and the KV cache of a {pool.settings.roofline.hardware.name} room for "
            f"{replicas[0].kv_tokens}; draw shorter requests, or take larger devices"
        )
    roofline, step_tokens = pool.settings.roofline, pool.settings.step_tokens
    seconds = sum(roofline.prompt_seconds(request.prompt_tokens, step_tokens) for request in requests)
    tokens = sum(request.prompt_tokens for request in requests)
    return _Pool(replicas, tokens / seconds if seconds else roofline.tokens_per_second)


def _reserved_tokens(request: SimulatedRequest) -> int:
    """Tokens of the KV cache where the prompt is computed: a split request's answer needs none there."""
    return request.prompt_tokens if request.placement is Placement.SPLIT else request.total_tokens
