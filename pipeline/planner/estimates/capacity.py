"""Lower bounds of time and cost on given hardware, from a model's shape and an accelerator's data sheet.

Prefill is bound by arithmetic, decode by the bandwidth that reads weights and KV cache once a step (Williams et al.
2009, Roofline; Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2). Pure functions in SI units:
bytes, seconds, operations. The bounds are for one device (`tensor_parallel` has those of several); real runs take
longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    Attributes:
        memory: bytes.  bandwidth: bytes per second.  flops: dense 16-bit operations per second.
        link: bytes per second that it sends to other devices of its machine: half of what data sheets give for both
            directions of NVLink, else of PCIe.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float


HARDWARE: Final[Mapping[str, Hardware]] = {
    hardware.name: hardware
    for hardware in (
        Hardware("b200", 180e9, 8.0e12, 2250e12, 900e9),
        Hardware("h200", 141e9, 4.8e12, 989e12, 450e9),
        Hardware("h100", 80e9, 3.35e12, 989e12, 450e9),
        Hardware("a100", 80e9, 2.04e12, 312e12, 300e9),
        Hardware("l40s", 48e9, 0.864e12, 362e12, 32e9),
        Hardware("a10g", 24e9, 0.6e12, 70e12, 32e9),
        Hardware("l4", 24e9, 0.3e12, 121e12, 32e9),
        Hardware("t4", 16e9, 0.32e12, 65e12, 16e9),
    )
}
"""Values of data sheets (SXM variants where there are several; without sparsity)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The parameters of a model in the formulas.

    Attributes:
        bytes_per_parameter: 2 for 16-bit, 1 for 8-bit, 0.5 for 4-bit.
        active_parameters: that a token is computed with, in a mixture of experts; None: all.
        kv_elements: of one token's keys and values, in all layers.
        state_bytes: of a sequence, in layers with states instead of keys and values.
        query_elements: of one token's queries, in all layers; 0: attention counts as no arithmetic.
    """

    parameters: int
    kv_elements: int
    bytes_per_parameter: float = 2.0
    bytes_per_kv_element: float = 2.0
    active_parameters: int | None = None
    state_bytes: int = 0
    query_elements: int = 0

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    def read_bytes(self, tokens: float) -> float:
        """Weights that a step of so many tokens reads: of a mixture, each token leaves the same share unread, as if
        experts were chosen evenly."""
        active = self.parameters if self.active_parameters is None else self.active_parameters
        unread: float = (1 - active / self.parameters) ** max(1.0, tokens)
        return self.weight_bytes * (1 - unread)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers that attend."""
        return self.kv_elements * self.bytes_per_kv_element


class DoesNotFit(ValueError):
    """Raised when a model's weights leave no room for a single sequence."""


def concurrent_sequences(model: ModelShape, hardware: Hardware, tokens: float, utilisation: float = 0.9) -> int:
    """Number of sequences of `tokens` that fit in memory with the weights; raises `DoesNotFit` when none does."""
    room = hardware.memory * utilisation - model.weight_bytes
    fits = int(room // (model.kv_bytes_per_token * max(1.0, tokens) + model.state_bytes))
    if fits < 1:
        raise DoesNotFit(
            f"the model's weights ({model.weight_bytes / 1e9:.1f} GB) leave no room for a sequence of {tokens:.0f} "
            f"tokens in {utilisation:.0%} of {hardware.name}'s {hardware.memory / 1e9:.0f} GB; "
            "quantize it or take larger hardware"
        )
    return fits


def read_seconds(model: ModelShape, hardware: Hardware, sequences: float, tokens: float) -> float:
    """Seconds that one decode step takes to read the weights once and the KV cache of `sequences` with `tokens`
    each, and to read and write their states."""
    cache = sequences * (tokens * model.kv_bytes_per_token + 2 * model.state_bytes)
    return (model.read_bytes(sequences) + cache) / hardware.bandwidth


def compute_seconds(model: ModelShape, hardware: Hardware, tokens: float) -> float:
    """Lower bound for computing `tokens`, of prompts or answers: two operations a parameter that they are
    computed with."""
    return 2 * (model.active_parameters or model.parameters) * tokens / hardware.flops


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """Time and cost of some work. `tokens_per_second` counts output tokens; `cost` None: no price is known."""

    seconds: float
    tokens_per_second: float
    cost: float | None
    sequences: int | None = None


def bound(
    model: ModelShape,
    hardware: Hardware,
    *,
    requests: int,
    prompt_tokens: float,
    computed_prompt_tokens: float,
    output_tokens: float,
    price_per_hour: float | None = None,
) -> WorkEstimate:
    """Lower bounds of time and cost on one device. An engine that mixes prefill into decode steps computes while it
    reads, so the longer of the two counts.

    Args:
        prompt_tokens: of all requests.  computed_prompt_tokens: of them, without the savings of shared prefixes.
        price_per_hour: of the device; None: no cost is known.
    Raises:
        DoesNotFit: no sequence of the mean length fits.
    """
    if requests == 0:
        return WorkEstimate(0.0, 0.0, 0.0, 0)
    mean_prompt, mean_output = prompt_tokens / requests, output_tokens / requests
    fits = concurrent_sequences(model, hardware, mean_prompt + mean_output)
    sequences = min(requests, fits)
    step = read_seconds(model, hardware, sequences, mean_prompt + mean_output / 2)
    computing = compute_seconds(model, hardware, computed_prompt_tokens + output_tokens)
    seconds = max(computing, output_tokens / sequences * step)
    cost = None if price_per_hour is None else seconds / 3600 * price_per_hour
    return WorkEstimate(seconds, output_tokens / seconds if seconds else 0.0, cost, sequences)


def at_rate(output_tokens: float, tokens_per_second: float, price_per_hour: float | None) -> WorkEstimate:
    """Time and cost at a measured rate of output tokens."""
    if not tokens_per_second > 0:
        raise ValueError(f"tokens_per_second is {tokens_per_second}, but must be above 0")
    seconds = output_tokens / tokens_per_second
    cost = None if price_per_hour is None else seconds / 3600 * price_per_hour
    return WorkEstimate(seconds, tokens_per_second, cost)
