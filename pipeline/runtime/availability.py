"""Errors for servers that the pipeline tolerates to be unavailable, and the redaction of their URLs in messages."""

from __future__ import annotations

from pipeline.ports import ComponentStopped, PipelineError


class BadAddress(ComponentStopped):
    """Raised when a URL doesn't name a server of the expected kind. A retry can't help."""


class ServiceUnavailable(PipelineError):
    """Raised when a broker or cache can't be reached, answers too late or refuses a request. It holds no durable state:
    callers may log the error, go on, and retry. The request may or may not have taken effect."""


def redacted(url: str) -> str:
    """The URL without user, password and query, for messages. URLs separated by ";" are redacted one by one."""
    return ";".join(_redacted(one) for one in url.split(";"))


def _redacted(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(a URL without a scheme)"
    # Everything before the last "@" may be a secret, though a slash, a "?" or a "#" in it should have been quoted.
    rest = rest.rpartition("@")[2]
    return f"{scheme}://{rest.partition('?')[0].partition('#')[0]}"
