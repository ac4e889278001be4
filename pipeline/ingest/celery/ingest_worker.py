"""Celery ingest: an app with the tasks `tokenmill.submit`, `status`, `cancel`, `generate`, and its worker.

Celery's own worker runs here, in a thread and without its signal handlers. Four of its properties need care. It stores
the current app in a thread-local: so the pool sets it in each of its threads. Its reconnecting is unreliable and can't
be stopped: so it is switched off, and a worker that lost its connection ends and is replaced. On Redis all consumers
share one set of unacknowledged messages, to which the shortest visibility timeout of all would apply: so this worker
has keys of its own. A full Redis would lose a message on delivery: `redis_transport` prevents that.

There is an app and a worker for each queue, because the queue determines the tenant; the queue that a message itself
names was written by its sender.

A `generate` that waits for its answer has ended as far as Celery is concerned: its message is acknowledged when the
request is on the lane, and its result is stored when it arrives. So it takes no thread, and never outlives a visibility
timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from celery import Celery
from celery.bootsteps import RUN
from celery.concurrency.thread import TaskPool
from celery.exceptions import Ignore, Reject, WorkerShutdown
from celery.worker import WorkController
from celery.worker import state as worker_state

from pipeline.adapters.celery.app import REDIS, private_app, scheme_of, security, socket_options
from pipeline.adapters.celery.redis_transport import NAME as REDIS_TRANSPORT
from pipeline.ingest.celery.generate_task import GENERATE, GenerateCalls
from pipeline.ingest.celery.tasks import CANCEL, STATUS, SUBMIT, CeleryTasks, TaskRefused, TryLater
from pipeline.ports import Randomness, World
from pipeline.runtime.availability import BadAddress, redacted
from pipeline.runtime.supervision import supervise
from pipeline.tracing import NO_TRACES, TRACEPARENT, Traces, ingest_span, read_traceparent

_POLL_SECONDS: Final = 0.1
_POLLS_PER_RESTORE: Final = 50
_RESULT_TRIES: Final = 3
_END_SECONDS: Final = 2.0
"""For how long a worker's loop may not react."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CeleryIngestSettings:
    """Broker, queues and time-outs; times in seconds.

    Attributes:
        broker_url: in Celery's format.
        result_url: of the backend from which callers read results; None: the broker, if it is a Redis.
        queues: queue -> its tenant.
        threads: tasks of a queue that run at once.
        timeout_seconds: for an answer of the broker or the backend.
        visibility_timeout_seconds: the tasks of a dead worker are delivered again after this long. Longer than any task
            takes, and than any wait between two attempts.
        result_expires_seconds: how long a result is stored.
        first_retry_seconds, max_retry_seconds: before the first retry of a task that can't be done now, and the maximum
            wait.
        max_attempts: after so many attempts the caller gets the error.
        reconnect_seconds: after the connection to the broker was lost, before the next attempt to connect.
        max_held_tasks: maximum number of tasks in one worker that wait for their next attempt, or for room.
        prefetch: prefetched tasks of each thread. When all have arrived, a worker without Celery's event loop fetches
            more only after two seconds.
    """

    broker_url: str = field(repr=False)
    result_url: str | None = field(default=None, repr=False)
    queues: Mapping[str, str] = field(default_factory=lambda: {"tokenmill": "default"})
    threads: int = 4
    timeout_seconds: float = 5.0
    visibility_timeout_seconds: float = 120.0
    result_expires_seconds: float = 86_400.0
    first_retry_seconds: float = 1.0
    max_retry_seconds: float = 30.0
    max_attempts: int = 30
    reconnect_seconds: float = 1.0
    max_held_tasks: int = 1_000
    prefetch: int = 32


