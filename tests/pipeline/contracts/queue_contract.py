"""The contract of shard queues while their server runs. An adapter's test module subclasses `QueueContract` and gives a
`make_queue` fixture: a function without arguments that opens one more queue on the same, initially empty, server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pipeline.ports import ShardQueue, ShardTask
from tests.waiting import HANG_SECONDS

MakeQueue = Callable[[], ShardQueue]


class QueueContract:
    """Given any adapter of the port, then this holds."""

    @pytest.fixture
    def queue(self, make_queue: MakeQueue) -> ShardQueue:
        return make_queue()

    def test_tasks_come_in_the_order_in_which_they_were_put(self, queue: ShardQueue) -> None:
        tasks = [ShardTask("job-a", number, attempt=number + 1) for number in range(5)]
        for task in tasks:
            queue.put("q", task)
        assert [queue.take(["q"], HANG_SECONDS) for _ in tasks] == tasks

    def test_take_waits_for_an_empty_queue_until_the_timeout(self, queue: ShardQueue) -> None:
        queue.take(["q"], 0)  # whatever has to be opened is open
        for timeout in (0.0, 0.3):
            began = time.monotonic()
            assert queue.take(["q"], timeout) is None
            assert time.monotonic() - began >= timeout * 0.9

    def test_a_waiting_worker_gets_a_task_that_is_put_meanwhile(self, make_queue: MakeQueue) -> None:
        threading.Timer(0.2, make_queue().put, ["q", ShardTask("job-a", 7)]).start()
        assert make_queue().take(["q"], HANG_SECONDS) == ShardTask("job-a", 7)

    def test_queues_are_polled_in_the_requested_order(self, queue: ShardQueue) -> None:
        queue.put("bulk", ShardTask("job-a", 1))
        queue.put("bulk", ShardTask("job-a", 2))
        queue.put("urgent", ShardTask("job-a", 3))
        assert queue.take(["other"], 0) is None
        assert [queue.take(["urgent", "bulk"], 0) for _ in range(2)] == [ShardTask("job-a", 3), ShardTask("job-a", 1)]
        assert queue.take(["bulk", "urgent"], 0) == ShardTask("job-a", 2)

    def test_of_several_workers_each_task_goes_to_one(self, make_queue: MakeQueue) -> None:
        putter, workers = make_queue(), [make_queue() for _ in range(3)]
        for number in range(60):
            putter.put("q", ShardTask("job-a", number))
        taken: list[list[int]] = [[] for _ in workers]

        def drain(me: int) -> None:
            while (task := workers[me].take(["q"], 0.3)) is not None:
                taken[me].append(task.shard)

        threads = [threading.Thread(target=drain, args=(me,)) for me in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(shard for shards in taken for shard in shards) == list(range(60))

    def test_one_queue_serves_a_thread_that_puts_and_one_that_takes(self, queue: ShardQueue) -> None:
        def put() -> None:
            for number in range(50):
                queue.put("q", ShardTask("job-a", number))

        putter = threading.Thread(target=put)
        putter.start()
        assert [queue.take(["q"], HANG_SECONDS) for _ in range(50)] == [
            ShardTask("job-a", number) for number in range(50)
        ]
        putter.join()

    def test_no_queues_give_nothing(self, queue: ShardQueue) -> None:
        assert queue.take([], 0) is None
