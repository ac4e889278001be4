"""The open releases as a gateway sees them: which requests are copied to a candidate, and which callers it answers.

A share is chosen by a hash, so that all gateways choose alike, and one caller is answered by one version. Copies are
chosen by conversation: all its turns are copied or none is, so that both versions have its prefix cached.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

import orjson
import structlog

from pipeline.lane.ports import LaneMonitor
from pipeline.lane.prefix_key import MIN_PREFIX_BYTES
from pipeline.models.registry import ModelRegistry
from pipeline.models.request_samples import REQUESTS_PER_SAMPLE, SampleBuffer
from pipeline.ports import PipelineError, World
from schemas.models import CatalogEntry
from schemas.releases import Release, RequestSample, Traffic
from schemas.requests.tokenizing import TOKENIZER_URLS
from schemas.workers.lane import LaneRequest

MAX_WAITING: Final = 16
"""Requests that wait for a version's workers: with more, none is copied to them, and no canary request is sent."""

_POLL_SECONDS: Final = 1.0
_IDLE_POLL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


RequestKind = Literal["compared", "dropped", "canary", "fell_back"]
REQUEST_KINDS: Final[tuple[RequestKind, ...]] = ("compared", "dropped", "canary", "fell_back")
"""Of a gateway's requests: both versions' answers were compared; a copy was not sent, or not compared; it was sent to a
candidate for a caller; the stable version answered instead."""


@dataclass(frozen=True, slots=True)
class OpenRelease:
    """An undecided release with callers' requests.

    Attributes:
        is_canary: the candidate answers callers; their requests are copied to the stable version.
        shares_tokens: token ids mean the same in both versions.
    """

    release: Release
    is_canary: bool
    shares_tokens: bool

    @property
    def traffic(self) -> Traffic:
        return "canary" if self.is_canary else "mirror"

    @property
    def copies_go_to(self) -> str:
        """The key of the version that gets copies."""
        return (self.release.stable if self.is_canary else self.release.candidate).pin.key


