"""The simulation: a heap of events on a virtual clock.

Production code decides: the dispatcher's rules (`SimulatedDispatch`) choose the next shard of a queue, `BulkReserve`
the tier that a worker takes from, and `decide` the number of workers. Its environment is simulated: all rows of a job
are equal, workers are `SimWorker`, machines start after a cold start, and a random worker ends when there are too many,
since a fleet's service can't see which workers are busy.

Interactive requests are not simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from math import ceil, exp, inf
from typing import Final

from pipeline.scaling.fleet import Demand
from pipeline.scaling.policy import PolicyState, PoolObservation, decide
from pipeline.simulator.dispatch import SimulatedDispatch
from pipeline.simulator.settings import Sample, SimulationOutcome, SimulationSettings
from pipeline.simulator.trace import SpotInterruption, Trace, TracedJob
from pipeline.simulator.workers import HeldShard, SimJob, SimulatedJobOrder, SimWorker
from pipeline.worker_client.ports import BY_URGENCY
from schemas.jobs.job import Tier

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


def simulate(trace: Trace, settings: SimulationSettings) -> SimulationOutcome:
    """Simulate the trace to its end."""
    simulation = Simulation(settings, max((job.at for job in trace.jobs), default=0.0))
    for number, job in enumerate(trace.jobs):
        simulation.submit(job, number)
    for interruption in trace.interruptions:
        simulation.interrupt(interruption)
    simulation.start()
    return simulation.finish()


class Simulation:
    """One installation. `last_arrival`: until then it goes on, in seconds, whatever is open.

    Attributes:
        outcome: the outcome so far; paid times are complete after `finish`.
    """

    def __init__(self, settings: SimulationSettings, last_arrival: float) -> None:
        self._settings = settings
        self._limits = settings.scaling.model_copy(update={"cold_start_seconds": settings.worker.cold_start_seconds})
        self._rng = random.Random(f"mill/{settings.seed}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._jobs = SimulatedDispatch(settings.dispatching)
        self._queues = self._jobs.queues
        self._workers: dict[int, SimWorker] = {}
        self._booting: dict[int, SimWorker] = {}
        self._hungry: dict[int, None] = {}  # workers that wait for a shard, the longest first
        self._only_bulk: dict[int, None] = {}  # workers that would open an urgent shard immediately
        self._names = count()
        self._tick_at = inf
        self._memory = PolicyState()
        self._speed = settings.worker.rows_per_second(settings.worker.batch, 300.0, 200.0) * 500.0
        self._last_arrival = last_arrival
        self._open = 0
        self._is_lost = False
        self.outcome = SimulationOutcome()

    def submit(self, job: TracedJob, number: int, answer_factor: float | None = None) -> None:
        """Let a job arrive at its time. `answer_factor`: actual over estimated answers; None: drawn at its arrival."""
        self._at(job.at, partial(self._arrive, job, number, answer_factor))

    def interrupt(self, interruption: SpotInterruption) -> None:
        """Let an interruption come at its time."""
        self._at(interruption.at, partial(self._interrupt, interruption))

    def start(self) -> None:
        """Start the fleet at 0 seconds. Jobs and interruptions of that time are added before."""
        if self._settings.fixed_workers is not None:
            for _ in range(self._settings.fixed_workers):
                self._launch(0.0)
        else:
            self._at(0.0, self._scale)

    def advance(self, until: float) -> None:
        """Simulate to this time, its events included."""
        while self._events and self._events[0][0] <= until:
            self._step()
        self._now = until

    def finish(self) -> SimulationOutcome:
        """Simulate until all jobs have ended and the workers have left."""
        while self._events:
            self._step()
            if self._over():
                break
        for worker in [*self._workers.values(), *self._booting.values()]:
            self._pay(worker)
        self.outcome.seconds = self._now
        return self.outcome

    def demands(self) -> list[Demand]:
        """The remaining work of open jobs, as it is estimated."""
        return [
            Demand(
                job.rows_left * job.planned_tokens / self._speed,
                None if job.due is None else job.due - self._now,
                self._now - job.arrival,
                job.order.tier is Tier.BULK,
            )
            for job in self._jobs
        ]

    @property
    def live(self) -> int:
        """Live workers."""
        return len(self._workers)

    def lose(self) -> list[SimJob]:
        """Lose all machines, and get none until `restore`; open jobs wait. Returns these."""
        self._is_lost = True
        for worker in list(self._workers.values()):
            self.outcome.interrupted += 1
            self._leave(worker, self._settings.unwritten_seconds, self._settings.detection_seconds)
        for worker in self._booting.values():
            self._pay(worker)
        self._booting.clear()
        return list(self._jobs)

    def withdraw(self, job: SimJob) -> None:
        """Remove an open job from this installation and its outcome."""
        self._end(job)
        self.outcome.jobs.remove(job)

    def restore(self) -> None:
        """Get machines again."""
        self._is_lost = False
        for _ in range(self._settings.fixed_workers or 0):
            self._launch(self._settings.worker.cold_start_seconds)
        self._want_tick()

    def _step(self) -> None:
        self._now, _, act = heapq.heappop(self._events)
        act()

    def _over(self) -> bool:
        if self._open or self._now < self._last_arrival:
            return False
        return (
            self._settings.fixed_workers is not None
            or not (self._workers or self._booting)
            or (len(self._workers) + len(self._booting) <= self._limits.min_workers)
        )

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), act))

    # -- jobs

    def _arrive(self, traced: TracedJob, number: int, answer_factor: float | None) -> None:
        settings, plan = self._settings, self._settings.plan
        tokens = traced.prompt_tokens + traced.output_tokens
        created = EPOCH + timedelta(seconds=self._now)
        due = None if traced.deadline is None else self._now + traced.deadline
        deadline = None if due is None else EPOCH + timedelta(seconds=due)
        rows_in_shard = max(1, min(plan.max_shard_rows, int(plan.shard_tokens / tokens)))
        if answer_factor is None:
            answer_factor = exp(self._rng.gauss(0.0, settings.answer_error))
        answer = traced.output_tokens * answer_factor
        job = SimJob(
            SimulatedJobOrder(f"{number:08d}", traced.tenant, traced.tier, deadline, created),
            self._now, due, traced.rows, rows_in_shard, traced.prompt_tokens, answer, tokens,
        )  # fmt: skip
        self.outcome.jobs.append(job)
        self._jobs.add(job)
        self._open += 1
        if due is not None:
            self._at(due, lambda: self._expire(job))
        first = min(traced.rows, plan.first_segment_rows)
        job.ready = self._now + settings.discovery_seconds + first / settings.planned_rows_per_second
        self._at(job.ready, self._want_tick)

    def _expire(self, job: SimJob) -> None:
        """Close a job at its deadline; workers release its shards."""
        if job.ended is not None:
            return
        self._end(job)
        for worker in list(self._workers.values()):
            mine = [shard for shard in worker.held if shard.job is job]
            for shard in mine:
                worker.drop(shard, self._now)
            if mine:
                self._look_for_more(worker, job)
        self._want_tick()

    def _end(self, job: SimJob) -> None:
        job.ended = self._now
        self._jobs.forget(job)
        self._open -= 1

    # -- the dispatcher

    def _want_tick(self) -> None:
        """Schedule a tick at the next interval of the dispatcher's loop."""
        every = self._settings.dispatching.tick_interval_seconds
        moment = ceil(self._now / every + 1e-9) * every
        if moment < self._tick_at:
            self._tick_at = moment
            self._at(moment, self._tick)

    def _tick(self) -> None:
        self._tick_at = inf
        workers = len(self._workers)
        self.outcome.shards += self._jobs.fill(self._now, workers, self._speed * workers)
        self.outcome.longest_queue = max(self.outcome.longest_queue, *map(len, self._queues.values()))
        self._feed()

    def _feed(self) -> None:
        """Give queued shards to waiting workers."""
        for name in list(self._hungry):
            if not any(self._queues.values()):
                return
            self._take(self._workers[name])
        for name in list(self._only_bulk):
            if not self._queues[Tier.STANDARD]:
                return
            self._take(self._workers[name], urgent_only=True)

    # -- workers

    def _take(self, worker: SimWorker, *, urgent_only: bool = False) -> None:
        floor = worker.floor.due and not urgent_only
        tiers = BY_URGENCY[:1] if urgent_only else BY_URGENCY[::-1] if floor else BY_URGENCY
        for tier in tiers:
            if not self._queues[tier]:
                continue
            job, number, rows = self._queues[tier].popleft()
            worker.floor.took(tier, round(rows * job.planned_tokens))
            job.begun = self._now if job.begun is None else job.begun
            shard = worker.take(job, number, rows, tier is Tier.STANDARD or floor, self._now)
            self._at(shard.finish, partial(self._finish, worker, shard))
            self._hungry.pop(worker.name, None)
            self._look_for_more(worker, job)
            self._want_tick()
            return
        self._hungry.setdefault(worker.name)

    def _look_for_more(self, worker: SimWorker, job: SimJob) -> None:
        """Schedule the worker's next take: when too few rows wait, or when one of its shards is finished."""
        worker.take_serial += 1
        self._only_bulk.pop(worker.name, None)
        if worker.held and worker.wants_urgent():
            self._only_bulk[worker.name] = None
        moment, turn = worker.wants_at(job, self._now), worker.take_serial
        if moment <= self._now:
            self._take(worker)
        elif moment < inf:
            self._at(moment, lambda: self._take(worker) if worker.take_serial == turn else None)

    def _finish(self, worker: SimWorker, shard: HeldShard) -> None:
        if shard not in worker.held:
            return
        if shard.finish > self._now + 1e-6:  # more urgent work has delayed it
            self._at(shard.finish, partial(self._finish, worker, shard))
            return
        worker.let_go(shard, self._now)
        job = shard.job
        job.rows_left = max(0.0, job.rows_left - shard.rows)
        tokens = shard.rows * (job.prompt + job.answer)
        self.outcome.tokens += tokens
        self.outcome.computed_until = self._now
        # A worker reports its tokens over the time that it had work.
        self._speed += 0.02 * (tokens / shard.flow - self._speed) if shard.flow else 0.0
        if job.rows_left < 0.5 and job.ended is None:
            self._end(job)
        self._look_for_more(worker, job)

    def _launch(self, seconds: float) -> None:
        ready = self._now + seconds
        worker = SimWorker(next(self._names), self._settings.worker, self._now, ready)
        self._booting[worker.name] = worker
        self.outcome.starts += 1

        def come() -> None:
            if self._booting.pop(worker.name, None) is not None:
                self._workers[worker.name] = worker
                self._take(worker)
                self._want_tick()

        if seconds <= 0:
            come()
        else:
            self._at(ready, come)

    def _pay(self, worker: SimWorker) -> None:
        self.outcome.paid.append((worker.launched, self._now))
        self.outcome.worker_seconds += self._now - worker.launched
        self.outcome.busy_seconds += worker.paid_until(self._now)

    def _leave(self, worker: SimWorker, lost: float, after: float) -> None:
        """End a worker; other workers resume its shards `after` so many seconds."""
        self._workers.pop(worker.name)
        self._hungry.pop(worker.name, None)
        self._only_bulk.pop(worker.name, None)
        worker.take_serial += 1
        lefts = [
            (shard, worker.drop(shard, self._now), _rows_of_last(shard, self._now, lost)) for shard in list(worker.held)
        ]
        self._pay(worker)

        def release() -> None:
            for shard, left, again in lefts:
                job = shard.job
                if job.ended is None:
                    job.rows_left -= shard.rows - left - again
                    self.outcome.tokens += (shard.rows - left) * (job.prompt + job.answer)
                    self.outcome.repeated_rows += again
                    if left + again > 0:
                        job.returned[shard.number] = left + again
            self._want_tick()

        self._at(self._now + after, release)

    # -- machines

    def _scale(self) -> None:
        """Run the autoscaler once, and let the provider start and end machines."""
        if self._is_lost:
            self._at(self._now + self._settings.interval_seconds, self._scale)
            return
        observed = PoolObservation(self.demands(), len(self._workers))
        decision = decide(self._limits, self._memory, observed, self._now)
        self._memory = decision.memory
        if decision.desired != decision.before:
            self.outcome.changes.append((self._now, decision.desired))
        self.outcome.samples.append(Sample(self._now, decision.desired, len(self._workers), observed.work))
        self._provide(decision.desired)
        self._at(self._now + self._settings.interval_seconds, self._scale)

    def _provide(self, desired: int) -> None:
        extra = len(self._workers) + len(self._booting) - desired
        for _ in range(-extra):
            spread = 1 + self._settings.cold_start_spread * self._rng.uniform(-1, 1)
            self._launch(self._settings.worker.cold_start_seconds * spread)
        for name in sorted(self._booting, reverse=True)[: max(0, extra)]:
            self._pay(self._booting.pop(name))
            extra -= 1
        if extra > 0:
            for name in self._rng.sample(sorted(self._workers), extra):
                self._leave(self._workers[name], 0.0, 0.0)

    def _interrupt(self, interruption: SpotInterruption) -> None:
        taken = round(len(self._workers) * interruption.interrupt)
        for name in self._rng.sample(sorted(self._workers), taken):
            self.outcome.interrupted += 1
            if self._rng.random() < self._settings.unannounced_fraction:
                self._leave(self._workers[name], self._settings.unwritten_seconds, self._settings.detection_seconds)
            else:
                self._leave(self._workers[name], 0.0, 0.0)


def _rows_of_last(shard: HeldShard, now: float, lost: float) -> float:
    """Rows of a shard that were computed in its last `lost` seconds."""
    span = max(1e-9, shard.finish - shard.taken)
    return min(lost, max(0.0, now - shard.taken)) / span * shard.rows
