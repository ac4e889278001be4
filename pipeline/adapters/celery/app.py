"""What the door and the queue on Celery have in common: apps by themselves, and how a broker's URL is read."""

from __future__ import annotations

import ssl
from typing import Any, Final

from celery import Celery
from kombu import Connection

from pipeline.runtime.availability import BadAddress, redacted

REDIS: Final = ("redis", "rediss")


def private_app(broker_url: str) -> Celery:
    """An app that speaks JSON, and that no other Celery code in the process sees or configures.

    Raises:
        BadAddress: Celery can't use the broker.
    """
    try:
        Connection(broker_url).get_transport_cls()
    except (KeyError, TypeError, ValueError, ImportError) as error:
        raise BadAddress(
            f"{redacted(broker_url)}: Celery can't use this broker (no such transport, or its package isn't "
            "installed); give a URL such as redis://host:6379/0"
        ) from error
    app = Celery("tokenmill", broker=broker_url, set_as_current=False, autofinalize=False)
    app.conf.update(accept_content=["json"], task_serializer="json", result_serializer="json")
    return app


def scheme_of(url: str) -> str:
    """The kind of server, without what Celery may add to it."""
    return url.partition(":")[0].partition("+")[0]


def security(url: str) -> dict[str, Any] | None:
    """TLS for Redis: kombu alone would take any certificate. What the URL says of it (`?ssl_ca_certs=…`) goes first."""
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} if scheme_of(url) == "rediss" else None


def socket_options(timeout: float) -> dict[str, Any]:
    """What makes kombu's Redis transport answer or fail within so many seconds."""
    return {"socket_timeout": timeout, "socket_connect_timeout": timeout, "socket_keepalive": True}
