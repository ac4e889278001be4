"""A guard model in an installation: gateway, Redis and workers as processes, one of them with a tiny random classifier.
Planted prompts are refused, flagged and routed, over HTTP and in a batch, and a guard that is stopped hangs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from celery import Celery
from openai import OpenAI
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.pipeline.observability.scrapes import scrape
from tests.servers.redis import RedisServer
from tests.tiny_encoders import make_classifier
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.exhaustive

LABELS = ("safe", "unsafe", "medical", "odd")
TEXTS = [f"{word} {number}" for word in ("river", "stream", "fox", "dog", "query") for number in range(20)]
QUESTION = "{{ text.split('user\\n')[-1].split('<end>')[0] }}"
"""Shows the guard the user's message alone, out of the model's own chat template."""


@pytest.fixture(scope="module")
def guard_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier that gives each of its labels to some texts."""
    folder = make_classifier("bert", tmp_path_factory.mktemp("guard") / "m", labels=LABELS, max_position_embeddings=512)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt", padding=False)).logits for text in TEXTS])
        model.classifier.bias -= logits.mean(0)
        model.classifier.weight.mul_(8)
        model.classifier.bias.mul_(8)
    model.save_pretrained(folder)
    return folder


@dataclass
class Installation:
    """The processes.

    Attributes:
        start_guard: starts a worker of the guard.
        guard, worker: numbers of the guard's worker, and of that which asks it.
        texts: a text of each label.
    """

    processes: Processes
    start_guard: Callable[[], int]
    url: str
    guard: int
    worker: int
    texts: dict[str, str]

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0)

    def ask(self, label: str, stream: bool = False) -> Any:
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0, "stream": stream}
        return self.client().chat.completions.create(messages=[{"role": "user", "content": self.texts[label]}], **body)

    def batch(self, *labels: str) -> dict[str, dict[str, Any]]:
        """The lines of a batch's output and error files, by the label of their text."""
        client = self.client()
        lines = [
            {"custom_id": label, "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": self.texts[label]}]}}
            for label in labels
        ]  # fmt: skip
        file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = ended(client, batch.id)
        found = [one for one in (batch.output_file_id, batch.error_file_id) if one is not None]
        texts = [client.files.content(one).text for one in found]
        return {line["custom_id"]: line for text in texts for line in map(json.loads, text.splitlines())}


@pytest.fixture
def installation(
    folder: Path, redis_server: RedisServer, guard_folder: Path, model_folder: Path
) -> Iterator[Callable[[str], Installation]]:
    """Starts an installation whose guard fails open or closed."""
    processes = Processes(
        folder,
        TOKENMILL_REDIS_URL=redis_server.url,
        TOKENMILL_ROOT=str(folder / "root"),
        TOKENMILL_GATEWAY__AUTH="off",
        TOKENMILL_METRICS__PORT="0",
        TOKENMILL_CELERY__QUEUES='{"tokenmill": "default"}',
    )

    def worker(*options: object) -> int:
        return processes.start("-m", "tokenmill", "worker", "--dtype", "float32", "--threads", 1, *options)

    def start(how: str) -> Installation:
        gateway = processes.start("-m", "tokenmill", "gateway", "--port", 0)
        processes.start("-m", "tokenmill", "dispatcher")
        start_guard = partial(worker, "--model", f"guard={guard_folder}")
        guard = start_guard()
        url = processes.url(gateway)
        labels = wait_for(lambda: labels_of(url), "the guard serves nothing")
        texts = {label: text for text, label in zip(TEXTS, labels or (), strict=True)}
        assert set(texts) == set(LABELS), "the classifier is not as random as it should be"
        path = folder / "guard.toml"
        path.write_text(
            f'url = "{url}"\nmodel = "guard"\nkind = "classifier"\non_failure = "{how}"\ntimeout_seconds = 3.0\n'
            f'prompt = "{QUESTION}"\n'
            '[[label]]\nname = "safe"\n[[label]]\nname = "unsafe"\naction = "refuse"\n'
            '[[label]]\nname = "medical"\naction = "route"\nmodel = "big"\n[[label]]\nname = "odd"\naction = "flag"\n',
            encoding="utf-8",
        )
        policy = ("--content-policy", f"guard:{path}")
        asking = worker("--model", f"tiny={model_folder}", *policy)
        worker("--model", f"big={model_folder}", "--kv-dtype", "int8")
        made = Installation(processes, start_guard, url, guard, asking, texts)
        names = {"guard", "tiny", "big"}
        wait_for(lambda: {model.id for model in made.client().models.list().data} == names, "a worker is missing")
        return made

    try:
        yield start
    finally:
        processes.close()


def labels_of(url: str) -> list[str] | None:
    """The guard's labels of all texts; None: it isn't there yet."""
    answer = httpx2.post(f"{url}/v1/classify", json={"model": "guard", "input": TEXTS}, timeout=HANG_SECONDS)
    return [one["label"] for one in answer.json()["data"]] if answer.status_code == 200 else None


