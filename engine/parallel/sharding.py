"""Sharding of a model over ranks, as in Megatron-LM (Shoeybi et al. 2019, section 3).

Rank r has its heads' rows of q, k and v and the columns of the output product that read them, and a part of the MLP's
inner dimension likewise, so that a layer needs two sums over the ranks and nothing else. Embedding and head are sharded
by tokens. The loader receives a shard as a smaller `DecoderSpec`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec

_LAYER = re.compile(r"layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.(weight|bias)$")
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's shard of a tensor: elements first ... end - 1 along an axis (0: rows)."""

    axis: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """The shard of a decoder of one of `size` ranks.

    Raises:
        UnsupportedModel: at creation, if the model can't be sharded so.
    """

    spec: DecoderSpec
    rank: int
    size: int

    def __post_init__(self) -> None:
        if (what := _uneven(self.spec, self.size)) is not None:
            sizes = [size for size in range(1, self.spec.num_heads + 1) if _uneven(self.spec, size) is None]
            raise UnsupportedModel(
                f"{what} can't be shared evenly by {self.size} devices; give a --tensor-parallel that this model's "
                f"sizes allow: {', '.join(map(str, sizes))}"
            )

    @property
    def local(self) -> DecoderSpec:
        """Return the rank's shard as a decoder; the sums over the ranks complete its results."""
        spec = self.spec
        tokens = self.vocabulary
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
            vocab_size=tokens.end - tokens.first,
        )

    @property
    def vocabulary_width(self) -> int:
        """Tokens of each rank but the last, which may have fewer."""
        return -(-self.spec.vocab_size // self.size)

    @property
    def vocabulary(self) -> TensorShard:
        first = self.rank * self.vocabulary_width
        return TensorShard(0, first, min(first + self.vocabulary_width, self.spec.vocab_size))

    def cut(self, name: str) -> TensorShard | None:
        """Return the shard of the tensor `name` (transformers' name); None: all of it."""
        if _VOCABULARY.search(name):
            return self.vocabulary
        if (match := _LAYER.search(name)) is None:
            return None
        module, kind = match.groups()
        heads = self._of(self.spec.num_heads, self.spec.head_dim)
        inner = self._of(self.spec.intermediate_size, 1)
        by_rows = {
            "q_proj": heads, "k_proj": self._kv_heads, "v_proj": self._kv_heads, "gate_proj": inner, "up_proj": inner,
        }  # fmt: skip
        if module in by_rows:
            return TensorShard(0, *by_rows[module])
        by_columns = {"o_proj": heads, "down_proj": inner}
        if module in by_columns and kind == "weight":
            return TensorShard(1, *by_columns[module])
        return None

    def is_added_once(self, name: str) -> bool:
        """Whether it is a bias of a product that is summed over the ranks: only the first rank adds it."""
        match = _LAYER.search(name)
        return match is not None and match[1] in ("o_proj", "down_proj") and match[2] == "bias"

    @property
    def _kv_heads(self) -> tuple[int, int]:
        """Rows of k; where there are fewer heads than ranks, some have the same one."""
        spec = self.spec
        count = max(1, spec.num_kv_heads // self.size)
        first = self.rank * spec.num_kv_heads // self.size
        return first * spec.head_dim, (first + count) * spec.head_dim

    def _of(self, count: int, width: int) -> tuple[int, int]:
        each = count // self.size * width
        return self.rank * each, (self.rank + 1) * each


def _uneven(spec: DecoderSpec, size: int) -> str | None:
    """Return the dimension of the decoder that is not divisible by `size` ranks; None: all are."""
    if spec.num_heads % size:
        return f"{spec.num_heads} attention heads"
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"{spec.num_kv_heads} key-value heads"
    if spec.intermediate_size % size:
        return f"an MLP of {spec.intermediate_size} columns"
    if -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
        return f"a vocabulary of {spec.vocab_size} tokens"
    return None
