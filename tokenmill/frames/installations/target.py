"""Where an installation is reached, and the options of its jobs, from the keywords of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from tokenmill.errors import InvalidCall
from tokenmill.frames.options import InstallationKeywords, engine_names
from tokenmill.jobs.submit import GATEWAYS, S3

PLACES: Final = ("root", "url")
"""Of the keywords, those that name an installation."""


@dataclass(frozen=True, slots=True)
class JobTarget:
    """The installation that answers a call.

    Attributes:
        target: as `tokenmill submit --to` has it: s3://BUCKET/PREFIX, the path of a folder, or a gateway's URL.
        options: of its job.
    """

    target: str
    options: Mapping[str, Any]

    @property
    def has_gateway(self) -> bool:
        """Whether it is reached over HTTP."""
        return self.target.startswith(GATEWAYS)

    @property
    def option(self) -> str:
        """How commands name it."""
        return f"--url {self.target}" if self.has_gateway else f"--root {self.target}"


def installation_of(keywords: Mapping[str, Any]) -> JobTarget | None:
    """The installation that checked keywords name; None: the call is computed in this process.

    Raises:
        InvalidCall: keywords of the other place are given, too.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    places = [name for name in PLACES if name in given]
    options = {name: given[name] for name in get_type_hints(InstallationKeywords) if name in given}
    if not places:
        for name in options:
            raise InvalidCall(f"{name}: is of an installation's jobs; give root or url, too")
        return None
    if len(places) > 1:
        raise InvalidCall("url: root names an installation already; give one of them")
    for name in sorted(engine_names() & given.keys()):
        raise InvalidCall(f"{name}: the workers of the installation decide that; leave it out with {places[0]}")
    if options.get("refuse_late") and "deadline" not in options:
        raise InvalidCall("refuse_late: needs a deadline")
    target = _root(options.pop("root")) if "root" in options else _url(options.pop("url"))
    return JobTarget(target, options)


def _root(given: str | os.PathLike[str]) -> str:
    text = os.fspath(given)
    if text.startswith(GATEWAYS):
        raise InvalidCall(f"root: {text} is a gateway; give it as url")
    if "://" in text and not text.startswith(S3):
        raise InvalidCall(f"root: must be s3://BUCKET/PREFIX or the folder of 'tokenmill serve', not {text!r}")
    return text.rstrip("/") if text.startswith(S3) else str(Path(text).expanduser().resolve())


def _url(given: str) -> str:
    if not given.startswith(GATEWAYS):
        raise InvalidCall(f"url: must be http(s)://HOST:PORT, as 'tokenmill serve' shows it, not {given!r}")
    return given.rstrip("/")
