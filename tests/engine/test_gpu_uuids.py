"""The GPUs of an engine, by CUDA's numbers, which differ from the driver's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import gpu_uuids


class Uuid:
    """torch's: only its text is of use."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=5,2,7; the second one is the current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    uuids = [Uuid("five"), Uuid("two"), Uuid("seven")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EngineConfig(), ("two",)),
        (EngineConfig(device="cuda"), ("two",)),
        (EngineConfig(device="cuda", tensor_parallel=2), ("five", "two")),
        (EngineConfig(device="cuda", pipeline_parallel=3), ("five", "two", "seven")),
        (EngineConfig(device="cpu"), ()),
        (EngineConfig(device="cpu", tensor_parallel=2), ()),
    ],
)
def test_given_visible_devices_then_an_engine_has_those_of_its_ranks(
    config: EngineConfig, expected: tuple[str, ...], three_gpus: None
) -> None:
    assert gpu_uuids(config) == expected


def test_given_no_device_then_an_engine_has_none() -> None:
    assert gpu_uuids(EngineConfig()) == ()