def outcome(line: dict[str, Any]) -> Any:
    """The status of a batch's line, or the code of its error."""
    return line["error"]["code"] if line["response"] is None else line["response"]["status_code"]


def verdicts(answer: Any) -> list[tuple[str, str, str]]:
    report = (answer.model_extra or {}).get("tokenmill", {}).get("content_policies", {})
    return [(verdict["policy"], verdict["rule"], verdict["action"]) for verdict in report.get("verdicts", [])]


def test_given_planted_prompts_then_they_are_refused_flagged_and_routed_over_http_and_in_a_batch(
    installation: Callable[[str], Installation],
) -> None:
    made = installation("closed")
    assert verdicts(made.ask("safe")) == []
    with pytest.raises(openai.BadRequestError, match="refused by content policy 'guard', rule 'unsafe'") as refused:
        made.ask("unsafe")
    assert refused.value.code == "content_filter"
    assert verdicts(made.ask("odd")) == [("guard", "odd", "flag")]
    routed = made.ask("medical")
    assert verdicts(routed) == [("guard", "medical", "route")]
    assert routed.choices[0].message.content is not None
    for label, action in (("odd", "flag"), ("medical", "route")):
        chunks = list(made.ask(label, stream=True))
        assert [(label, action)] == [(rule, what) for _, rule, what in verdicts(chunks[-1])]
    lines = made.batch(*LABELS)
    refused_row = "content_filter"
    assert {label: outcome(line) for label, line in lines.items()} == {
        "safe": 200, "unsafe": refused_row, "medical": refused_row, "odd": 200,
    }  # fmt: skip
    report = lines["odd"]["response"]["body"]["tokenmill"]["content_policies"]
    assert [verdict["action"] for verdict in report["verdicts"]] == ["flag"]
    assert report["usage"]["prompt_tokens"] == 0, "the worker has asked about this text before"
    assert "routes the prompt to model 'big'" in str(lines["medical"])


@pytest.mark.parametrize("how", ["open", "closed"])
def test_given_a_guard_that_is_killed_then_requests_end_as_the_file_says_and_rows_that_would_fail_wait_for_it(
    installation: Callable[[str], Installation], how: str
) -> None:
    made = installation(how)
    assert verdicts(made.ask("odd")) == [("guard", "odd", "flag")]
    made.processes.running[made.guard].kill()
    made.processes.running[made.guard].wait()
    assert verdicts(made.ask("odd")) == [("guard", "odd", "flag")], "this verdict is remembered"
    if how == "open":
        ((policy, rule, action),) = verdicts(made.ask("unsafe"))
        assert (policy, action) == ("guard", "flag")
        assert rule.startswith("not judged (Guard")
    else:
        with pytest.raises(openai.InternalServerError, match=r"'guard' could not judge the prompt \(Guard"):
            made.ask("unsafe")
    if how == "open":
        lines = made.batch("safe", "medical")
        assert {outcome(line) for line in lines.values()} == {200}, lines
        return
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(made.batch, "safe", "medical")
        log = made.processes.log(made.worker)
        wait_for(lambda: "rows of jobs wait for it" in log.read_text(), "the rows don't wait")
        made.start_guard()
        lines = batch.result()
    assert {label: outcome(line) for label, line in lines.items()} == {"safe": 200, "medical": "content_filter"}


def test_given_tasks_over_celery_then_the_worker_judges_them_and_they_count_in_its_metrics(
    installation: Callable[[str], Installation], redis_server: RedisServer
) -> None:
    made = installation("closed")
    made.processes.start("-m", "tokenmill", "intake")
    caller = Celery("a-caller", broker=redis_server.url, backend=redis_server.url, set_as_current=False)

    def generate(text: str) -> str | None:
        """The code of the error of a task with this text; None: it was answered."""
        body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": text}]}
        answer = caller.send_task("tokenmill.generate", args=[body], queue="tokenmill").get(timeout=HANG_SECONDS)
        return answer["error"]["code"] if "error" in answer else None

    assert [generate(made.texts[label]) for label in ("safe", "unsafe", "odd")] == [None, "content_filter", None]
    made.processes.running[made.guard].kill()
    made.processes.running[made.guard].wait()
    assert generate("another text") == "engine_error"

    def counts() -> tuple[float, ...]:
        """The samples of refused and of flagged texts, and of failures."""
        found, about = scrape(f"{made.url}/metrics"), {"model": "tiny", "policy": "guard"}
        judged = [found.all("tokenmill_judged_texts_total", action=one, **about) for one in ("refuse", "flag")]
        failed = found.all("tokenmill_content_policy_failures_total", **about)
        return tuple(sum(samples.values()) for samples in (*judged, failed))

    wait_for(lambda: counts() == (1, 1, 1), "the metrics lack the verdicts")
