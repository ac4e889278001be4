"""The least time that a load can take on a machine of measured bandwidth and matrix rate, whatever the kernels.

A request of I prompt and O answer tokens has I + O - 1 positions computed and O rows of logits made. Its products take
2 operations a parameter and position (in the head: a parameter and row); or, if that is longer, as long as reading the
weights once a step, of which a step's B requests share the cost. Beside that, attention of the prompt takes
4 * heads * head_dim * I (I + 1) / 2 operations in each layer, and each decoding step reads the keys and values of all
tokens before it: (O - 1) (I + O / 2) in all. Layers with a window see no more tokens than it has. These three follow
each other, so their times add up. Activations, norms, sampling and everything on the host count nothing, so the bound
is never reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine can do, measured. Bytes and operations a second.

    Attributes:
        bandwidth: of a large copy on the device, bytes read plus bytes written.
        bf16, fp8: of a large square product; fp8 None: there is none.
    """

    bandwidth: float
    bf16: float
    fp8: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes, from its config.

    Attributes:
        windows: tokens of the window of each layer that has one.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the values of a config.json."""
        heads = int(config["num_attention_heads"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            inner=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=int(config["vocab_size"]),
            windows=(config.get("sliding_window"),) * config.get("layer_types", ()).count("sliding_attention"),
        )

    @property
    def layer_parameters(self) -> int:
        """Of the products of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    def seen(self, tokens: int) -> int:
        """Tokens that the first `tokens` ones see, themselves included, added up over all layers."""
        whole = tokens * (tokens + 1) // 2
        beyond = (max(0, tokens - window) for window in self.windows)
        return self.layers * whole - sum(each * (each + 1) // 2 for each in beyond)

    def kv_bytes(self, item: int) -> int:
        """Of one token's keys and values in a layer, `item` bytes a number."""
        return 2 * self.kv_heads * self.head_dim * item


@dataclass(frozen=True, slots=True)
class Form:
    """In what weights and cache are kept and multiplied: bytes a number. The head stays in 2."""

    weights: int = 2
    cache: int = 2


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of some requests. Seconds, by what they go to.

    Attributes:
        products: of the weights, whichever is longer of computing and reading.  weights_bound: reading is.
        prompts: attention of the prompts.  cache: reading keys and values while decoding.
        output_tokens: that the requests ask for.
    """

    products: float
    weights_bound: bool
    prompts: float
    cache: float
    output_tokens: int

    @property
    def seconds(self) -> float:
        return self.products + self.prompts + self.cache

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds


def bound(
    shape: Shape,
    form: Form,
    rates: Rates,
    requests: Sequence[tuple[int, int]],
    *,
    batch: int | None,
    cached: int = 0,
) -> Bound:
    """The bound of these requests (prompt and answer tokens), computed `batch` at a time.

    Args:
        batch: None: as many as it takes for reading weights to cost nothing.
        cached: prompt tokens among them that need no computing, since others share them.

    Raises:
        ValueError: the form is fp8, but the machine has no rate for it.
    """
    rate = rates.bf16 if form.weights > 1 else rates.fp8
    if rate is None:
        raise ValueError("no fp8 rate was measured here")
    outputs = sum(answer for _, answer in requests)
    positions = sum(prompt + answer - 1 for prompt, answer in requests) - cached
    computing = 2 * shape.layer_parameters * positions / rate + 2 * shape.head_parameters * outputs / rates.bf16
    weight_bytes = shape.layer_parameters * form.weights + shape.head_parameters * 2
    steps = 0.0 if batch is None else outputs / min(batch, len(requests))
    reading = steps * weight_bytes / rates.bandwidth
    pairs: float = sum(shape.seen(prompt) for prompt, _ in requests)
    # Shared prompts are not attended again; how the rest divides is not known, so it counts by its share.
    pairs *= 1 - cached / max(1, sum(prompt for prompt, _ in requests))
    read_tokens = sum(shape.seen(prompt + answer - 1) - shape.seen(prompt) for prompt, answer in requests)
    return Bound(
        products=max(computing, reading),
        weights_bound=reading > computing,
        prompts=4 * shape.heads * shape.head_dim * pairs / rates.bf16,
        cache=read_tokens * shape.kv_bytes(form.cache) / rates.bandwidth,
        output_tokens=outputs,
    )
