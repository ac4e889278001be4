"""Commands of the leader arrive as they were sent, without pickle in a step, and damaged ones are refused."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.attention import AttentionBatch
from engine.errors import EngineError
from engine.parallel import encoding
from engine.parallel.encoding import decode, encode
from engine.parallel.messages import CopyBlocks, Forward, JoinGroup, Logits, Message, ZeroBlocks
from engine.plan import BlockCopy


def ints(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int32)


def batch(**changes: Any) -> AttentionBatch:
    """Two decoding sequences and a chunk of three tokens, in two cache groups."""
    tables = tuple(np.arange(12, dtype=np.int32).reshape(3, 4) + group for group in range(2))
    slots = tuple(np.array([2**40, 7, 8, 9, 10]) + group for group in range(2))
    return replace(AttentionBatch(ints(31, 5, 0), ints(1, 1, 3), 2, tables, slots), **changes)


def one_token() -> AttentionBatch:
    return AttentionBatch(ints(0), ints(1), 1, (np.zeros((1, 1), np.int32),), (np.zeros(1, np.int64),))


def forward(*ends: int, lengths: bool = False, graph: int | None = None, **changes: Any) -> Forward:
    return Forward(batch(**changes), lengths, ints(*(ends or (3,))), graph)


STEPS: dict[str, Message] = {
    "a mixed step": forward(),
    "with rotary lengths": forward(lengths=True),
    "by a graph": forward(graph=0),
    "some tokens are wanted": forward(wanted=ints(0, 4)),
    "none is wanted": forward(wanted=ints()),
    "tables that are views": forward(block_tables=(np.zeros((3, 8), np.int32)[:, 2:6],) * 2),
    "two micro-batches": forward(2, 3),
    "adapters": replace(forward(), adapters=ints(0, -1, 2, 2, 2)),
    "one token": Forward(one_token(), lengths=False, ends=ints(1)),
    "logits": Logits(9),
    "zeros": ZeroBlocks(1, [3, 2**31]),
    "copies": CopyBlocks(1, [BlockCopy(1, 4, 5, 16), BlockCopy(1, 6, 7, 3)]),
}  # fmt: skip


def check_equal(got: object, wanted: object) -> None:
    """Dataclasses of arrays, to their dtypes."""
    assert type(got) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, Forward | AttentionBatch):
        for field in fields(wanted):
            check_equal(getattr(got, field.name), getattr(wanted, field.name))
    elif type(wanted) is tuple:
        assert isinstance(got, tuple)
        for left, right in zip(got, wanted, strict=True):
            check_equal(left, right)
    else:
        assert got == wanted


@pytest.fixture
def without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "pickle", None)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_arrives_as_it_was_sent_without_pickle(name: str, without_pickle: None) -> None:
    check_equal(decode(encode(STEPS[name])), STEPS[name])


def test_arrays_that_arrive_can_be_written_to() -> None:
    """Torch makes tensors of others, and warns that they may change."""
    got = decode(encode(forward(wanted=ints(4))))
    assert isinstance(got, Forward)
    arrays = got.batch.starts, got.batch.wanted, *got.batch.slot_mapping, *got.batch.block_tables
    assert all(array is not None and array.flags.writeable for array in arrays)


def test_commands_that_set_up_a_rank_arrive() -> None:
    message = JoinGroup(1, 2, 2, "cpu", Path("meeting"), 3.5, None)
    assert decode(encode(message)) == message


@pytest.mark.parametrize("name", [name for name in STEPS if name != "zeros"])
def test_a_step_that_is_too_short_or_too_long_is_refused(name: str, without_pickle: None) -> None:
    """But for a command to zero blocks: all that follows are numbers of blocks."""
    whole = encode(STEPS[name])
    complete = [len(encode(CopyBlocks(1, STEPS["copies"].copies[:count]))) for count in (0, 1)]  # type: ignore[union-attr]
    for length in range(len(whole)):
        if name != "copies" or length not in complete:
            with pytest.raises(EngineError, match="a command of the leader is damaged"):
                decode(whole[:length])
    for more in (1, 4, 8):
        with pytest.raises(EngineError, match=r"a command of the leader is damaged: .* bytes are left"):
            decode(whole + bytes(more))


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (1, 2), (2, -2), (3, 2), (3, -1), (4, 0), (4, 6), (4, -1), (4, 2**62), (5, 4), (5, -1), (6, 0), (6, 3), (7, 5),
        (8, 0), (8, -2), (9, 0), (9, 2), (9, -1),
    ],
)  # fmt: skip
def test_a_step_whose_sizes_contradict_each_other_is_refused(at: int, number: int, without_pickle: None) -> None:
    """Kind, lengths, graph, sequences, tokens, decodes, groups, width, wanted, micro-batches."""
    sent = encode(forward(wanted=ints(4)))
    damaged, rest = np.frombuffer(sent[: 10 * 8], dtype=np.int64).copy(), sent[10 * 8 :]
    assert damaged.tolist() == [1, 0, -1, 3, 5, 2, 2, 4, 1, 1]
    damaged[at] = number
    with pytest.raises(EngineError, match="a command of the leader is damaged"):
        decode(damaged.tobytes() + rest)


@pytest.mark.parametrize("ends", [(2,), (4,), (0, 3), (-1, 3), (2, 2, 3), (3, 2)])
def test_micro_batches_that_do_not_divide_the_sequences_are_refused(
    ends: tuple[int, ...], without_pickle: None
) -> None:
    with pytest.raises(EngineError, match="micro-batches of 3 sequences end at"):
        decode(encode(forward(*ends)))


@pytest.mark.parametrize("data", [b"", b"\x01", np.array([5]).tobytes(), np.array([-1]).tobytes(), pickle.dumps([1])])
def test_what_is_no_command_is_refused(data: bytes, without_pickle: None) -> None:
    with pytest.raises(EngineError, match="a command of the leader is damaged"):
        decode(data)


def test_logits_of_no_rows_are_refused(without_pickle: None) -> None:
    with pytest.raises(EngineError, match="logits of 0 rows"):
        decode(encode(Logits(0)))
