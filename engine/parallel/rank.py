"""A rank other than the first: a process that executes the leader's commands, and ends with the leader.

It does not schedule or sample: it receives each step's attention batch, and runs the same forward pass over its own
shard of the weights and of the cache.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection

import torch

from engine.adapters.adapter import Adapter, open_adapter
from engine.attention import AttentionBackend, KVLayout, make_backend
from engine.errors import CorruptWeights, EngineError
from engine.logs import only_errors
from engine.parallel.decoder import RankDecoder
from engine.parallel.encoding import decode
from engine.parallel.loading import load_share, rank_device, resident_bytes
from engine.parallel.messages import (
    AddPlaces,
    Answer,
    CopyBlocks,
    Done,
    DropGraphs,
    Failed,
    Forward,
    JoinGroup,
    Loaded,
    LoadShare,
    Logits,
    MakeCache,
    MakeGraphs,
    Measure,
    MeasuredMemory,
    Message,
    PlaceAdapter,
    RecordGraph,
    ZeroBlocks,
)
from engine.parallel.pipeline import held_groups
from engine.parallel.process_group import RankGroups
from engine.runner.device_memory import make_memory_release, measure
from engine.runner.graphs import Graphs, make_recorder
from engine.runner.memory import available_bytes


class RankWorker:
    """Executes the leader's commands. A new model replaces the one before."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._loaded: RankDecoder | None = None
        self._attention: AttentionBackend | None = None
        self._graphs: Graphs | None = None
        self._adapters: dict[bytes, Adapter] = {}  # by their digests; opened, not read

    def execute(self, message: Message) -> Answer | None:
        """Execute one command; None: it has no answer. Raises as the command."""
        match message:
            case LoadShare():
                return self._load(message)
            case AddPlaces():
                self._model.add_places(message.max_loras, message.max_ranks)
            case PlaceAdapter():
                self._place(message)
            case Measure():
                return MeasuredMemory(measure(self._model, message.schedule, self._groups.device))
            case MakeCache():
                return self._make_cache(message)
            case MakeGraphs():
                return self._make_graphs(message)
            case RecordGraph():
                return self._record_graph(message)
            case DropGraphs():
                self._graphs = None
                make_memory_release(self._groups.device)()
            case ZeroBlocks():
                self._cache.zero(message.group, message.blocks)
            case CopyBlocks():
                self._cache.copy(message.group, message.copies)
            case Forward():
                self._forward(message)
            case Logits():
                spec = self._model.spec
                hidden = torch.empty(message.rows, spec.hidden_size, dtype=spec.dtype, device=self._groups.device)
                self._model.logits(self._groups.stage.broadcast(hidden))
            case JoinGroup():
                raise AssertionError("a rank joins once")
        return None

    @property
    def _model(self) -> RankDecoder:
        assert self._loaded is not None, "a model is loaded before it computes"
        return self._loaded

    @property
    def _cache(self) -> AttentionBackend:
        assert self._attention is not None, "the cache is made before a step"
        return self._attention

    def _load(self, message: LoadShare) -> Answer:
        self._loaded = self._attention = self._graphs = None
        self._adapters.clear()
        before = resident_bytes()
        try:
            self._loaded = load_share(
                message.path, message.dtype, self._groups, quantize=message.quantize,
                max_positions=message.max_positions, expert_parallel=message.expert_parallel,
                expert_counts=message.expert_counts,
            )  # fmt: skip
        except EngineError as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Loaded(available_bytes(self._groups.device), resident_bytes() - before)

    def _place(self, message: PlaceAdapter) -> None:
        if message.folder is None:
            self._model.place_adapter(message.place, None)
            return
        if message.digest not in self._adapters:
            opened = open_adapter(message.folder.name, message.folder, self._model.decoder_spec)
            if opened.digest != message.digest:
                raise CorruptWeights(f"{message.folder} is not the adapter any more that the leader has opened")
            self._adapters[message.digest] = opened
        self._model.place_adapter(message.place, self._model.pack_adapter(self._adapters[message.digest]))

    def _make_cache(self, message: MakeCache) -> Answer:
        spec = self._model.spec
        layout = KVLayout.of(spec, held_groups(spec, message.groups), message.block_size)
        try:
            self._attention = make_backend(message.attention, layout, spec.dtype, self._groups.device)
        except (EngineError, MemoryError, torch.OutOfMemoryError) as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Done()

    def _make_graphs(self, message: MakeGraphs) -> Answer:
        device = self._groups.device
        try:
            recorder = make_recorder(device)
            self._graphs = Graphs(self._model, self._cache, message.buckets, message.table_width, recorder, device)
        except EngineError as error:
            return Failed(f"{type(error).__name__}: {error}")
        return Done()

    def _record_graph(self, message: RecordGraph) -> Answer:
        assert self._graphs is not None, "graphs are made before they are recorded"
        try:
            self._graphs.record(self._graphs.shapes[message.number])
        except EngineError as error:
            if not self._graphs.has_computed:  # the other ranks wait for this one's part, until it has ended
                raise
            return Failed(f"{type(error).__name__}: {error}")
        return Done()

    def _forward(self, message: Forward) -> None:
        shape = 3 if message.lengths else 2, len(message.batch.slot_mapping[0])
        inputs = self._groups.whole.broadcast(torch.empty(shape, dtype=torch.int64, device=self._groups.device))
        if message.graph is not None:
            assert self._graphs is not None, "graphs are recorded before a step replays one"
            self._graphs.replay_chosen(message.graph, inputs[0], inputs[1], message.batch, message.adapters)
            return
        lengths = inputs[2] if message.lengths else None
        self._model.forward_step(
            inputs[0], inputs[1], lengths, message.batch, message.ends, self._cache, message.adapters
        )


def serve(connection: Connection) -> None:
    """Execute commands until the leader closes the connection."""
    follower: RankWorker | None = None
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        answer: Answer | None
        try:
            message = decode(received)
            if isinstance(message, JoinGroup):
                follower, answer = RankWorker(_join(message)), Done()
            else:
                assert follower is not None, "the first message is to join"
                answer = follower.execute(message)
        except Exception as error:
            # After any error this rank is out of step: it reports the error, if the leader still reads, and ends.
            if not _answer(connection, Failed(f"{type(error).__name__}: {error}")):
                return
            raise
        if answer is not None:
            _answer(connection, answer)


def _join(message: JoinGroup) -> RankGroups:
    if message.threads is not None:
        torch.set_num_threads(message.threads)
    device = rank_device(message.device, message.rank)
    return RankGroups.join(message.rank, message.size, message.stages, device, message.meeting, message.timeout)


def _answer(connection: Connection, answer: Answer) -> bool:
    """Whether the leader received the report."""
    try:
        connection.send(answer)
    except OSError:
        return False
    return True


def _end_with_leader() -> None:
    """Exit at the end of stdin: the leader has ended or closed the rank, also while this rank waits on a GPU."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Run the process; its one argument is the file descriptor of the leader's socket."""
    only_errors()  # the leader says the rest
    threading.Thread(target=_end_with_leader, daemon=True).start()
    with Connection(int(sys.argv[1])) as connection, torch.inference_mode():
        connection.send(Done())
        serve(connection)
    os._exit(0)  # threads of the group may still wait for ranks that are gone


if __name__ == "__main__":
    main()
