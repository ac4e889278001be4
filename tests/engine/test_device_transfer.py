"""Arrays that are copied to a device in one buffer arrive unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.device_transfer import HostTransfer, make_transfer, pack, unpack

ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.array([[True, False, True]]),
    np.zeros((0, 4), dtype=np.float32),
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    np.array([0.1, 1e300]),
    np.arange(7, dtype=np.int32),
)


def test_arrays_of_all_kinds_share_a_buffer() -> None:
    whole, begins = pack(ARRAYS, pinned=False)
    assert all(begin % 16 == 0 for begin in begins)
    for there, array in zip(unpack(whole.clone(), begins, ARRAYS), ARRAYS, strict=True):
        np.testing.assert_array_equal(there.numpy(), array)
        assert there.numpy().dtype == array.dtype


def test_nothing_is_copied_where_the_host_computes() -> None:
    transfer = make_transfer(torch.device("cpu"))
    assert isinstance(transfer, HostTransfer)
    (there,) = transfer.up(ARRAYS[0])
    assert there.data_ptr() == ARRAYS[0].ctypes.data
    np.testing.assert_array_equal(transfer.down(there).numpy(), ARRAYS[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: transfers to a GPU; there is none")
def test_there_and_back() -> None:
    transfer = make_transfer(torch.device("cuda"))
    arrived = transfer.up(*ARRAYS)
    for there, array in zip([transfer.down(one) for one in arrived], ARRAYS, strict=True):
        np.testing.assert_array_equal(there.numpy(), array)
