"""Capacity and lower bounds of a model on accelerators, for `tokenmill estimate --hardware`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.config import KVDType
from engine.errors import UnsupportedModel
from engine.models.base import ModelSpec
from pipeline.planner import DoesNotFit, InputEstimate, ModelShape
from pipeline.planner.estimates.capacity import HARDWARE
from pipeline.planner.estimates.tensor_parallel import (
    Capacity,
    DecoderLayout,
    ReplicaWork,
    ShardedModel,
    UnevenShards,
    capacity,
    check_fits,
    replica_bound,
)
from tokenmill.errors import UserError

HOURS_PER_MONTH: Final = 730.0
_16_BITS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Equal replicas of a model on one kind of device.

    Attributes:
        device: its name in `HARDWARE`.  tensor_parallel: devices that share a replica.
        price_per_hour: of a replica; None: it is not known.
    """

    device: str
    tensor_parallel: int
    count: int
    price_per_hour: float | None

    def __str__(self) -> str:
        if self.tensor_parallel > 1:
            return f"{self.count}x{self.tensor_parallel}x{self.device}"
        return self.device if self.count == 1 else f"{self.count}x{self.device}"

    @property
    def price_per_month(self) -> float | None:
        """Of all of them, whether they compute or not."""
        return None if self.price_per_hour is None else self.count * self.price_per_hour * HOURS_PER_MONTH


@dataclass(frozen=True, slots=True)
class HardwareBound:
    """What fits on the replicas, and how long they need for a job at least.

    Attributes:
        parts: replicas that the job occupies: each has at least a shard.  work: of one of these with its part.
    """

    replicas: ReplicaGroup
    capacity: Capacity
    parts: int
    work: ReplicaWork

    def as_json(self) -> dict[str, Any]:
        """For programs; bytes are those on each device."""
        replicas, fits = self.replicas, self.capacity
        return {
            "on": str(replicas),
            "devices": replicas.count * replicas.tensor_parallel,
            "tensor_parallel": replicas.tensor_parallel,
            "replicas": replicas.count,
            "weight_bytes": fits.weight_bytes,
            "kv_bytes_per_token": fits.kv_bytes_per_token,
            "kv_bytes_per_request": fits.kv_bytes_per_request,
            "context_tokens": fits.context_tokens,
            "max_requests": replicas.count * fits.max_requests,
            "communication_seconds": self.work.sum_seconds,
            "price_per_month": replicas.price_per_month,
        }


def hardware_bound(
    amount: InputEstimate,
    spec: ModelSpec,
    bytes_per_parameter: float,
    kv_dtype: KVDType,
    replicas: ReplicaGroup,
    context_tokens: int | None,
    parts: int,
) -> HardwareBound:
    """The bound for a job that is divided among so many of the replicas (`parts`).

    Args:
        context_tokens: of a request, for the most concurrent ones, of which one at least must fit; None: the model's
            longest, whether it fits or not.

    Raises:
        DoesNotFit: a request has no room.  UnevenShards: the model can't be shared by so many devices.
    """
    model = ShardedModel(_shape(spec, bytes_per_parameter, kv_dtype), _layout(spec), replicas.tensor_parallel)
    hardware = HARDWARE[replicas.device]
    if context_tokens is not None:
        check_fits(model, hardware, context_tokens)
    work = replica_bound(
        model, hardware,
        requests=-(-amount.unique // parts),
        prompt_tokens=amount.prompt_tokens / parts,
        computed_prompt_tokens=amount.computed_prompt_tokens / parts,
        output_tokens=amount.expected_tokens / parts,
        price_per_hour=replicas.price_per_hour,
    )  # fmt: skip
    return HardwareBound(replicas, capacity(model, hardware, context_tokens or spec.max_position), parts, work)


def lower_bounds(
    amount: InputEstimate,
    spec: ModelSpec,
    bytes_per_parameter: float,
    kv_dtype: KVDType,
    groups: Sequence[ReplicaGroup],
    context_tokens: int | None,
    parts: int,
) -> list[HardwareBound | str]:
    """The bound on each of these, or why the model doesn't fit. Raises `UserError` where it fits none, can't be shared
    so, or has a shorter context."""
    found: list[HardwareBound | str] = []
    try:
        spec.context(context_tokens)
        for replicas in groups:
            try:
                found.append(
                    hardware_bound(amount, spec, bytes_per_parameter, kv_dtype, replicas, context_tokens, parts)
                )
            except DoesNotFit as error:
                found.append(str(error))
    except (UnevenShards, UnsupportedModel) as error:
        raise UserError(str(error)) from error
    if found and all(isinstance(one, str) for one in found):
        raise UserError(str(found[0]))
    return found


def _shape(spec: ModelSpec, bytes_per_parameter: float, kv_dtype: KVDType) -> ModelShape:
    return ModelShape(
        spec.num_parameters,
        spec.kv_elements,
        bytes_per_parameter=bytes_per_parameter,
        bytes_per_kv_element=_16_BITS if kv_dtype == "auto" else 1.0,
        active_parameters=spec.num_active_parameters,
        state_bytes=sum(shape.nbytes for layer in spec.states for shape in layer),
    )


def _layout(spec: ModelSpec) -> DecoderLayout:
    kv_heads = min((shape.num_kv_heads for shape in spec.kv_shapes), default=spec.num_kv_heads)
    return DecoderLayout(spec.num_layers, spec.hidden_size, spec.num_heads, kv_heads, any(spec.states))
