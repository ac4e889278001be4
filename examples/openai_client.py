"""OpenAI's own client: a streamed chat, then a batch. Only the base URL and the key are other ones.

python examples/openai_client.py MODEL          reads OPENAI_BASE_URL and OPENAI_API_KEY, as the client does
"""

from __future__ import annotations

import io
import json
import sys
import time

from openai import OpenAI


def main(model: str) -> None:
    client = OpenAI()
    messages = [{"role": "user", "content": "Count to five."}]
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=24, stream=True):  # type: ignore[call-overload]
        print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
    print()
    lines = [
        {
            "custom_id": f"count-to-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Count to {number}."}],
                "max_tokens": 24,
            },
        }
        for number in (3, 4, 5)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("counts.jsonl", io.BytesIO(data)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    print(f"{batch.id}: {batch.status}")
    if batch.output_file_id is not None:
        for line in client.files.content(batch.output_file_id).text.splitlines():
            answer = json.loads(line)
            print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['message']['content']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
