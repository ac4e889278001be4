"""WebSocket connections whose only limit of time is the guard against hanging."""

from __future__ import annotations

from functools import partial

from websockets.sync.client import connect as _connect

from tests.waiting import HANG_SECONDS

connect = partial(_connect, open_timeout=HANG_SECONDS, ping_interval=None)
"""`websockets.sync.client.connect`, for a machine that may be busy for longer than that library waits for a handshake
or a pong."""
