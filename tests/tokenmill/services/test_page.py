"""The page in a browser: `tokenmill serve` with a tiny model, and headless Chromium. Both are real.

Skipped, with a reason, where there is no Chromium or no playwright. TOKENMILL_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tokenmill.command_processes import Processes, as_jsonl

pytest.importorskip("playwright", reason="playwright is not installed: the page is not tried in a browser")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: the page is not tried in a browser")

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
SECONDS = 60_000


@pytest.fixture
def processes(place: Path) -> Iterator[Processes]:
    made = Processes(place)
    yield made
    made.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


def watched(page: Page) -> list[str]:
    """The page's error message."""
    said: list[str] = []
    page.is_enabled(
        "console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None
    )
    page.is_enabled("pageerror", lambda error: said.append(str(error)))
    page.set_default_timeout(SECONDS)
    return said


def picture(page: Page, name: str) -> None:
    folder = os.environ.get("TOKENMILL_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def is_inert(page: Page) -> bool:
    """Nothing that came from outside has become an element, or has run."""
    return "taken" not in page.title() and page.locator("main img, main script, main [onerror]").count() == 0


def test_an_ingested_file_is_answered_and_read_and_a_chat_streams(
    processes: Processes, browser: Browser, model_folder: Path, chat: Any
) -> None:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    served = processes.start("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *engine)
    url = processes.url(served)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    said = watched(page)
    page.goto(url)
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    picture(page, "empty")

    page.get_by_role("navigation").get_by_role("link", name="Submit").click()
    asked = [chat(f"{HOSTILE} {n}", f"{HOSTILE} {n}", max_tokens=24) for n in range(60)]
    data = as_jsonl([*asked, chat("late", "x" * 3_000)]).decode()
    drop = """([zone, name, text]) => {
        const held = new DataTransfer();
        held.items.add(new File([text], name));
        zone.dispatchEvent(new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, [page.locator(".zone").element_handle(), f"{HOSTILE}.jsonl", data])
    expect(page.get_by_label("Endpoint")).to_have_value("/v1/chat/completions")
    page.get_by_label("An invalid line").select_option("row")
    picture(page, "submit")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/#/jobs/*")
    expect(page.locator(".heading .status").first).to_have_text("completed")
    answers = page.get_by_role("region", name="First results").get_by_role("listitem")
    expect(answers).to_have_count(50)
    expect(answers.first).to_contain_text("<img src=x onerror=")
    assert is_inert(page)
    picture(page, "job")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download answers").click()
    stored = [json.loads(line) for line in Path(downloading.value.path()).read_text().splitlines()]
    assert len(stored) == 60
    with page.expect_download():
        page.get_by_role("button", name="Download errors").click()

    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("table")).to_contain_text("61 of 61")
    assert is_inert(page)
    page.get_by_role("navigation").get_by_role("link", name="Workers").click()
    expect(page.get_by_role("table").first).to_contain_text("tiny")
    picture(page, "workers")

    page.get_by_role("navigation").get_by_role("link", name="Chat").click()
    page.locator("summary").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("tiny")
    page.get_by_label("Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .note")).to_contain_text("tokens in")
    assert page.locator(".message.assistant .text").inner_text().strip()
    assert is_inert(page)
    page.get_by_label("At most so many tokens").fill("100000")
    page.get_by_label("Message").fill("and again")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_be_visible()
    picture(page, "chat")
    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    for name in ("Time to first token", "Between tokens"):
        chart = page.get_by_role("figure").filter(has_text=name)
        expect(chart).to_contain_text(re.compile(r"\d (ms|s) p50\s+\d.* (ms|s) p95\s+interactive"))
        expect(chart.get_by_role("img")).to_have_attribute("aria-label", re.compile(rf"{name}: now p50 .*p95 "))
    expect(page.get_by_role("figure").filter(has_text="Throughput")).to_contain_text("answers")
    held = page.get_by_role("figure").filter(has_text="Requests at workers")
    expect(held).to_contain_text(re.compile(r"\d+ running"))
    picture(page, "charts")
    page.get_by_role("navigation").get_by_role("link", name="Workers").click()
    tiers = page.get_by_role("region", name="Requests by tier")
    expect(tiers.get_by_role("row").filter(has_text="interactive")).to_contain_text(re.compile(r"ms? / "))
    expect(page.get_by_role("region", name="Workers")).to_contain_text(re.compile(r"\d %"))
    expect(page.locator("main")).to_contain_text("Answers since it began: 1,")
    assert [line for line in said if "400" not in line] == [], "a refused request is all that may be told"


def test_times_are_those_of_the_last_minute_over_all_workers(tmp_path: Path, browser: Browser) -> None:
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    bounds = [0.01, 0.02, 0.05, 0.1, 1.0]

    def status(**workers: tuple[float, list[int]]) -> dict[str, Any]:
        """Each worker with its seconds, and its counts."""
        nothing = {"counts": [], "seconds": 0.0}
        told = [
            {"name": name, "metrics": {"model": "m", "seconds": seconds, "tiers": {
                "interactive": {"ttft": {"counts": counts, "seconds": 1.0}, "itl": nothing}}}}
            for name, (seconds, counts) in workers.items()
        ]  # fmt: skip
        return {"workers": [*told, {"name": "silent", "metrics": None}]}

    looks = [
        status(old=(100.0, [1_000]), other=(50.0, [0, 0, 500])),  # how they stand; nothing of it is new
        status(old=(103.0, [1_010]), other=(53.0, [0, 0, 510]), late=(1.0, [0, 0, 0, 0, 70])),  # a late one stands
        status(old=(106.0, [1_010]), other=(56.0, [0, 0, 520]), late=(4.0, [0, 0, 0, 0, 80])),
        status(old=(1.0, [3]), other=(59.0, [0, 0, 520])),  # one has begun anew, one is gone
        status(old=(4.0, [13])),
    ]
    script = """async ([looks, bounds]) => {
        const told = await import("/static/latency.js");
        for (const look of looks) told.learn(look);
        return [told.quantiles("interactive", "ttft", bounds), told.quantiles("interactive", "itl", bounds),
                told.quantiles("bulk", "ttft", bounds), told.busiest(bounds)];
    }"""
    with run_http_harness(tmp_path) as harness:
        page = browser.new_page()
        said = watched(page)
        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))  # asked for beside a picture
        page.goto(f"{harness.url}/static/mill.svg")
        found, nothing, no_tier, busiest = page.evaluate(script, [looks, bounds])
    # New are 10 + 10 up to 10 ms (of the old one), 10 + 10 from 20 to 50 ms, and 10 from 100 ms to 1 s: 50 in all.
    assert found == [pytest.approx(0.02 + 0.03 * 5 / 20), pytest.approx(0.1 + 0.9 * 7.5 / 10)]
    assert (nothing, no_tier, busiest) == (None, None, "interactive")
    assert said == []


def test_hostile_answers_are_inert_and_a_stream_can_be_stopped(tmp_path: Path, browser: Browser) -> None:
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    with run_http_harness(tmp_path) as harness:
        harness.worker.text, harness.worker.pause = HOSTILE, 0.05
        page = browser.new_page(viewport={"width": 360, "height": 740})
        said = watched(page)
        page.goto(f"{harness.url}/#/chat")
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant .text")).to_contain_text("<script>")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".message.assistant .note")).to_have_text("stopped")
        assert is_inert(page)
        for view in ("#/chat", "#/", "#/workers", "#/submit"):
            page.goto(f"{harness.url}/{view}")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, f"{view} is {wide} wide"
        assert said == []


def test_a_key_is_prompted_for_and_never_in_urls(tmp_path: Path, browser: Browser) -> None:
    from pipeline.gateway.http.api_keys import Scope  # noqa: PLC0415
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    with run_http_harness(tmp_path) as harness:
        _, text = harness.keys.create("acme", (Scope.BATCHES,))
        page = browser.new_page()
        watched(page)
        asked: list[str] = []
        page.is_enabled("request", lambda request: asked.append(request.url))
        page.goto(harness.url)
        box = page.get_by_label("Key", exact=True)
        box.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("wrong")
        box.fill(text)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        assert page.evaluate("localStorage.length") == 0
        assert not any(text in url for url in asked)
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_role("dialog")).to_be_visible()