class OpenReleases:
    """Thread-safe. `run` reads the releases, and writes samples.

    Args:
        lane: tells how many requests wait.
    """

    def __init__(self, world: World, lane: LaneMonitor) -> None:
        self._world = world
        self._lane = lane
        self._registry = ModelRegistry(world.store)
        self._samples = SampleBuffer(world)
        self._lock = threading.Lock()
        self._open: dict[str, OpenRelease] = {}  # by the stable version's key
        self._waiting: dict[str, int] = {}  # by a version's key
        self._paused: dict[str, float] = {}  # release -> until when its candidate gets nothing, monotonic
        self._counts: Counter[RequestKind] = Counter()
        self._sampled: Counter[tuple[str, Traffic]] = Counter()

    def run(self, stop: threading.Event) -> None:
        """Read releases and write samples until `stop` is set: each second while a release is open, else more seldom,
        since each reading costs requests to the store."""
        while not stop.wait(_POLL_SECONDS if self._open else _IDLE_POLL_SECONDS):
            self.refresh()

    def refresh(self) -> None:
        """Read the open releases and the load of their lanes, and write samples. An unavailable store or lane is
        logged: then nothing is copied, and the candidate answers nobody."""
        found: dict[str, OpenRelease] = {}
        waiting: dict[str, int] = {}
        try:
            for state in self._registry.all_last():
                release = state.release
                if state.outcome is None and (release.rules.mirror or release.rules.canary):
                    found[release.stable.pin.key] = self._read(release)
            keys = [one.pin.key for each in found.values() for one in (each.release.stable, each.release.candidate)]
            waiting = dict(self._lane.waiting(keys)) if keys else {}
        except PipelineError as error:
            logger.warning("releases can't be read: no request is copied", reason=str(error))
            with self._lock:
                self._open = {}
            return
        with self._lock:
            self._open, self._waiting = found, waiting
        self._samples.flush({one.release.id: one.release for one in found.values()})

    def _read(self, release: Release) -> OpenRelease:
        drift, limit = self._registry.drift(release), release.rules.drift
        shares_tokens = drift is not None and limit is not None and drift.mean <= limit
        is_canary = bool(release.rules.canary) and self._registry.canary(release) is not None
        return OpenRelease(release, is_canary, shares_tokens)

    # -- choices

    def canary_of(self, entry: CatalogEntry, identity: str) -> OpenRelease | None:
        """The release whose candidate answers this caller; None: the stable version does.

        Args:
            entry: of the requested model.  identity: of the caller, the same for all its requests.
        """
        with self._lock:
            found = self._open.get(entry.pin.key)
            if found is None or not found.is_canary or entry.pin.name != found.release.name:
                return None  # a request may also name the version itself
            if not self._takes(found.release, found.release.candidate):
                return None
            if not _is_in_share(found.release, "canary", identity, found.release.rules.canary):
                return None
            self._counts["canary"] += 1
        return found

    def copied(self, request: LaneRequest, canary: OpenRelease | None) -> OpenRelease | None:
        """The release for which the request is copied; None: it isn't. `canary`: whose candidate answers it."""
        with self._lock:
            found = canary or self._open.get(request.model)
            if found is None or request.url in TOKENIZER_URLS or found.is_canary != (canary is not None):
                return None
            other = found.release.stable if found.is_canary else found.release.candidate
            counted = self._sampled[found.release.id, found.traffic]
        if counted >= found.release.rules.most_shards * REQUESTS_PER_SAMPLE:
            return None
        share = found.release.rules.mirror
        if canary is None and not _is_in_share(found.release, "mirror", _conversation(request), share):
            return None
        with self._lock:
            takes = self._takes(found.release, other)
        if not takes:
            self.count_dropped(found)
        return found if takes else None

    def _takes(self, release: Release, version: CatalogEntry) -> bool:
        """Whether the version's workers keep up, and the candidate hasn't just lost a request."""
        is_paused = self._world.clock.monotonic() < self._paused.get(release.id, 0.0)
        return not is_paused and self._waiting.get(version.pin.key, 0) < MAX_WAITING

    # -- outcomes

    def fell_back(self, found: OpenRelease, *, is_dead: bool) -> None:
        """The stable version answers a request in place of the candidate. `is_dead`: its worker ended or is silent;
        nothing is sent to it for a while, in which the release may be rolled back."""
        with self._lock:
            self._counts["fell_back"] += 1
            if is_dead:
                self._paused[found.release.id] = self._world.clock.monotonic() + _PAUSE_SECONDS

    def add_sample(self, found: OpenRelease, sample: RequestSample) -> None:
        """Add a compared request."""
        with self._lock:
            self._sampled[found.release.id, found.traffic] += 1
            self._counts["compared"] += 1
        self._samples.add(found.release, found.traffic, sample)

    def count_dropped(self, found: OpenRelease) -> None:
        """Count a copy that was not sent, or is not compared."""
        with self._lock:
            self._counts["dropped"] += 1
        self._samples.count_dropped(found.release, found.traffic)

    def counts(self) -> dict[RequestKind, int]:
        """Number of requests of releases, by kind."""
        with self._lock:
            return {kind: self._counts[kind] for kind in REQUEST_KINDS}


def _is_in_share(release: Release, purpose: Traffic, what: str, share: float) -> bool:
    digest = hashlib.sha256(f"{release.id}\0{purpose}\0{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _conversation(request: LaneRequest) -> str:
    """The same for all turns of a chat, and another for another chat with its system prompt: its tenant and messages up
    to the first one that isn't the system's. Of a short first turn, whose prefix is not worth a cache, and of other
    requests their id."""
    messages = request.body.get("messages")
    if not isinstance(messages, list):
        return request.id
    system = len(list(takewhile(lambda one: one.get("role") in ("system", "developer"), messages)))
    begin = orjson.dumps(messages[: system + 1])
    if len(messages) <= system + 1 and len(begin) < MIN_PREFIX_BYTES:
        return request.id
    return f"{request.tenant}\0{hashlib.sha256(begin).hexdigest()}"
