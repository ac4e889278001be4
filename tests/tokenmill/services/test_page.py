"""The page in a browser: `tokenmill serve` with a tiny model, and headless Chromium. Both are real.

Skipped, with a reason, where there is no Chromium or no playwright. Screenshots are saved to the folder that
TOKENMILL_SCREENSHOTS names.
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
from tests.waiting import HANG_SECONDS

pytest.importorskip("playwright", reason="playwright is not installed: the page is not tested in a browser")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: the page is not tested in a browser")

HOSTILE = "<img src=x onerror=\"document.title='injected'\"><script>document.title='injected'</script>"
TIMEOUT_MILLISECONDS = HANG_SECONDS * 1000
expect.set_options(timeout=TIMEOUT_MILLISECONDS)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def collect_errors(page: Page) -> list[str]:
    """A list to which the page's console errors, console warnings and uncaught exceptions are appended."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(TIMEOUT_MILLISECONDS)
    return errors


def save_screenshot(page: Page, name: str) -> None:
    folder = os.environ.get("TOKENMILL_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def is_inert(page: Page) -> bool:
    """No external data has become an element or has run as a script."""
    return "injected" not in page.title() and page.locator("main img, main script, main [onerror]").count() == 0


def test_a_dropped_file_is_processed_and_shown_and_a_chat_streams(
    processes: Processes, browser: Browser, model_folder: Path, chat: Any
) -> None:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    server = processes.start("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *engine)
    url = processes.url(server)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = collect_errors(page)
    page.goto(url)
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    save_screenshot(page, "empty")

    page.get_by_role("navigation").get_by_role("link", name="Submit").click()
    requests = [chat(f"{HOSTILE} {n}", f"{HOSTILE} {n}", max_tokens=24) for n in range(60)]
    data = as_jsonl([*requests, chat("too-long", "x" * 3_000)]).decode()
    drop = """([zone, name, text]) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([text], name));
        zone.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, [page.locator(".drop-zone").element_handle(), f"{HOSTILE}.jsonl", data])
    expect(page.get_by_label("Endpoint")).to_have_value("/v1/chat/completions")
    page.get_by_label("Invalid lines").select_option("row")
    save_screenshot(page, "submit")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/#/jobs/*")
    expect(page.locator(".heading .status").first).to_have_text("completed")
    results = page.get_by_role("region", name="First results").get_by_role("listitem")
    expect(results).to_have_count(50)
    expect(results.first).to_contain_text("<img src=x onerror=")
    assert is_inert(page)
    save_screenshot(page, "job")
    with page.expect_download() as download_info:
        page.get_by_role("button", name="Download answers").click()
    downloaded = [json.loads(line) for line in Path(download_info.value.path()).read_text().splitlines()]
    assert len(downloaded) == 60
    with page.expect_download():
        page.get_by_role("button", name="Download errors").click()

    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("table")).to_contain_text("61 of 61")
    assert is_inert(page)
    page.get_by_role("navigation").get_by_role("link", name="Workers").click()
    expect(page.get_by_role("table").first).to_contain_text("tiny")
    save_screenshot(page, "workers")

    page.get_by_role("navigation").get_by_role("link", name="Chat").click()
    page.locator("summary").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("tiny")
    page.get_by_label("Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .note")).to_contain_text("tokens in")
    assert page.locator(".message.assistant .text").inner_text().strip()
    assert is_inert(page)
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_label("Message").fill("and again")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_be_visible()
    save_screenshot(page, "chat")
    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    for name in ("Time to first token", "Inter-token latency"):
        chart = page.get_by_role("figure").filter(has_text=name)
        expect(chart).to_contain_text(re.compile(r"\d (ms|s) p50\s+\d.* (ms|s) p95\s+interactive"))
        expect(chart.get_by_role("img")).to_have_attribute("aria-label", re.compile(rf"{name}: now p50 .*p95 "))
    expect(page.get_by_role("figure").filter(has_text="Throughput")).to_contain_text("answers")
    worker_requests = page.get_by_role("figure").filter(has_text="Requests at workers")
    expect(worker_requests).to_contain_text(re.compile(r"\d+ running"))
    save_screenshot(page, "charts")
    page.get_by_role("navigation").get_by_role("link", name="Workers").click()
    tiers = page.get_by_role("region", name="Requests by tier")
    expect(tiers.get_by_role("row").filter(has_text="interactive")).to_contain_text(re.compile(r"ms? / "))
    expect(page.get_by_role("region", name="Workers")).to_contain_text(re.compile(r"\d %"))
    expect(page.locator("main")).to_contain_text("Responses since its start: 1,")
    assert [error for error in errors if "400" not in error] == [], "the rejected request is the only expected error"


def test_latencies_cover_the_last_minute_of_all_workers(tmp_path: Path, browser: Browser) -> None:
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    bounds = [0.01, 0.02, 0.05, 0.1, 1.0]

    def status(**workers: tuple[float, list[int]]) -> dict[str, Any]:
        """A response of /v1/status. Each worker has its seconds since its start, and its bucket counts."""
        no_samples = {"counts": [], "seconds": 0.0}
        reporting = [
            {"name": name, "metrics": {"model": "m", "seconds": seconds, "tiers": {
                "interactive": {"ttft": {"counts": counts, "seconds": 1.0}, "itl": no_samples}}}}
            for name, (seconds, counts) in workers.items()
        ]  # fmt: skip
        return {"workers": [*reporting, {"name": "silent", "metrics": None}]}

    polls = [
        status(old=(100.0, [1_000]), other=(50.0, [0, 0, 500])),  # the first poll is only the baseline
        status(old=(103.0, [1_010]), other=(53.0, [0, 0, 510]), late=(1.0, [0, 0, 0, 0, 70])),  # late: a baseline
        status(old=(106.0, [1_010]), other=(56.0, [0, 0, 520]), late=(4.0, [0, 0, 0, 0, 80])),
        status(old=(1.0, [3]), other=(59.0, [0, 0, 520])),  # old has restarted, late is gone
        status(old=(4.0, [13])),
    ]
    script = """async ([polls, bounds]) => {
        const { addSamples, computeQuantiles, findMostUrgentTier } = await import("/static/latency.js");
        for (const status of polls) addSamples(status);
        return [computeQuantiles("interactive", "ttft", bounds), computeQuantiles("interactive", "itl", bounds),
                computeQuantiles("bulk", "ttft", bounds), findMostUrgentTier(bounds)];
    }"""
    with run_http_harness(tmp_path) as harness:
        page = browser.new_page()
        errors = collect_errors(page)
        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))  # the browser requests it with an image
        page.goto(f"{harness.url}/static/mill.svg")
        ttft, itl, bulk_ttft, tier = page.evaluate(script, [polls, bounds])
    # New samples: 10 + 10 up to 10 ms (of old), 10 + 10 from 20 to 50 ms, and 10 from 100 ms to 1 s: 50 in all.
    assert ttft == [pytest.approx(0.02 + 0.03 * 5 / 20), pytest.approx(0.1 + 0.9 * 7.5 / 10)]
    assert (itl, bulk_ttft, tier) == (None, None, "interactive")
    assert errors == []


def test_hostile_answers_are_inert_and_a_stream_can_be_stopped(tmp_path: Path, browser: Browser) -> None:
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    with run_http_harness(tmp_path) as harness:
        harness.worker.text, harness.worker.pause = HOSTILE, 0.05
        page = browser.new_page(viewport={"width": 360, "height": 740})
        errors = collect_errors(page)
        page.goto(f"{harness.url}/#/chat")
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant .text")).to_contain_text("<script>")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".message.assistant .note")).to_have_text("stopped")
        assert is_inert(page)
        for view in ("#/chat", "#/", "#/workers", "#/submit"):
            page.goto(f"{harness.url}/{view}")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 360, f"{view} is {width} pixels wide"
        assert errors == []


def test_a_key_is_prompted_for_and_never_in_urls(tmp_path: Path, browser: Browser) -> None:
    from pipeline.gateway.http.api_keys import Scope  # noqa: PLC0415
    from tests.pipeline.gateway.http_harness import run_http_harness  # noqa: PLC0415

    with run_http_harness(tmp_path) as harness:
        _, key = harness.keys.create("acme", (Scope.BATCHES,))
        page = browser.new_page()
        collect_errors(page)
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto(harness.url)
        key_input = page.get_by_label("Key", exact=True)
        key_input.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("wrong")
        key_input.fill(key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        assert page.evaluate("localStorage.length") == 0
        assert not any(key in url for url in urls)
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_role("dialog")).to_be_visible()
