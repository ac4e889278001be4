"""A rank's process whose graphs are recorded as tests do it on a CPU, or that has a fake CUDA device.

The environment says which, and at which graph recording fails. What it reserves, fills, records and replays goes into a
file, an event a line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine.attention import AttentionBatch
from engine.attention.choice import _TORCH_BACKENDS as BACKENDS
from engine.attention.reference import ReferenceStep
from engine.parallel import rank
from engine.parallel.process_group import RankGroup
from engine.runner import graphs
from engine.runner.graphs import Recorder, Replay
from tests.engine.runner.fake_cuda import DEVICE as FAKE_DEVICE
from tests.engine.runner.fake_cuda import DeviceTensor, FakeCuda, fake_cuda, host_tensor
from tests.engine.runner.test_graphs import FakeRecorder, PoisonedPadding

MODULE = "tests.engine.parallel.rank_with_recorder"
EVENTS, FAILURE, DEVICE = "TEST_RANK_EVENTS", "TEST_RANK_FAILURE", "TEST_RANK_DEVICE"
"""Environment: the file of events; "before N" or "after N": recording graph N fails, before or after the forward pass
is computed (with a fake device: N, after that); "cuda": the process has a fake CUDA device."""


class LoggedAttention(PoisonedPadding):
    """The oracle for graphs, which logs its buffers' use."""

    events: list[str]

    def reserve(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> ReferenceStep:
        self.events.append(f"reserve {tokens} {sequences} {decodes} {mixed} {table_width}")
        return super().reserve(tokens, sequences, decodes, mixed, table_width)

    def refill(self, step: ReferenceStep, batch: AttentionBatch) -> None:
        self.events.append(f"refill {len(step.slots[0])} {batch.starts.tolist()} {batch.counts.tolist()}")
        super().refill(step, batch)


class LoggedRecorder(FakeRecorder):
    """Logs records and replays, and may fail."""

    def __init__(self, events: Any, failure: str = "") -> None:
        super().__init__()
        self._events = events
        self._when, _, number = failure.partition(" ")
        self._number = int(number or 0)

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._number -= 1
        if self._number == 0 and self._when == "before":
            raise torch.OutOfMemoryError("no room for it")
        replay = super().record(run)
        size = self.sizes[-1]
        self._events.append(f"record {size}")
        if self._number == 0 and self._when == "after":
            raise RuntimeError("operation not permitted when stream is capturing")

        def logged() -> Tensor:
            self._events.append(f"replay {size}")
            return replay()

        return logged


class RefusingRecorder:
    """Records as `inner` does, but for graph `number`, which it refuses when its forward pass was computed."""

    def __init__(self, inner: Recorder, number: int) -> None:
        self._inner = inner
        self._number = number

    def record(self, run: Callable[[], Tensor]) -> Replay:
        self._number -= 1
        replay = self._inner.record(run)
        if self._number == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay


class EventFile:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, event: str) -> None:
        with self._path.open("a") as file:
            file.write(event + "\n")


class HostGroup(RankGroup):
    """The collective operations of fake CUDA devices: gloo's, on the host's tensors."""

    def __init__(self, number: int, size: int, device: torch.device, meeting: Path, timeout: float) -> None:
        super().__init__(number, size, torch.device("cpu"), meeting, timeout)
        self.device = device

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        super().sum(host_tensor(part))
        return part

    def broadcast(self, tensor: Tensor) -> Tensor:
        super().broadcast(host_tensor(tensor))
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        return DeviceTensor(super().gather(host_tensor(part.contiguous())))

    def send(self, tensor: Tensor, to: int) -> Any:
        return super().send(host_tensor(tensor), to)

    def receive(self, into: Tensor, sender: int) -> Any:
        return super().receive(host_tensor(into), sender)

    def abort(self) -> None:
        """gloo detects a dead rank itself."""


@contextmanager
def recorder_of(events: Any, failure: str = "") -> Iterator[None]:
    """Within this context graphs can be recorded on a CPU."""
    made = LoggedRecorder(events, failure)
    with ExitStack() as patches:
        for module in ("engine.runner.graphs", "engine.parallel.rank"):
            patches.enter_context(mock.patch(f"{module}.make_recorder", return_value=made))
        patches.enter_context(mock.patch.dict(BACKENDS, reference=LoggedAttention))
        patches.enter_context(mock.patch.object(LoggedAttention, "events", events, create=True))
        yield


@contextmanager
def fake_device(refused: int = 0) -> Iterator[FakeCuda]:
    """Within this context the process has a fake CUDA device, and its rank group too. `refused`: the number of a graph
    that it can't record as a rank; 0: it records all."""
    with fake_cuda() as device, ExitStack() as patches:
        patches.enter_context(mock.patch("engine.parallel.process_group.RankGroup", HostGroup))
        for module in ("rank", "rank_group"):
            patches.enter_context(mock.patch(f"engine.parallel.{module}.rank_device", return_value=FAKE_DEVICE))
        recorder = RefusingRecorder(graphs.make_recorder(FAKE_DEVICE), refused)  # the fake one
        patches.enter_context(mock.patch("engine.parallel.rank.make_recorder", return_value=recorder))
        patches.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=2))
        yield device


if __name__ == "__main__":
    with ExitStack() as stack:
        if os.environ.get(DEVICE) == "cuda":
            stack.enter_context(fake_device(int(os.environ.get(FAILURE, "0"))))
        else:
            stack.enter_context(recorder_of(EventFile(Path(os.environ[EVENTS])), os.environ.get(FAILURE, "")))
        rank.main()
