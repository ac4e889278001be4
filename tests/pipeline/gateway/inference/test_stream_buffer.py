"""The stream buffer: events are numbered, bounded, and evicted once no reader can take them."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.gateway.inference.stream_buffer import Item, Overrun, ServerEvent, StreamBuffer


def items(*numbers: int) -> list[Item]:
    return [Item(number, b"%d" % number) for number in numbers]


def fill(buffer: StreamBuffer, count: int) -> StreamBuffer:
    for number in range(count):
        buffer.push(ServerEvent(b"%d" % number))
    return buffer


def test_an_event_that_arrives_at_a_readers_time_out_is_not_lost() -> None:
    async def read() -> None:
        buffer = StreamBuffer(100, retain=False)
        taking = asyncio.create_task(buffer.take(-1, 0.0))
        for _ in range(2):  # it waits; its time is over, which it does not know yet
            await asyncio.sleep(0)
        buffer.push(ServerEvent(b"0"))
        buffer.end()
        assert not taking.done()
        assert await taking == items(0), "a reader would take this for the end"

    asyncio.run(read())


def test_a_reader_gets_each_event_once_and_in_order() -> None:
    async def read() -> None:
        buffer = fill(StreamBuffer(100, retain=False), 3)
        assert await buffer.take(-1, 1.0) == items(0, 1, 2)
        taking = asyncio.create_task(buffer.take(2, 5.0))
        await asyncio.sleep(0)
        buffer.push(ServerEvent(b"3"))
        assert await taking == items(3)
        assert await buffer.take(3, 0.01) == [], "nothing has come"
        buffer.end()
        assert await buffer.take(3, 5.0) == [], "nothing will come"

    asyncio.run(read())


def test_a_too_slow_reader_gets_an_error_and_its_events_are_evicted() -> None:
    async def read() -> None:
        buffer = fill(StreamBuffer(8, retain=False), 9)
        assert not buffer.overrun, "they exceed the bound by no more than one push"
        buffer.push(ServerEvent(b"9"))
        assert not buffer.overrun
        buffer.push(ServerEvent(b"10"))
        assert buffer.overrun
        assert len(buffer._items) == 1
        with pytest.raises(Overrun):
            await buffer.take(-1, 1.0)

    asyncio.run(read())


def test_a_resumable_buffer_retains_the_newest_events_for_every_reader() -> None:
    async def read() -> None:
        buffer = fill(StreamBuffer(10, retain=True), 10)
        taking = [asyncio.create_task(buffer.take(9, 5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        buffer.push(ServerEvent(b"10"))
        assert [await one for one in taking] == [items(10)] * 2
        assert not buffer.overrun
        for number in (11, 12):
            buffer.push(ServerEvent(b"%d" % number))
        for _ in range(2):
            assert await buffer.take(1, 1.0) == items(*range(2, 13))
        with pytest.raises(Overrun):
            await buffer.take(0, 1.0)

    asyncio.run(read())


def test_one_event_is_never_too_large() -> None:
    async def read() -> None:
        buffer = StreamBuffer(10, retain=False)
        buffer.push(ServerEvent(b"x" * 11))
        assert await buffer.take(-1, 1.0) == [Item(0, b"x" * 11)]

    asyncio.run(read())


@pytest.mark.parametrize("retain", [False, True])
def test_events_of_one_push_reach_a_reader_that_keeps_up(retain: bool) -> None:
    async def read() -> None:
        buffer = StreamBuffer(10, retain=retain)
        buffer.push(*[ServerEvent(b"first")] * 4)  # as a response that repeats a large request
        buffer.push(ServerEvent(b"a token"))
        buffer.push(*[ServerEvent(b"last")] * 4)
        assert not buffer.overrun
        assert [item.data for item in await buffer.take(-1, 1.0)] == [b"first"] * 4 + [b"a token"] + [b"last"] * 4

    asyncio.run(read())
