"""Responses of the answer store: an identical request of the same tenant gets the stored answer, which an earlier
request or a row of a job has got.

Only deterministic requests (greedy, or with a seed) take part. New responses are found at once by this gateway, and by
other processes after `FLUSH_SECONDS`, when they are stored together. The store never fails a request: when it can't be
read, or an answer in it is damaged, the response is computed; when it can't be written, the response isn't stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import orjson
import structlog

from pipeline.answers.http_answers import NewAnswer, read_response, store_responses
from pipeline.answers.index import AnswerIndex, find_or_none
from pipeline.answers.retention import old_responses
from pipeline.answers.segments import AnswersDamaged, answer_space
from pipeline.ports import Clock, ObjectNotFound, StoreError
from schemas.requests.policy_report import may_be_repeated

MARK: Final = "tokenmill_cached"
"""The field in `usage` that marks a response from the store."""
FLUSH_SECONDS: Final = 2.0
MAX_UNSTORED_BYTES: Final = 16 << 20
"""Of responses that are not stored yet; further ones aren't stored."""
_CACHEABLE_FINISH_REASONS: Final = frozenset({"stop", "length"})

logger = structlog.get_logger(__name__)


class ResponseCache:
    """Finds and stores responses. Thread-safe.

    Args:
        index: of the root's answers.
    """

    def __init__(self, index: AnswerIndex, clock: Clock) -> None:
        self.index = index
        self.options = index.options
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, bytes], tuple[datetime, bytes]] = OrderedDict()
        self._recent_bytes = self._unstored_bytes = 0
        self._unstored: defaultdict[str, list[NewAnswer]] = defaultdict(list)
        self._stored_bytes: dict[str, int] = {}  # of responses in a space, as far as this gateway knows

    def find(self, tenant: str, policies: str | None, key: bytes) -> dict[str, Any] | None:
        """The stored response, with `MARK` in its usage; None: there is none. May block on the store.

        Args:
            policies: the fingerprint of the content policies that judge the request now.  key: of the request.
        """
        space = answer_space(tenant, policies)
        data = self._find_recent(space, key)
        response = self._find_stored(space, key) if data is None else orjson.loads(data)
        self.index.counts.add("miss" if response is None else "hit")
        return None if response is None else response | {"usage": response["usage"] | {MARK: True}}

    def add(self, tenant: str, policies: str | None, key: bytes, response: Mapping[str, Any], request: str) -> None:
        """Store a response with the next flush, if it may be repeated. `request`: the id of its request."""
        data = orjson.dumps(response)
        if not _is_cacheable(response) or len(data) > self.options.max_entry_bytes:
            return
        space, now = answer_space(tenant, policies), self._clock.now()
        self._add_recent(space, key, now, data)
        with self._lock:
            if self._unstored_bytes + len(data) <= MAX_UNSTORED_BYTES:
                self._unstored_bytes += len(data)
                self._unstored[space].append(NewAnswer(key, response, request, now))

    def run(self, stop: threading.Event) -> None:
        """Store new responses until `stop` is set."""
        while not stop.wait(FLUSH_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Store the new responses. A failure is logged, and they are computed again when they are wanted."""
        with self._lock:
            unstored, self._unstored = self._unstored, defaultdict(list)
            self._unstored_bytes = 0
        for space, answers in unstored.items():
            try:
                size = store_responses(self.index, space, answers)
                self._bound(space, size)
                self.index.merge(space)
            except Exception as error:  # noqa: BLE001 - answers that aren't stored are computed again
                logger.warning("answers_not_stored", reason=f"{type(error).__name__}: {error}")

    def _bound(self, space: str, added_bytes: int) -> None:
        """Remove the oldest responses of a tenant that has too many bytes of them. Raises `StoreError`."""
        known = self._stored_bytes.get(space)
        if known is None or known + added_bytes > self.options.max_tenant_bytes:
            stored = old_responses(self.index.store, space, self.options, self._clock.now())
            for info in stored.old:
                self.index.store.delete(info.key)
            self._stored_bytes[space] = stored.kept_bytes
        else:
            self._stored_bytes[space] = known + added_bytes

    def _find_recent(self, space: str, key: bytes) -> bytes | None:
        with self._lock:
            at, data = self._recent.get((space, key), (None, None))
            if at is None or at + self.options.retention <= self._clock.now():
                return None
            self._recent.move_to_end((space, key))
            return data

    def _add_recent(self, space: str, key: bytes, at: datetime, data: bytes) -> None:
        with self._lock:
            _, former = self._recent.pop((space, key), (at, b""))
            self._recent[space, key] = at, data
            self._recent_bytes += len(data) - len(former)
            while self._recent_bytes > self.options.max_memory_bytes:
                _, (_, evicted) = self._recent.popitem(last=False)
                self._recent_bytes -= len(evicted)

    def _find_stored(self, space: str, key: bytes) -> dict[str, Any] | None:
        (file,) = find_or_none(self.index, space, [key])
        if file is None:
            return None
        try:
            response = read_response(self.index.store, file, key)
        except ObjectNotFound:  # removed meanwhile
            return None
        except (AnswersDamaged, StoreError) as error:
            self.index.counts.add("damaged", int(isinstance(error, AnswersDamaged)))
            logger.warning("stored_answer_not_used", reason=str(error))
            return None
        if not _is_cacheable(response):
            return None
        self._add_recent(space, key, file.at, orjson.dumps(response))
        return response


def _is_cacheable(response: Mapping[str, Any]) -> bool:
    """Whether a response is complete, passed the content policies, and isn't from the store itself. That of a model to
    which a policy sent the request isn't stored: the key holds the requested model's weights. Nor is one that passed
    because a policy could not judge it."""
    if "usage" not in response or MARK in response["usage"] or not may_be_repeated(response):
        return False
    choices = response.get("choices", [])
    return all(
        choice.get("finish_reason") in _CACHEABLE_FINISH_REASONS and not (choice.get("message") or {}).get("tool_calls")
        for choice in choices
    )
