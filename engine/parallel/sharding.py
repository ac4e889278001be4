"""Sharding of a stage's layers over its ranks, as in Megatron-LM (Shoeybi et al. 2019, section 3).

Rank r has its heads' rows of q, k and v and the columns of the output product that read them, and a part of the MLP's
inner dimension likewise (of each expert's, in a mixture), so that a layer needs two sums over the ranks and nothing
else. Embedding and head are sharded by tokens. The loader receives a shard as a smaller `DecoderSpec`. Where there are
several stages, each has some of the layers (`engine.parallel.pipeline`).

With expert parallelism (Lepikhin et al. 2021, GShard, section 3.2) rank r has whole experts of a mixture instead. All
ranks have all tokens of a step, compute those of their own experts, and the same sum completes the mixture: tokens are
not exchanged, so a step needs no all-to-all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.experts import ExpertSpec
from engine.parallel.pipeline import divide_layers

_LAYER = re.compile(
    r"layers\.(\d+)\."
    r"(self_attn|(?:mlp|feed_forward|block_sparse_moe)(?:\.shared_(?:experts?|mlp))?|(?:\w+\.)?experts\.\d+)"
    r"\.(\w+)\.(weight|bias)$"
)
_OF_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.")
_GATED, _DOWN = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")
_SINKS = re.compile(r"layers\.\d+\.self_attn\.sinks$")
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's shard of a tensor: elements first ... end - 1 along an axis (0: rows)."""

    axis: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """The shard of a decoder of one of a stage's `size` ranks.

    Attributes:
        rank: in its stage.
        expert_parallel: each rank has whole experts, of a decoder that has some.
        placement: per layer, each expert's rank; None: neighbours are on one rank.
        stage, num_stages: which stage of the pipeline it is.

    Raises:
        UnsupportedModel: at creation, if the model can't be sharded so.
    """

    spec: DecoderSpec
    rank: int
    size: int
    expert_parallel: bool = False
    placement: tuple[tuple[int, ...], ...] | None = None
    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.spec.state_layers is not None:
            raise UnsupportedModel(
                "layers with states can't be shared by several devices yet; leave --tensor-parallel, "
                "--pipeline-parallel and --expert-parallel out"
            )
        if self.num_stages > 1:
            self._check_stages()

        def uneven(size: int) -> str | None:
            return _uneven(self.spec, size, expert_parallel=self.expert_parallel)

        if (what := uneven(self.size)) is not None:
            sizes = [size for size in range(1, self.spec.num_heads + 1) if uneven(size) is None]
            raise UnsupportedModel(
                f"{what} can't be shared evenly by {self.size} devices; give a --tensor-parallel that this model's "
                f"sizes allow: {', '.join(map(str, sizes))}"
            )

    def _check_stages(self) -> None:
        spec, stages = self.spec, self.num_stages
        if spec.num_layers < stages:
            raise UnsupportedModel(
                f"{spec.num_layers} layers can't be divided into {stages} stages; give a --pipeline-parallel of "
                f"{spec.num_layers} or less"
            )
        if spec.layer_inputs is not None or any(shape.reads is not None for shape in spec.layer_shapes):
            raise UnsupportedModel(
                "layers with inputs of their own, or that read the keys and values of others, can't be divided into "
                "stages yet; leave --pipeline-parallel out"
            )
        if any(spec.without_mixer.issuperset(layers) for layers in divide_layers(spec.num_layers, stages)):
            raise UnsupportedModel(
                f"of {stages} stages one would have no layer that attends, which is not supported; give a smaller "
                "--pipeline-parallel"
            )

    @property
    def local(self) -> DecoderSpec:
        """Return the rank's shard as a decoder; the sums over the ranks complete its results."""
        spec = self.spec
        tokens = self.vocabulary
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=self._num_kv_heads(spec.num_kv_heads),
            intermediate_size=spec.intermediate_size // self.size,
            layer_shapes=tuple(
                replace(
                    shape,
                    num_kv_heads=self._num_kv_heads(shape.num_kv_heads),
                    intermediate_size=shape.intermediate_size // self.size,
                )
                for shape in spec.layer_shapes
            ),
            experts=self._local_experts,
            vocab_size=tokens.end - tokens.first,
            fused_qkv=False,
            fused_gate_up=False,
            held=self._layers,
        )

    @property
    def _layers(self) -> range:
        return divide_layers(self.spec.num_layers, self.num_stages)[self.stage]

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
        if self.size == 1:
            return None
        if _VOCABULARY.search(name):
            return self.vocabulary
        if _SINKS.search(name):
            return TensorShard(0, *self._of(self.spec.num_heads, 1))
        if (match := _LAYER.search(name)) is None or (self.expert_parallel and _EXPERT.search(name)):
            return None
        layer, block, module, kind = match.groups()
        spec = self.spec.at(int(layer))
        inner = self._of(_inner_size(spec, block), 1)
        by_rows = self._head_rows(spec) | dict.fromkeys(_GATED, inner)
        if module in by_rows:
            return TensorShard(0, *by_rows[module])
        by_columns = {"o_proj": self._of(spec.attended_size, 1)} | dict.fromkeys(_DOWN, inner)
        if module in by_columns and kind == "weight":
            return TensorShard(1, *by_columns[module])
        return None

    def has(self, name: str) -> bool:
        """Whether the rank has the tensor `name` or a part of it; not so for other stages' layers and other ranks'
        experts."""
        layer = _OF_LAYER.search(name)
        if layer is not None and self.num_stages > 1 and int(layer[1]) not in self._layers:
            return False
        match = _EXPERT.search(name) if self.expert_parallel else None
        return match is None or int(match[2]) in self._experts_of(int(match[1]))

    def is_added_once(self, name: str) -> bool:
        """Whether it is a bias of a product that is summed over the ranks: only the first rank adds it."""
        if self.expert_parallel and _EXPERT.search(name):  # one rank has the product
            return False
        match = _LAYER.search(name)
        return match is not None and match[3] in ("o_proj", *_DOWN) and match[4] == "bias"

    def key_rows(self, name: str) -> int:
        """Return the rows of all ranks' keys together, for a product of keys or values."""
        match = _LAYER.search(name)
        assert match is not None, name
        spec = self.spec.at(int(match[1]))
        return spec.num_kv_heads * spec.head_dim

    @property
    def _local_experts(self) -> ExpertSpec | None:
        if (experts := self.spec.experts) is None:
            return None
        shared = experts.shared_size // self.size
        if self.expert_parallel:
            return replace(experts, shared_size=shared, held=tuple(map(self._experts_of, range(self.spec.num_layers))))
        return replace(experts, intermediate_size=experts.intermediate_size // self.size, shared_size=shared)

    @property
    def expert_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return per layer the rank of each expert, where ranks have whole ones."""
        if self.placement is not None:
            return self.placement
        assert self.spec.experts is not None
        each = self.spec.experts.num_experts // self.size
        return (tuple(expert // each for expert in range(self.spec.experts.num_experts)),) * self.spec.num_layers

    def _experts_of(self, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer that the rank has."""
        return tuple(expert for expert, rank in enumerate(self.expert_ranks[layer]) if rank == self.rank)

    def _head_rows(self, spec: DecoderSpec) -> dict[str, tuple[int, int]]:
        """Products whose rows are those of heads -> the rank's rows. With latent attention all ranks make and cache the
        vector that is expanded for their heads."""
        if (latent := spec.latent) is not None:
            queries = self._of(spec.num_heads, latent.query_dim)
            expanded = self._of(spec.num_heads, latent.plain_dim + latent.value_dim)
            return {"q_proj": queries, "q_b_proj": queries, "kv_b_proj": expanded}
        heads = self._of(spec.num_heads, spec.head_dim)
        first = self.rank * spec.num_kv_heads // self.size
        keys = first * spec.head_dim, (first + self._num_kv_heads(spec.num_kv_heads)) * spec.head_dim
        return {"q_proj": heads, "k_proj": keys, "v_proj": keys}

    def _num_kv_heads(self, count: int) -> int:
        """The rank's; where there are fewer heads than ranks, some have the same one."""
        return max(1, count // self.size)

    def _of(self, count: int, width: int) -> tuple[int, int]:
        each = count // self.size * width
        return self.rank * each, (self.rank + 1) * each


def _inner_size(spec: DecoderSpec, block: str) -> int:
    """Return the intermediate size of an MLP, by its name within a layer."""
    experts = spec.experts
    if experts is None or "." not in block:
        return spec.intermediate_size
    return experts.shared_size if ".shared_" in block else experts.intermediate_size


def _uneven(spec: DecoderSpec, size: int, *, expert_parallel: bool) -> str | None:
    """Return the dimension of the decoder that is not divisible by `size` ranks; None: all are."""
    if spec.qk_norm in ("heads", "projection") and size > 1:
        return "norms over all heads"
    if spec.num_heads % size:
        return f"{spec.num_heads} attention heads"
    for heads in sorted({shape.num_kv_heads for shape in spec.layer_shapes or (spec,)}):
        if heads % size and size % heads:
            return f"{heads} key-value heads"
    dense = spec.experts is None or spec.experts.joins_mlp or not all(spec.experts.layers)
    for inner in sorted({shape.intermediate_size for shape in spec.layer_shapes or (spec,)}):
        if dense and inner % size:
            return f"an MLP of {inner} columns"
    if spec.experts is not None and expert_parallel and spec.experts.num_experts % size:
        return f"{spec.experts.num_experts} experts"
    if spec.experts is not None and not expert_parallel and spec.experts.intermediate_size % size:
        return f"experts of {spec.experts.intermediate_size} columns"
    if spec.experts is not None and spec.experts.shared_size % size:
        return f"a shared expert of {spec.experts.shared_size} columns"
    if -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
        return f"a vocabulary of {spec.vocab_size} tokens"
    return None
