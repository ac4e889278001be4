"""Settings of the transfer of KV blocks between workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.identifiers import Host
from schemas.requests.limits import Positive

Role = Literal["both", "prefill", "decode"]
"""What a worker computes of interactive requests: whole ones, prompts, or answers whose prompts others computed."""


class KVTransferOptions(BaseModel):
    """Settings of the transfer of KV blocks between workers (`worker --role`).

    Attributes:
        host, port: that a prefill worker listens on; port 0: any. Blocks are sent in the clear.
        advertised_host: under which decode workers reach it; None: `host`, or for 0.0.0.0 and :: the machine's address
            towards Redis.
        max_bytes: most bytes of blocks that a prefill worker offers, and that a decode worker holds before it loads
            them.
        offer_seconds: for which an offer is valid.
        timeout_seconds: of a transfer; what has not arrived then is computed.
        shared_memory: use it between workers of one machine; else TCP.
        hand_over: auto: a request is handed over where that is sooner, by what the workers measure; always: each one
            whose prompt fills a KV block.
        help_after_seconds: a worker takes requests that are another role's when they have waited for so long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Host = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    advertised_host: Host | None = None
    max_bytes: Positive = 1 << 30
    offer_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    shared_memory: bool = True
    hand_over: Literal["auto", "always"] = "auto"
    help_after_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
