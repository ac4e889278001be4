"""OpenAI's `service_tier`: another spelling of the tier of an interactive request."""

from __future__ import annotations

from typing import Any, Final

from pipeline.gateway.http.errors import bad_request
from schemas.jobs.job import Tier
from schemas.requests.dialects.anthropic.body import MESSAGES_URL

AUTO: Final = "auto"
TIER_OF: Final = {"priority": Tier.INTERACTIVE, "default": Tier.STANDARD, "flex": Tier.BULK}
NAME_OF: Final = {tier: name for name, tier in TIER_OF.items()}
SERVICE_TIERS: Final = (AUTO, *TIER_OF)


def take_service_tier(url: str, fields: dict[str, Any], own: Tier | None) -> tuple[Tier, str | None]:
    """Remove `service_tier` from a body's fields; Anthropic's, which has other values, stays there.

    Args:
        own: the tier that the body sets under `tokenmill`.

    Returns the request's tier, and the `service_tier` of its response: the name of that tier; None: the body sets none.
    Raises `ApiError` for an unknown value, and for one that contradicts `own`.
    """
    value = None if url == MESSAGES_URL else fields.pop("service_tier", None)
    if value is None:
        return own or Tier.INTERACTIVE, None
    if not isinstance(value, str) or value not in SERVICE_TIERS:
        shown = repr(value[:40]) if isinstance(value, str) else "no string"
        raise bad_request(f"service_tier is {shown}, but must be one of {', '.join(SERVICE_TIERS)}", "service_tier")
    tier = (own or Tier.INTERACTIVE) if value == AUTO else TIER_OF[value]
    if own is not None and tier is not own:
        message = f"service_tier {value} is the tier {tier}, but tokenmill.tier is {own}; remove one of them"
        raise bad_request(message, "service_tier")
    return tier, NAME_OF[tier]
