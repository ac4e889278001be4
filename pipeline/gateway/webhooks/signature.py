"""Signatures of webhook events, as in the Standard Webhooks specification (HMAC-SHA256 over id, time and payload)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import datetime


def signature_headers(secret: bytes, event: str, at: datetime, payload: bytes) -> dict[str, str]:
    """The headers by which the receiver verifies the origin and the age of the payload."""
    timestamp = str(int(at.timestamp()))
    digest = hmac.new(secret, b".".join((event.encode(), timestamp.encode(), payload)), hashlib.sha256).digest()
    return {
        "webhook-id": event,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
