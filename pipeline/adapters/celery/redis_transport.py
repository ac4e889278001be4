"""kombu's transport for Redis, with a delivery that loses no message on a full server.

kombu pops a message from its queue, and then records in two other keys that it is unacknowledged. A Redis that has
reached its `maxmemory` allows the pop and refuses the records: the message is then in no key, and its task is lost.
"""

from __future__ import annotations

import time
from typing import Any, Final

from kombu.transport import redis, virtual
from kombu.utils.json import dumps

NAME: Final = f"{__name__}:Transport"
"""The value of Celery's `broker_transport`."""

# KEYS: 1 index of unacknowledged messages, 2 unacknowledged messages.  ARGV: 1 delivery tag, 2 time, 3 message.
# A full Redis refuses a script's first write, unless that can only free memory, and no later write. The data written
# here was in the queue a moment ago.
_HOLD: Final = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
"""


class _QoS(redis.QoS):  # type: ignore[misc]  # kombu has no types
    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold the message until it is acknowledged."""
        delivery = message.delivery_info
        held = dumps([message._raw, delivery["exchange"], delivery["routing_key"]])
        with self.channel.conn_or_acquire() as client:
            client.eval(_HOLD, 2, self.unacked_index_key, self.unacked_key, delivery_tag, time.time(), held)
        virtual.QoS.append(self, message, delivery_tag)


class _Channel(redis.Channel):  # type: ignore[misc]
    QoS = _QoS


class Transport(redis.Transport):  # type: ignore[misc]
    """kombu's transport, in which a message is always in some key."""

    Channel = _Channel
