"""S3 and SQS in memory: moto's server. It loses all data when it is killed, and accepts any credentials."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tests.servers.process import MissingServer, answers
from tests.servers.s3 import S3Server

APP = Path(__file__).with_name("moto_app.py")


class MotoServer(S3Server):
    """S3 and SQS at `endpoint`. Uploads send notifications to SQS as with S3, but twice for one in several parts, with
    "/" as "%2F"."""

    name = "moto"

    def command(self) -> list[str]:
        for module in ("moto", "flask", "flask_cors"):
            if importlib.util.find_spec(module) is None:
                raise MissingServer(
                    f"{module} is missing; install it with: pip install 'moto[s3,sqs]' flask flask-cors"
                )
        return [sys.executable, "-P", str(APP), str(self.port)]  # -P: this folder has a moto.py, too

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /moto-api/ HTTP/1.0\r\n\r\n", b"HTTP/1.1 200")
