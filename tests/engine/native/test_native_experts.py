"""The kernels' mixtures of experts: what they are for every kind of weight and routing, and for each row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.experts import Experts, ExpertSpec, LinearPerExpert, Mlp
from engine.models.layer_ops.torch_ops import clamped_swiglu
from engine.models.native import NativeBuilder
from engine.models.native_experts import NativeExperts
from engine.models.native_parts import ExpertRoom, NativeMixture
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.packing import pack_quantized
from engine.native.structs import ElementKind
from engine.quant.weight import Activations, QWeight
from tests.engine.native.quantized_weights import WEIGHT_KINDS, int8_rows, random_weight
from tests.native_paths import PATHS, native_path

HIDDEN = 70

KINDS: dict[str, tuple[ElementKind | str, torch.dtype, float]] = {
    "f32": (ElementKind.F32, torch.float32, 1e-5),
    "bf16": (ElementKind.BF16, torch.bfloat16, 0.01),
    "w8-bf16": (ElementKind.W8, torch.bfloat16, 0.02),
    "i8-f32": (ElementKind.I8, torch.float32, 0.04),
    "i8-bf16": (ElementKind.I8, torch.bfloat16, 0.04),
    "int4-f32": ("int4, two levels (Q4_K)", torch.float32, 1e-5),
    "int4-bf16": ("int4, two levels (Q4_K)", torch.bfloat16, 0.01),
    "int8-bf16": ("int8, scale (Q8_0)", torch.bfloat16, 0.01),
    "fp8-bf16": ("fp8", torch.bfloat16, 0.01),
    "w8a8-bf16": ("w8a8", torch.bfloat16, 0.04),
}
"""Name -> kind of the weights, dtype of the rows, and how far the sums may be off relatively."""

PLAIN = ExpertSpec(9, 3, 50, (True,))
ROUTINGS = {
    "softmax": PLAIN,
    "renormalized": replace(PLAIN, renormalize=True, scale=2.5),
    "one of one": replace(PLAIN, num_experts=1, top_k=1),
    "all of many": replace(PLAIN, num_experts=40, top_k=40, intermediate_size=10),
    "sigmoid, corrected": replace(PLAIN, scoring="sigmoid", has_correction=True, renormalize=True),
    "groups": replace(PLAIN, num_experts=12, scoring="sigmoid", num_groups=4, top_groups=2, has_correction=True),
    "groups by their best": replace(PLAIN, num_experts=12, num_groups=4, top_groups=2, group_scores=1),
    "shared": replace(PLAIN, shared_size=34),
    "shared, gated": replace(PLAIN, shared_size=130, has_shared_gate=True, renormalize=True),
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """The same mixture for the kernels and for a reference.

    Attributes:
        gate_up, down: float64, of each expert and then of the shared one, as the kernels' are stored.
    """

    native: NativeExperts
    spec: ExpertSpec
    parts: Experts
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]

    def reference(self, x: Tensor, gated: Callable[[Tensor, Tensor], Tensor] = lambda g, u: F.silu(g) * u) -> Tensor:
        """float64 [rows, hidden]."""
        weights, chosen = self.parts.route(self.spec, x)
        results = torch.stack([self._expert(e, x.double(), gated) for e in range(len(self.down))], dim=1)
        picked = results.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[1]))
        total = (picked * weights.double()[:, :, None]).sum(1)
        if self.spec.shared_size:
            gate = self.parts.shared_gate
            total += results[:, -1] * (1 if gate is None else (x.double() @ gate.double().t()).sigmoid())
        return total

    def _expert(self, number: int, x: Tensor, gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        gate, up = (x @ self.gate_up[number].t()).chunk(2, dim=1)
        return gated(gate, up) @ self.down[number].t()


def mixture(library: NativeLibrary, spec: ExpertSpec, name: str = "f32", *, ordered: bool = False) -> Mixture:
    kind, dtype, _ = KINDS[name]
    random = torch.Generator().manual_seed(spec.num_experts)
    sizes = [spec.intermediate_size] * spec.num_experts + [spec.shared_size] * (spec.shared_size > 0)
    gate_up = [weight(kind, 2 * size, HIDDEN, seed, ordered) for seed, size in enumerate(sizes)]
    down = [weight(kind, HIDDEN, size, 1000 + seed, ordered) for seed, size in enumerate(sizes)]
    linears = [linear(library, kind, w, dtype, gated=True) for w in gate_up]
    downs = [linear(library, kind, w, dtype, gated=False) for w in down]
    parts = Experts(
        router=torch.randn(spec.num_experts, HIDDEN, generator=random) / 8,
        gate_up=LinearPerExpert(linears[: spec.num_experts]),
        down=LinearPerExpert(downs[: spec.num_experts]),
        correction=torch.rand(spec.num_experts, generator=random) if spec.has_correction else None,
        shared=Mlp(linears[-1], downs[-1]) if spec.shared_size else None,
        shared_gate=torch.randn(1, HIDDEN, generator=random) if spec.has_shared_gate else None,
    )
    native = NativeExperts(library, spec, parts)
    return Mixture(native, spec, parts, stored(gate_up, kind, dtype), stored(down, kind, dtype))


def weight(kind: ElementKind | str, n: int, k: int, seed: int, ordered: bool = False) -> Tensor | QWeight:
    if kind == "w8a8":
        return int8_rows(n, k, activations=Activations("int8"), seed=seed)
    if isinstance(kind, str):
        return random_weight(WEIGHT_KINDS[kind], n, k, 16, seed=seed, ordered=ordered)
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / math.sqrt(k)


def linear(
    library: NativeLibrary, kind: ElementKind | str, weight: Tensor | QWeight, dtype: torch.dtype, *, gated: bool
) -> NativeLinear:
    if isinstance(weight, QWeight):
        return NativeLinear(library, pack_quantized(library, weight, gated=gated))
    assert isinstance(kind, ElementKind)
    return NativeLinear.dense(library, kind, NativeBuilder(library)._mix(weight) if gated else weight)


def stored(weights: Sequence[Tensor | QWeight], kind: ElementKind | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rounded = dtype if isinstance(kind, str) or kind == ElementKind.BF16 else torch.float32
    return tuple((w.dequantize(rounded) if isinstance(w, QWeight) else w.to(rounded)).double() for w in weights)


def inputs(rows: int, name: str = "f32") -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(KINDS[name][1])


def relative_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.fixture(params=PATHS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native_path(request.param)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_every_kind_of_weight_gives_the_weighted_sum(name: str, rows: int, library: NativeLibrary) -> None:
    for routing in ("softmax", "shared, gated"):
        mixed = mixture(library, ROUTINGS[routing], name)
        x = inputs(rows, name)
        y = mixed.native.product(x)
        assert (y.shape, y.dtype) == ((rows, HIDDEN), torch.float32)
        assert relative_error(y, mixed.reference(x)) < KINDS[name][2], routing


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_gives_the_weighted_sum(routing: str, library: NativeLibrary) -> None:
    mixed = mixture(library, ROUTINGS[routing])
    for rows in (1, 8, 9, 300):
        x = inputs(rows)
        assert relative_error(mixed.native.product(x), mixed.reference(x)) < 1e-5, rows


@pytest.mark.parametrize("name", ["f32", "bf16", "i8-bf16", "int4-bf16", "int4-f32"])
def test_an_expert_that_most_rows_choose_computes_them_in_several_runs(name: str, library: NativeLibrary) -> None:
    """Rows beyond those that a panel is unpacked for, and a product takes at once."""
    mixed = mixture(library, replace(PLAIN, num_experts=3, top_k=2), name)
    x = inputs(700, name)
    assert relative_error(mixed.native.product(x), mixed.reference(x)) < KINDS[name][2]


@pytest.mark.parametrize("name", ["int4-bf16", "int4-f32"])
def test_experts_whose_columns_have_an_order_gather_their_rows(name: str, library: NativeLibrary) -> None:
    mixed = mixture(library, ROUTINGS["shared"], name, ordered=True)
    x = inputs(20, name)
    assert relative_error(mixed.native.product(x), mixed.reference(x)) < KINDS[name][2]


def test_mixtures_share_a_room_if_the_columns_of_some_have_an_order() -> None:
    # Given a layer in order, one that gathers rows which are longer than all others, and one in order again
    library, spec, room = (
        native_path("avx2"),
        replace(PLAIN, num_experts=1, top_k=1, intermediate_size=170),
        ExpertRoom(),
    )
    layers = [mixture(library, spec, "int4-bf16", ordered=ordered) for ordered in (False, True, False)]
    x = inputs(20, "int4-bf16")
    # When a decoder computes them one after the other, then each has the room that it needs
    for mixed in layers:
        y = NativeMixture(library, mixed.native, "silu", room)(x)
        assert relative_error(y, mixed.reference(x)) < KINDS["int4-bf16"][2]
    assert room.of(library, layers[0].native, x) is room.of(library, layers[1].native, x)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str, library: NativeLibrary) -> None:
    mixed = mixture(library, ROUTINGS["shared, gated"], name)
    x = inputs(130, name)
    together = mixed.native.product(x)
    for first, last in ((0, 1), (7, 9), (50, 130), (129, 130)):
        assert torch.equal(mixed.native.product(x[first:last]), together[first:last]), (first, last)
    backwards = mixed.native.product(x.flip(0))
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("name", ["f32", "bf16", "i8-bf16", "int4-bf16"])
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_threads_change_no_bit(name: str, threads: int) -> None:
    ours, theirs = (mixture(native_path("avx2", n), ROUTINGS["shared"], name) for n in (2, threads))
    for rows in (1, 65):
        x = inputs(rows, name)
        assert torch.equal(ours.native.product(x), theirs.native.product(x))


def test_of_equal_scores_the_lowest_expert_wins(library: NativeLibrary) -> None:
    mixed = mixture(library, replace(PLAIN, num_experts=40, top_k=5))
    mixed.parts.router.zero_()
    mixed.parts.router[[7, 20, 33]] = 1.0
    tied = NativeExperts(library, mixed.spec, mixed.parts)
    for sign, chosen in ((1, [7, 20, 33, 0, 1]), (-1, [0, 1, 2, 3, 4])):
        tied.rows.zero_()
        tied.product(torch.full((6, HIDDEN), 0.1 * sign))
        assert tied.rows.nonzero().flatten().tolist() == sorted(chosen)
        assert set(tied.rows[chosen].tolist()) == {6}


def test_rows_are_counted_by_expert(library: NativeLibrary) -> None:
    mixed = mixture(library, ROUTINGS["groups"])
    for rows in (1, 30):
        x = inputs(rows)
        mixed.native.rows.zero_()
        mixed.native.product(x)
        _, chosen = mixed.parts.route(mixed.spec, x)
        assert torch.equal(mixed.native.rows, chosen.flatten().bincount(minlength=12))


@pytest.mark.parametrize("name", ["f32", "bf16", "i8-bf16", "int4-bf16"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("routing", ["groups", "shared, gated"])
def test_non_finite_rows_change_no_other(name: str, broken: float, routing: str, library: NativeLibrary) -> None:
    mixed = mixture(library, ROUTINGS[routing], name)
    x = inputs(40, name)
    sound = mixed.native.product(x)
    spoilt, rest = torch.tensor([1, 9, 39]), torch.tensor([row for row in range(40) if row not in (1, 9, 39)])
    x[spoilt, 17] = broken
    y = mixed.native.product(x)
    assert not y[spoilt].isfinite().any()
    assert torch.equal(y[rest], sound[rest])


@pytest.mark.parametrize("rows", [1, 40])
def test_the_clamped_gate_is_its_definition(rows: int, library: NativeLibrary) -> None:
    # Given inputs so large that gate and up pass their limits on both sides
    mixed = mixture(library, ROUTINGS["renormalized"])
    x = 12 * inputs(rows)
    _, chosen = mixed.parts.route(mixed.spec, x)
    inner = torch.cat([x[row].double() @ mixed.gate_up[e].t() for row in range(rows) for e in chosen[row]])
    assert float(inner.max()) > 7 > -7 > float(inner.min())
    # When they are computed, then each is what the definition says
    wanted = mixed.reference(x, clamped_swiglu)
    assert relative_error(mixed.native.product(x, "clamped_swiglu"), wanted) < 1e-5
    by_hand = torch.tensor([[7.0, 7.0, -9.0, 1.0]]), torch.tensor([[7.0, -7.0, 2.0, 0.0]])
    given = torch.tensor([[8.0, 7.5, -9.0, 1.0]]), torch.tensor([[9.0, -30.0, 2.0, 0.0]])
    gate, up = by_hand
    torch.testing.assert_close(clamped_swiglu(*given), gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))


def test_copies_of_one_expert_are_that_expert_to_the_bit(library: NativeLibrary) -> None:
    """Two of eight equal experts, each by half, add up to one exactly."""
    one = mixture(library, replace(PLAIN, num_experts=1, top_k=1))
    eight = replace(PLAIN, num_experts=8, top_k=2, renormalize=True)
    gate_up, down = one.parts.gate_up, one.parts.down
    assert isinstance(gate_up, LinearPerExpert)
    assert isinstance(down, LinearPerExpert)
    copies = replace(
        one.parts,
        router=torch.zeros(8, HIDDEN),
        gate_up=LinearPerExpert(gate_up.linears * 8),
        down=LinearPerExpert(down.linears * 8),
    )
    x = inputs(33)
    assert torch.equal(NativeExperts(library, eight, copies).product(x), one.native.product(x))
