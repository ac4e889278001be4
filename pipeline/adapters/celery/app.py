"""Shared by Celery ingest and the shard queue on Celery: isolated apps, and parsing of a broker's URL."""

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
    """The scheme of the server's URL, without Celery's suffix."""
    return url.partition(":")[0].partition("+")[0]


def security(url: str) -> dict[str, Any] | None:
    """TLS options for Redis: kombu's default accepts any certificate. Options in the URL (`?ssl_ca_certs=…`)
    override."""
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} if scheme_of(url) == "rediss" else None


def socket_options(timeout: float) -> dict[str, Any]:
    """Options that make kombu's Redis transport answer or fail within so many seconds."""
    return {"socket_timeout": timeout, "socket_connect_timeout": timeout, "socket_keepalive": True}
