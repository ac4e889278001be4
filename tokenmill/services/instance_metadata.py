"""The metadata service of Amazon's EC2 instances.

It is queried in sessions of version 2, since instances may refuse others (Amazon EC2 User Guide, "Use the Instance
Metadata Service to access instance metadata").
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from typing import Final

ENDPOINT_VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The variable of AWS's own tools."""
ENDPOINT: Final = "http://169.254.169.254"
TOKEN: Final = "/latest/api/token"
DATA: Final = "/latest/meta-data/"
TOKEN_SECONDS: Final = 600
TIMEOUT: Final = 2.0
"""Seconds for each query; the service is on the instance itself."""


def ask(*names: str) -> list[str | None]:
    """The values of these names, such as instance-type; None where the service has none. Raises `OSError` where the
    service can't be reached."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, ENDPOINT).rstrip("/")
    wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    token = _read(urllib.request.Request(endpoint + TOKEN, headers=wanted, method="PUT"))
    return [_find(f"{endpoint}{DATA}{name}", token) for name in names]


def _find(url: str, token: str) -> str | None:
    try:
        return _read(urllib.request.Request(url, headers={"X-aws-ec2-metadata-token": token}))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _read(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        body: bytes = answer.read(4096)
    return body.decode(errors="replace").strip()
