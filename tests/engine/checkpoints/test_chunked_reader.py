"""Weights are read in pieces, side by side, exactly and in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.checkpoints.chunked_reader import ChunkedReader, Extent
from engine.errors import CorruptWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_pieces_make_the_whole(stored: torch.dtype, wanted: torch.dtype, threads: int, tmp_path: Path) -> None:
    tensor = torch.randn(37, 11).to(stored)
    file = tmp_path / "data"
    file.write_bytes(b"before" + tensor.view(torch.uint8).numpy().tobytes() + b"behind")
    into = torch.full((37, 11), float("nan"), dtype=wanted)
    reader = ChunkedReader(CPU, piece_bytes=64, in_flight=2, threads=threads)
    reader.fill(Extent(file, 6, tensor.nbytes, stored), into)
    assert torch.equal(into, tensor.to(wanted))


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    save_file({"one": torch.tensor(3.0), "none": torch.empty(0, 4)}, tmp_path / "model.safetensors")
    source = SafetensorsCheckpoint(tmp_path)
    one, none = torch.zeros((), dtype=torch.bfloat16), torch.empty(0, 4)
    source.read("one", one)
    source.read("none", none)
    assert float(one) == 3.0


def test_non_contiguous_memory_is_filled_too(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    into = torch.zeros(6, 4).t()
    SafetensorsCheckpoint(tmp_path).read("weight", into)
    assert torch.equal(into, weight)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_shrinks_while_it_is_read_is_named(threads: int, tmp_path: Path) -> None:
    file = tmp_path / "model-00001.safetensors"
    file.write_bytes(bytes(1000))
    reader = ChunkedReader(CPU, piece_bytes=64, threads=threads)
    with pytest.raises(CorruptWeights, match=r"model-00001\.safetensors ends at byte 1000, in the midst of a tensor"):
        reader.fill(Extent(file, 8, 1024, torch.float32), torch.empty(256))
    whole = torch.ones(128)
    reader.fill(Extent(file, 8, 512, torch.float32), whole)  # and it can go on
    assert not whole.any()


def test_a_file_that_is_gone_is_named_with_the_tensor(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    source = SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptWeights, match=r"^tensor weight in .*model\.safetensors can't be read: "):
        source.read("weight", torch.empty(4))


def _resident(key: str) -> int:
    """Bytes that this process has in memory (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_a_large_tensor_takes_no_memory_but_its_destination(tmp_path: Path) -> None:
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("NOT TESTED HERE: the memory of loading; this system does not report a process's peak")
    save_file({"weight": torch.ones(24 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = SafetensorsCheckpoint(tmp_path)
    into = torch.zeros(24 << 20, dtype=torch.bfloat16).fill_(0)
    reset.write_text("5")
    before = _resident("VmRSS")
    source.read("weight", into)
    assert bool((into == 1).all())
    assert _resident("VmHWM") - before < 40 << 20, "the 48 MiB of the file are not held next to their destination"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: reading to a GPU; there is none")
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_pieces_make_the_whole_on_a_gpu(wanted: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3000, 100).to(torch.bfloat16)
    (tmp_path / "data").write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    into = torch.zeros(3000, 100, dtype=wanted, device="cuda")
    ChunkedReader(into.device, piece_bytes=4096).fill(Extent(tmp_path / "data", 0, tensor.nbytes, tensor.dtype), into)
    assert torch.equal(into.cpu(), tensor.to(wanted))