def make_app(
    tasks: CeleryTasks,
    queue: str,
    tenant: str,
    settings: CeleryIngestSettings,
    random: Randomness,
    generating: GenerateCalls | None = None,
    traces: Traces = NO_TRACES,
) -> Celery:
    """An app whose tasks act for `tenant`. No other Celery code in the process sees or configures it.

    Args:
        generating: serves waiting requests; None: there is no lane here.

    Raises:
        BadAddress: Celery can't use the broker, or no result backend is given.
    """
    app = private_app(settings.broker_url)
    app.conf.update(_configuration(queue, settings))

    def wait(tries: int) -> float:
        """Seconds before the next attempt: they double each time, with jitter."""
        longest = min(settings.max_retry_seconds, settings.first_retry_seconds * 2.0 ** min(tries, 30))
        return longest * (0.5 + int.from_bytes(random.token(2), "big") / (1 << 17))

    def traced(act: Callable[[Any], Any], task: Any) -> Any:
        if not traces.is_enabled:
            return act(task)
        request = task.request
        # Instrumented senders put it into the message's headers, which Celery turns into attributes.
        sent = getattr(request, TRACEPARENT, None) or (request.headers or {}).get(TRACEPARENT)
        with ingest_span(traces, task.name, (read_traceparent(sent if isinstance(sent, str) else None),)) as span:
            span.set({"messaging.system": "celery", "messaging.destination.name": queue, "tokenmill.tenant": tenant})
            span.set({"messaging.message.id": str(request.id)[:128]})
            try:
                return act(task)
            except Ignore:  # not a failure: the pending call has a span of its own
                span.end()
                raise

    def with_retries(act: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(task: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return traced(act, task)
            except TryLater as error:
                # To this worker's queue: the queue that the message names was written by its sender.
                again = TryLater(str(error))
                try:
                    raise task.retry(exc=again, countdown=wait(task.request.retries), queue=queue) from None
                except Reject as unsent:  # Celery would lose the task
                    raise Reject(unsent.reason, requeue=True) from None
            except TaskRefused as error:
                logger.info("task_refused", task=task.name, tenant=tenant, reason=str(error))
                raise TaskRefused(str(error)) from None

        return run

    def submit(task: Any) -> str:
        return tasks.submit(tenant, task.request.id, task.request.args, task.request.kwargs)

    def status(task: Any) -> dict[str, Any]:
        return tasks.status(tenant, task.request.args, task.request.kwargs)

    def cancel(task: Any) -> dict[str, Any]:
        return tasks.cancel(tenant, task.request.args, task.request.kwargs)

    def generate(task: Any) -> dict[str, Any]:
        request = task.request
        if generating is None:
            raise TaskRefused("unavailable: no Redis is named here for the lane (TOKENMILL_REDIS_URL)")
        if request.callbacks or request.chain:
            raise TaskRefused(f"invalid_request: nothing can be linked to {GENERATE}; wait for its result")
        waiting = _WaitingTask(task, request, queue)
        result = generating.start(tenant, request.id, request.args, request.kwargs, waiting)
        if result is None:
            raise Ignore("its result is stored when it comes")
        return result

    for name, act in ((SUBMIT, submit), (STATUS, status), (CANCEL, cancel), (GENERATE, generate)):
        app.task(
            with_retries(act), name=name, bind=True, shared=False, typing=False, max_retries=settings.max_attempts - 1,
            throws=(TaskRefused, TryLater), acks_late=True,
        )  # fmt: skip
    app.finalize()
    return app


class _WaitingTask:
    """A `generate` task whose message is acknowledged: this process must store its result."""

    def __init__(self, task: Any, request: Any, queue: str) -> None:
        self._task, self._request, self._queue = task, request, queue

    def revoked(self) -> bool:
        return self._request.id in worker_state.revoked

    def done(self, body: Mapping[str, Any]) -> None:
        self._task.backend.mark_as_done(self._request.id, body, request=self._request)

    def cancelled(self) -> None:
        self._task.backend.mark_as_revoked(self._request.id, "revoked", request=self._request)

    def send_again(self) -> None:
        self._task.signature_from_request(self._request, queue=self._queue).apply_async()


class CeleryIngestWorker:
    """Processes tasks from the queues until it is stopped. Several may run, here and elsewhere.

    Raises:
        BadAddress: see `make_app`.
    """

    def __init__(
        self,
        tasks: CeleryTasks,
        settings: CeleryIngestSettings,
        world: World,
        generating: GenerateCalls | None = None,
    ) -> None:
        self._settings = settings
        self._world = world
        self._generating = generating
        # Celery identifies workers by their names: a revoke reaches one worker of a name.
        self._name = world.random.token(4).hex()
        self._apps = {
            queue: make_app(tasks, queue, tenant, settings, world.random, generating, world.traces)
            for queue, tenant in settings.queues.items()
        }

    def run(self, stop: threading.Event) -> None:
        """Process tasks until `stop` is set; running tasks are finished then, unless they take long. A queue's worker
        that fails is replaced; on `PartStopped` this sets `stop` and raises the error."""
        nothing_starts = threading.Event()
        with ThreadPoolExecutor(1 + len(self._apps), thread_name_prefix="celery-ingest") as pool:
            serving = [
                pool.submit(supervise, "celery", partial(self._serve, queue, app), stop, self._world)
                for queue, app in self._apps.items()
            ]
            waiting = None
            if self._generating is not None:
                waiting = pool.submit(supervise, "celery generate", self._generating.run, nothing_starts, self._world)
            if waiting is not None:
                waiting.add_done_callback(lambda _: stop.set())
            try:
                for ended in as_completed(serving):
                    ended.result()
            finally:
                stop.set()  # if one can't go on, the others must not appear to be complete
                wait(serving)
                nothing_starts.set()
        if waiting is not None:
            waiting.result()
        for app in self._apps.values():
            app.close()

    def _serve(self, queue: str, app: Celery, stop: threading.Event) -> None:
        """Run one Celery worker after the other: each ends with its connection."""
        broker = redacted(self._settings.broker_url)
        while not stop.is_set():
            worker = self._worker(queue, app)
            thread = threading.Thread(target=worker.start, name=f"celery-{queue}", daemon=True)
            thread.start()
            polls = 0
            while thread.is_alive():
                if stop.wait(_POLL_SECONDS):
                    worker.consumer.call_soon(_end, worker)
                    thread.join(_END_SECONDS + 2 * self._settings.timeout_seconds)
                    if thread.is_alive():  # it may be connecting to its broker; its tasks are delivered again
                        logger.warning("celery_worker_left", queue=queue, broker=broker)
                        break
                elif polls % _POLLS_PER_RESTORE == 0:
                    worker.consumer.call_soon(_restore, worker)
                polls += 1
            if not stop.is_set():
                logger.warning(
                    "celery_worker_ended", queue=queue, broker=broker, again_in=self._settings.reconnect_seconds
                )
                stop.wait(self._settings.reconnect_seconds)

    def _worker(self, queue: str, app: Celery) -> WorkController:
        def ready(_consumer: Any) -> None:
            logger.info("celery_queue_open", queue=queue, broker=redacted(self._settings.broker_url))

        return WorkController(
            app=app,
            queues=[queue],
            pool=_Threads,
            concurrency=self._settings.threads,
            hostname=f"tokenmill-{queue}-{self._name}@%h",
            ready_callback=ready,
            use_eventloop=False,  # its event loop is shared by the whole process
            without_heartbeat=True,
            without_mingle=True,
            without_gossip=True,
        )


class _Threads(TaskPool):  # type: ignore[misc]  # Celery has no types
    """Celery's thread pool, with the app set in each thread: else a task would run in the default app."""

    task_join_will_block = False  # else no thread of the process could wait for a result
    executor: ThreadPoolExecutor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.executor = ThreadPoolExecutor(self.limit, "celery-task", self.app.set_current)  # none was used yet


def _restore(worker: WorkController) -> None:
    """In the worker's own loop: restore a dead worker's messages to the queue on Redis. Without Celery's event loop,
    kombu does so only when Redis fails to answer."""
    if worker.blueprint.state == RUN and worker.consumer.connection is not None:
        restore = getattr(worker.consumer.connection.transport.cycle, "maybe_restore_messages", None)
        if restore is not None:
            restore()


def _end(worker: WorkController) -> None:
    """End the worker in order, from its own loop, unless it is ending already."""
    if worker.blueprint.state == RUN:
        raise WorkerShutdown(0)


def _configuration(queue: str, settings: CeleryIngestSettings) -> dict[str, Any]:
    scheme = scheme_of(settings.broker_url)
    if settings.result_url is None and scheme not in REDIS:
        broker = redacted(settings.broker_url)
        raise BadAddress(f"{broker}: keeps no results; give a result backend, such as redis://host:6379/1")
    if settings.max_retry_seconds >= settings.visibility_timeout_seconds:
        raise BadAddress(
            "max_retry_seconds must be below visibility_timeout_seconds, or tasks that wait are delivered twice"
        )
    timeout, results = settings.timeout_seconds, settings.result_url or settings.broker_url
    return {
        "broker_url": settings.broker_url,
        "broker_read_url": settings.broker_url,
        "broker_write_url": settings.broker_url,
        "broker_transport": REDIS_TRANSPORT if scheme in REDIS else None,
        "broker_transport_options": _transport_options(scheme, queue, settings),
        "broker_use_ssl": security(settings.broker_url),
        "broker_connection_timeout": timeout,
        "broker_connection_retry": False,
        "broker_connection_retry_on_startup": False,
        "result_backend": results,
        # A stall of the result backend isn't the task's failure; with Celery's defaults its caller would get an error.
        "result_backend_always_retry": True,
        "result_backend_max_retries": _RESULT_TRIES,
        "result_backend_base_sleep_between_retries_ms": 100,
        "result_backend_max_sleep_between_retries_ms": 1_000,
        "redis_backend_use_ssl": security(results),
        "result_expires": settings.result_expires_seconds,
        "redis_socket_timeout": timeout,
        "redis_socket_connect_timeout": timeout,
        "result_accept_content": ["json"],
        "task_acks_late": True,
        "task_default_queue": queue,
        "worker_prefetch_multiplier": settings.prefetch,
        "worker_eta_task_limit": settings.max_held_tasks,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
    }


def _transport_options(scheme: str, queue: str, settings: CeleryIngestSettings) -> dict[str, Any]:
    if scheme in REDIS:
        return socket_options(settings.timeout_seconds) | {
            "visibility_timeout": settings.visibility_timeout_seconds,
            "unacked_restore_throttle": 1,
            "unacked_key": f"{queue}.unacked",
            "unacked_index_key": f"{queue}.unacked_index",
            "unacked_mutex_key": f"{queue}.unacked_mutex",
        }
    return {"visibility_timeout": settings.visibility_timeout_seconds} if scheme == "sqs" else {}
