"""moto's server with S3 requests one at a time: run as `python moto_app.py PORT`.

moto checks whether a key is free and then writes it, in two steps; two threads may both find it free. S3 guarantees
that one of two conditional writes wins, and tests rely on that. Other services are not serialized: a receive from an
SQS queue may wait for seconds.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def one_at_a_time(app: App) -> App:
    """The same, but requests signed for S3 wait for each other once their body is here."""
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "/s3/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return app(environ, start_response)
        if environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with lock:
            return list(app(environ, start_response))

    return serve


def main() -> None:
    app = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)


if __name__ == "__main__":
    main()
