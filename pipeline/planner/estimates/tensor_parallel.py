"""Capacity, and lower bounds of time, of a model that several devices of a machine share by tensor parallelism.

Each device has an equal part of the weights and of the heads (Shoeybi et al. 2019, Megatron-LM, section 3); key-value
heads that are fewer than the devices are held by several of them. A layer adds up its results over the devices twice,
while nothing else is computed. However it is done, each of n devices sends 2 (n - 1) / n of a step's 16-bit activations
for such a sum (Patarasuk and Yuan 2009), and waits for one message at least, which takes a latency (the cost model of
Thakur et al. 2005, section 3). A ring sends 2 (n - 1) of them one after the other. Norms, which all devices have, and
the sums for embedding and head are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pipeline.planner.estimates.capacity import (
    DoesNotFit,
    Hardware,
    ModelShape,
    WorkEstimate,
    bound,
    concurrent_sequences,
)

MAX_DEVICES: Final = 8
"""Devices of one machine, which the links connect."""

LATENCY_SECONDS: Final = 1e-6
"""Of one message between two devices; assumed."""

ACTIVATION_BYTES: Final = 2
SUMS_PER_LAYER: Final = 2


class UnevenShards(ValueError):
    """Raised when a model can't be shared evenly by so many devices."""


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """What decides how a decoder is shared.

    Attributes:
        heads, kv_heads: of a layer; where layers differ, the smallest number.
        has_states: of layers with states instead of keys and values: then it isn't shared.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    has_states: bool = False

    def can_be_shared_by(self, devices: int) -> bool:
        """Whether each device gets as many heads as the others."""
        even_keys = self.kv_heads % devices == 0 or devices % self.kv_heads == 0
        return devices == 1 or (not self.has_states and self.heads % devices == 0 and even_keys)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model that `devices` equal devices share. Raises `UnevenShards`."""

    whole: ModelShape
    layout: DecoderLayout
    devices: int = 1

    def __post_init__(self) -> None:
        if not self.layout.can_be_shared_by(self.devices):
            even = [number for number in range(1, MAX_DEVICES + 1) if self.layout.can_be_shared_by(number)]
            raise UnevenShards(
                f"the model can't be shared evenly by {self.devices} devices; give a --tensor-parallel that its heads "
                f"allow: {', '.join(map(str, even))}"
            )

    @property
    def shard(self) -> ModelShape:
        """The part of one device."""
        number, whole, kv_heads = self.devices, self.whole, self.layout.kv_heads
        active = whole.active_parameters
        return replace(
            whole,
            parameters=-(-whole.parameters // number),
            active_parameters=None if active is None else -(-active // number),
            kv_elements=whole.kv_elements * max(1, kv_heads // number) // kv_heads,
        )

    def sum_seconds(self, hardware: Hardware, tokens: float, steps: float = 1.0) -> float:
        """Least seconds of the sums over the devices in so many steps with so many tokens together."""
        number = self.devices
        sums = SUMS_PER_LAYER * self.layout.layers
        num_bytes = tokens * self.layout.hidden_size * ACTIVATION_BYTES
        sent = 2 * (number - 1) / number * num_bytes
        return sums * (steps * (number > 1) * LATENCY_SECONDS + sent / hardware.link)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits into one replica: a device, or several that share a model.

    Attributes:
        weight_bytes: on each device.
        kv_bytes_per_token, kv_bytes_per_request: on each device, for a request of `context_tokens`.
        context_tokens: of a request, prompt and answer.
        max_requests: of this length, at the same time; 0: none fits.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    kv_bytes_per_request: float
    context_tokens: int
    max_requests: int


def capacity(model: ShardedModel, hardware: Hardware, context_tokens: int) -> Capacity:
    """The capacity of a replica for requests of this length."""
    shard = model.shard
    try:
        fits = concurrent_sequences(shard, hardware, context_tokens)
    except DoesNotFit:
        fits = 0
    per_request = context_tokens * shard.kv_bytes_per_token + shard.state_bytes
    return Capacity(shard.weight_bytes, shard.kv_bytes_per_token, per_request, context_tokens, fits)


def check_fits(model: ShardedModel, hardware: Hardware, tokens: float) -> None:
    """Raise `DoesNotFit`, with the least tensor parallelism that does, where a replica has no room for a request."""
    if capacity(model, hardware, round(tokens)).max_requests:
        return
    enough = next(
        (
            number
            for number in range(1, MAX_DEVICES + 1)
            if model.layout.can_be_shared_by(number)
            and capacity(replace(model, devices=number), hardware, round(tokens)).max_requests
        ),
        None,
    )
    advice = (
        f"no --tensor-parallel up to {MAX_DEVICES} is enough: quantize it, or take larger devices"
        if enough is None
        else f"it fits with --tensor-parallel {enough}"
    )
    raise DoesNotFit(
        f"{model.devices} x {hardware.name}: {model.shard.weight_bytes / 1e9:.1f} GB of weights on each leave no room "
        f"for a request of {tokens:,.0f} tokens in {hardware.memory / 1e9:.0f} GB; {advice}"
    )


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """Lower bounds of some work on one replica. `sum_seconds`: of its time, that of sums over the devices."""

    estimate: WorkEstimate
    sum_seconds: float


def replica_bound(
    model: ShardedModel,
    hardware: Hardware,
    *,
    requests: int,
    prompt_tokens: float,
    computed_prompt_tokens: float,
    output_tokens: float,
    price_per_hour: float | None = None,
) -> ReplicaWork:
    """Lower bounds of time and cost on one replica, as `capacity.bound` has them for one device, with the sums added.

    Args:
        prompt_tokens: of all requests.  computed_prompt_tokens: of them, without the savings of shared prefixes.
        price_per_hour: of the replica; None: no cost is known.

    Raises:
        DoesNotFit: no sequence of the mean length fits.
    """
    if requests:
        check_fits(model, hardware, (prompt_tokens + output_tokens) / requests)
    least = bound(
        model.shard, hardware, requests=requests, prompt_tokens=prompt_tokens,
        computed_prompt_tokens=computed_prompt_tokens, output_tokens=output_tokens,
    )  # fmt: skip
    steps = output_tokens / max(1, least.sequences or 0)
    summing = model.sum_seconds(hardware, computed_prompt_tokens + output_tokens, steps)
    seconds = least.seconds + summing
    cost = None if price_per_hour is None else seconds / 3600 * price_per_hour
    rate = output_tokens / seconds if seconds else 0.0
    return ReplicaWork(WorkEstimate(seconds, rate, cost, least.sequences), summing)
