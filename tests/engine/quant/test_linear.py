"""Dense linears give the product they stand for, however the weight is laid out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.quant.base import DenseLinear, PackedLinear, dense, packs

CPU = torch.device("cpu")


def test_only_dtypes_that_gain_are_packed():
    assert not packs(torch.float32, CPU)
    assert isinstance(dense(torch.zeros(4, 8)), DenseLinear)
    packed = isinstance(dense(torch.zeros(4, 8, dtype=torch.bfloat16)), PackedLinear)
    assert packed == packs(torch.bfloat16, CPU)


@pytest.mark.skipif(not packs(torch.bfloat16, CPU), reason="this CPU has no bfloat16 kernels to pack for")
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 65, 300])
@pytest.mark.parametrize("shape", [(48, 576), (960, 576), (33, 80)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_product_of_the_plain_one(tokens, shape, bias):
    # Given a bfloat16 weight, plain and packed
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(shape, generator=generator).bfloat16()
    offset = torch.randn(shape[0], generator=generator).bfloat16() if bias else None
    x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
    linear = PackedLinear(weight.clone(), offset)
    # Then both give the exact product, rounded once
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    y = linear(x)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    assert (linear.out_features, linear.in_features) == shape
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().max()) / 64)
