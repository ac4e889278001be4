"""Shapes of names and numbers that come in from several sides, and are checked alike at each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
"""Of a job, or of a request on the lane: it stands as it is in a path, in a URL and in a log."""

Traceparent = Annotated[str, StringConstraints(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
"""A place in a trace, as W3C's Trace Context writes it: version, trace, span, flags."""

Attempt = Annotated[int, Field(ge=1, lt=2**31)]
"""How often something was tried, this time included."""
