"""Amazon's notice that a spot instance will be taken away, two minutes before: the worker then ends in order.

The notice stands at the instance's metadata service, which is asked every few seconds (Amazon EC2 User Guide, "Spot
Instance interruption notices"). Sessions of version 2 of the service are used, since instances may refuse others.
"""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from typing import Final

import structlog

ENDPOINT_VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""As AWS's own tools have it."""
ENDPOINT: Final = "http://169.254.169.254"
TOKEN: Final = "/latest/api/token"
NOTICE: Final = "/latest/meta-data/spot/instance-action"
TOKEN_SECONDS: Final = 600
LOOK_SECONDS: Final = 5.0
TIMEOUT: Final = 2.0

logger = structlog.get_logger(__name__)


def watch_for_notice(stop: threading.Event, look_seconds: float = LOOK_SECONDS) -> None:
    """Set `stop` once the notice stands. Returns when it is set, by whomever."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, ENDPOINT).rstrip("/")
    heard = True
    while not stop.is_set():
        try:
            notice = _notice(endpoint)
        except OSError as error:
            if heard:  # once: it may be so for months
                logger.warning("the metadata service can't be asked for a spot notice", reason=str(error))
            heard, notice = False, None
        else:
            heard = True
        if notice is not None:
            logger.warning("the instance will be taken away", notice=notice)
            stop.set()
        stop.wait(look_seconds)


def _notice(endpoint: str) -> str | None:
    """The notice, or None where there is none. Raises `OSError`."""
    wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    token = _ask(urllib.request.Request(endpoint + TOKEN, headers=wanted, method="PUT"))
    try:
        return _ask(urllib.request.Request(endpoint + NOTICE, headers={"X-aws-ec2-metadata-token": token}))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _ask(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        body: bytes = answer.read(4096)
    return body.decode(errors="replace").strip()
