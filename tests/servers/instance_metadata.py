"""A fake of the instance metadata service of Amazon's EC2, with sessions of version 2 only."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

NOTICE: Final = "spot/instance-action"
TOKEN: Final = "a-session"


class MetadataServer:
    """Listens on a port of its own, until it is closed.

    Attributes:
        metadata: name below /latest/meta-data/ -> its value; other names are not found.
        notices: codes and bodies for the notice of a spot instance, one for each request, and the last one for ever.
        noticed: how often that was requested.
        silent: while it is set, requests are accepted and not answered.
    """

    def __init__(self) -> None:
        self.metadata = {"instance-type": "g6.xlarge", "placement/region": "us-east-1", "instance-life-cycle": "spot"}
        self.notices: list[tuple[int, str]] = [(404, "")]
        self.noticed = 0
        self.silent = threading.Event()
        self._over = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                if service.silent.is_set():
                    service._over.wait()
                    return
                wanted = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] or ""
                right = self.path == "/latest/api/token" and wanted.isdecimal()
                self._answer(*((200, TOKEN) if right else (400, "")))

            def do_GET(self) -> None:
                right = self.headers["X-aws-ec2-metadata-token"] == TOKEN
                self._answer(*(service._find(self.path) if right else (401, "")))

            def _answer(self, code: int, body: str) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """For `tokenmill.services.instance_metadata.ENDPOINT_VARIABLE`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Release waiting requests, and stop."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _find(self, path: str) -> tuple[int, str]:
        name = path.removeprefix("/latest/meta-data/")
        if name == NOTICE:
            self.noticed += 1
            return self.notices.pop(0) if len(self.notices) > 1 else self.notices[0]
        return (200, self.metadata[name]) if name in self.metadata else (404, "")
