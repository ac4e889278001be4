"""Calls tokenmill's Celery tasks by name, from an app that imports nothing of tokenmill.

python examples/celery_call.py BROKER MODEL             such as redis://localhost:6379/0; needs celery[redis]
"""

from __future__ import annotations

import sys

from celery import Celery


def main(broker: str, model: str) -> None:
    app = Celery("caller", broker=broker, backend=broker)
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
    # One request whose answer is waited for: it takes the lane, and is no job.
    response = app.send_task("tokenmill.generate", args=[body], queue="tokenmill").get(timeout=300)
    print(response["choices"][0]["message"]["content"])
    # A url takes its own body, here that of OpenAI's Responses API.
    asked = {"model": model, "input": "Say hello.", "max_output_tokens": 16}
    task = app.send_task("tokenmill.generate", args=[asked], kwargs={"url": "/v1/responses"}, queue="tokenmill")
    print(task.get(timeout=300)["status"])
    # Many requests: a job, which outlives this process.
    lines = [
        {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(3)
    ]
    job = app.send_task("tokenmill.submit", args=[lines], queue="tokenmill").get(timeout=300)
    status = app.send_task("tokenmill.status", args=[job], queue="tokenmill").get(timeout=300)
    print(f"{job}: {status['status']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
