"""Types of names and numbers that several entry points accept and check alike."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
"""The id of a job, or of a request on the lane. It is used unescaped in paths, URLs and logs."""

Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:%-]{1,255}$")]
"""A name or an address of a machine."""

Traceparent = Annotated[str, StringConstraints(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
"""A span context in the format of W3C Trace Context: version, trace, span, flags."""

Attempt = Annotated[int, Field(ge=1, lt=2**31)]
"""The number of an attempt, from 1."""
