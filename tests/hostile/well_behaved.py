"""A well-behaved tenant in a process of its own: a short streamed chat each second, whatever the state of earlier ones.

    python -m tests.hostile.well_behaved HOST PORT < KEY > SAMPLES.jsonl

It ends when it gets SIGTERM. A chat is sent each second, also while earlier ones wait, so all chats that a
stalled deployment delays are measured.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final

EVERY_SECONDS: Final = 1.0
GIVE_UP_SECONDS: Final = 60.0
MAX_TOKENS: Final = 4


@dataclass(slots=True)
class Sample:
    """One chat.

    Attributes:
        at: `time.monotonic`, which all processes of a machine share, when it was sent.
        ttft: seconds from then to the first chunk with text; None: there was none.
        ended: whether the stream came to its end.  error: what came instead.
    """

    at: float
    ttft: float | None = None
    ended: bool = False
    error: str | None = None


async def chat(host: str, port: int, key: str, number: int) -> Sample:
    """Sends one, and reads its answer."""
    begun = time.monotonic()
    sample = Sample(begun)
    body = json.dumps({
        "model": "demo", "messages": [{"role": "user", "content": f"Greeting number {number}, please."}],
        "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer = None
    try:
        async with asyncio.timeout(GIVE_UP_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head.encode() + body)
            received = b""
            while piece := await reader.read(65_536):
                received += piece
                if sample.ttft is None and _has_text(received):
                    sample.ttft = time.monotonic() - begun
        sample.ended = b"data: [DONE]" in received
        if sample.ttft is None or not sample.ended:
            sample.error = received[:400].decode(errors="replace") or "closed without an answer"
    except TimeoutError:
        sample.error = f"no answer within {GIVE_UP_SECONDS:.0f} s"
    except OSError as error:
        sample.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return sample


def _has_text(received: bytes) -> bool:
    """Whether a chunk with text is there: the first has the role only."""
    return any(
        b'"content":"' in event and b'"content":""' not in event
        for event in received.split(b"\n\n")
        if b"data: {" in event
    )


async def run(host: str, port: int, key: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    begun, number, chats = time.monotonic(), 0, set[asyncio.Task[None]]()

    async def one(number: int) -> None:
        print(json.dumps(asdict(await chat(host, port, key, number))), flush=True)

    while not stop.is_set():
        task = asyncio.create_task(one(number))
        chats.add(task)
        task.add_done_callback(chats.discard)
        number += 1
        try:
            await asyncio.wait_for(stop.wait(), max(0.0, begun + number * EVERY_SECONDS - time.monotonic()))
        except TimeoutError:
            continue
    if chats:
        await asyncio.wait(chats)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.stdin.readline().strip()))
