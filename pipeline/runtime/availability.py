"""What is raised when a server that the pipeline can do without for a while is away, and how messages name it."""

from __future__ import annotations

from pipeline.ports import PartStopped, PipelineError


class BadAddress(PartStopped):
    """Raised when a URL names no server of the kind that is wanted. Trying again won't help."""


class ServiceUnavailable(PipelineError):
    """Raised when a broker or cache can't be reached, answers too late or refuses. Nothing durable lies there: callers
    may log it, go on, and try again. What was asked may or may not have happened."""


def redacted(url: str) -> str:
    """The URL as messages show it: no user, no password, no query. Several with ";" between stay several."""
    return ";".join(_redacted(one) for one in url.split(";"))


def _redacted(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(a URL without a scheme)"
    # Everything before the last "@" may be a secret, though a slash, a "?" or a "#" in it should have been quoted.
    rest = rest.rpartition("@")[2]
    return f"{scheme}://{rest.partition('?')[0].partition('#')[0]}"
