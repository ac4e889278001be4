"""Weights handed to humming-kernels: the layout is compressed-tensors' own packing, and the layer's arguments are those
of the library (0.1.19), which a stand-in replaces that computes with the given tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.quant.formats.base import affine
from engine.quant.humming import HummingKernel, HummingProduct, fits, packed, whole_zeros
from engine.quant.linear import QuantizedLinear, fast_kernel
from engine.quant.rtn import AT_LOAD, Rounding, round_to_nearest
from engine.quant.weight import Activations, QWeight

CPU = torch.device("cpu")


def weight(n: int = 128, k: int = 256, group: int = 64, *, zeros: bool = True) -> tuple[QWeight, Tensor, Tensor]:
    """A weight of four bits, with its codes [n, k] and zeros [n, groups] one by one."""
    made = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=made).to(torch.uint8)
    scale = (torch.rand(n, k // group, generator=made) + 0.1).to(torch.float16)
    zero = torch.randint(0, 16, scale.shape, generator=made).to(torch.int32) if zeros else torch.full(scale.shape, 8)
    return affine(codes, 4, scale, zero if zeros else None, group), codes, zero


class Layer(nn.Module):
    """Takes the tensors that the library's schema names, and multiplies with what they stand for."""

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], input_config: None = None,
        pad_n_to_multiple: int = 1, pad_k_to_multiple: int = 1, num_experts: int | None = None, has_bias: bool = False,
        torch_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert weight_config["quant_method"] == "humming"
        assert weight_config["dtype"] == "uint4"
        groups = shape_k // (weight_config["group_size"] or shape_k)
        shapes = {
            "weight": ((shape_n, shape_k // 8), torch.int32),
            "weight_scale": ((shape_n, groups), torch_dtype),
            "zero_point": ((shape_n // 8, groups), torch.int32) if weight_config["has_zero_point"] else None,
            "bias": ((shape_n,), torch_dtype) if has_bias else None,
        }
        self.shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self.ready = False

    def load_from_tensors(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == self.shapes
        self.tensors = tensors

    def transform(self) -> None:
        self.ready = True

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.ready
        assert inputs.is_contiguous()
        tensors, shifts = self.tensors, torch.arange(0, 32, 4)
        words, scale = tensors["weight"], tensors["weight_scale"].float()
        codes = (words[:, :, None] >> shifts & 15).flatten(1).float()
        group = codes.shape[1] // scale.shape[1]
        zeros = torch.tensor(8.0)
        if "zero_point" in tensors:
            zeros = (tensors["zero_point"][:, None, :] >> shifts[:, None] & 15).flatten(0, 1).float()
            zeros = zeros.repeat_interleave(group, 1)
        whole = ((codes - zeros) * scale.repeat_interleave(group, 1)).to(inputs.dtype)
        return nn.functional.linear(inputs, whole, tensors.get("bias"))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("group", [64, 256])
def test_tensors_lie_as_in_compressed_tensors(zeros: bool, group: int) -> None:
    reason = "NOT TESTED HERE: the library of the format is not installed"
    library: Any = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason=reason)
    pack_to_int32 = library.pack_to_int32
    q, codes, zero = weight(group=group, zeros=zeros)
    tensors = packed(q, torch.float16)
    assert torch.equal(tensors["weight"], pack_to_int32(codes.to(torch.int8) - 8, 4))
    assert torch.equal(tensors["weight_scale"], q.scale)  # type: ignore[arg-type]
    assert ("zero_point" in tensors) == zeros
    if zeros:
        assert torch.equal(tensors["zero_point"], pack_to_int32(zero.to(torch.int8) - 8, 4, packed_dim=0))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_its_product_is_that_with_the_weight(zeros: bool, group: int, dtype: torch.dtype) -> None:
    q, _, _ = weight(group=group, zeros=zeros)
    x, bias = torch.randn(5, 256).to(dtype), torch.randn(128)
    y = HummingProduct(Layer, q, bias, dtype)(x)
    assert y.dtype == dtype
    wanted = x.float() @ q.dequantize().t() + bias
    assert float((y.float() - wanted).norm() / wanted.norm()) < 4 * torch.finfo(dtype).eps


def test_columns_in_another_order_meet_their_inputs() -> None:
    q, _, _ = weight()
    ordered = QWeight(q.form, q.codes, q.n, q.k, q.group, q.scale, q.low, torch.randperm(q.k))
    x = torch.randn(3, q.k).half()
    wanted = x.float() @ ordered.dequantize().t()
    assert float((HummingProduct(Layer, ordered, None, torch.float16)(x) - wanted).norm() / wanted.norm()) < 4e-3


def test_what_it_takes() -> None:
    q, _, zero = weight()
    assert fits(q)
    assert torch.equal(whole_zeros(q), zero.to(torch.uint8))  # type: ignore[arg-type]
    assert not fits(weight(n=64)[0]), "its tiles have 128 rows"
    assert not fits(weight(group=16)[0])
    at_load = round_to_nearest(torch.randn(128, 256), AT_LOAD["int4"])
    assert not fits(at_load), "lowest values are no whole zeros"
    assert not fits(round_to_nearest(torch.randn(128, 256), Rounding("int8", group=64)))
    w4a8 = Rounding("int4", group=64, activations=Activations("int8"))
    assert not fits(round_to_nearest(torch.randn(128, 256), w4a8))
    assert fast_kernel(q, torch.bfloat16) is None, "a CPU has kernels of its own"


def test_it_is_chosen_where_it_is_installed_and_keeps_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, _ = weight()
    monkeypatch.setattr("engine.quant.humming._layer_class", lambda: Layer)
    monkeypatch.setattr("engine.quant.humming._on_a_device_for_it", lambda device: True)
    kernel = fast_kernel(q, torch.bfloat16)
    assert isinstance(kernel, HummingKernel)
    linear = QuantizedLinear(q, kernel)
    assert linear.weight.codes.device.type == "meta"
    assert linear.num_bytes == q.nbytes
    assert linear(torch.randn(2, 256).bfloat16()).shape == (2, 128)
    assert fast_kernel(q, torch.float32) is None, "it computes in 16 bits"


def test_a_library_that_can_not_compile_raises_an_error_with_a_remedy() -> None:
    class NoCompiler(Layer):
        def transform(self) -> None:
            raise FileNotFoundError("nvcc")

    with pytest.raises(EngineError, match=r"^humming-kernels can't prepare a weight of 128 x 256 .*nvcc.*uninstall it"):
        HummingProduct(NoCompiler, weight()[0], None, torch.float16)
