"""Helpers for tests of webhooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.gateway.webhooks.client import Endpoint, Sender
from pipeline.gateway.webhooks.service import Notifier, NotifierSettings, endpoint_id
from pipeline.ports import World

KEY = bytes(range(32))
SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
ALL = frozenset({"batch.completed", "batch.failed", "batch.expired", "batch.cancelled"})
HASTY = NotifierSettings(poll_interval_seconds=0.02, min_retry_seconds=0.1, retry_growth=0.1)


def endpoint(url: str, tenant: str = "default", events: frozenset[str] = ALL) -> Endpoint:
    return Endpoint(endpoint_id(tenant, url), tenant, url, KEY, events)


@contextmanager
def running_notifier(
    world: World, *endpoints: Endpoint, settings: NotifierSettings = HASTY, timeout: float = 2.0
) -> Iterator[None]:
    """Run a notifier until the block ends."""
    stop = threading.Event()
    notifier = Notifier(world, endpoints, Sender(timeout, allow_private=True), settings)
    thread = threading.Thread(target=notifier.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
