"""Makes the pictures of the page in docs/images, with the demo model and headless Chromium.

    make test-page

Needs what the `browser` group of pyproject.toml installs, and a Chromium. Takes two minutes, on a machine that has
nothing else to do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parent / "images"
CHAT = "/v1/chat/completions"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXTS = ("Arrived early, works well.", "The lid was broken.", "Fine for the price.", "Never again.", "My cat loves it.")


def request(number: int, question: str, tokens: int) -> bytes:
    """A line of a file."""
    messages = [{"role": "user", "content": f"{question}: {TEXTS[number % len(TEXTS)]} ({number})"}]
    body = {"model": "demo", "messages": messages, "max_tokens": tokens}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


def send(client: OpenAI, name: str, rows: int, tokens: int, tier: str = "standard", last: bytes = b"") -> str:
    """A batch of so many rows; its id."""
    data = b"".join(request(number, "What does the customer feel", tokens) for number in range(rows)) + last
    file = client.files.create(file=(name, data), purpose="batch")
    more: dict[str, Any] = {"extra_body": {"tokenmill": {"tier": tier}}, "metadata": {"name": name}}
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more).id


def talk(client: OpenAI, stop: threading.Event) -> None:
    """People who chat, so that there is something to see of them."""
    number = 0
    while not stop.is_set():
        number += 1
        asked: Any = [{"role": "user", "content": f"Say something about the number {number}."}]
        for _ in client.chat.completions.create(model="demo", messages=asked, max_tokens=40, stream=True):
            pass


def work(url: str, stop: threading.Event) -> None:
    """Batches of all kinds, and two who chat."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    done = send(client, "reviews.jsonl", 60, 8)
    send(client, "tickets-broken.jsonl", 3, 8, last=b"not json\n")
    while client.batches.retrieve(done).status != "completed":
        time.sleep(0.2)
    send(client, "catalogue-titles.jsonl", 1_500, 24)
    send(client, "archive.jsonl", 3_000, 48, "bulk")
    client.batches.cancel(send(client, "headlines.jsonl", 500, 12, "bulk"))
    for _ in range(2):
        threading.Thread(target=talk, args=(client, stop), daemon=True).start()


def take(browser: Browser, url: str) -> None:
    """The pictures."""
    wide = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme="light")
    wide.goto(url)
    narrow = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light", device_scale_factor=1.5)
    narrow.goto(url)
    time.sleep(50)  # for the charts to have something to show
    wide.screenshot(path=IMAGES / "page-jobs.png")
    narrow.screenshot(path=IMAGES / "page-narrow.png")
    wide.get_by_role("navigation").get_by_role("link", name="Workers").click()
    wide.get_by_role("region", name="Requests by tier").get_by_text("interactive").wait_for()
    time.sleep(4)
    wide.screenshot(path=IMAGES / "page-workers.png")
    dark = browser.new_page(viewport={"width": 1000, "height": 760}, color_scheme="dark")
    dark.goto(f"{url}/#/chat")
    dark.get_by_label("Message").fill("Why is the sky blue? Answer in three sentences.")
    dark.keyboard.press("Enter")
    dark.locator(".message.assistant .note").get_by_text("tokens in").wait_for(timeout=60_000)
    dark.screenshot(path=IMAGES / "page-chat-dark.png")


def main() -> int:
    """See the module's text."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        command = [
            sys.executable,
            "-m",
            "tokenmill",
            "serve",
            "--model",
            "demo",
            "--data",
            f"{place}/data",
            "--port",
            "0",
        ]
        with log.open("wb") as said:
            served = subprocess.Popen(
                [*command, "--price-per-hour", "1.2"], stdout=said, stderr=said, env={**os.environ}
            )
        stop = threading.Event()
        try:
            while not (found := re.search(r"(http://[0-9.:]+)/v1", log.read_text(encoding="utf-8"))):
                if served.poll() is not None:
                    raise SystemExit(log.read_text(encoding="utf-8"))
                time.sleep(0.2)
            work(found[1], stop)
            with sync_playwright() as tools:
                browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                take(browser, found[1])
                browser.close()
        finally:
            stop.set()
            served.terminate()
            served.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
